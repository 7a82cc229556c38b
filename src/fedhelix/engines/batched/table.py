"""What a stack works on: phases of clients' training, and the table with all their batches."""

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
    noise: int  # the seed of what layers such as dropout draw
    loss: Tensor | None = None  # summed over the steps, once the task is done

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
        return cls(
            setup,
            task,
            local,
            phase,
            batch_schedule(setup, task, phase, purpose, index),
            noise(setup, task, purpose, index),
        )

    @property
    def steps(self) -> int:
        """How many steps it takes."""
        return len(self.schedule.sizes)

    @property
    def settings(self) -> tuple[float, float, float]:
        """Learning rate, momentum and weight decay."""
        training = self.setup.training
        return training.rate(self.task.round, self.phase), training.momentum, training.weight_decay

    @property
    def description(self) -> str:
        """What decides how fast its kind of step is, in words that mean the same in another
        process.
        """
        training = self.setup.training
        network = hashlib.sha256(self.setup.architecture.encode()).hexdigest()[:12]
        return f"{network} {self.phase.part} batch {training.batch_size} {training.precision}"

    @property
    def kind(self) -> tuple[Any, ...]:
        """Tasks of one kind can share a stack: same network, same objective, same names and shapes."""
        training, loss_key = self.setup.training, self.setup.method.capabilities.loss_key
        context = tuple((name, value.shape) for name, value in flatten(self.local.context).items())
        return (
            loss_key,
            None if loss_key is None else self.phase,  # a loss may look at all of it
            self.setup.objective,
            self.phase.part,
            self.phase.model,
            training.batch_size,
            training.augment,
            training.precision,
            training.rule,
            training.rule.slots(training.momentum),
            self.setup.architecture,
            id(self.setup.data.x),
            context,
            tuple(
                (name, value.dtype) for name, value in self.local.models[self.phase.model].items()
            ),
        )


@dataclass(eq=False)
class BatchTable:
    """The plans of all tasks as one table on the device; a slot is at one of its rows."""

    samples: Tensor  # rows x batch size
    mask: Tensor
    crops: Tensor | None
    settings: (
        Tensor  # rows x (learning rate, momentum, weight decay); a task's stand in its first row
    )

    @classmethod
    def empty(cls, rows: int, setup: Setup) -> BatchTable:
        """A table for some rows."""
        size, device = setup.training.batch_size, setup.device
        return cls(
            torch.zeros(rows, size, dtype=torch.int64, device=device),
            torch.zeros(rows, size, device=device),
            torch.zeros(rows, size, 3, dtype=torch.int64, device=device)
            if setup.training.augment
            else None,
            torch.zeros(rows, 3, dtype=torch.float64, device=device),
        )

    def fill(self, phase_tasks: Sequence[PhaseTask]) -> list[int]:
        """Write the tasks' plans one below the other; returns the row at which each begins."""
        samples = torch.cat([phase_task.schedule.samples for phase_task in phase_tasks])
        sizes = torch.tensor(
            [size for phase_task in phase_tasks for size in phase_task.schedule.sizes]
        )
        self.samples[: len(samples)] = samples.to(self.samples.device)
        self.mask[: len(samples)] = (torch.arange(samples.shape[1]) < sizes[:, None]).to(self.mask)
        if self.crops is not None:
            self.crops[: len(samples)] = torch.cat(
                [_crops(phase_task.schedule) for phase_task in phase_tasks]
            ).to(self.crops.device)
        *starts, _ = itertools.accumulate(
            (phase_task.steps for phase_task in phase_tasks), initial=0
        )
        # All of them at once: a copy for every task would make the device wait for the host each
        # time.
        settings = self.settings.new_tensor([phase_task.settings for phase_task in phase_tasks])
        self.settings[torch.tensor(starts, device=self.settings.device)] = settings
        return starts


def _crops(schedule: BatchSchedule) -> Tensor:
    assert schedule.crops is not None
    return schedule.crops


@dataclass(eq=False)
class Slot:
    """Which task a slot works on and how far it is."""

    phase_task: PhaseTask
    done: int = 0

    @property
    def left(self) -> int:
        """Steps to go."""
        return self.phase_task.steps - self.done

    @property
    def size(self) -> int:
        """Samples in its next batch."""
        return self.phase_task.schedule.sizes[self.done]
