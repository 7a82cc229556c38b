"""Several runs as one program: their clients share the slots of one batched engine.

Seeds, methods with one objective and settings such as the learning rate can be swept together; the loop of each run
stays as it is, in a thread of its own, and only waits at `work` until every other run has brought its clients too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ClassVar, TypeVar

import torch

from fedhelix.client import Job, Outcome, Setup
from fedhelix.cuda import wake_up
from fedhelix.engines.base import Engine
from fedhelix.engines.batched import Batched

T = TypeVar("T")


class Meeting:
    """Where runs bring their jobs; the last one to come sets off the common work."""

    def __init__(self, guests: int):
        self.turn = threading.Condition()
        # Two, so that one computes while the other waits for the GPU; more would only fight for the interpreter. On a
        # CPU one: the switches of its kernels are for the whole process.
        self.floor = threading.Semaphore(2 if torch.cuda.is_available() else 1)
        self.guests = guests
        self.engine: Batched | None = None
        self.brought: dict[int, list[tuple[Setup, Job]]] = {}
        self.results: dict[int, list[Outcome]] = {}
        self.failure: BaseException | None = None

    def work(self, guest: int, setup: Setup, jobs: Sequence[Job]) -> list[Outcome]:
        """Bring jobs, wait for the others, take the outcomes along."""
        with self._floor_given_up(), self.turn:
            self.brought[guest] = [(setup, job) for job in jobs]
            self._work_if_complete()
            self.turn.wait_for(lambda: guest in self.results or self.failure is not None)
            if self.failure is not None:
                raise self.failure
            return self.results.pop(guest)

    @contextmanager
    def _floor_given_up(self) -> Iterator[None]:
        self.floor.release()
        try:
            yield
        finally:
            self.floor.acquire()

    def host(self, setup: Setup) -> Batched:
        """The engine whose stacks all runs use."""
        with self.turn:
            if self.engine is None:
                wake_up(setup.device)
                self.engine = Batched(setup)
            return self.engine

    def leave(self) -> None:
        """A run is over; the others need not wait for it."""
        with self.turn:
            self.guests -= 1
            self._work_if_complete()

    def _work_if_complete(self) -> None:
        if not self.brought or len(self.brought) < self.guests:
            return
        brought, self.brought = dict(sorted(self.brought.items())), {}
        everything = [pair for jobs in brought.values() for pair in jobs]
        try:
            outcomes = iter(self.host(everything[0][0]).work_together(everything))
            self.results |= {guest: [next(outcomes) for _ in jobs] for guest, jobs in brought.items()}
        except BaseException as problem:
            self.failure = problem
        self.turn.notify_all()


class Guest(Batched):
    """One run's seat at a meeting: it trains with all others, and judges its models by itself."""

    name: ClassVar[str] = "together"

    def __init__(self, setup: Setup, meeting: Meeting, number: int):
        super().__init__(setup, neighbour=meeting.host(setup))
        self.meeting, self.number = meeting, number

    def work(self, jobs: Sequence[Job]) -> list[Outcome]:
        """The outcomes of the jobs, in their order."""
        return self.meeting.work(self.number, self.setup, jobs)

    def close(self) -> None:
        """The stacks belong to the meeting."""


def together(
    runs: Sequence[Callable[[Callable[[Setup], Engine]], T]], on_interrupt: Callable[[], None] = lambda: None
) -> list[T]:
    """Call each run with an engine maker; all of them share one stack of slots. Returns what the runs return.

    Ctrl-C reaches only the main thread; `on_interrupt` has to make the runs stop.
    """
    meeting = Meeting(len(runs))

    def attend(number: int) -> T:
        try:
            with meeting.floor:
                return runs[number](lambda setup: Guest(setup, meeting, number))
        finally:
            meeting.leave()

    with ThreadPoolExecutor(len(runs)) as threads:
        tasks = [threads.submit(attend, number) for number in range(len(runs))]
        try:
            return [task.result() for task in tasks]
        except KeyboardInterrupt:
            on_interrupt()
            raise
