"""What an engine offers to the round loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from fedhelix.client import (
    Job,
    Outcome,
    Pool,
    Scores,
    Setup,
    client_of,
    evaluate,
    judge_clients,
    personal_model,
    predict,
    samples_of,
    untuned_model,
)
from fedhelix.task import judge
from fedhelix.tree import State, Tree


class Engine(ABC):
    """Maps a client's work over many clients. Only `work` must be written; the rest has a plain default."""

    name: ClassVar[str] = ""

    def __init__(self, setup: Setup):
        self.setup = setup

    @abstractmethod
    def work(self, jobs: Sequence[Job]) -> list[Outcome]:
        """The outcomes of the jobs, in their order."""

    def hello(self, jobs: Sequence[Job]) -> dict[int, Tree]:
        """What the clients tell before round 0."""
        return {job.client: self.setup.method.hello(client_of(self.setup, job)) for job in jobs}

    def personal(self, jobs: Sequence[Job]) -> list[State]:
        """The models that the clients would use now."""
        return [personal_model(self.setup, job) for job in jobs]

    def outputs(self, state: State, pool: Pool, indices: Tensor) -> Tensor:
        """What one model says to some samples of a pool."""
        return predict(self.setup, state, pool, indices)

    def score(self, states: Sequence[State], pool: Pool, indices: Tensor | None = None) -> list[tuple[float, float]]:
        """Metric and loss of whole models on common samples: all of a pool, or some."""
        targets = samples_of(self.setup, pool)[1]
        wanted = torch.arange(len(targets)) if indices is None else indices
        targets = targets[wanted.to(targets.device)]
        return [judge(self.setup.task, self.outputs(state, pool, wanted), targets) for state in states]

    def evaluate(self, jobs: Sequence[Job]) -> list[Scores]:
        """Every client's personal model on its own samples. Clients that use one and the same model share a pass."""
        users: dict[object, list[Job]] = {}
        models: dict[object, State | None] = {}
        for job in jobs:
            state = untuned_model(self.setup, job)
            same = object() if state is None else tuple(id(value) for value in state.values())
            users.setdefault(same, []).append(job)
            models[same] = state
        found: dict[int, Scores] = {}
        alone: list[Job] = []
        for same, group in users.items():
            state = models[same]
            if state is None or len(group) == 1:
                alone += group
            else:
                clients = [job.client for job in group]
                found |= judge_clients(self.setup, clients, partial(self.outputs, state))
        found |= {job.client: scores for job, scores in zip(alone, self.evaluate_each(alone), strict=True)}
        return [found[job.client] for job in jobs]

    def evaluate_each(self, jobs: Sequence[Job]) -> list[Scores]:
        """Clients that each use a model of their own."""
        return [evaluate(self.setup, job) for job in jobs]

    def close(self) -> None:  # noqa: B027 - most engines hold nothing
        """Give back processes or memory, if the engine holds any."""
