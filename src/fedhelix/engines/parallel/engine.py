"""Many clients at once on the CPU: single-threaded worker processes, one client each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedhelix.core.errors import UserError
from fedhelix.core.means import tensors_of
from fedhelix.core.objective import evaluate_all
from fedhelix.core.tree import State, Tree, tensors
from fedhelix.engines.base import Engine
from fedhelix.engines.local import (
    EVALUATED_AT_ONCE,
    ClientResult,
    ClientTask,
    PersonalModel,
    Scores,
    Setup,
    Subset,
    evaluate,
    personal_model,
    predict_all,
    run_client,
    samples_of,
)
from fedhelix.engines.parallel.pool import NoWorkers, WorkerPool, WorkItem, cores
from fedhelix.engines.parallel.worker import client_init
from fedhelix.engines.probe import are_whole, probe_all

# As in `predict`: batches of another size would change the last bits of the outputs.
CHUNK = EVALUATED_AT_ONCE[0]


class Parallel(Engine):
    """Gives the results of `serial` with one thread, whatever the number of workers.

    Workers start when they are first needed. Where they cannot start, clients run one after the
    other.
    """

    name: ClassVar[str] = "parallel"

    def __init__(self, setup: Setup, workers: int | None = None):
        if setup.device.type != "cpu":
            raise UserError(
                f"the parallel engine works on the CPU, not on {setup.device}; "
                "use auto or serial there."
            )
        if workers is not None and workers < 1:
            raise UserError(f"workers must be at least 1, not {workers}.")
        super().__init__(setup)
        self.workers = workers or cores()
        self.alone = False  # no workers could start: everything runs in this process
        self._pool: WorkerPool | None = None

    @property
    def used(self) -> str:
        """Parallel, or serial where no workers could start."""
        return "serial" if self.alone else self.name

    def run_clients(self, tasks: Sequence[ClientTask]) -> list[ClientResult]:
        """The results of the tasks, in order."""
        return self._each(run_client, tasks)

    def client_init(self, tasks: Sequence[ClientTask]) -> dict[int, Tree]:
        """What the clients send before round 0."""
        clients = [task.client for task in tasks]
        return dict(zip(clients, self._each(client_init, tasks), strict=True))

    def personal(self, tasks: Sequence[ClientTask]) -> list[PersonalModel]:
        """The clients' personal models as of now."""
        return self._each(personal_model, tasks)

    def evaluate_each(self, tasks: Sequence[ClientTask]) -> list[Scores]:
        """Scores of clients that each use a different model."""
        return self._each(evaluate, tasks)

    def outputs(self, state: State, subset: Subset, indices: Tensor) -> Tensor:
        """One model's outputs for some samples of a subset."""
        return self._predict([state], subset, indices)[0]

    def score(
        self, states: Sequence[State], pool: Subset, indices: Tensor | None = None
    ) -> list[tuple[float, float]]:
        """Metric and loss of several models on the same samples, spread over the workers."""
        targets = samples_of(self.setup, pool)[1]
        indices = torch.arange(len(targets)) if indices is None else indices
        outputs = self._predict(states, pool, indices)
        return evaluate_all(self.setup.objective, outputs, [targets[indices]] * len(states))

    def close(self) -> None:
        """Release the workers; the engine takes others if it is used again."""
        if self._pool is not None:
            self._pool.release()
            self._pool = None

    def _each(
        self, function: Callable[[Setup, ClientTask], Any], tasks: Sequence[ClientTask]
    ) -> list[Any]:
        """Call a function once per task, in the workers."""
        splits = self.setup.splits
        items = [
            WorkItem(function, (task,), len(splits[task.client].train), f"client {task.client}")
            for task in tasks
        ]
        payloads = {id(task.payload): task.payload for task in tasks}
        shared = (tensor for payload in payloads.values() for tensor in tensors(payload))
        return self._run(items, shared)

    def _predict(self, states: Sequence[State], subset: Subset, indices: Tensor) -> list[Tensor]:
        """The outputs of every model: a worker computes some models on one chunk of the samples.

        A partial model is fitted to all samples, so its work cannot be split.
        """
        whole = are_whole(self.setup, states)
        function, chunks = (predict_all, indices.split(CHUNK)) if whole else (probe_all, [indices])
        together = max(1, -(-len(states) * len(chunks) // self.workers))  # models in one item
        groups = [states[at : at + together] for at in range(0, len(states), together)]
        items = [
            WorkItem(function, (group, subset, chunk), len(chunk) * len(group), "the evaluation")
            for chunk in chunks
            for group in groups
        ]
        found = iter(self._run(items, tensors_of(states)))
        parts = [[output for _ in groups for output in next(found)] for _ in chunks]
        return [torch.cat(outputs) for outputs in zip(*parts, strict=True)]

    def _run(self, items: Sequence[WorkItem], shared: Iterable[Tensor]) -> list[Any]:
        """The results of the work items, in order."""
        if not self.alone:
            try:
                return self._open_pool(min(self.workers, len(items))).run(items, shared)
            except NoWorkers as problem:
                self._abandon()
                self.alone, self.why = True, f"{problem}"
                warnings.warn(f"clients run one after the other, because {problem}.", stacklevel=2)
            except BaseException:
                self._abandon()
                raise
        return [item.function(self.setup, *item.arguments) for item in items]

    def _open_pool(self, count: int) -> WorkerPool:
        """The pool, with at least so many workers."""
        if self._pool is None or self._pool.living() < count:
            with self.starting():
                if self._pool is None:
                    self._pool = WorkerPool(self.setup)
                    # One copy of the data in all.
                    self.setup = replace(self.setup, data=self._pool.data)
                self._pool.start(count)
        return self._pool

    def _abandon(self) -> None:
        """Kill all workers, so that none goes on with work whose result nobody awaits."""
        if self._pool is not None:
            self._pool.end()
            self._pool = None
