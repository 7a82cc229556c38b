"""The input of a stack: phases of the clients' training, and the table of all their batches."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedhelix.core.method import LocalRound, Phase
from fedhelix.core.tree import flatten
from fedhelix.engines.local import BatchSchedule, ClientTask, Setup, batch_schedule, noise


@dataclass(eq=False)
class PhaseTask:
    """One phase of one client's training."""

    setup: Setup
    task: ClientTask
    local: LocalRound
    phase: Phase
    schedule: BatchSchedule
    noise: int  # seed of layers such as dropout
    loss: Tensor | None = None  # summed over the steps; set when the task is done

    @classmethod
    def of(
        cls,
        setup: Setup,
        task: ClientTask,
        local: LocalRound,
        phase: Phase,
        index: int,
        purpose: str,
    ) -> PhaseTask:
        """The task with its batches drawn."""
        schedule = batch_schedule(setup, task, phase, purpose, index)
        return cls(setup, task, local, phase, schedule, noise(setup, task, purpose, index))

    @property
    def steps(self) -> int:
        """The number of training steps."""
        return len(self.schedule.sizes)

    @property
    def settings(self) -> tuple[float, float, float]:
        """Learning rate, momentum and weight decay."""
        training = self.setup.training
        return training.rate(self.task.round, self.phase), training.momentum, training.weight_decay

    @property
    def description(self) -> str:
        """What the speed of a step depends on, in words that are the same in every process."""
        training = self.setup.training
        network = hashlib.sha256(self.setup.architecture.encode()).hexdigest()[:12]
        return f"{network} {self.phase.part} batch {training.batch_size} {training.precision}"

    @property
    def kind(self) -> tuple[Any, ...]:
        """Tasks of equal kind can share a stack: same network, objective, names and shapes."""
        training, loss_key = self.setup.training, self.setup.loss_key
        model = self.local.models[self.phase.model]
        context = tuple((name, value.shape) for name, value in flatten(self.local.context).items())
        return (
            loss_key,
            None if loss_key is None else self.phase,  # the loss may use all of its fields
            self.setup.objective,
            self.phase.part,
            self.phase.extra,
            self.phase.frozen,
            self.phase.model,
            training.batch_size,
            training.augment,
            training.precision,
            training.rule,
            training.rule.slots(training.momentum),
            self.setup.architecture,
            self.setup.frozen,
            self.setup.cuts,
            id(self.setup.data.x),
            context,
            tuple((name, value.dtype) for name, value in model.items()),
        )


@dataclass(eq=False)
class BatchTable:
    """The batch schedules of all tasks as one table on the device; each slot points to a row."""

    samples: Tensor  # rows x batch size
    mask: Tensor  # 0 for padding
    draws: Tensor | None  # of the augmentation
    # rows x (learning rate, momentum, weight decay); only the first row of a task is filled
    settings: Tensor

    @classmethod
    def empty(cls, rows: int, setup: Setup) -> BatchTable:
        """A table of that many rows."""
        size, device = setup.training.batch_size, setup.device
        draws, augmentation = None, setup.training.augmentation
        if augmentation is not None:
            one = augmentation.draw(1, torch.Generator()).to(device)
            draws = one.new_zeros(rows, size, one.shape[1])
        return cls(
            torch.zeros(rows, size, dtype=torch.int64, device=device),
            torch.zeros(rows, size, device=device),
            draws,
            torch.zeros(rows, 3, dtype=torch.float64, device=device),
        )

    def fill(self, phase_tasks: Sequence[PhaseTask]) -> list[int]:
        """Write the tasks' schedules one below the other; returns the first row of each."""
        schedules = [phase_task.schedule for phase_task in phase_tasks]
        samples = torch.cat([schedule.samples for schedule in schedules])
        sizes = torch.tensor([size for schedule in schedules for size in schedule.sizes])
        self.samples[: len(samples)] = samples.to(self.samples.device)
        self.mask[: len(samples)] = (torch.arange(samples.shape[1]) < sizes[:, None]).to(self.mask)
        if self.draws is not None:
            draws = torch.cat([_draws(schedule) for schedule in schedules])
            self.draws[: len(samples)] = draws.to(self.draws.device)
        *starts, _ = itertools.accumulate((len(s.sizes) for s in schedules), initial=0)
        # One copy for all tasks: with one per task, the device would wait for the host each time.
        settings = self.settings.new_tensor([phase_task.settings for phase_task in phase_tasks])
        self.settings[torch.tensor(starts, device=self.settings.device)] = settings
        return starts


def _draws(schedule: BatchSchedule) -> Tensor:
    assert schedule.draws is not None
    return schedule.draws


@dataclass(eq=False)
class Slot:
    """The task in a slot, and its progress."""

    phase_task: PhaseTask
    done: int = 0

    @property
    def left(self) -> int:
        """The steps that are left."""
        return self.phase_task.steps - self.done

    @property
    def size(self) -> int:
        """The number of samples in the next batch."""
        return self.phase_task.schedule.sizes[self.done]

    @property
    def width(self) -> int | None:
        """How wide the next batch must be, where sequences are cut."""
        widths = self.phase_task.schedule.widths
        return None if widths is None else widths[self.done]
