"""Several runs as one program: their clients share the slots of one batched engine.

Seeds, methods with one objective and settings such as the learning rate can be swept together; the
loop of each run stays as it is, in a thread of its own, and only waits at `work` until every other
run has brought its clients too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ClassVar, TypeVar

import torch

from fedhelix.core.cuda import wake_up
from fedhelix.engines.base import Engine
from fedhelix.engines.batched.engine import Batched
from fedhelix.engines.local import ClientResult, ClientTask, Setup

T = TypeVar("T")


class Barrier:
    """Where runs bring their jobs; the last one to come sets off the common work."""

    def __init__(self, runs: int):
        self.turn = threading.Condition()
        # Two, so that one computes while the other waits for the GPU; more would only fight for the
        # interpreter. On a
        # CPU one: the switches of its kernels are for the whole process.
        self.floor = threading.Semaphore(2 if torch.cuda.is_available() else 1)
        self.runs = runs
        self.engine: Batched | None = None
        self.brought: dict[int, list[tuple[Setup, ClientTask]]] = {}
        self.results: dict[int, list[ClientResult]] = {}
        self.failure: BaseException | None = None

    def run_clients(
        self, run: int, setup: Setup, tasks: Sequence[ClientTask]
    ) -> list[ClientResult]:
        """Bring jobs, wait for the others, take the outcomes along."""
        with self._floor_given_up(), self.turn:
            self.brought[run] = [(setup, task) for task in tasks]
            self._work_if_complete()
            self.turn.wait_for(lambda: run in self.results or self.failure is not None)
            if self.failure is not None:
                raise self.failure
            return self.results.pop(run)

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
            self.runs -= 1
            self._work_if_complete()

    def _work_if_complete(self) -> None:
        if not self.brought or len(self.brought) < self.runs:
            return
        brought, self.brought = dict(sorted(self.brought.items())), {}
        everything = [pair for tasks in brought.values() for pair in tasks]
        try:
            results = iter(self.host(everything[0][0]).run_many(everything))
            self.results |= {run: [next(results) for _ in tasks] for run, tasks in brought.items()}
        except BaseException as problem:
            self.failure = problem
        self.turn.notify_all()


class SharedEngine(Batched):
    """One run's seat at a meeting: it trains with all others, and judges its models by itself."""

    name: ClassVar[str] = "together"

    def __init__(self, setup: Setup, barrier: Barrier, number: int):
        super().__init__(setup, scheduler=barrier.host(setup).scheduler)
        self.barrier, self.number = barrier, number

    def run_clients(self, tasks: Sequence[ClientTask]) -> list[ClientResult]:
        """The outcomes of the jobs, in their order."""
        return self.barrier.run_clients(self.number, self.setup, tasks)

    def close(self) -> None:
        """The stacks belong to the meeting."""


def run_together(
    runs: Sequence[Callable[[Callable[[Setup], Engine]], T]],
    on_interrupt: Callable[[], None] = lambda: None,
) -> list[T]:
    """Call each run with an engine maker; all of them share one stack of slots. Returns what the
    runs return.

    Ctrl-C reaches only the main thread; `on_interrupt` has to make the runs stop.
    """
    barrier = Barrier(len(runs))

    def attend(number: int) -> T:
        try:
            with barrier.floor:
                return runs[number](lambda setup: SharedEngine(setup, barrier, number))
        finally:
            barrier.leave()

    with ThreadPoolExecutor(len(runs)) as threads:
        tasks = [threads.submit(attend, number) for number in range(len(runs))]
        try:
            return [task.result() for task in tasks]
        except KeyboardInterrupt:
            on_interrupt()
            raise
