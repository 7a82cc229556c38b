"""What an engine offers to the round loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from fedhelix.client import Job, Outcome, Scores, Setup, client_of, evaluate, personal_model, predict
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

    def evaluate(self, jobs: Sequence[Job]) -> list[Scores]:
        """Every client's personal model on its own samples. Clients that use one model are judged in one go."""
        found: dict[int, Scores] = {}
        users: dict[tuple[int, ...], list[int]] = {}
        models: dict[tuple[int, ...], State] = {}
        for job, state in zip(jobs, self.personal(jobs), strict=True):
            same = tuple(id(value) for value in state.values())
            users.setdefault(same, []).append(job.client)
            models[same] = state
        for same, clients in users.items():
            found.update(evaluate(self.setup, models[same], clients))
        return [found[job.client] for job in jobs]

    def score(self, states: Sequence[State], x: Tensor, y: Tensor) -> list[tuple[float, float]]:
        """Metric and loss of whole models on common samples."""
        return [judge(self.setup.task, predict(self.setup, state, x), y) for state in states]

    def close(self) -> None:  # noqa: B027 - most engines hold nothing
        """Give back processes or memory, if the engine holds any."""
