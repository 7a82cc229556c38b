"""Many clients at once on the CPU: single-threaded worker processes, one client each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedhelix.core.errors import UserError
from fedhelix.core.objective import evaluate_outputs
from fedhelix.core.tree import State, Tree, tensors
from fedhelix.engines.base import Engine
from fedhelix.engines.local import (
    EVALUATED_AT_ONCE,
    ClientResult,
    ClientTask,
    Scores,
    Setup,
    Subset,
    evaluate,
    personal_model,
    predict,
    run_client,
    samples_of,
)
from fedhelix.engines.parallel.pool import NoWorkers, WorkerPool, WorkItem, cores
from fedhelix.engines.parallel.worker import client_init, for_client
from fedhelix.engines.probe import is_whole, probe

CHUNK = EVALUATED_AT_ONCE[
    0
]  # as `predict` does: cut elsewhere, outputs would differ in their last bits


class Parallel(Engine):
    """Results are those of `serial` with one thread, whatever the number of workers.

    Workers start when they are first needed. Where they cannot be had, clients run one after the
    other.
    """

    name: ClassVar[str] = "parallel"

    def __init__(self, setup: Setup, workers: int | None = None):
        if setup.device.type != "cpu":
            raise UserError(
                f"the parallel engine works on the CPU, not on {setup.device}; use auto or serial there."
            )
        if workers is not None and workers < 1:
            raise UserError(f"workers must be at least 1, not {workers}.")
        super().__init__(setup)
        self.workers = workers or cores()
        self.alone = False
        self._pool: WorkerPool | None = None

    def run_clients(self, tasks: Sequence[ClientTask]) -> list[ClientResult]:
        """The outcomes of the jobs, in their order."""
        return self._each(run_client, tasks)

    def client_init(self, tasks: Sequence[ClientTask]) -> dict[int, Tree]:
        """What the clients tell before round 0."""
        return {
            task.client: said
            for task, said in zip(tasks, self._each(client_init, tasks), strict=True)
        }

    def personal(self, tasks: Sequence[ClientTask]) -> list[State]:
        """The models that the clients would use now."""
        return self._each(personal_model, tasks)

    def evaluate_each(self, tasks: Sequence[ClientTask]) -> list[Scores]:
        """Clients that each use a model of their own."""
        return self._each(evaluate, tasks)

    def outputs(self, state: State, pool: Subset, indices: Tensor) -> Tensor:
        """What one model says to some samples of a pool."""
        return self._predict([state], pool, indices)[0]

    def score(
        self, states: Sequence[State], pool: Subset, indices: Tensor | None = None
    ) -> list[tuple[float, float]]:
        """Metric and loss of models on common samples; models and samples are spread over the
        workers.
        """
        targets = samples_of(self.setup, pool)[1]
        wanted = torch.arange(len(targets)) if indices is None else indices
        return [
            evaluate_outputs(self.setup.objective, found, targets[wanted])
            for found in self._predict(states, pool, wanted)
        ]

    def close(self) -> None:
        """Let the workers go; the engine takes on others if it is used again."""
        if self._pool is not None:
            self._pool.release()
            self._pool = None

    def _each(
        self, function: Callable[[Setup, ClientTask], Any], tasks: Sequence[ClientTask]
    ) -> list[Any]:
        """A function of every client."""
        splits = {task.client: self.setup.splits[task.client] for task in tasks}
        items = [
            WorkItem(for_client, (function, task, split), len(split.train), f"client {task.client}")
            for task, split in ((task, splits[task.client]) for task in tasks)
        ]
        return self._run(items, (tensor for task in tasks for tensor in tensors(task.payload)))

    def _predict(self, states: Sequence[State], pool: Subset, indices: Tensor) -> list[Tensor]:
        """What every model says to the samples."""
        work = [
            (predict, indices.split(CHUNK)) if is_whole(self.setup, s) else (probe, (indices,))
            for s in states
        ]
        items = [
            WorkItem(function, (state, pool, part), len(part), "the evaluation")
            for state, (function, parts) in zip(states, work, strict=True)
            for part in parts
        ]
        found = iter(self._run(items, (tensor for state in states for tensor in state.values())))
        return [torch.cat([next(found) for _ in parts]) for _, parts in work]

    def _run(self, items: Sequence[WorkItem], shared: Iterable[Tensor]) -> list[Any]:
        """The results of the tasks, in their order."""
        if not self.alone:
            try:
                return self._pool_here().run(items, shared, self.workers)
            except NoWorkers as problem:
                self._abandon()
                self.alone = True
                warnings.warn(f"clients run one after the other, because {problem}.", stacklevel=2)
            except BaseException:
                self._abandon()
                raise
        return [item.function(self.setup, *item.arguments) for item in items]

    def _pool_here(self) -> WorkerPool:
        if self._pool is None:
            self._pool = WorkerPool(self.setup)
            self.setup = replace(self.setup, data=self._pool.data)  # one copy of the data in all
        return self._pool

    def _abandon(self) -> None:
        """After a mishap no worker goes on with something that nobody waits for."""
        if self._pool is not None:
            self._pool.end()
            self._pool = None
