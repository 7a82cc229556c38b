"""Many clients as one program: the engine for GPUs, which one small network would leave idle."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap
from torch.nn.utils.rnn import pad_sequence

from fedhelix.core.cpu import one_thread
from fedhelix.core.cuda import LARGE
from fedhelix.core.means import Means, stacked_means
from fedhelix.core.method import LocalRound, Phase
from fedhelix.core.objective import evaluate_all
from fedhelix.core.parts import Inputs
from fedhelix.core.shift import SHIFT, all_shifted, unshifted
from fedhelix.core.tree import State
from fedhelix.data import rows_of
from fedhelix.engines.base import Engine
from fedhelix.engines.batched.convolution import StackedConvolutions
from fedhelix.engines.batched.gradients import can_stack, explained, without_fallback_warning
from fedhelix.engines.batched.padding import mixes_samples
from fedhelix.engines.batched.scheduler import WIDTHS, Scheduler
from fedhelix.engines.batched.table import PhaseTask
from fedhelix.engines.local import (
    PERSONALIZE,
    ClientResult,
    ClientTask,
    PersonalModel,
    Scores,
    Setup,
    Subset,
    call,
    chosen_model,
    evaluate_clients,
    phases_of,
    predict,
    samples_of,
    start_personal,
    start_round,
)
from fedhelix.engines.probe import are_whole

CPU_SLOTS = 16
SAMPLES_AT_ONCE = 20_000  # in a stacked evaluation
FEW = 1000  # samples at once on a CPU, or when memory is short
FEW_WIDTHS = (4, 32, 128)  # of means: what is spare costs a GPU less than one more recording
RECORDED = 4096  # samples of an evaluation that costs a GPU less than its launch costs Python


class Batched(Engine):
    """Clients share a stack of slots; on a GPU a step of all slots is one CUDA graph."""

    name: ClassVar[str] = "batched"

    def __init__(self, setup: Setup, slots: int | None = None, scheduler: Scheduler | None = None):
        super().__init__(replace(setup, programs={}))
        slots = slots or (WIDTHS[-1] if setup.device.type == "cuda" else CPU_SLOTS)
        # The engines of several runs can share stacks, and the choices made for them by timing.
        self.scheduler = scheduler or Scheduler(slots, self.choices)
        self.choices = self.scheduler.choices

    @cached_property
    def can_stack(self) -> bool:
        """Whether several models can run as one program, with samples that fill their rows up."""
        return can_stack(self.setup) and not mixes_samples(self.setup)

    def run_clients(self, tasks: Sequence[ClientTask]) -> list[ClientResult]:
        """The results of the tasks, in order."""
        return self.run_many([(self.setup, task) for task in tasks])

    @one_thread()
    def run_many(self, tasks: Sequence[tuple[Setup, ClientTask]]) -> list[ClientResult]:
        """Tasks of one run or of several; those of one kind share the slots."""
        rounds = [start_round(setup, task) for setup, task in tasks]
        phases = [phases_of(setup, local) for (setup, _), local in zip(tasks, rounds, strict=True)]
        trained = self._train(tasks, rounds, phases, "batches")
        results, losses = [], []
        for (setup, task), local, phase_tasks in zip(tasks, rounds, trained, strict=True):
            steps = sum(phase_task.steps for phase_task in phase_tasks)
            upload, client_state = setup.hooks.upload(replace(local, steps=steps))
            total = sum(
                (phase_task.loss for phase_task in phase_tasks if phase_task.loss is not None),
                torch.zeros(()).to(setup.device),
            )
            losses.append(total / max(steps, 1))
            results.append(
                ClientResult(task.client, local.client.samples, upload, client_state, 0.0)
            )
        # Copied to the host in one go: this is the only wait for the device.
        values = torch.stack(losses).tolist() if losses else []
        return [result._replace(loss=loss) for result, loss in zip(results, values, strict=True)]

    @one_thread()
    def personal(self, tasks: Sequence[ClientTask]) -> list[PersonalModel]:
        """The clients' personal models as of now."""
        started = [start_personal(self.setup, task) for task in tasks]
        rounds, phases = [local for local, _ in started], [phases for _, phases in started]
        self._train([(self.setup, task) for task in tasks], rounds, phases, PERSONALIZE)
        return [
            chosen_model(self.setup, task, local) for task, local in zip(tasks, rounds, strict=True)
        ]

    def _train(
        self,
        tasks: Sequence[tuple[Setup, ClientTask]],
        rounds: Sequence[LocalRound],
        phases: Sequence[Sequence[Phase]],
        purpose: str,
    ) -> list[list[PhaseTask]]:
        """Train the first phase of all clients, then the second, and so on."""
        trained: list[list[PhaseTask]] = [[] for _ in tasks]
        for index in range(max((len(own_phases) for own_phases in phases), default=0)):
            for (setup, task), local, own_phases, done in zip(
                tasks, rounds, phases, trained, strict=True
            ):
                if index < len(own_phases):
                    done.append(PhaseTask.of(setup, task, local, own_phases[index], index, purpose))
            with explained(), without_fallback_warning():
                self.scheduler.train(done[index] for done in trained if index < len(done))
        return trained

    def outputs(self, state: State, subset: Subset, indices: Tensor) -> Tensor:
        """One model's outputs for some samples of a subset; in small parts if memory is short."""
        try:
            return super().outputs(state, subset, indices)
        except torch.cuda.OutOfMemoryError:
            self._free_memory()
        return torch.cat(
            [super(Batched, self).outputs(state, subset, part) for part in indices.split(FEW)]
        )

    def _free_memory(self) -> None:
        """Drop the stacks, which can be built again, so that the evaluation can go on."""
        warnings.warn(
            "out of GPU memory: the training frees memory for the evaluation", stacklevel=3
        )
        self.scheduler.drop_stacks()

    def score(
        self, states: Sequence[State], pool: Subset, indices: Tensor | None = None
    ) -> list[tuple[float, float]]:
        """Metric and loss of several models on the same samples; on a GPU whole ones are stacked.

        A CPU has faster kernels for one model after the other.
        """
        if self.setup.device.type == "cpu" or not are_whole(self.setup, states):
            return super().score(states, pool, indices)
        targets = samples_of(self.setup, pool)[1]
        indices = torch.arange(len(targets)) if indices is None else indices
        indices = indices.to(targets.device)
        outputs: Sequence[Tensor] | None = None
        if isinstance(states, Means):
            outputs = self._outputs_of_means(states, pool, indices)
        if outputs is None:
            outputs = self._outputs(list(states), pool, [indices] * len(states))
        return evaluate_all(self.setup.objective, outputs, [targets[indices]] * len(states))

    def evaluate_each(self, tasks: Sequence[ClientTask]) -> list[Scores]:
        """Scores of clients that each use a different model, many at once."""
        models, splits = self.personal(tasks), [self.setup.splits[task.client] for task in tasks]
        if self.setup.method.overrides("predict"):
            return [
                evaluate_clients(
                    self.setup, {task.client: used}, partial(self.outputs, unshifted(used.state))
                )[task.client]
                for task, used in zip(tasks, models, strict=True)
            ]
        states = [model.state for model in models]
        test = self._evaluate_parts(states, "test", [split.test for split in splits])
        valid = self._evaluate_parts(states, "train", [split.valid for split in splits])
        return [
            Scores(*on_test, metric, model.name)
            for on_test, (metric, _), model in zip(test, valid, models, strict=True)
        ]

    def _evaluate_parts(
        self, states: Sequence[State], subset: Subset, parts: Sequence[np.ndarray]
    ) -> list[tuple[float, float]]:
        """Metric and loss of each model on its own part of a subset."""
        indices, y = [torch.as_tensor(part) for part in parts], samples_of(self.setup, subset)[1]
        outputs = self._outputs(states, subset, indices)
        targets = [y[part.to(y.device)] for part in indices]
        return evaluate_all(self.setup.objective, outputs, targets)

    def _outputs(
        self, states: Sequence[State], subset: Subset, indices: Sequence[Tensor]
    ) -> list[Tensor]:
        """Each model's outputs for its own samples; in small parts if memory is short."""
        values = sum(value.numel() for value in self.setup.initial.values())
        if self.setup.device.type == "cuda" and values >= LARGE:
            return [
                self.outputs(state, subset, part)
                for state, part in zip(states, indices, strict=True)
            ]
        try:
            return self._stacked_outputs(states, subset, indices, SAMPLES_AT_ONCE)
        except torch.cuda.OutOfMemoryError:
            self._free_memory()
        return self._stacked_outputs(states, subset, indices, FEW)

    @one_thread()
    @torch.no_grad()
    def _stacked_outputs(
        self, states: Sequence[State], subset: Subset, indices: Sequence[Tensor], at_once: int
    ) -> list[Tensor]:
        """Each model's outputs for its own samples, several models in one program."""
        setup, device = self.setup, self.setup.device
        setup.module.eval()
        x = samples_of(setup, subset)[0]
        longest = max((len(part) for part in indices), default=0)
        if not longest:
            return [x.new_zeros(0) for _ in indices]
        if not self.can_stack:
            pairs = zip(states, indices, strict=True)
            return [predict(setup, state, subset, part) for state, part in pairs]
        models = max(1, at_once // longest)  # in one stack
        columns = max(1, (at_once if device.type == "cuda" else FEW) // min(models, len(states)))
        states = all_shifted(states)
        names = [name for name in (*setup.layers.names, SHIFT) if name in states[0]]
        outputs: list[Tensor] = []
        for at in range(0, len(states), models):
            some, parts = states[at : at + models], indices[at : at + models]
            spare = self._spare(len(some), longest)
            filled, own = [*some, *[some[0]] * spare], [*parts, *[parts[0]] * spare]
            rows = pad_sequence(own, batch_first=True).to(device)
            stacked = {name: torch.stack([state[name] for state in filled]) for name in names}
            pieces = [
                self._forward(stacked, setup.data.prepare(rows_of(x, piece)))
                for piece in rows.split(columns, dim=1)
            ]
            padded = torch.cat(pieces, dim=1)
            outputs += [row[: len(part)] for row, part in zip(padded, parts, strict=False)]
        return outputs

    @one_thread()
    @torch.no_grad()
    def _outputs_of_means(
        self, means: Means, subset: Subset, indices: Tensor
    ) -> Sequence[Tensor] | None:
        """The outputs of all means for the same samples, by a recorded program that computes the
        means too; None where they are too much for one.
        """
        setup, samples = self.setup, max(1, len(indices))
        width = next((width for width in FEW_WIDTHS if width >= len(means)), RECORDED)
        if not self.can_stack or means.values.shape[1] >= LARGE or width * samples > RECORDED:
            return None
        setup.module.eval()
        x = setup.data.prepare(rows_of(samples_of(setup, subset)[0], indices))
        if not isinstance(x, Tensor):
            return None
        shares = F.pad(means.shares, (0, 0, 0, width - len(means))).to(means.values)

        def program(x: Tensor, values: Tensor, shares: Tensor) -> tuple[Tensor, ...]:
            stacked = stacked_means(values, shares, means.layout)
            return (self._run_stacked(stacked, x.expand(len(shares), *x.shape)),)

        recorded = setup.recorded(("means", means.layout), program)
        return recorded(x, means.values, shares)[0][: len(means)].unbind()

    def _spare(self, models: int, samples: int) -> int:
        """How many more models of so many samples each make one of the few widths for which there
        are recordings.
        """
        width = next((width for width in WIDTHS if width >= models), models)
        recorded = self.setup.device.type == "cuda" and width * samples <= RECORDED
        return width - models if recorded else 0

    def _forward(self, stacked: State, x: Inputs) -> Tensor:
        """The outputs of stacked models for the samples of each."""
        names = tuple(stacked)

        def program(x: Inputs, *values: Tensor) -> tuple[Tensor, ...]:
            return (self._run_stacked(dict(zip(names, values, strict=True)), x),)

        if not isinstance(x, Tensor) or x.shape[0] * x.shape[1] > RECORDED:
            return program(x, *stacked.values())[0]
        return self.setup.recorded(("stacked", names), program)(x, *stacked.values())[0]

    def close(self) -> None:
        """Release the device's memory."""
        self.scheduler.caches.clear()
        self.setup.forget_programs()

    def _run_stacked(self, stacked: State, x: Inputs) -> Tensor:
        cuda = self.setup.device.type == "cuda"
        convolutions = StackedConvolutions() if cuda else nullcontext()
        with convolutions, without_fallback_warning():
            outputs: Tensor = vmap(partial(call, self.setup))(stacked, x)
        return outputs
