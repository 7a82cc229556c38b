"""Clients stacked along a leading axis: one training step of many clients is one program.

A `Stack` has a number of slots. Each slot holds one client's parameters, buffers, optimiser state
and row in the table of batches. `run` takes a step in every slot at once; when a client is done,
the scheduler loads the next one into its slot.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedhelix.core.copies import copied
from fedhelix.core.cuda import WARM_UP, recording
from fedhelix.core.method import Batch
from fedhelix.core.optimizers import StepSettings
from fedhelix.core.tree import State, copy_all, flatten
from fedhelix.engines.batched.gradients import Gradients, Mode
from fedhelix.engines.batched.table import BatchTable, PhaseTask, Slot
from fedhelix.engines.local import gather, part_of

ALIGNED = 64  # values: every entry starts at a multiple of 256 bytes, as fast kernels want it
Shape = tuple[int | None, int | None]  # of batches: samples, and places of sequences that are cut


def no_memory_pool() -> None:
    """Let every CUDA graph allocate its own memory."""


@dataclass(eq=False)
class Stack:
    """Slots for tasks of one kind.

    Trainable entries lie side by side in one flat row per slot, so that an optimiser step is three
    kernels whatever the number of layers; the network sees views of it.
    """

    example: PhaseTask
    width: int
    batches: BatchTable
    pads: bool  # whether short batches are filled up
    mode: Mode = "grouped"
    # Memory that CUDA graphs can share, because only one of them runs at a time.
    memory_pool: Callable[[], Any] = no_memory_pool

    def __post_init__(self) -> None:
        # A copy of the network: other runs may evaluate with theirs at the same time, in threads.
        setup = replace(self.example.setup, module=copied(self.example.setup.module).train())
        self.example = replace(self.example, setup=setup)
        self.gradients = Gradients(self.example, self.mode)
        self.slots: list[Slot | None] = [None] * self.width
        self.graphs: dict[Shape, Any] = {}  # the recorded step for each shape, on a GPU
        self.warm: dict[Shape, int] = {}  # how often each shape has run without a graph
        # The flat row of each model that several clients start from, by the ids of its tensors.
        self.start_rows: dict[tuple[int, ...], Tensor] = {}
        self._allocate()

    def _allocate(self) -> None:
        """The tensors of all slots."""
        setup, model = self.example.setup, self.example.local.models[self.example.phase.model]
        device, width = setup.device, self.width
        self.names = part_of(setup.layers, self.example.phase)
        self.shapes = [model[name].shape for name in self.names]
        self.types = [model[name].dtype for name in self.names]
        dtype = common_type(self.types)
        lengths = [-(-model[name].numel() // ALIGNED) * ALIGNED for name in self.names]
        self.starts = list(itertools.accumulate(lengths, initial=0))
        self.flat = torch.zeros(width, self.starts[-1], dtype=dtype, device=device)
        self.gradient = torch.zeros_like(self.flat)
        self.rule = setup.training.rule
        buffers = range(self.rule.slots(setup.training.momentum))
        self.optimizer_state = [torch.zeros_like(self.flat) for _ in buffers]
        self.taken = torch.zeros(width, 1, dtype=dtype, device=device)  # steps of each slot's task
        fixed = {name: value for name, value in model.items() if name not in set(self.names)}
        self.fixed = self._zeros(fixed)
        self.context = self._zeros(flatten(self.example.local.context))
        self.row = torch.zeros(width, dtype=torch.int64, device=device)
        self.busy = torch.zeros_like(self.row)  # 1 where a slot has a task; others stay on row 0
        # Learning rate, momentum and weight decay of each slot.
        self.settings = torch.zeros(width, 3, dtype=dtype, device=device)
        self.lr, self.momentum, self.decay = self.settings.split(1, dim=1)
        self.loss = torch.zeros(width, device=device)

    def _zeros(self, values: State) -> State:
        """Zeros of these shapes, for every slot."""
        width, device = self.width, self.example.setup.device
        return {
            name: self._view(
                torch.zeros(width, value.numel(), dtype=value.dtype, device=device), value.shape
            )
            for name, value in values.items()
        }

    def views(self, flat: Tensor) -> State:
        """The trainable entries of one row, or of all rows."""
        places = zip(self.names, self.starts, self.shapes, strict=False)
        return {
            name: self._view(flat.narrow(-1, start, shape.numel()), shape)
            for name, start, shape in places
        }

    def _view(self, values: Tensor, shape: torch.Size) -> Tensor:
        """One entry; where slots are computed apart, the channels of a kernel lie side by side, as
        the GPU's convolutions want them.
        """
        lead = values.shape[:-1]
        if self.mode != "apart" or len(shape) != 4:
            return values.view((*lead, *shape))
        outputs, inputs, *kernel = shape
        return values.view(*lead, outputs, *kernel, inputs).movedim(-1, -3)

    def typed(self, flat: Tensor) -> State:
        """The same in the types of the network; entries of the row's type are still views."""
        pairs = zip(self.views(flat).items(), self.types, strict=True)
        return {name: value.to(dtype) for (name, value), dtype in pairs}

    def load(self, place: int, phase_task: PhaseTask, row: int) -> None:
        """Put a task into a slot."""
        model = phase_task.local.models[phase_task.phase.model]
        identity = tuple(id(model[name]) for name in self.names)
        if identity not in self.start_rows:
            start = torch.zeros_like(self.flat[place])
            torch._foreach_copy_(
                list(self.views(start).values()), [model[name] for name in self.names]
            )
            self.start_rows[identity] = start
        self.flat[place] = self.start_rows[identity]
        for value in (*self.optimizer_state, self.taken, self.loss):
            value[place].zero_()
        context = flatten(phase_task.local.context)
        given = [model[name] for name in self.fixed] + list(context.values())
        copy_all([*self.at(place, self.fixed), *self.at(place, self.context, context)], given)
        self._point(place, row, busy=True)
        self.settings[place] = self.batches.settings[row]
        self.slots[place] = Slot(phase_task)

    @staticmethod
    def at(place: int, values: State, names: Iterable[str] | None = None) -> list[Tensor]:
        """One slot's part of these values, or of those with some names."""
        return [values[name][place] for name in (values if names is None else names)]

    def unload(self, place: int) -> None:
        """Take a finished task out of its slot: its model and its summed loss."""
        slot = self.slots[place]
        assert slot is not None
        typed = self.typed(self.flat[place].clone())
        model = {name: value.contiguous() for name, value in typed.items()}
        row, fixed = torch.contiguous_format, self.at(place, self.fixed)
        copies = [torch.empty_like(value, memory_format=row) for value in fixed]
        copy_all(copies, fixed)
        model |= dict(zip(self.fixed, copies, strict=True))
        task = slot.phase_task
        started = task.local.models[task.phase.model]
        task.local.models[task.phase.model] = {name: model[name] for name in started}
        task.loss = self.loss[place].clone()
        self._empty(place)

    def _empty(self, place: int) -> None:
        self.slots[place] = None
        self._point(place, 0, busy=False)

    def _point(self, place: int, row: int, busy: bool) -> None:
        """The row of a slot's next batch. Filled: a value that is assigned waits for the GPU."""
        self.row[place].fill_(row)
        self.busy[place].fill_(int(busy))

    def move(self, place: int, other: Stack, there: int) -> None:
        """Move a half-done task to another stack."""
        pairs = [(self.flat, other.flat), (self.row, other.row), (self.loss, other.loss)]
        pairs += [(self.settings, other.settings), (self.taken, other.taken)]
        pairs += [(value, other.fixed[name]) for name, value in self.fixed.items()]
        pairs += [(value, other.context[name]) for name, value in self.context.items()]
        pairs += list(zip(self.optimizer_state, other.optimizer_state, strict=True))
        for source, target in pairs:
            target[there] = source[place]
        other.slots[there], other.busy[there] = self.slots[place], 1
        self._empty(place)

    def step(self, places: Tensor | None = None, shape: Shape = (None, None)) -> None:
        """One step in every slot, or only in some places, with batches of this shape."""
        setup, (size, width) = self.example.setup, shape
        row = self.row if places is None else self.row[places]
        samples, mask = self.batches.samples[row][:, :size], self.batches.mask[row][:, :size]
        draws = None if self.batches.draws is None else self.batches.draws[row][:, :size]
        x, y, _ = gather(setup, samples, draws, width)
        batch = Batch(x, y, mask if self.pads else None)
        select = (lambda value: value) if places is None else (lambda value: value[places])
        flat, gradient = select(self.flat), select(self.gradient)
        fixed = {name: select(value) for name, value in self.fixed.items()}
        context = {name: select(value) for name, value in self.context.items()}
        buffers, taken = [select(value) for value in self.optimizer_state], select(self.taken)
        settings = (select(self.lr), select(self.momentum), select(self.decay))

        @torch.no_grad()
        def update(slots: slice) -> None:
            mine, count = flat[slots], taken[slots]
            count += 1
            state = [[value[slots]] for value in buffers]
            lr, momentum, decay = (value[slots] for value in settings)
            how = StepSettings(lr, momentum, decay, count)
            self.rule.update([mine], [gradient[slots]], state, how)
            if len(set(self.types)) > 1:
                torch._foreach_copy_(
                    list(self.views(mine).values()), list(self.typed(mine).values())
                )

        typed, out = self.typed(flat), self.views(gradient)
        loss = self.gradients(typed, fixed, context, batch, out, update)
        with torch.no_grad():
            if places is None:
                self.loss += loss
                self.row += self.busy
                return
            # Selected values are copies: write back what has changed.
            self.flat[places], self.taken[places] = flat, taken
            for whole, part in zip(self.optimizer_state, buffers, strict=True):
                whole[places] = part
            for name, value in fixed.items():
                self.fixed[name][places] = value
            self.loss[places] += loss
            self.row[places] += 1

    def run(self, steps: int, size: int) -> None:
        """Steps in all slots with batches of this size; the results of idle slots are not used."""
        slots = [slot for slot in self.slots if slot is not None]
        for _ in range(steps):
            shape = size, widest(slots)
            if shape in self.graphs or self._record(shape):
                self.graphs[shape].replay()
            else:
                self.step(None, shape)
            for slot in slots:
                slot.done += 1

    def run_some(self, places: list[int], size: int) -> None:
        """One step in those slots whose next batch has this size."""
        slots = [slot for place in places if (slot := self.slots[place]) is not None]
        self.step(torch.tensor(places, device=self.flat.device), (size, widest(slots)))
        for slot in slots:
            slot.done += 1

    def _record(self, shape: Shape) -> bool:
        """Record the step as a CUDA graph, which costs no Python, once it has run a few times.

        The first runs choose kernels and allocate workspaces, which a recording does not allow.
        """
        self.warm[shape] = self.warm.get(shape, 0) + 1
        if self.flat.device.type != "cuda" or self.warm[shape] <= WARM_UP:
            return False
        graph = torch.cuda.CUDAGraph()
        with recording(graph, pool=self.memory_pool()):
            self.step(None, shape)
        self.graphs[shape] = graph
        return True

    def seconds_per_step(self, repetitions: int = 5) -> float:
        """The duration of a step; whatever is loaded is lost."""
        self.load(0, self.example, 0)
        self._empty(0)
        size = self.batches.samples.shape[1]
        for _ in range(WARM_UP + 2):
            self.run(1, size)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(repetitions):
            self.run(1, size)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / repetitions


def widest(slots: Collection[Slot]) -> int | None:
    """The width that the next batches of all slots need; None: sequences are not cut."""
    return max((slot.width for slot in slots if slot.width is not None), default=None)


def common_type(types: Collection[torch.dtype]) -> torch.dtype | None:
    """The type that can hold all values of these types; None if there are none."""
    return functools.reduce(torch.promote_types, types) if types else None
