"""The interface between engines and the round loop."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedhelix.core.objective import evaluate_all, evaluate_outputs
from fedhelix.core.shift import unshifted, without_shift
from fedhelix.core.tree import State, Tree
from fedhelix.engines.local import (
    ClientResult,
    ClientTask,
    PersonalModel,
    Scores,
    Setup,
    Subset,
    evaluate,
    evaluate_clients,
    make_client,
    personal_model,
    predict,
    predict_all,
    received_model,
    samples_of,
    train_plainly,
    unpersonalized_model,
)
from fedhelix.engines.probe import are_whole, probe_all

Evaluation = tuple[float, float]  # metric and mean loss


class Engine(ABC):
    """Maps a client's work over many clients.

    A subclass must define `run_clients`; everything else has a default that runs in this process.
    """

    name: ClassVar[str] = ""
    deployed: ClassVar[bool] = False  # its clients are real sites
    why: str = ""  # the reason for choosing this engine
    start_seconds: float = 0.0  # so far, to start processes: not part of a round's own time

    def __init__(self, setup: Setup):
        self.setup = setup
        # Chosen by timing and saved with the run, so that a resumed run computes the same numbers.
        self.choices: dict[str, str] = {}
        # Clients that did not answer the last call, with the reason; a simulation misses none.
        self.missing: Mapping[int, str] = {}
        # Clients whose privacy budget lasts for another round; None: nobody's is spent.
        self.able: Collection[int] | None = None
        # Clients that got their payload in the last round; None: all.
        self.reached: Collection[int] | None = None
        # Uploads of the last round that arrived and are of no use; a simulation has none.
        self.unused: list[Tree] = []
        # Of a round, what went both ways besides these; None: as the method says.
        self.exchanged: int | None = None

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Inside of it processes start."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.start_seconds += time.perf_counter() - began

    @property
    def spent(self) -> Collection[int]:
        """Clients that count their privacy budget themselves and have said that it is spent."""
        return ()

    @property
    def counted(self) -> Mapping[int, int]:
        """Rounds with noise that clients say they have answered; a simulation loses none."""
        return {}

    @property
    def used(self) -> str:
        """The name of the engine that does the work, which may be another one's."""
        return self.name

    @abstractmethod
    def run_clients(self, tasks: Sequence[ClientTask]) -> list[ClientResult]:
        """The results of the tasks, in order; missing clients are left out."""

    def report(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Further entries for the record of the round, with what the method wants recorded."""
        return {"metadata": metadata}

    def report_again(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Entries of a record that was reported that change once its round is evaluated again."""
        return {}

    def client_init(self, tasks: Sequence[ClientTask]) -> dict[int, Tree]:
        """What the clients send before round 0."""
        return {
            task.client: self.setup.hooks.client_init(make_client(self.setup, task))
            for task in tasks
        }

    def onboard_client(self, task: ClientTask) -> Tree:
        """A newcomer's answer to one message of the onboarding."""
        return self.setup.hooks.onboard_client(task.payload, make_client(self.setup, task))

    def onboard_state(self, task: ClientTask) -> Tree:
        """The state that a newcomer keeps from the last payload."""
        return self.setup.hooks.onboard_state(task.payload, make_client(self.setup, task))

    def personal(self, tasks: Sequence[ClientTask]) -> list[PersonalModel]:
        """The clients' personal models as of now."""
        return [personal_model(self.setup, task) for task in tasks]

    def outputs(self, state: State, subset: Subset, indices: Tensor) -> Tensor:
        """One model's outputs for some samples of a subset."""
        return predict(self.setup, state, subset, indices)

    def score(
        self, states: Sequence[State], pool: Subset, indices: Tensor | None = None
    ) -> list[Evaluation]:
        """Metric and loss of several models on the same samples: a whole subset, or some of it.

        Entries that a model lacks are fitted to these samples; see `probe`.
        """
        targets = samples_of(self.setup, pool)[1]
        indices = torch.arange(len(targets)) if indices is None else indices
        targets = targets[indices.to(targets.device)]
        if are_whole(self.setup, states):
            outputs = predict_all(self.setup, states, pool, indices)
        else:
            outputs = probe_all(self.setup, states, pool, indices)
        return evaluate_all(self.setup.objective, outputs, [targets] * len(states))

    def train(self, samples: np.ndarray, state: State, epochs: int) -> State:
        """A model after some epochs on the server's own samples."""
        return train_plainly(self.setup, samples, state, epochs)

    def evaluate(
        self, tasks: Sequence[ClientTask], model: State | None = None
    ) -> tuple[list[Scores], Evaluation | None]:
        """Each client's personal model on its own samples, and the server's model on the test set.

        Clients that use the same model share one forward pass; if it is the server's model, they
        share that one too.
        """
        objective, y_test = self.setup.objective, self.setup.data.y_test
        on_test = None if model is None else self.outputs(model, "test", torch.arange(len(y_test)))
        groups: dict[object, list[tuple[ClientTask, PersonalModel]]] = {}
        alone: list[ClientTask] = []
        for task in tasks:
            # A model of which the method makes more than the network's outputs is shared by nobody.
            shares = not self.setup.method.overrides("predict")
            used = unpersonalized_model(self.setup, task) if shares else None
            if used is None:
                alone.append(task)
            else:
                groups.setdefault(_identity(used.state), []).append((task, used))
        scores: dict[int, Scores] = {}
        for identity, group in groups.items():
            if len(group) == 1:
                alone.append(group[0][0])
                continue
            known = on_test if model is not None and identity == _identity(model) else None
            outputs = partial(self._outputs_or_known, without_shift(group[0][1].state), known)
            users = {task.client: used for task, used in group}
            scores |= evaluate_clients(self.setup, users, outputs)
        clients = [task.client for task in alone]
        scores |= dict(zip(clients, self.evaluate_each(alone), strict=True))
        evaluation = None if on_test is None else evaluate_outputs(objective, on_test, y_test)
        return [scores[task.client] for task in tasks], evaluation

    def _outputs_or_known(
        self, state: State, known: Tensor | None, subset: Subset, indices: Tensor
    ) -> Tensor:
        """A model's outputs; `known` are those for the whole test set, where it was run already."""
        if subset == "test" and known is not None:
            return known[indices.to(known.device)]
        return self.outputs(state, subset, indices)

    def evaluate_each(self, tasks: Sequence[ClientTask]) -> list[Scores]:
        """Scores of clients that each use a different model."""
        return [evaluate(self.setup, task) for task in tasks]

    def evaluate_received(self, tasks: Sequence[ClientTask]) -> list[Scores]:
        """Each client's personal model on its own samples, before `personalize`."""
        scores = []
        for task in tasks:
            used = received_model(self.setup, task)
            outputs = partial(self.outputs, unshifted(used.state))
            scores.append(evaluate_clients(self.setup, {task.client: used}, outputs)[task.client])
        return scores

    def close(self) -> None:  # noqa: B027 - most engines hold nothing
        """Release processes or memory, if the engine holds any."""


def _identity(state: State) -> tuple[int, ...]:
    """Equal for states that consist of the very same tensors, but for their shifts."""
    return tuple(id(value) for value in without_shift(state).values())
