"""Several runs as one program: their clients share the slots of one batched engine.

Seeds, methods with the same objective and settings such as the learning rate can be swept together.
Each run keeps its own loop in a thread of its own; in `run_clients` it waits until every other run
has submitted its clients too.
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
    """Collects the tasks of all runs; the last run to submit trains the tasks of all."""

    def __init__(self, runs: int):
        self.changed = threading.Condition()
        # Two threads on a GPU, so that one computes while the other waits for the device; more
        # would only compete for the interpreter. One on a CPU, whose kernel switches are
        # process-wide.
        self.running = threading.Semaphore(2 if torch.cuda.is_available() else 1)
        self.runs = runs
        self.engine: Batched | None = None
        self.submitted: dict[int, list[tuple[Setup, ClientTask]]] = {}
        self.results: dict[int, list[ClientResult]] = {}
        self.failure: BaseException | None = None

    def run_clients(
        self, run: int, setup: Setup, tasks: Sequence[ClientTask]
    ) -> list[ClientResult]:
        """Submit the tasks of one run, wait for the other runs, and return the results."""
        with self._paused(), self.changed:
            self.submitted[run] = [(setup, task) for task in tasks]
            self._train_if_complete()
            self.changed.wait_for(lambda: run in self.results or self.failure is not None)
            if self.failure is not None:
                raise self.failure
            return self.results.pop(run)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Let another thread run while this one waits."""
        self.running.release()
        try:
            yield
        finally:
            self.running.acquire()

    def shared_engine(self, setup: Setup) -> Batched:
        """The engine whose stacks all runs use."""
        with self.changed:
            if self.engine is None:
                wake_up(setup.device)
                self.engine = Batched(setup)
            return self.engine

    def leave(self) -> None:
        """End one run; the others no longer wait for it."""
        with self.changed:
            self.runs -= 1
            self._train_if_complete()

    def _train_if_complete(self) -> None:
        if not self.submitted or len(self.submitted) < self.runs:
            return
        submitted, self.submitted = dict(sorted(self.submitted.items())), {}
        everything = [pair for tasks in submitted.values() for pair in tasks]
        try:
            results = iter(self.shared_engine(everything[0][0]).run_many(everything))
            for run, tasks in submitted.items():
                self.results[run] = [next(results) for _ in tasks]
        except BaseException as problem:
            self.failure = problem
        self.changed.notify_all()


class SharedEngine(Batched):
    """The engine of one run: it trains together with the other runs, and evaluates on its own."""

    name: ClassVar[str] = "together"
    why = "several runs as one program"

    def __init__(self, setup: Setup, barrier: Barrier, number: int):
        super().__init__(setup, scheduler=barrier.shared_engine(setup).scheduler)
        self.barrier, self.number = barrier, number

    def run_clients(self, tasks: Sequence[ClientTask]) -> list[ClientResult]:
        """The results of the tasks, in order."""
        return self.barrier.run_clients(self.number, self.setup, tasks)

    def close(self) -> None:
        """Keep the stacks, which belong to all runs."""


def run_together(
    runs: Sequence[Callable[[Callable[[Setup], Engine]], T]],
    on_interrupt: Callable[[], None] = lambda: None,
) -> list[T]:
    """Call each run with a function that makes its engine; returns the results of the runs.

    Ctrl-C reaches only the main thread, so `on_interrupt` has to stop the runs.
    """
    barrier = Barrier(len(runs))

    def execute(number: int) -> T:
        try:
            with barrier.running:
                return runs[number](lambda setup: SharedEngine(setup, barrier, number))
        finally:
            barrier.leave()

    with ThreadPoolExecutor(len(runs)) as threads:
        futures = [threads.submit(execute, number) for number in range(len(runs))]
        try:
            return [future.result() for future in futures]
        except KeyboardInterrupt:
            on_interrupt()
            raise
