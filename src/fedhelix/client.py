"""A client's work, written once for one client; engines decide how many run at once.

Everything here is a function of (setup, job) alone: no process, device or other client is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedhelix.asked import Asked
from fedhelix.cpu import Kernels, applied
from fedhelix.data import Dataset, Split, crop_and_flip, draw_crops, rows_of
from fedhelix.errors import BadInput
from fedhelix.method import Batch, Client, Local, LocalRound, Method, Phase
from fedhelix.options import Checked, option
from fedhelix.seeds import draw, key, seeded
from fedhelix.task import Task, judge
from fedhelix.tree import State, Tree, clone, flatten, unflatten
from fedhelix.units import Units


@dataclass(frozen=True)
class Training(Checked):
    """How a client trains: minibatch SGD, with a fresh optimiser in every round and phase."""

    epochs: int = option(2, "local epochs of one round", low=0)
    batch_size: int = option(16, "samples in a minibatch", low=1, high=1_000_000)
    lr: float = option(0.1, "learning rate", above=0)
    lr_decay: float = option(1.0, "factor on the learning rate after each round", above=0, high=1)
    momentum: float = option(0.5, "momentum of SGD", low=0, below=1)
    weight_decay: float = option(0.0, "weight decay of SGD", low=0)
    augment: bool = option(False, "random crop and horizontal flip of the training pictures")
    precision: Literal["float32", "bfloat16"] = option(
        "float32", "arithmetic of the training steps (float32, bfloat16)"
    )

    def rate(self, round: int, phase: Phase) -> float:
        """The learning rate of a phase of a round."""
        return phase.rate * self.lr * self.lr_decay**round


@dataclass(frozen=True, eq=False)
class Setup:
    """Everything that a client's work depends on besides what it receives and keeps."""

    method: Method
    module: nn.Module
    units: Units
    initial: State
    data: Dataset
    splits: Sequence[Split]
    training: Training
    task: Task
    seed: int
    device: torch.device
    kernels: Kernels = "onednn"

    @cached_property
    def asked(self) -> Asked:
        """The method's hooks, whose answers are looked at."""
        return Asked(self.method)

    @cached_property
    def architecture(self) -> str:
        """Equal for networks that can be stacked."""
        return str(self.module)


EVALUATED_AT_ONCE = (1000, 10_000)  # samples: on a CPU they should stay in its caches, a GPU wants many

Pool = Literal["train", "test"]
Outputs = Callable[[Pool, Tensor], Tensor]  # what a model says to some samples of a pool


class Job(NamedTuple):
    """One client's turn in one round."""

    client: int
    round: int
    payload: Tree
    own: Tree
    arriving: bool = False  # a newcomer, which is judged after the local training of one round


class Outcome(NamedTuple):
    """What comes of it; the loss is the mean over the round's steps."""

    client: int
    samples: int
    upload: Tree
    own: Tree
    loss: float


class Scores(NamedTuple):
    """A personal model on the client's own test and validation parts."""

    test: float
    test_loss: float
    valid: float


class Plan(NamedTuple):
    """Which samples each training step sees, and how they are cropped and flipped; short rows are filled with zeros."""

    samples: Tensor  # steps x batch size
    crops: Tensor | None
    sizes: list[int]  # how many samples of each row count

    def steps(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The batches one by one, without the filling."""
        for row, size in enumerate(self.sizes):
            yield self.samples[row, :size], None if self.crops is None else self.crops[row, :size]


def client_of(setup: Setup, job: Job) -> Client:
    """The client as its hooks see it."""
    indices = torch.from_numpy(setup.splits[job.client].train)

    def gradients(state: State) -> Iterator[State]:
        names = setup.units.parameters
        setup.module.train()
        for row, (samples, crops) in enumerate(plan(setup, job, Phase(epochs=1), "gradients").steps()):
            leaves = {name: state[name].detach().clone().requires_grad_() for name in names}
            model = {**{name: value.clone() for name, value in state.items()}, **leaves}
            drawn = key(setup.seed, "noise-gradients", job.round, job.client, row)
            with seeded(drawn, setup.device), applied(setup.kernels, setup.module):
                loss = risk(setup, model, gather(setup, samples, crops))
                found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
            yield dict(zip(names, found, strict=True))

    def sample_loss(state: State, x: Tensor, y: Tensor) -> Tensor:
        setup.module.eval()
        return setup.task.risk(functional_call(setup.module, state, (x[None],)), y[None])

    def valid(state: State) -> float:
        wanted = torch.from_numpy(setup.splits[job.client].valid)
        if not len(wanted):
            return math.nan
        return judge(setup.task, predict(setup, state, "train", wanted), setup.data.y[wanted.to(setup.device)])[0]

    def train_alone(state: State, turn: int) -> State:
        plain = replace(setup, method=Method())
        local = replace(open_round(plain, job), models={"model": state})
        train(plain, job, local, turn, "alone")
        return local.models["model"]

    return Client(
        id=job.client,
        samples=len(indices),
        round=job.round,
        lr=setup.training.rate(job.round, Phase()),
        momentum=setup.training.momentum,
        epochs=setup.training.epochs,
        units=setup.units,
        initial=setup.initial,
        seed=setup.seed,
        inputs=lambda: setup.data.prepare(setup.data.x[indices.to(setup.device)]),
        targets=lambda: setup.data.y[indices.to(setup.device)],
        features=lambda: unscaled(setup.data.x[indices.to(setup.device)]),
        sample_loss=sample_loss,
        valid=valid,
        gradients=gradients,
        train=train_alone,
    )


def unscaled(x: Tensor) -> Tensor:
    """Samples before they are normalised: pixels between 0 and 1, other values as they are."""
    return x.float() / 255 if x.dtype == torch.uint8 else x.float()


def plan(setup: Setup, job: Job, phase: Phase, purpose: str, index: int = 0) -> Plan:
    """The minibatches of a phase: every epoch visits every sample once, in a new order."""
    indices = torch.from_numpy(setup.splits[job.client].train)
    epochs = setup.training.epochs if phase.epochs is None else phase.epochs
    count, size = len(indices), setup.training.batch_size
    generator = draw(setup.seed, f"{purpose}-{index}", job.round, job.client)
    sizes = [min(size, count - at) for at in range(0, count, size)]
    if setup.units.norm and sizes[-1] == 1:
        sizes.pop()  # one sample has no variance to normalise by; another epoch's order will bring it back
    rows = len(sizes)
    samples = torch.zeros(epochs, rows * size, dtype=torch.int64)
    crops = torch.zeros(epochs, rows * size, 3, dtype=torch.int64) if setup.training.augment else None
    for epoch in range(epochs):
        order = indices[torch.randperm(count, generator=generator)]
        samples[epoch, : sum(sizes)] = order[: sum(sizes)]
        if crops is not None:
            crops[epoch, : sum(sizes)] = draw_crops(count, generator)[: sum(sizes)]
    return Plan(
        samples.view(epochs * rows, size),
        None if crops is None else crops.view(epochs * rows, size, 3),
        sizes * epochs,
    )


def gather(setup: Setup, samples: Tensor, crops: Tensor | None) -> Batch:
    """Samples as the model gets them; both arguments may carry a leading axis of clients."""
    samples = samples.to(setup.device)
    x = rows_of(setup.data.x, samples)
    if crops is not None:
        x = crop_and_flip(x, crops.to(setup.device))
    return Batch(setup.data.prepare(x), setup.data.y[samples])


def risk(setup: Setup, params: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """The mean loss of a model on a batch. BatchNorm statistics in `params` are brought up to date in place."""
    return setup.task.risk(forward(setup, params, batch.x), batch.y, batch.mask)


def forward(setup: Setup, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """A model's outputs for prepared samples, in the precision of the training."""
    half = setup.training.precision == "bfloat16"
    with torch.autocast(setup.device.type, torch.bfloat16) if half else nullcontext():
        found = call(setup, params, x)
    if not isinstance(found, Tensor):  # in evaluation mode it did
        raise BadInput(f"the model must return one tensor when it is trained, too, not {type(found).__name__}.")
    return found.float()


def call(setup: Setup, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """A model's outputs. To search the module for tied tensors every time would take as long as a small layer."""
    return functional_call(setup.module, dict(params), (x,), tie_weights=setup.units.tied)


def part_of(units: Units, part: str) -> list[str]:
    """The trainable entries of a part of the model."""
    if part == "all":
        return list(units.parameters)
    chosen = set({"head": units.head, "body": units.body}[part])
    return [name for name in units.parameters if name in chosen]


def sgd_step(params: list[Tensor], grads: list[Tensor], velocity: list[Tensor], lr: float, training: Training) -> None:
    """One step of SGD in place, as torch.optim.SGD does it; entries may carry a leading axis of clients."""
    if training.weight_decay:
        grads = list(torch._foreach_add(grads, params, alpha=training.weight_decay))
    if training.momentum:
        torch._foreach_mul_(velocity, training.momentum)
        torch._foreach_add_(velocity, grads)
        grads = velocity
    torch._foreach_add_(params, grads, alpha=-lr)


def noise(setup: Setup, job: Job, purpose: str, index: int) -> int:
    """The seed of what layers such as dropout draw in a phase."""
    return key(setup.seed, f"noise-{purpose}-{index}", job.round, job.client)


def train(setup: Setup, job: Job, local: LocalRound, index: int, purpose: str) -> tuple[int, Tensor]:
    """Run one phase; the model in `local.models` is replaced by the trained one. Returns steps and summed loss."""
    setup.module.train()
    model = {name: value.detach().clone() for name, value in local.models[local.phase.model].items()}
    local.models[local.phase.model] = model
    leaves = [model[name].requires_grad_() for name in part_of(setup.units, local.phase.part)]
    velocity = [torch.zeros_like(leaf) for leaf in leaves]
    lr = setup.training.rate(job.round, local.phase)
    steps = plan(setup, job, local.phase, purpose, index)
    view = Local(local.anchor, local.phase, local.units, local.risk, local.outputs)
    total = torch.zeros((), device=setup.device)
    with seeded(noise(setup, job, purpose, index), setup.device), applied(setup.kernels, setup.module):
        for samples, crops in steps.steps():
            loss = setup.asked.loss(model, gather(setup, samples, crops), view)
            grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
            with torch.no_grad():
                sgd_step(leaves, list(grads), velocity, lr, setup.training)
            total += loss.detach()
    for leaf in leaves:
        leaf.requires_grad_(False)
    return len(steps.sizes), total


def work(setup: Setup, job: Job) -> Outcome:
    """A client's whole round: start, phases, upload."""
    local = open_round(setup, job)
    total = torch.zeros((), device=setup.device)
    steps = 0
    for index, phase in enumerate(setup.asked.phases(local.client, local.models)):
        count, loss = train(setup, job, replace(local, phase=phase), index, "batches")
        steps, total = steps + count, total + loss
    upload, own = setup.asked.upload(replace(local, steps=steps))
    return Outcome(job.client, local.client.samples, upload, own, float(total) / max(steps, 1))


def open_round(setup: Setup, job: Job, anchored: bool = True) -> LocalRound:
    """A client that has received its payload and is about to train; where it will not, it needs no anchor."""
    client = client_of(setup, job)
    return LocalRound(
        anchor=anchor_of(setup, job, client) if anchored else {},
        phase=Phase(),
        units=setup.units,
        risk=partial(risk, setup),
        outputs=partial(forward, setup),
        client=client,
        payload=job.payload,
        own=job.own,
        models=setup.asked.start(job.payload, job.own, client),
        steps=0,
    )


def personal_model(setup: Setup, job: Job) -> State:
    """The model that a client would use now: what it starts from, after `tune`."""
    local, used, phases = open_use(setup, job)
    for index, phase in enumerate(phases):
        train(setup, job, replace(local, phase=phase), index, "tune")
    return local.models[used]


def anchor_of(setup: Setup, job: Job, client: Client) -> Tree:
    """What the client's loss looks at, as tensors of its own: BatchNorm brings a teacher's statistics up to date."""
    found = setup.asked.anchor(job.payload, job.own, client)
    return unflatten(clone(flatten(found))) if setup.units.buffers else found


def open_use(setup: Setup, job: Job) -> tuple[LocalRound, str, list[Phase]]:
    """A client that is about to use a model, its name, and the training before; newcomers train it as in a round."""
    client = client_of(setup, job)
    tuning = [] if job.arriving else setup.asked.tune(client)
    local = open_round(setup, job, anchored=job.arriving or bool(tuning))
    phases = setup.asked.phases(client, local.models) if job.arriving else tuning
    used = setup.asked.personal(local.models)
    if job.arriving and len(phases) > 1:
        phases = [phase for phase in phases if phase.model == used]
    return local, used, [replace(phase, model=used) for phase in phases]


def untuned_model(setup: Setup, job: Job) -> State | None:
    """The personal model where it needs no training, sharing its tensors with what was received; otherwise None."""
    if job.arriving or setup.asked.tune(client_of(setup, job)):
        return None
    return received_model(setup, job)


def received_model(setup: Setup, job: Job) -> State:
    """The personal model before any preparation."""
    models = setup.asked.start(job.payload, job.own, client_of(setup, job))
    return models[setup.asked.personal(models)]


def samples_of(setup: Setup, pool: Pool) -> tuple[Tensor, Tensor]:
    """The raw samples and targets of a pool."""
    return (setup.data.x, setup.data.y) if pool == "train" else (setup.data.x_test, setup.data.y_test)


@torch.no_grad()
def predict(setup: Setup, state: State, pool: Pool, indices: Tensor) -> Tensor:
    """A model's outputs for some samples of a pool, in evaluation mode."""
    batch = EVALUATED_AT_ONCE[setup.device.type == "cuda"]
    setup.module.eval()
    x, indices = samples_of(setup, pool)[0], indices.to(setup.device)
    with applied(setup.kernels, setup.module):
        parts = [call(setup, state, setup.data.prepare(rows_of(x, part))) for part in indices.split(batch)]
    return torch.cat(parts)


def judge_clients(setup: Setup, clients: Sequence[int], outputs: Outputs) -> dict[int, Scores]:
    """One model on the own test and validation parts of the clients that use it; every sample is computed once."""
    parts = [setup.splits[client] for client in clients]
    test = _judge_parts(setup, "test", [part.test for part in parts], outputs)
    valid = _judge_parts(setup, "train", [part.valid for part in parts], outputs)
    return {
        client: Scores(*on_test, on_valid[0]) for client, on_test, on_valid in zip(clients, test, valid, strict=True)
    }


def _judge_parts(setup: Setup, pool: Pool, parts: Sequence[np.ndarray], outputs: Outputs) -> list[tuple[float, float]]:
    wanted = np.unique(np.concatenate(parts))
    if not len(wanted):
        return [(math.nan, math.nan) for _ in parts]
    samples = torch.from_numpy(wanted)
    found, targets = outputs(pool, samples), samples_of(setup, pool)[1]
    targets = targets[samples.to(targets.device)]
    places = [np.searchsorted(wanted, part) for part in parts]
    if setup.task.by_sample is None:
        at = [torch.from_numpy(place).to(found.device) for place in places]
        return [judge(setup.task, found[place], targets[place]) for place in at]
    # One copy from the device for all clients instead of several waits for each.
    values = (torch.as_tensor(rule(found, targets)) for rule in (setup.task.by_sample, setup.task.loss))
    table = torch.stack(list(values)).double().cpu().numpy()
    means = [table[:, place].mean(1) if len(place) else np.full(2, math.nan) for place in places]
    return [(float(metric), float(loss)) for metric, loss in means]


def evaluate(setup: Setup, job: Job) -> Scores:
    """A client's personal model on its own samples."""
    state = personal_model(setup, job)
    return judge_clients(setup, [job.client], partial(predict, setup, state))[job.client]
