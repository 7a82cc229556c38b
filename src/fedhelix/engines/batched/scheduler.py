"""Decides which client trains in which slot of which stack."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast, get_args

import torch

from fedhelix.core.errors import EngineFailure
from fedhelix.core.seeds import seeded
from fedhelix.engines.batched.gradients import Mode, can_stack
from fedhelix.engines.batched.padding import allows_padding
from fedhelix.engines.batched.stack import Stack
from fedhelix.engines.batched.streams import STREAMS
from fedhelix.engines.batched.table import BatchTable, PhaseTask, Slot
from fedhelix.engines.remembered import remembered

# Few widths, so that few CUDA graphs have to be recorded.
WIDTHS = (
    *(1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128),
    *(160, 192, 256, 320, 384, 512),
)
APART = STREAMS  # slots that are computed apart: enough to fill a GPU, and quickly recorded


@dataclass(eq=False)
class StackCache:
    """The stacks for one kind of task, kept from round to round."""

    batches: BatchTable
    pads: bool  # whether short batches are filled up
    mode: Mode | None = None
    slots: int = WIDTHS[-1]  # at most
    width: int = 1  # of the stack in use
    stacks: dict[int, Stack] = field(default_factory=dict)  # by width


class Scheduler:
    """Trains tasks in stacks of slots. The engines of several runs can share one."""

    def __init__(self, slots: int, choices: dict[str, str]):
        self.slots, self.choices = slots, choices
        self.caches: dict[Any, StackCache] = {}  # by kind of task
        self.lock = threading.RLock()  # one engine trains at a time
        self.steps_taken = 0  # by slots, idle ones included
        self.steps_needed = 0  # by tasks

    def train(self, phase_tasks: Iterable[PhaseTask]) -> None:
        """Train all tasks, those of one kind together."""
        kinds: dict[Any, list[PhaseTask]] = {}
        for phase_task in phase_tasks:
            if phase_task.steps:
                kinds.setdefault(phase_task.kind, []).append(phase_task)
        with self.lock:
            for kind, alike in kinds.items():
                self._train_alike(kind, alike)

    def _train_alike(self, kind: Any, phase_tasks: list[PhaseTask]) -> None:
        """Train tasks of one kind; if memory is short, retry the rest with half of the slots."""
        cache = self._cache(kind, phase_tasks)
        while not self._fits(cache, phase_tasks):
            phase_tasks = [phase_task for phase_task in phase_tasks if phase_task.loss is None]
            cache.slots = cache.width // 2
            drop_stacks([cache])
            warnings.warn(
                f"out of GPU memory: going on with {cache.slots} clients at once", stacklevel=2
            )

    def _fits(self, cache: StackCache, phase_tasks: list[PhaseTask]) -> bool:
        """Train the tasks; False if that needs more memory than there is."""
        try:
            self._train_all(cache, phase_tasks)
        except torch.cuda.OutOfMemoryError:
            if cache.width == 1:
                raise
            return False
        return True

    def _cache(self, kind: Any, phase_tasks: list[PhaseTask]) -> StackCache:
        rows = sum(phase_task.steps for phase_task in phase_tasks)
        cache = self.caches.get(kind)
        if cache is None or len(cache.batches.samples) < rows:
            # CUDA graphs hold the addresses of the table, so replacing it discards all stacks.
            # Spare rows make that rare.
            setup = phase_tasks[0].setup
            batches = BatchTable.empty(rows + rows // 2, setup)
            cache = (
                replace(cache, batches=batches, stacks={})
                if cache
                else StackCache(batches, allows_padding(setup), slots=self.slots)
            )
            self.caches[kind] = cache
        return cache

    def _train_all(self, cache: StackCache, phase_tasks: list[PhaseTask]) -> None:
        """Fill the table of batches, and train until no task is left; the longest start first."""
        starts = dict(zip(map(id, phase_tasks), cache.batches.fill(phase_tasks), strict=True))
        waiting = sorted(phase_tasks, key=lambda phase_task: phase_task.steps)
        # More slots than this would only wait for the longest task.
        enough = -(-sum(phase_task.steps for phase_task in phase_tasks) // waiting[-1].steps)
        stack = self._stack(cache, phase_tasks[0], enough)
        # Seeded only now: choosing a mode by timing takes steps that draw numbers as well.
        with seeded(phase_tasks[0].noise, phase_tasks[0].setup.device):
            while busy := self._refill(stack, waiting, starts):
                stack, busy = self._narrow(cache, stack, busy)
                self._advance(stack, busy)
        stack.start_rows.clear()

    def _refill(
        self, stack: Stack, waiting: list[PhaseTask], starts: Mapping[int, int]
    ) -> list[int]:
        """Replace finished tasks by waiting ones; returns the places of all busy slots."""
        for place, slot in enumerate(stack.slots):
            if slot is not None and not slot.left:
                stack.unload(place)
            if stack.slots[place] is None and waiting:
                phase_task = waiting.pop()
                stack.load(place, phase_task, starts[id(phase_task)])
        return [place for place, slot in enumerate(stack.slots) if slot is not None]

    def _narrow(self, cache: StackCache, stack: Stack, busy: list[int]) -> tuple[Stack, list[int]]:
        """Move the last few tasks to a narrower stack, if there is one."""
        if len(busy) == stack.width:
            return stack, busy
        narrow = self._stack(cache, stack.example, len(busy))
        if narrow.width >= stack.width:
            return stack, busy
        for there, place in enumerate(busy):
            stack.move(place, narrow, there)
        stack.start_rows.clear()
        return narrow, list(range(len(busy)))

    def _advance(self, stack: Stack, busy: list[int]) -> None:
        """Steps until the first task is done, or one step where batches cannot be padded."""
        slots = {place: slot for place in busy if (slot := stack.slots[place]) is not None}
        full = stack.batches.samples.shape[1]
        short = {} if stack.pads else short_batches(slots, full)
        steps = 1
        if len(short) == 1 and len(next(iter(short.values()))) == len(slots):
            stack.run(1, next(iter(short)))  # everybody's batches are equally short
        elif short:
            # Only batches of equal size can share a step. The few short ones go first, so that
            # all slots can then share steps with full batches, which are recorded.
            for size, places in short.items():
                stack.run_some(places, size)
            busy = [place for places in short.values() for place in places]
        else:
            steps = min(slot.left for slot in slots.values()) if stack.pads else 1
            stack.run(steps, full)
        self.steps_taken += steps * stack.width
        self.steps_needed += steps * len(busy)

    def _stack(self, cache: StackCache, example: PhaseTask, wanted: int) -> Stack:
        """A stack of at least the wanted width, as far as memory allows."""
        width = next(width for width in WIDTHS if width >= min(wanted, WIDTHS[-1]))
        width = min(width, cache.slots)
        if cache.mode is None:
            cache.mode = self._mode(cache, example, width)
            self.choices[example.description] = cache.mode
        if cache.mode == "apart":
            width = min(width, APART)
        cache.width = width
        if width not in cache.stacks:
            cache.stacks[width] = Stack(
                example, width, cache.batches, cache.pads, cache.mode, self._memory_pool
            )
        return cache.stacks[width]

    def _memory_pool(self) -> Any:
        """The memory pool of any recorded CUDA graph; None if there is none."""
        stacks = [stack for cache in self.caches.values() for stack in cache.stacks.values()]
        return next((graph.pool() for stack in stacks for graph in stack.graphs.values()), None)

    def _mode(self, cache: StackCache, example: PhaseTask, width: int) -> Mode:
        """How to compute a step: as the run did before, or as is fastest on this GPU."""
        known = self.choices.get(example.description)
        if known in get_args(Mode):
            return cast(Mode, known)
        if example.setup.device.type != "cuda":
            return "grouped" if can_stack(example.setup) else "apart"
        if example.setup.training.precision != "float32":
            return "apart"  # the stacked programs do not support mixed precision
        gpu = torch.cuda.get_device_name(example.setup.device)
        key = f"{gpu} torch {torch.__version__} {example.description} {width} slots"
        choose = partial(self._fastest_mode, cache, example, width)
        return remembered("modes.json", key, get_args(Mode), choose)

    def _fastest_mode(self, cache: StackCache, example: PhaseTask, width: int) -> Mode:
        """The fastest mode in a few timed steps, of those that work with this network."""
        seconds: dict[Mode, float] = {}  # per slot
        modes: dict[Mode, int] = {"products": width, "grouped": width, "apart": min(width, APART)}
        for mode, slots in modes.items():
            try:
                stack = Stack(example, slots, cache.batches, cache.pads, mode)
                seconds[mode] = stack.seconds_per_step() / slots
            except torch.cuda.OutOfMemoryError:
                if mode == "apart" and not seconds:
                    raise
            except RuntimeError as problem:
                reason = str(problem).partition("\n")[0]
                warnings.warn(
                    f"clients of this model cannot be run as '{mode}': {reason}", stacklevel=2
                )
        if not seconds:
            raise EngineFailure(
                "this model cannot be run by the batched engine; use --engine serial."
            )
        return min(seconds, key=lambda mode: seconds[mode])

    def drop_stacks(self) -> None:
        """Free the memory of all stacks; they are built again when needed."""
        drop_stacks(self.caches.values())


def short_batches(slots: Mapping[int, Slot], full: int) -> dict[int, list[int]]:
    """The places of the slots whose next batch is not full, by its size."""
    short: dict[int, list[int]] = {}
    for place, slot in slots.items():
        if slot.size != full:
            short.setdefault(slot.size, []).append(place)
    return short


def drop_stacks(caches: Iterable[StackCache]) -> None:
    """Free the memory of the stacks in some caches."""
    for cache in caches:
        cache.stacks.clear()
    gc.collect()  # steps that were not recorded leave their activations in reference cycles
    torch.cuda.empty_cache()
