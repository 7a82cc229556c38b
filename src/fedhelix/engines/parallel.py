"""Many clients at once on the CPU: single-threaded worker processes, one client each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedhelix.client import (
    EVALUATED_AT_ONCE,
    Job,
    Outcome,
    Pool,
    Scores,
    Setup,
    evaluate,
    personal_model,
    predict,
    samples_of,
    work,
)
from fedhelix.engines.base import Engine
from fedhelix.engines.crew import Crew, NoCrew, Task, cores
from fedhelix.engines.worker import for_client, hello
from fedhelix.errors import BadInput
from fedhelix.probe import is_whole, probe
from fedhelix.task import judge
from fedhelix.tree import State, Tree, tensors

CHUNK = EVALUATED_AT_ONCE[0]  # as `predict` does: cut elsewhere, outputs would differ in their last bits


class Parallel(Engine):
    """Results are those of `serial` with one thread, whatever the number of workers.

    Workers start when they are first needed. Where they cannot be had, clients run one after the other.
    """

    name: ClassVar[str] = "parallel"

    def __init__(self, setup: Setup, workers: int | None = None):
        if setup.device.type != "cpu":
            raise BadInput(f"the parallel engine works on the CPU, not on {setup.device}; use auto or serial there.")
        if workers is not None and workers < 1:
            raise BadInput(f"workers must be at least 1, not {workers}.")
        super().__init__(setup)
        self.workers = workers or cores()
        self.alone = False
        self._crew: Crew | None = None

    def work(self, jobs: Sequence[Job]) -> list[Outcome]:
        """The outcomes of the jobs, in their order."""
        return self._each(work, jobs)

    def hello(self, jobs: Sequence[Job]) -> dict[int, Tree]:
        """What the clients tell before round 0."""
        return {job.client: said for job, said in zip(jobs, self._each(hello, jobs), strict=True)}

    def personal(self, jobs: Sequence[Job]) -> list[State]:
        """The models that the clients would use now."""
        return self._each(personal_model, jobs)

    def evaluate_each(self, jobs: Sequence[Job]) -> list[Scores]:
        """Clients that each use a model of their own."""
        return self._each(evaluate, jobs)

    def outputs(self, state: State, pool: Pool, indices: Tensor) -> Tensor:
        """What one model says to some samples of a pool."""
        return self._predict([state], pool, indices)[0]

    def score(self, states: Sequence[State], pool: Pool, indices: Tensor | None = None) -> list[tuple[float, float]]:
        """Metric and loss of models on common samples; models and samples are spread over the workers."""
        targets = samples_of(self.setup, pool)[1]
        wanted = torch.arange(len(targets)) if indices is None else indices
        return [judge(self.setup.task, found, targets[wanted]) for found in self._predict(states, pool, wanted)]

    def close(self) -> None:
        """Let the workers go; the engine takes on others if it is used again."""
        if self._crew is not None:
            self._crew.retire()
            self._crew = None

    def _each(self, function: Callable[[Setup, Job], Any], jobs: Sequence[Job]) -> list[Any]:
        """A function of every client."""
        splits = {job.client: self.setup.splits[job.client] for job in jobs}
        tasks = [
            Task(for_client, (function, job, split), len(split.train), f"client {job.client}")
            for job, split in ((job, splits[job.client]) for job in jobs)
        ]
        return self._run(tasks, (tensor for job in jobs for tensor in tensors(job.payload)))

    def _predict(self, states: Sequence[State], pool: Pool, indices: Tensor) -> list[Tensor]:
        """What every model says to the samples."""
        work = [(predict, indices.split(CHUNK)) if is_whole(self.setup, s) else (probe, (indices,)) for s in states]
        tasks = [
            Task(function, (state, pool, part), len(part), "the evaluation")
            for state, (function, parts) in zip(states, work, strict=True)
            for part in parts
        ]
        found = iter(self._run(tasks, (tensor for state in states for tensor in state.values())))
        return [torch.cat([next(found) for _ in parts]) for _, parts in work]

    def _run(self, tasks: Sequence[Task], shared: Iterable[Tensor]) -> list[Any]:
        """The results of the tasks, in their order."""
        if not self.alone:
            try:
                return self._crew_here().run(tasks, shared, self.workers)
            except NoCrew as problem:
                self._abandon()
                self.alone = True
                warnings.warn(f"clients run one after the other, because {problem}.", stacklevel=2)
            except BaseException:
                self._abandon()
                raise
        return [task.function(self.setup, *task.arguments) for task in tasks]

    def _crew_here(self) -> Crew:
        if self._crew is None:
            self._crew = Crew(self.setup)
            self.setup = replace(self.setup, data=self._crew.data)  # one copy of the data in all
        return self._crew

    def _abandon(self) -> None:
        """After a mishap no worker goes on with something that nobody waits for."""
        if self._crew is not None:
            self._crew.end()
            self._crew = None
