"""What an engine offers to the round loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

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
    received_model,
    samples_of,
    untuned_model,
)
from fedhelix.probe import is_whole, probe
from fedhelix.task import judge
from fedhelix.tree import State, Tree

Judgement = tuple[float, float]  # metric and mean loss


class Engine(ABC):
    """Maps a client's work over many clients. Only `work` must be written; the rest has a plain default."""

    name: ClassVar[str] = ""
    why: str = ""  # this engine was taken

    def __init__(self, setup: Setup):
        self.setup = setup
        self.choices: dict[str, str] = {}  # made by timing; kept with the run, so that resuming it computes alike
        self.missing: Mapping[int, str] = {}  # who did not answer the last call, and why; here everybody does

    @abstractmethod
    def work(self, jobs: Sequence[Job]) -> list[Outcome]:
        """The outcomes of the jobs, in their order, without those of clients that are missing."""

    def report(self) -> dict[str, Any]:
        """What else the record of the round should say."""
        return {}

    def hello(self, jobs: Sequence[Job]) -> dict[int, Tree]:
        """What the clients tell before round 0."""
        return {job.client: self.setup.asked.hello(client_of(self.setup, job)) for job in jobs}

    def reply(self, job: Job) -> Tree:
        """A newcomer's turn in its dialogue with the server."""
        return self.setup.asked.reply(job.payload, client_of(self.setup, job))

    def settle(self, job: Job) -> Tree:
        """What a newcomer keeps of the last payload."""
        return self.setup.asked.settle(job.payload, client_of(self.setup, job))

    def personal(self, jobs: Sequence[Job]) -> list[State]:
        """The models that the clients would use now."""
        return [personal_model(self.setup, job) for job in jobs]

    def outputs(self, state: State, pool: Pool, indices: Tensor) -> Tensor:
        """What one model says to some samples of a pool."""
        return predict(self.setup, state, pool, indices)

    def score(self, states: Sequence[State], pool: Pool, indices: Tensor | None = None) -> list[Judgement]:
        """Metric and loss of models on common samples: all of a pool, or some. What they lack is fitted to these."""
        targets = samples_of(self.setup, pool)[1]
        wanted = torch.arange(len(targets)) if indices is None else indices
        targets = targets[wanted.to(targets.device)]
        outputs = [
            (self.outputs if is_whole(self.setup, state) else partial(probe, self.setup))(state, pool, wanted)
            for state in states
        ]
        return [judge(self.setup.task, output, targets) for output in outputs]

    def evaluate(self, jobs: Sequence[Job], model: State | None = None) -> tuple[list[Scores], Judgement | None]:
        """Every client's personal model on its own samples, and the server's model on the whole test pool.

        Clients that use one and the same model share a pass, and where that is the server's, its pass as well.
        """
        whole = None
        if model is not None:
            targets = self.setup.data.y_test
            whole = self.outputs(model, "test", torch.arange(len(targets)))
        users: dict[object, list[Job]] = {}
        models: dict[object, State | None] = {}
        for job in jobs:
            state = untuned_model(self.setup, job)
            same = object() if state is None else _identity(state)
            users.setdefault(same, []).append(job)
            models[same] = state
        found: dict[int, Scores] = {}
        alone: list[Job] = []
        for same, group in users.items():
            state = models[same]
            if state is None or len(group) == 1:
                alone += group
                continue
            known = whole if model is not None and same == _identity(model) else None
            outputs = partial(self._outputs_or_known, state, known)
            found |= judge_clients(self.setup, [job.client for job in group], outputs)
        found |= {job.client: scores for job, scores in zip(alone, self.evaluate_each(alone), strict=True)}
        judgement = None if whole is None else judge(self.setup.task, whole, self.setup.data.y_test)
        return [found[job.client] for job in jobs], judgement

    def _outputs_or_known(self, state: State, known: Tensor | None, pool: Pool, indices: Tensor) -> Tensor:
        if pool == "test" and known is not None:
            return known[indices.to(known.device)]
        return self.outputs(state, pool, indices)

    def evaluate_each(self, jobs: Sequence[Job]) -> list[Scores]:
        """Clients that each use a model of their own."""
        return [evaluate(self.setup, job) for job in jobs]

    def evaluate_received(self, jobs: Sequence[Job]) -> list[Scores]:
        """Every client's personal model on its own samples, as it is before `tune`."""
        models = [(job.client, received_model(self.setup, job)) for job in jobs]
        return [judge_clients(self.setup, [i], partial(self.outputs, state))[i] for i, state in models]

    def close(self) -> None:  # noqa: B027 - most engines hold nothing
        """Give back processes or memory, if the engine holds any."""


def _identity(state: State) -> tuple[int, ...]:
    """Equal for states that are made of the very same tensors."""
    return tuple(id(value) for value in state.values())
