"""What an engine offers to the round loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedhelix.core.objective import evaluate_outputs
from fedhelix.core.tree import State, Tree
from fedhelix.engines.local import (
    ClientResult,
    ClientTask,
    Scores,
    Setup,
    Subset,
    evaluate,
    evaluate_clients,
    make_client,
    personal_model,
    predict,
    received_model,
    samples_of,
    unpersonalized_model,
)
from fedhelix.engines.probe import is_whole, probe

Evaluation = tuple[float, float]  # metric and mean loss


class Engine(ABC):
    """Maps a client's work over many clients. Only `work` must be written; the rest has a plain
    default.
    """

    name: ClassVar[str] = ""
    why: str = ""  # this engine was taken

    def __init__(self, setup: Setup):
        self.setup = setup
        self.choices: dict[
            str, str
        ] = {}  # made by timing; kept with the run, so that resuming it computes alike
        self.missing: Mapping[
            int, str
        ] = {}  # who did not answer the last call, and why; here everybody does

    @abstractmethod
    def run_clients(self, tasks: Sequence[ClientTask]) -> list[ClientResult]:
        """The outcomes of the jobs, in their order, without those of clients that are missing."""

    def report(self) -> dict[str, Any]:
        """What else the record of the round should say."""
        return {}

    def client_init(self, tasks: Sequence[ClientTask]) -> dict[int, Tree]:
        """What the clients tell before round 0."""
        return {
            task.client: self.setup.hooks.client_init(make_client(self.setup, task))
            for task in tasks
        }

    def onboard_client(self, task: ClientTask) -> Tree:
        """A newcomer's turn in its dialogue with the server."""
        return self.setup.hooks.onboard_client(task.payload, make_client(self.setup, task))

    def onboard_state(self, task: ClientTask) -> Tree:
        """What a newcomer keeps of the last payload."""
        return self.setup.hooks.onboard_state(task.payload, make_client(self.setup, task))

    def personal(self, tasks: Sequence[ClientTask]) -> list[State]:
        """The models that the clients would use now."""
        return [personal_model(self.setup, task) for task in tasks]

    def outputs(self, state: State, pool: Subset, indices: Tensor) -> Tensor:
        """What one model says to some samples of a pool."""
        return predict(self.setup, state, pool, indices)

    def score(
        self, states: Sequence[State], pool: Subset, indices: Tensor | None = None
    ) -> list[Evaluation]:
        """Metric and loss of models on common samples: all of a pool, or some. What they lack is
        fitted to these.
        """
        targets = samples_of(self.setup, pool)[1]
        wanted = torch.arange(len(targets)) if indices is None else indices
        targets = targets[wanted.to(targets.device)]
        outputs = [
            (self.outputs if is_whole(self.setup, state) else partial(probe, self.setup))(
                state, pool, wanted
            )
            for state in states
        ]
        return [evaluate_outputs(self.setup.objective, output, targets) for output in outputs]

    def evaluate(
        self, tasks: Sequence[ClientTask], model: State | None = None
    ) -> tuple[list[Scores], Evaluation | None]:
        """Every client's personal model on its own samples, and the server's model on the whole
        test pool.

        Clients that use one and the same model share a pass, and where that is the server's, its
        pass as well.
        """
        whole = None
        if model is not None:
            targets = self.setup.data.y_test
            whole = self.outputs(model, "test", torch.arange(len(targets)))
        users: dict[object, list[ClientTask]] = {}
        models: dict[object, State | None] = {}
        for task in tasks:
            state = unpersonalized_model(self.setup, task)
            same = object() if state is None else _identity(state)
            users.setdefault(same, []).append(task)
            models[same] = state
        found: dict[int, Scores] = {}
        alone: list[ClientTask] = []
        for same, group in users.items():
            state = models[same]
            if state is None or len(group) == 1:
                alone += group
                continue
            known = whole if model is not None and same == _identity(model) else None
            outputs = partial(self._outputs_or_known, state, known)
            found |= evaluate_clients(self.setup, [task.client for task in group], outputs)
        found |= {
            task.client: scores
            for task, scores in zip(alone, self.evaluate_each(alone), strict=True)
        }
        evaluation = (
            None
            if whole is None
            else evaluate_outputs(self.setup.objective, whole, self.setup.data.y_test)
        )
        return [found[task.client] for task in tasks], evaluation

    def _outputs_or_known(
        self, state: State, known: Tensor | None, pool: Subset, indices: Tensor
    ) -> Tensor:
        if pool == "test" and known is not None:
            return known[indices.to(known.device)]
        return self.outputs(state, pool, indices)

    def evaluate_each(self, tasks: Sequence[ClientTask]) -> list[Scores]:
        """Clients that each use a model of their own."""
        return [evaluate(self.setup, task) for task in tasks]

    def evaluate_received(self, tasks: Sequence[ClientTask]) -> list[Scores]:
        """Every client's personal model on its own samples, as it is before `tune`."""
        models = [(task.client, received_model(self.setup, task)) for task in tasks]
        return [
            evaluate_clients(self.setup, [i], partial(self.outputs, state))[i]
            for i, state in models
        ]

    def close(self) -> None:  # noqa: B027 - most engines hold nothing
        """Give back processes or memory, if the engine holds any."""


def _identity(state: State) -> tuple[int, ...]:
    """Equal for states that are made of the very same tensors."""
    return tuple(id(value) for value in state.values())
