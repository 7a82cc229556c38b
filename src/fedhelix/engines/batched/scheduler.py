"""Which client is trained in which slot of which stack."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast, get_args

import torch

from fedhelix.core.errors import EngineFailure
from fedhelix.core.seeds import seeded
from fedhelix.engines.batched.stack import Mode, Stack
from fedhelix.engines.batched.table import BatchTable, PhaseTask

WIDTHS = (
    *(1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128),
    *(160, 192, 256, 320, 384, 512),
)


@dataclass(eq=False)
class StackCache:
    """Stacks of one kind of task, kept from round to round with what was learnt about them."""

    batches: BatchTable
    mode: Mode | None = None
    slots: int = WIDTHS[-1]
    width: int = 1  # of the stack in use
    stacks: dict[int, Stack] = field(default_factory=dict)


class Scheduler:
    """Trains tasks in stacks of slots. Engines of several runs can share one."""

    def __init__(self, slots: int, choices: dict[str, str]):
        self.slots, self.choices = slots, choices
        self.caches: dict[Any, StackCache] = {}
        self.lock = threading.RLock()  # one engine trains at a time
        self.steps_taken = 0  # by slots, idle ones included
        self.steps_needed = 0

    def train(self, phase_tasks: Iterable[PhaseTask]) -> None:
        """All of them, those of one kind together."""
        kinds: dict[Any, list[PhaseTask]] = {}
        for phase_task in phase_tasks:
            if phase_task.steps:
                kinds.setdefault(phase_task.kind, []).append(phase_task)
        with self.lock:
            for kind, alike in kinds.items():
                self._train_alike(kind, alike)

    def _train_alike(self, kind: Any, phase_tasks: list[PhaseTask]) -> None:
        """Tasks of one kind; with too little memory, again with half of the slots."""
        cache = self._cache(kind, phase_tasks)
        while not self._fits(cache, phase_tasks):
            phase_tasks = [phase_task for phase_task in phase_tasks if phase_task.loss is None]
            cache.slots = cache.width // 2
            drop_stacks([cache])
            warnings.warn(
                f"out of GPU memory: going on with {cache.slots} clients at once", stacklevel=2
            )

    def _fits(self, cache: StackCache, phase_tasks: list[PhaseTask]) -> bool:
        """Train the tasks; False when that needs more memory than there is."""
        try:
            self._schedule(cache, phase_tasks)
        except torch.cuda.OutOfMemoryError:
            if cache.width == 1:
                raise
            return False
        return True

    def _cache(self, kind: Any, phase_tasks: list[PhaseTask]) -> StackCache:
        rows = sum(phase_task.steps for phase_task in phase_tasks)
        cache = self.caches.get(kind)
        if cache is None or len(cache.batches.samples) < rows:
            # Graphs hold addresses, so a table that has become too small takes its stacks with it:
            # leave some room.
            batches = BatchTable.empty(rows + rows // 2, phase_tasks[0].setup)
            cache = StackCache(
                batches, cache.mode if cache else None, cache.slots if cache else self.slots
            )
            self.caches[kind] = cache
        return cache

    def _schedule(self, cache: StackCache, phase_tasks: list[PhaseTask]) -> None:
        """Longest tasks first; a slot that is done takes the next; the last few move to a narrower
        stack.
        """
        starts = dict(zip(map(id, phase_tasks), cache.batches.fill(phase_tasks), strict=True))
        waiting = sorted(phase_tasks, key=lambda phase_task: phase_task.steps)
        # More slots than this would only wait for the longest task.
        enough = -(-sum(phase_task.steps for phase_task in phase_tasks) // waiting[-1].steps)
        stack = self._stack(cache, phase_tasks[0], enough)
        with seeded(
            phase_tasks[0].noise, phase_tasks[0].setup.device
        ):  # after a choice by timing, whose steps draw too
            self._play(cache, stack, waiting, starts)

    def _play(
        self, cache: StackCache, stack: Stack, waiting: list[PhaseTask], starts: Mapping[int, int]
    ) -> None:
        """Until nobody waits and all slots are empty."""
        while True:
            for place, slot in enumerate(stack.slots):
                if slot is not None and not slot.left:
                    stack.unload(place)
                if stack.slots[place] is None and waiting:
                    phase_task = waiting.pop()
                    stack.load(place, phase_task, starts[id(phase_task)])
            busy = [place for place, slot in enumerate(stack.slots) if slot is not None]
            if not busy:
                stack.seen.clear()
                return
            if len(busy) < stack.width:
                narrow = self._stack(cache, stack.example, len(busy))
                if narrow.width < stack.width:
                    for there, place in enumerate(busy):
                        stack.move(place, narrow, there)
                    stack.seen.clear()
                    stack, busy = narrow, list(range(len(busy)))
            self._advance(stack, busy)

    def _advance(self, stack: Stack, busy: list[int]) -> None:
        """As many steps as all busy slots can take alike, or one for each size of batch that is
        due.
        """
        slots = {place: slot for place in busy if (slot := stack.slots[place]) is not None}
        full = stack.batches.samples.shape[1]
        if stack.fills_up:
            steps = min(slot.left for slot in slots.values())
            stack.run(steps, full)
        else:
            # Only batches of one size go together.
            sizes: dict[int, list[int]] = {}
            for place, slot in slots.items():
                sizes.setdefault(slot.size, []).append(place)
            steps = 1
            if len(sizes) == 1:
                stack.run(1, next(iter(sizes)))
            else:
                for size, places in sizes.items():
                    stack.run_some(places, size)
        self.steps_taken += steps * stack.width
        self.steps_needed += steps * len(busy)

    def _stack(self, cache: StackCache, example: PhaseTask, wanted: int) -> Stack:
        """A stack of at least the wanted width, as far as memory allows; few widths, so that few
        graphs serve all.
        """
        width = min(
            next(width for width in WIDTHS if width >= min(wanted, WIDTHS[-1])), cache.slots
        )
        cache.width = width
        if width not in cache.stacks:
            if cache.mode is None:
                known = self.choices.get(example.description)
                cache.mode = (
                    cast(Mode, known)
                    if known in get_args(Mode)
                    else self._choose_mode(cache, example, width)
                )
                self.choices[example.description] = cache.mode
            cache.stacks[width] = Stack(example, width, cache.batches, cache.mode, self._pool)
        return cache.stacks[width]

    def _pool(self) -> Any:
        """The memory of any graph that is alive."""
        stacks = [stack for cache in self.caches.values() for stack in cache.stacks.values()]
        return next((graph.pool() for stack in stacks for graph in stack.graphs.values()), None)

    def _choose_mode(self, cache: StackCache, example: PhaseTask, width: int) -> Mode:
        """Time a few steps of each way and keep the fastest; one that fails with this network is
        out.
        """
        if example.setup.device.type != "cuda":
            return "grouped"
        if example.setup.training.precision != "float32":
            return "apart"  # the stacked programs know no mixed precision
        seconds: dict[Mode, float] = {}
        for mode in ("products", "grouped", "apart"):
            try:
                seconds[mode] = Stack(example, width, cache.batches, mode).seconds_per_step()
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
        """Give memory back; stacks can be built again."""
        drop_stacks(self.caches.values())


def drop_stacks(shops: Iterable[StackCache]) -> None:
    for cache in shops:
        cache.stacks.clear()
    gc.collect()  # steps that were not recorded leave their activations in reference cycles
    torch.cuda.empty_cache()
