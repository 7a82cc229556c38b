"""Many clients as one program: the engine for GPUs, where one small network at a time would leave
them idle.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from fedhelix.core.method import LocalRound, Phase
from fedhelix.core.objective import evaluate_all
from fedhelix.core.tree import State
from fedhelix.data import rows_of
from fedhelix.engines.base import Engine
from fedhelix.engines.batched.convolution import StackedConvolutions
from fedhelix.engines.batched.scheduler import WIDTHS, Scheduler
from fedhelix.engines.batched.table import PhaseTask
from fedhelix.engines.local import (
    ClientResult,
    ClientTask,
    Scores,
    Setup,
    Subset,
    phases_of,
    samples_of,
    start_personal,
    start_round,
)
from fedhelix.engines.probe import is_whole

CPU_SLOTS = 16
SAMPLES_AT_ONCE = 20_000  # of a stacked evaluation
FEW = 1000


class Batched(Engine):
    """Clients share a stack of slots; on a GPU a step of all slots is one CUDA graph."""

    name: ClassVar[str] = "batched"

    def __init__(self, setup: Setup, slots: int | None = None, scheduler: Scheduler | None = None):
        super().__init__(setup)
        wanted = slots or (WIDTHS[-1] if setup.device.type == "cuda" else CPU_SLOTS)
        # Engines of several runs can share their stacks, and what was chosen for them by timing.
        self.scheduler = scheduler or Scheduler(wanted, self.choices)
        self.choices = self.scheduler.choices

    def run_clients(self, tasks: Sequence[ClientTask]) -> list[ClientResult]:
        """The outcomes of the jobs, in their order."""
        return self.run_many([(self.setup, task) for task in tasks])

    def run_many(self, tasks: Sequence[tuple[Setup, ClientTask]]) -> list[ClientResult]:
        """Jobs of one run or of several: those that train alike share the slots."""
        rounds = [start_round(setup, task) for setup, task in tasks]
        opened = zip(tasks, rounds, strict=True)
        phases = [phases_of(setup, local) for (setup, _), local in opened]
        phase_tasks = self._train(tasks, rounds, phases, "batches")
        results, losses = [], []
        for (setup, task), local, mine in zip(tasks, rounds, phase_tasks, strict=True):
            steps = sum(phase_task.steps for phase_task in mine)
            upload, client_state = setup.hooks.upload(replace(local, steps=steps))
            total = sum(
                (phase_task.loss for phase_task in mine if phase_task.loss is not None),
                torch.zeros(()).to(setup.device),
            )
            losses.append(total / max(steps, 1))
            results.append(
                ClientResult(task.client, local.client.samples, upload, client_state, 0.0)
            )
        figures = torch.stack(losses).tolist() if losses else []  # the only wait for the device
        return [result._replace(loss=loss) for result, loss in zip(results, figures, strict=True)]

    def personal(self, tasks: Sequence[ClientTask]) -> list[State]:
        """The models that the clients would use now."""
        opened = [start_personal(self.setup, task) for task in tasks]
        rounds, phases = [local for local, _, _ in opened], [phases for _, _, phases in opened]
        self._train([(self.setup, task) for task in tasks], rounds, phases, "tune")
        return [local.models[used] for local, used, _ in opened]

    def _train(
        self,
        tasks: Sequence[tuple[Setup, ClientTask]],
        rounds: Sequence[LocalRound],
        phases: Sequence[Sequence[Phase]],
        purpose: str,
    ) -> list[list[PhaseTask]]:
        """All clients through their first phase, then all through their second, and so on."""
        trained: list[list[PhaseTask]] = [[] for _ in tasks]
        for index in range(max((len(mine) for mine in phases), default=0)):
            for (setup, task), local, mine, done in zip(
                tasks, rounds, phases, trained, strict=True
            ):
                if index < len(mine):
                    done.append(PhaseTask.of(setup, task, local, mine[index], index, purpose))
            self.scheduler.train(done[index] for done in trained if index < len(done))
        return trained

    def outputs(self, state: State, pool: Subset, indices: Tensor) -> Tensor:
        """What one model says to some samples of a pool; short of memory, to a few at a time."""
        try:
            return super().outputs(state, pool, indices)
        except torch.cuda.OutOfMemoryError:
            self._make_room()
        return torch.cat(
            [super(Batched, self).outputs(state, pool, part) for part in indices.split(FEW)]
        )

    def _make_room(self) -> None:
        """Stacks can be built again; what is to be judged now cannot wait."""
        warnings.warn("out of GPU memory: the training makes room for the evaluation", stacklevel=3)
        self.scheduler.drop_stacks()

    def score(
        self, states: Sequence[State], pool: Subset, indices: Tensor | None = None
    ) -> list[tuple[float, float]]:
        """Metric and loss of models on common samples, many whole models at once."""
        if not all(is_whole(self.setup, state) for state in states):
            return super().score(states, pool, indices)
        targets = samples_of(self.setup, pool)[1]
        wanted = torch.arange(len(targets)) if indices is None else indices
        outputs = self._outputs(states, pool, [wanted] * len(states))
        return evaluate_all(
            self.setup.objective, outputs, [targets[wanted.to(targets.device)]] * len(states)
        )

    def evaluate_each(self, tasks: Sequence[ClientTask]) -> list[Scores]:
        """Clients that each use a model of their own, many at once."""
        states, phase_task = self.personal(tasks), self.setup.objective
        parts = [self.setup.splits[task.client] for task in tasks]
        tests, valids = (
            [torch.as_tensor(part.test) for part in parts],
            [torch.as_tensor(part.valid) for part in parts],
        )
        on_test, on_valid = (
            self._outputs(states, "test", tests),
            self._outputs(states, "train", valids),
        )
        y_test, y = self.setup.data.y_test, self.setup.data.y
        evaluated = evaluate_all(phase_task, on_test, [y_test[test.to(y.device)] for test in tests])
        checked = evaluate_all(phase_task, on_valid, [y[valid.to(y.device)] for valid in valids])
        return [Scores(*test, valid[0]) for test, valid in zip(evaluated, checked, strict=True)]

    def _outputs(
        self, states: Sequence[State], pool: Subset, indices: Sequence[Tensor]
    ) -> list[Tensor]:
        """What each model says to its own samples; short of memory, a few at a time."""
        try:
            return self._stacked_outputs(states, pool, indices, SAMPLES_AT_ONCE)
        except torch.cuda.OutOfMemoryError:
            self._make_room()
        return self._stacked_outputs(states, pool, indices, FEW)

    @torch.no_grad()
    def _stacked_outputs(
        self, states: Sequence[State], pool: Subset, indices: Sequence[Tensor], at_once: int
    ) -> list[Tensor]:
        """What each model says to its own samples: several models in one program."""
        setup, device = self.setup, self.setup.device
        setup.module.eval()
        x = samples_of(setup, pool)[0]
        longest = max((len(part) for part in indices), default=0)
        if not longest:
            return [x.new_zeros(0) for _ in indices]
        together = max(1, at_once // longest)
        most = max(1, (at_once if device.type == "cuda" else FEW) // min(together, len(states)))
        found: list[Tensor] = []
        for at in range(0, len(states), together):
            some, wanted = states[at : at + together], indices[at : at + together]
            rows = torch.nn.utils.rnn.pad_sequence(list(wanted), batch_first=True).to(device)
            stacked = {
                name: torch.stack([state[name] for state in some]) for name in setup.layers.names
            }
            call = vmap(lambda state, batch: functional_call(setup.module, state, (batch,)))
            with StackedConvolutions() if device.type == "cuda" else nullcontext():
                pieces = [
                    call(stacked, setup.data.prepare(rows_of(x, piece)))
                    for piece in rows.split(most, dim=1)
                ]
            outputs = torch.cat(pieces, dim=1)
            found += [output[: len(part)] for output, part in zip(outputs, wanted, strict=True)]
        return found

    def close(self) -> None:
        """Give the device's memory back."""
        self.scheduler.caches.clear()
