"""Clients stacked along a leading axis: one training step of many clients is one program.

A `Stack` has a number of slots. Each slot holds one client's parameters, buffers, optimiser state
and place in the table of batches; `run` takes a step in every slot at once. When a client is done,
its slot takes the next one.
"""

from __future__ import annotations

import copy
import functools
import itertools
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from fedhelix.core.cuda import recording
from fedhelix.core.method import Batch, Local
from fedhelix.core.optimizers import StepSettings
from fedhelix.core.seeds import seeded
from fedhelix.core.tree import State, flatten, unflatten
from fedhelix.engines.batched.convolution import StackedConvolutions
from fedhelix.engines.batched.streams import STREAMS, fork_streams, join_streams, on_stream
from fedhelix.engines.batched.table import BatchTable, PhaseTask, Slot
from fedhelix.engines.local import Setup, base_loss, features, forward, gather, part_of

# How a step computes the gradients of its slots: as one program with grouped convolutions or with
# convolutions as matrix products (small networks), or apart, slot by slot on parallel streams
# (large ones).
Mode = Literal["products", "grouped", "apart"]

ALIGNED = 64  # values
WARM_UP = 2


@dataclass(eq=False)
class Stack:
    """Slots for tasks of one kind.

    Trainable entries lie side by side in one flat row per slot, so that an optimiser step is three
    kernels whatever the number of layers; the network sees views into it.
    """

    example: PhaseTask
    width: int
    batches: BatchTable
    mode: Mode = "grouped"
    pool: Callable[[], Any] = lambda: (
        None
    )  # memory for graphs to share, since only one of them runs at a time

    def __post_init__(self) -> None:
        # A network of its own: other runs may judge models with theirs meanwhile, in other threads.
        setup = replace(self.example.setup, module=copy.deepcopy(self.example.setup.module).train())
        self.example = replace(self.example, setup=setup)
        device, width = setup.device, self.width
        model = self.example.local.models[self.example.phase.model]
        self.names = part_of(setup.layers, self.example.phase.part)
        self.shapes = [model[name].shape for name in self.names]
        dtype = common_type(model[name] for name in self.names)
        # Every entry begins at a multiple of 256 bytes, as fast kernels want it.
        lengths = [-(-model[name].numel() // ALIGNED) * ALIGNED for name in self.names]
        self.starts = list(itertools.accumulate(lengths, initial=0))
        self.flat = torch.zeros(width, self.starts[-1], dtype=dtype, device=device)
        self.gradient = torch.zeros_like(self.flat)
        self.rule, training = setup.training.rule, setup.training
        kept = range(self.rule.slots(training.momentum))
        self.optimizer_state = [torch.zeros_like(self.flat) for _ in kept]
        self.taken = torch.zeros(width, 1, dtype=dtype, device=device)  # steps of each slot's task
        self.fixed = {
            name: torch.zeros(width, *value.shape, dtype=value.dtype, device=device)
            for name, value in model.items()
            if name not in set(self.names)
        }
        self.context = {
            name: torch.zeros(width, *value.shape, dtype=value.dtype, device=device)
            for name, value in flatten(self.example.local.context).items()
        }
        self.row = torch.zeros(width, dtype=torch.int64, device=device)
        self.busy = torch.zeros_like(
            self.row
        )  # 1 where a slot has a task; the others idle along on row 0
        # Of each slot learning rate, momentum and weight decay.
        self.settings = torch.zeros(width, 3, dtype=dtype, device=device)
        self.lr, self.momentum, self.decay = self.settings.split(1, dim=1)
        self.loss = torch.zeros(width, device=device)
        self.slots: list[Slot | None] = [None] * width
        self.fills_up = may_fill_up(setup)
        self.graphs: dict[int, Any] = {}  # on a GPU the recorded step for each size of batch
        self.warm: dict[int, int] = {}  # how often each size was run without a graph
        self.seen: dict[
            tuple[int, ...], Tensor
        ] = {}  # flattened start of clients that received the same model

    def views(self, flat: Tensor) -> State:
        """The trainable entries of one row, or of all rows."""
        lead = flat.shape[:-1]
        places = zip(self.names, self.starts, self.shapes, strict=False)
        return {
            name: flat.narrow(-1, start, shape.numel()).view(*lead, *shape)
            for name, start, shape in places
        }

    def load(self, place: int, phase_task: PhaseTask, row: int) -> None:
        """Put a task into a slot."""
        model = phase_task.local.models[phase_task.phase.model]
        same = tuple(id(model[name]) for name in self.names)
        if same not in self.seen:
            self.seen[same] = torch.zeros_like(self.flat[place])
            torch._foreach_copy_(
                list(self.views(self.seen[same]).values()), [model[name] for name in self.names]
            )
        self.flat[place] = self.seen[same]
        for kept in (*self.optimizer_state, self.taken):
            kept[place] = 0
        for name, value in self.fixed.items():
            value[place] = model[name]
        for name, value in flatten(phase_task.local.context).items():
            self.context[name][place] = value
        self.row[place], self.loss[place], self.busy[place] = row, 0, 1
        self.settings[place] = self.batches.settings[row]
        self.slots[place] = Slot(phase_task)

    def unload(self, place: int) -> None:
        """Take a finished task out of its slot."""
        slot = self.slots[place]
        assert slot is not None
        model = {
            **self.views(self.flat[place].clone()),
            **{k: v[place].clone() for k, v in self.fixed.items()},
        }
        slot.phase_task.local.models[slot.phase_task.phase.model] = {
            name: model[name] for name in slot.phase_task.setup.layers.names
        }
        slot.phase_task.loss = self.loss[place].clone()
        self._leave(place)

    def _leave(self, place: int) -> None:
        self.slots[place] = None
        self.row[place], self.busy[place] = 0, 0

    def move(self, place: int, other: Stack, there: int) -> None:
        """Carry a half-done task over to another stack."""
        pairs = [(self.flat, other.flat), (self.row, other.row), (self.loss, other.loss)]
        pairs += [(self.settings, other.settings)]
        pairs += [(value, other.fixed[name]) for name, value in self.fixed.items()]
        pairs += [(value, other.context[name]) for name, value in self.context.items()]
        pairs += [(self.taken, other.taken)]
        pairs += list(zip(self.optimizer_state, other.optimizer_state, strict=True))
        for mine, its in pairs:
            its[there] = mine[place]
        other.slots[there], other.busy[there] = self.slots[place], 1
        self._leave(place)

    def step(self, places: Tensor | None = None, size: int | None = None) -> None:
        """One step in every slot, or in some that have a shorter batch."""
        setup = self.example.setup
        row = self.row if places is None else self.row[places]
        samples, mask = self.batches.samples[row][:, :size], self.batches.mask[row][:, :size]
        crops = None if self.batches.crops is None else self.batches.crops[row][:, :size]
        x, y, _ = gather(setup, samples, crops)
        batch = Batch(x, y, mask if self.fills_up else None)
        pick = (lambda value: value) if places is None else (lambda value: value[places])
        flat = pick(self.flat)
        fixed = {name: pick(value) for name, value in self.fixed.items()}
        context = {name: pick(value) for name, value in self.context.items()}
        gradients = self._apart if self.mode == "apart" else self._stacked
        gradient = pick(self.gradient)
        loss = gradients(self.views(flat), fixed, context, batch, self.views(gradient))
        with torch.no_grad():
            kept, taken = [pick(value) for value in self.optimizer_state], pick(self.taken)
            taken += 1
            settings = (pick(self.lr), pick(self.momentum), pick(self.decay))
            state = [[value] for value in kept]
            self.rule.update([flat], [gradient], state, StepSettings(*settings, taken))
            if places is None:
                self.loss += loss
                self.row += self.busy
                return
            # Picked values are copies, so what has changed goes back to its place.
            self.flat[places], self.taken[places] = flat, taken
            for whole, part in zip(self.optimizer_state, kept, strict=True):
                whole[places] = part
            for name, value in fixed.items():
                self.fixed[name][places] = value
            self.loss[places] += loss
            self.row[places] += 1

    def _one(
        self, params: State, fixed: State, context: State, x: Tensor, y: Tensor, mask: Tensor | None
    ) -> Tensor:
        """The objective of one client, as its method wrote it."""
        setup = self.example.setup
        local = Local(
            unflatten(context),
            self.example.phase,
            setup.layers,
            partial(base_loss, setup),
            partial(forward, setup),
            partial(features, setup),
        )
        return setup.hooks.loss({**params, **fixed}, Batch(x, y, mask), local)

    def _stacked(
        self, params: State, fixed: State, context: State, batch: Batch, out: State
    ) -> Tensor:
        """Losses of all slots in one program; the gradients go to `out`."""
        axes = (0, 0, 0, 0, 0, None if batch.mask is None else 0)
        with StackedConvolutions() if self.mode == "products" else nullcontext():
            grads, loss = vmap(grad_and_value(self._one), axes, randomness="different")(
                params, fixed, context, *batch
            )
        torch._foreach_copy_(list(out.values()), [grads[name] for name in out])
        return loss

    def _apart(
        self, params: State, fixed: State, context: State, batch: Batch, out: State
    ) -> Tensor:
        """The same, slot by slot, on parallel streams where there are any."""
        losses: list[Tensor] = []
        streams = fork_streams(batch.x.device, min(STREAMS, len(batch.y)))
        for at in range(len(batch.y)):
            with on_stream(streams, at):
                mine = {name: value[at].detach().requires_grad_() for name, value in params.items()}
                still, held = (
                    {name: value[at] for name, value in part.items()} for part in (fixed, context)
                )
                mask = None if batch.mask is None else batch.mask[at]
                loss = self._one(mine, still, held, _layout(batch.x[at]), batch.y[at], mask)
                grads = torch.autograd.grad(
                    loss, list(mine.values()), allow_unused=True, materialize_grads=True
                )
                torch._foreach_copy_([value[at] for value in out.values()], list(grads))
                losses.append(loss.detach())
        join_streams(streams)
        return torch.stack(losses)

    def run(self, steps: int, size: int) -> None:
        """Take some steps in all slots, each with a batch of this size; those of idle slots are
        never used.
        """
        for _ in range(steps):
            if size in self.graphs or self._record(size):
                self.graphs[size].replay()
            else:
                self.step(None, size)
        for slot in self.slots:
            if slot is not None:
                slot.done += steps

    def run_some(self, places: list[int], size: int) -> None:
        """One step in some slots only: those whose next batch has this size."""
        self.step(torch.tensor(places, device=self.flat.device), size)
        for place in places:
            slot = self.slots[place]
            assert slot is not None
            slot.done += 1

    def _record(self, size: int) -> bool:
        """Record the step as a CUDA graph, so that it costs no Python any more, once it has run a
        few times without.

        Those first runs choose kernels and make workspaces, which must not happen during the
        recording.
        """
        self.warm[size] = self.warm.get(size, 0) + 1
        if self.flat.device.type != "cuda" or self.warm[size] <= WARM_UP:
            return False
        graph = torch.cuda.CUDAGraph()
        with recording(graph, pool=self.pool()):
            self.step(None, size)
        self.graphs[size] = graph
        return True

    def seconds_per_step(self, repetitions: int = 5) -> float:
        """How long a step takes; what is loaded is lost."""
        self.load(0, self.example, 0)
        self._leave(0)
        size = self.batches.samples.shape[1]
        for _ in range(WARM_UP + 2):
            self.run(1, size)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(repetitions):
            self.run(1, size)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / repetitions


def common_type(values: Iterable[Tensor]) -> torch.dtype | None:
    """The type of tensors that are to lie side by side; None where there are none."""
    found = {value.dtype for value in values}
    return functools.reduce(torch.promote_types, found) if found else None


@torch.no_grad()
def may_fill_up(setup: Setup) -> bool:
    """Whether short batches may be filled up with samples that do not count.

    They would spoil statistics of the batch, and a loss that is one number for all samples cannot
    leave them out.
    """
    counting = nn.modules.batchnorm._NormBase
    if setup.layers.norm or any(
        isinstance(m, counting) and m.track_running_stats for m in setup.module.modules()
    ):
        return False
    with seeded(0, setup.device):
        x, y, _ = gather(setup, torch.arange(min(2, len(setup.data.y)), device=setup.device), None)
        return setup.objective.loss(forward(setup, setup.initial, x), y).dim() > 0


def _layout(x: Tensor) -> Tensor:
    """Large convolutions are fastest on a GPU when the channels of a pixel lie together."""
    return x.contiguous(memory_format=torch.channels_last) if x.is_cuda and x.dim() == 4 else x
