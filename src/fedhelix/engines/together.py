"""Several runs as one program: their clients share the slots of one batched engine.

Seeds, methods with one objective and settings such as the learning rate can be swept together; the loop of each run
stays as it is, in a thread of its own, and only waits at `work` until every other run has brought its clients too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, TypeVar

from torch import Tensor

from fedhelix.client import Job, Outcome, Pool, Scores, Setup
from fedhelix.engines.base import Engine, Judgement
from fedhelix.engines.batched import Batched
from fedhelix.tree import State

T = TypeVar("T")


class Meeting:
    """Where runs bring their jobs; the last one to come sets off the common work."""

    def __init__(self, guests: int):
        self.turn = threading.Condition()
        self.device = threading.RLock()  # one thread at a time talks to the device
        self.guests = guests
        self.engine: Batched | None = None
        self.brought: dict[int, list[tuple[Setup, Job]]] = {}
        self.results: dict[int, list[Outcome]] = {}
        self.failure: BaseException | None = None

    def work(self, guest: int, setup: Setup, jobs: Sequence[Job]) -> list[Outcome]:
        """Bring jobs, wait for the others, take the outcomes along."""
        with self.turn:
            self.brought[guest] = [(setup, job) for job in jobs]
            self._work_if_complete()
            self.turn.wait_for(lambda: guest in self.results or self.failure is not None)
            if self.failure is not None:
                raise self.failure
            return self.results.pop(guest)

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
            with self.device:
                if self.engine is None:
                    self.engine = Batched(everything[0][0])
                outcomes = iter(self.engine.work_together(everything))
            self.results |= {guest: [next(outcomes) for _ in jobs] for guest, jobs in brought.items()}
        except BaseException as problem:
            self.failure = problem
        self.turn.notify_all()


class Guest(Engine):
    """One run's seat at a meeting."""

    name: ClassVar[str] = "together"

    def __init__(self, setup: Setup, meeting: Meeting, number: int):
        super().__init__(setup)
        self.meeting, self.number, self.alone = meeting, number, Batched(setup)

    def work(self, jobs: Sequence[Job]) -> list[Outcome]:
        """The outcomes of the jobs, in their order."""
        return self.meeting.work(self.number, self.setup, jobs)

    def personal(self, jobs: Sequence[Job]) -> list[State]:
        """The models that the clients would use now."""
        with self.meeting.device:
            return self.alone.personal(jobs)

    def score(self, states: Sequence[State], pool: Pool, indices: Tensor | None = None) -> list[Judgement]:
        """Metric and loss of models on common samples."""
        with self.meeting.device:
            return self.alone.score(states, pool, indices)

    def evaluate(self, jobs: Sequence[Job], model: State | None = None) -> tuple[list[Scores], Judgement | None]:
        """Every client's personal model on its own samples, and the server's model on the whole test pool."""
        with self.meeting.device:
            return self.alone.evaluate(jobs, model)


def together(runs: Sequence[Callable[[Callable[[Setup], Engine]], T]]) -> list[T]:
    """Call each run with an engine maker; all of them share one stack of slots. Returns what the runs return."""
    meeting = Meeting(len(runs))

    def attend(number: int) -> T:
        try:
            return runs[number](lambda setup: Guest(setup, meeting, number))
        finally:
            meeting.leave()

    with ThreadPoolExecutor(len(runs)) as threads:
        return list(threads.map(attend, range(len(runs))))
