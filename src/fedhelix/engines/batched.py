"""Many clients as one program: the engine for GPUs, where one small network at a time would leave them idle."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast, get_args

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from fedhelix.client import Job, Outcome, Pool, Scores, Setup, open_round, open_use, samples_of
from fedhelix.data import rows_of
from fedhelix.engines.base import Engine
from fedhelix.engines.convolution import StackedConvolutions
from fedhelix.engines.stack import Batches, Mode, Stack, Task
from fedhelix.errors import EngineFailure
from fedhelix.method import LocalRound, Phase
from fedhelix.probe import is_whole
from fedhelix.seeds import seeded
from fedhelix.task import judge_all
from fedhelix.tree import State

WIDTHS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512)
SAMPLES_AT_ONCE = 20_000  # of a stacked evaluation
FEW = 1000


@dataclass(eq=False)
class Workshop:
    """Stacks of one kind of task, kept from round to round with what was learnt about them."""

    batches: Batches
    mode: Mode | None = None
    slots: int = WIDTHS[-1]
    width: int = 1  # of the stack in use
    stacks: dict[int, Stack] = field(default_factory=dict)


class Batched(Engine):
    """Clients share a stack of slots; on a GPU a step of all slots is one CUDA graph."""

    name: ClassVar[str] = "batched"

    def __init__(self, setup: Setup, slots: int | None = None, neighbour: Batched | None = None):
        super().__init__(setup)
        self.slots = slots or (WIDTHS[-1] if setup.device.type == "cuda" else 16)
        # Engines of several runs can share their stacks; then one of them trains at a time.
        self.workshops: dict[Any, Workshop] = neighbour.workshops if neighbour else {}
        self.lock: threading.RLock = neighbour.lock if neighbour else threading.RLock()
        if neighbour:
            self.choices = neighbour.choices
        self.steps_taken = 0  # by slots, idle ones included
        self.steps_needed = 0

    def work(self, jobs: Sequence[Job]) -> list[Outcome]:
        """The outcomes of the jobs, in their order."""
        return self.work_together([(self.setup, job) for job in jobs])

    def work_together(self, jobs: Sequence[tuple[Setup, Job]]) -> list[Outcome]:
        """Jobs of one run or of several: those that train alike share the slots."""
        rounds = [open_round(setup, job) for setup, job in jobs]
        opened = zip(jobs, rounds, strict=True)
        phases = [setup.asked.phases(local.client, local.models) for (setup, _), local in opened]
        tasks = self._train(jobs, rounds, phases, "batches")
        outcomes, losses = [], []
        for (setup, job), local, mine in zip(jobs, rounds, tasks, strict=True):
            steps = sum(task.steps for task in mine)
            upload, own = setup.asked.upload(replace(local, steps=steps))
            total = sum((task.loss for task in mine if task.loss is not None), torch.zeros(()).to(setup.device))
            losses.append(total / max(steps, 1))
            outcomes.append(Outcome(job.client, local.client.samples, upload, own, 0.0))
        figures = torch.stack(losses).tolist() if losses else []  # the only wait for the device
        return [outcome._replace(loss=loss) for outcome, loss in zip(outcomes, figures, strict=True)]

    def personal(self, jobs: Sequence[Job]) -> list[State]:
        """The models that the clients would use now."""
        opened = [open_use(self.setup, job) for job in jobs]
        rounds, phases = [local for local, _, _ in opened], [phases for _, _, phases in opened]
        self._train([(self.setup, job) for job in jobs], rounds, phases, "tune")
        return [local.models[used] for local, used, _ in opened]

    def _train(
        self,
        jobs: Sequence[tuple[Setup, Job]],
        rounds: Sequence[LocalRound],
        phases: Sequence[Sequence[Phase]],
        purpose: str,
    ) -> list[list[Task]]:
        """All clients through their first phase, then all through their second, and so on."""
        tasks: list[list[Task]] = [[] for _ in jobs]
        for index in range(max((len(mine) for mine in phases), default=0)):
            kinds: dict[Any, list[Task]] = {}
            for (setup, job), local, mine, done in zip(jobs, rounds, phases, tasks, strict=True):
                if index < len(mine):
                    task = Task.of(setup, job, local, mine[index], index, purpose)
                    done.append(task)
                    if task.steps:
                        kinds.setdefault(task.kind, []).append(task)
            with self.lock:
                for kind, alike in kinds.items():
                    self._train_alike(kind, alike)
        return tasks

    def _train_alike(self, kind: Any, tasks: list[Task]) -> None:
        """Tasks of one kind; with too little memory, again with half of the slots."""
        shop = self._workshop(kind, tasks)
        while not self._fits(shop, tasks):
            tasks = [task for task in tasks if task.loss is None]
            shop.slots = shop.width // 2
            self._drop_stacks([shop])
            warnings.warn(f"out of GPU memory: going on with {shop.slots} clients at once", stacklevel=2)

    def _fits(self, shop: Workshop, tasks: list[Task]) -> bool:
        """Train the tasks; False when that needs more memory than there is."""
        try:
            self._schedule(shop, tasks)
        except torch.cuda.OutOfMemoryError:
            if shop.width == 1:
                raise
            return False
        return True

    def _workshop(self, kind: Any, tasks: list[Task]) -> Workshop:
        rows = sum(task.steps for task in tasks)
        shop = self.workshops.get(kind)
        if shop is None or len(shop.batches.samples) < rows:
            # Graphs hold addresses, so a table that has become too small takes its stacks with it: leave some room.
            batches = Batches.empty(rows + rows // 2, tasks[0].setup)
            shop = Workshop(batches, shop.mode if shop else None, shop.slots if shop else self.slots)
            self.workshops[kind] = shop
        return shop

    def _schedule(self, shop: Workshop, tasks: list[Task]) -> None:
        """Longest tasks first; a slot that is done takes the next; the last few move to a narrower stack."""
        starts = dict(zip(map(id, tasks), shop.batches.fill(tasks), strict=True))
        waiting = sorted(tasks, key=lambda task: task.steps)
        # More slots than this would only wait for the longest task.
        enough = -(-sum(task.steps for task in tasks) // waiting[-1].steps)
        stack = self._stack(shop, tasks[0], enough)
        with seeded(tasks[0].noise, tasks[0].setup.device):  # after a choice by timing, whose steps draw too
            self._play(shop, stack, waiting, starts)

    def _play(self, shop: Workshop, stack: Stack, waiting: list[Task], starts: Mapping[int, int]) -> None:
        """Until nobody waits and all slots are empty."""
        while True:
            for place, slot in enumerate(stack.slots):
                if slot is not None and not slot.left:
                    stack.unload(place)
                if stack.slots[place] is None and waiting:
                    task = waiting.pop()
                    stack.load(place, task, starts[id(task)])
            busy = [place for place, slot in enumerate(stack.slots) if slot is not None]
            if not busy:
                stack.seen.clear()
                return
            if len(busy) < stack.width:
                narrow = self._stack(shop, stack.example, len(busy))
                if narrow.width < stack.width:
                    for there, place in enumerate(busy):
                        stack.move(place, narrow, there)
                    stack.seen.clear()
                    stack, busy = narrow, list(range(len(busy)))
            self._advance(stack, busy)

    def _advance(self, stack: Stack, busy: list[int]) -> None:
        """As many steps as all busy slots can take alike, or one for each size of batch that is due."""
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

    def _stack(self, shop: Workshop, example: Task, wanted: int) -> Stack:
        """A stack of at least the wanted width, as far as memory allows; few widths, so that few graphs serve all."""
        width = min(next(width for width in WIDTHS if width >= min(wanted, WIDTHS[-1])), shop.slots)
        shop.width = width
        if width not in shop.stacks:
            if shop.mode is None:
                known = self.choices.get(example.description)
                shop.mode = cast(Mode, known) if known in get_args(Mode) else self._choose_mode(shop, example, width)
                self.choices[example.description] = shop.mode
            shop.stacks[width] = Stack(example, width, shop.batches, shop.mode, self._pool)
        return shop.stacks[width]

    def _pool(self) -> Any:
        """The memory of any graph that is alive."""
        stacks = [stack for shop in self.workshops.values() for stack in shop.stacks.values()]
        return next((graph.pool() for stack in stacks for graph in stack.graphs.values()), None)

    def _choose_mode(self, shop: Workshop, example: Task, width: int) -> Mode:
        """Time a few steps of each way and keep the fastest; one that fails with this network is out."""
        if example.setup.device.type != "cuda":
            return "grouped"
        if example.setup.training.precision != "float32":
            return "apart"  # the stacked programs know no mixed precision
        seconds: dict[Mode, float] = {}
        for mode in ("products", "grouped", "apart"):
            try:
                seconds[mode] = Stack(example, width, shop.batches, mode).seconds_per_step()
            except torch.cuda.OutOfMemoryError:
                if mode == "apart" and not seconds:
                    raise
            except RuntimeError as problem:
                reason = str(problem).partition("\n")[0]
                warnings.warn(f"clients of this model cannot be run as '{mode}': {reason}", stacklevel=2)
        if not seconds:
            raise EngineFailure("this model cannot be run by the batched engine; use --engine serial.")
        return min(seconds, key=lambda mode: seconds[mode])

    def outputs(self, state: State, pool: Pool, indices: Tensor) -> Tensor:
        """What one model says to some samples of a pool; short of memory, to a few at a time."""
        try:
            return super().outputs(state, pool, indices)
        except torch.cuda.OutOfMemoryError:
            self._make_room()
        return torch.cat([super(Batched, self).outputs(state, pool, part) for part in indices.split(FEW)])

    def _make_room(self) -> None:
        """Stacks can be built again; what is to be judged now cannot wait."""
        warnings.warn("out of GPU memory: the training makes room for the evaluation", stacklevel=3)
        self._drop_stacks(self.workshops.values())

    @staticmethod
    def _drop_stacks(shops: Iterable[Workshop]) -> None:
        for shop in shops:
            shop.stacks.clear()
        gc.collect()  # steps that were not recorded leave their activations in reference cycles
        torch.cuda.empty_cache()

    def score(self, states: Sequence[State], pool: Pool, indices: Tensor | None = None) -> list[tuple[float, float]]:
        """Metric and loss of models on common samples, many whole models at once."""
        if not all(is_whole(self.setup, state) for state in states):
            return super().score(states, pool, indices)
        targets = samples_of(self.setup, pool)[1]
        wanted = torch.arange(len(targets)) if indices is None else indices
        outputs = self._outputs(states, pool, [wanted] * len(states))
        return judge_all(self.setup.task, outputs, [targets[wanted.to(targets.device)]] * len(states))

    def evaluate_each(self, jobs: Sequence[Job]) -> list[Scores]:
        """Clients that each use a model of their own, many at once."""
        states, task = self.personal(jobs), self.setup.task
        parts = [self.setup.splits[job.client] for job in jobs]
        tests, valids = [torch.as_tensor(part.test) for part in parts], [torch.as_tensor(part.valid) for part in parts]
        on_test, on_valid = self._outputs(states, "test", tests), self._outputs(states, "train", valids)
        y_test, y = self.setup.data.y_test, self.setup.data.y
        judged = judge_all(task, on_test, [y_test[test.to(y.device)] for test in tests])
        checked = judge_all(task, on_valid, [y[valid.to(y.device)] for valid in valids])
        return [Scores(*test, valid[0]) for test, valid in zip(judged, checked, strict=True)]

    def _outputs(self, states: Sequence[State], pool: Pool, indices: Sequence[Tensor]) -> list[Tensor]:
        """What each model says to its own samples; short of memory, a few at a time."""
        try:
            return self._stacked_outputs(states, pool, indices, SAMPLES_AT_ONCE)
        except torch.cuda.OutOfMemoryError:
            self._make_room()
        return self._stacked_outputs(states, pool, indices, FEW)

    @torch.no_grad()
    def _stacked_outputs(
        self, states: Sequence[State], pool: Pool, indices: Sequence[Tensor], at_once: int
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
            stacked = {name: torch.stack([state[name] for state in some]) for name in setup.units.names}
            call = vmap(lambda state, batch: functional_call(setup.module, state, (batch,)))
            with StackedConvolutions() if device.type == "cuda" else nullcontext():
                pieces = [call(stacked, setup.data.prepare(rows_of(x, piece))) for piece in rows.split(most, dim=1)]
            outputs = torch.cat(pieces, dim=1)
            found += [output[: len(part)] for output, part in zip(outputs, wanted, strict=True)]
        return found

    def close(self) -> None:
        """Give the device's memory back."""
        self.workshops.clear()
