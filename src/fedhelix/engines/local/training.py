"""One client's training; engines decide how many clients run at once.

Everything here is a function of (setup, task) alone, whatever the process, device or other clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedhelix.core.cpu import one_thread
from fedhelix.core.cuda import sent
from fedhelix.core.entries import check_whole
from fedhelix.core.errors import UserError, unknown
from fedhelix.core.method import Batch, Client, Local, LocalRound, Method, Phase
from fedhelix.core.objective import evaluate_outputs
from fedhelix.core.optimizers import StepSettings
from fedhelix.core.parts import Inputs, each
from fedhelix.core.returns import known_model
from fedhelix.core.seeds import key, seeded
from fedhelix.core.tree import State, Tree, clone, flatten, unflatten
from fedhelix.data import Split
from fedhelix.engines.kernels import applied
from fedhelix.engines.local.batches import (
    batch_schedule,
    batch_sizes,
    epochs_of,
    gather,
    unscaled,
)
from fedhelix.engines.local.network import (
    base_loss,
    call,
    check_gradient,
    features,
    forward,
    part_of,
    predict,
    training_features,
)
from fedhelix.engines.local.setup import ClientResult, ClientTask, PersonalModel, Setup
from fedhelix.engines.local.squares import squared_gradients

# The purpose of the random draws while a personal model trains. It decides the draws, so another
# text would change results.
PERSONALIZE = "tune"


def make_client(setup: Setup, task: ClientTask) -> Client:
    """The client as a method's hooks see it."""
    indices = torch.from_numpy(setup.splits[task.client].train)

    def gradients(state: State, names: Sequence[str] = setup.layers.parameters) -> Iterator[State]:
        setup.module.train()
        schedule = batch_schedule(setup, task, Phase(epochs=1), "gradients")
        for row, step in enumerate(schedule.steps()):
            drawn = key(setup.seed, "noise-gradients", task.round, task.client, row)
            with seeded(drawn, setup.device), applied(setup.kernels, setup.module):
                gradient = batch_gradient(setup, state, names, gather(setup, *step))
            yield gradient

    def sample_loss(state: State, x: Inputs, y: Tensor) -> Tensor:
        setup.module.eval()
        alone = each(lambda part: part[None], x)
        return setup.objective.mean_loss(call(setup, state, alone), y[None])

    kept = torch.from_numpy(setup.splits[task.client].valid)

    def valid(state: State) -> float:
        if not len(kept):
            return math.nan
        outputs = predict(setup, state, "train", kept)
        return evaluate_outputs(setup.objective, outputs, setup.data.y[kept.to(setup.device)])[0]

    def valid_losses(state: State) -> Tensor:
        if not len(kept):
            return torch.zeros(0, device=setup.device)
        outputs = predict(setup, state, "train", kept)
        return setup.objective.losses(outputs, setup.data.y[kept.to(setup.device)]).reshape(-1)

    def train_alone(state: State, turn: int) -> State:
        plain = replace(setup, method=Method())
        local = replace(start_round(plain, task), models={"model": state})
        train(plain, task, local, turn, "alone")
        return local.models["model"]

    return Client(
        id=task.client,
        samples=len(indices),
        round=task.round,
        final=task.final,
        classes=setup.data.classes,
        metric=setup.objective.name,
        lr=setup.training.rate(task.round, Phase()),
        momentum=setup.training.momentum,
        optimizer=setup.training.rule.label,
        epochs=setup.training.epochs,
        layers=setup.layers,
        initial=setup.initial,
        seed=setup.seed,
        inputs=lambda: setup.data.prepare(setup.data.x[sent(indices, setup.device)]),
        targets=lambda: setup.data.y[sent(indices, setup.device)],
        raw_inputs=lambda: unscaled(setup.data, setup.data.x[sent(indices, setup.device)]),
        sample_loss=sample_loss,
        squared_gradients=partial(squared_gradients, setup),
        valid=valid,
        valid_losses=valid_losses,
        gradients=gradients,
        outputs=lambda state: predict(setup, state, "train", indices),
        features=lambda state: training_features(setup, state, indices),
        train=train_alone,
        deployed=setup.deployed,
    )


def batch_gradient(setup: Setup, state: State, names: Sequence[str], batch: Batch) -> State:
    """The gradient of a model's loss on a batch for some entries; the model stays as it is."""
    entries = tuple(state)

    def program(x: Inputs, y: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        copies = (value.detach().clone() for value in values)  # BatchNorm changes its buffers
        model = dict(zip(entries, copies, strict=True))
        leaves = [model[name].requires_grad_() for name in names]
        loss = base_loss(setup, model, Batch(x, y))
        return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)

    compute: Callable[..., tuple[Tensor, ...]] = program
    if isinstance(batch.x, Tensor):
        compute = setup.recorded(("gradient", entries, tuple(names)), program)
    return dict(zip(names, compute(batch.x, batch.y, *state.values()), strict=True))


def noise(setup: Setup, task: ClientTask, purpose: str, index: int) -> int:
    """The seed of layers such as dropout in a phase."""
    return key(setup.seed, f"noise-{purpose}-{index}", task.round, task.client)


def train(
    setup: Setup, task: ClientTask, local: LocalRound, index: int, purpose: str
) -> tuple[int, Tensor]:
    """Run one phase and replace the model in `local.models`; returns steps and summed loss."""
    setup.module.train()
    model = {
        name: value.detach().clone() for name, value in local.models[local.phase.model].items()
    }
    local.models[local.phase.model] = model
    leaves = [model[name].requires_grad_() for name in part_of(setup.layers, local.phase)]
    rule, training = setup.training.rule, setup.training
    slots = [
        [torch.zeros_like(leaf) for leaf in leaves] for _ in range(rule.slots(training.momentum))
    ]
    lr = training.rate(task.round, local.phase)
    steps = batch_schedule(setup, task, local.phase, purpose, index)
    view = Local(
        local.context, local.phase, local.layers, local.base_loss, local.outputs, local.features
    )
    total = torch.zeros((), device=setup.device)
    with (
        seeded(noise(setup, task, purpose, index), setup.device),
        applied(setup.kernels, setup.module),
    ):
        for count, drawn in enumerate(steps.steps(), start=1):
            loss = setup.hooks.loss(model, gather(setup, *drawn), view)
            check_gradient(setup, loss)
            grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
            with torch.no_grad():
                step = StepSettings(lr, training.momentum, training.weight_decay, count)
                rule.update(leaves, list(grads), slots, step)
            total += loss.detach()
    for leaf in leaves:
        leaf.requires_grad_(False)
    return len(steps.sizes), total


def train_plainly(setup: Setup, samples: np.ndarray, state: State, epochs: int) -> State:
    """A model after some epochs on some training samples that are no client's."""
    nothing = samples[:0]
    split = Split(train=samples, valid=nothing, test=nothing)
    plain, task = replace(setup, method=Method(), splits=[split]), ClientTask(0, 0, {}, {})
    local = replace(start_round(plain, task), models={"model": state}, phase=Phase(epochs=epochs))
    train(plain, task, local, 0, "server")
    return local.models["model"]


@one_thread()
def run_client(setup: Setup, task: ClientTask) -> ClientResult:
    """A client's whole round: start, phases, upload."""
    local = start_round(setup, task)
    total = torch.zeros((), device=setup.device)
    steps = 0
    for index, phase in enumerate(phases_of(setup, local)):
        count, loss = train(setup, task, replace(local, phase=phase), index, "batches")
        steps, total = steps + count, total + loss
    upload, client_state = setup.hooks.upload(replace(local, steps=steps))
    return ClientResult(
        task.client, local.client.samples, upload, client_state, float(total) / max(steps, 1)
    )


def samples_trained(setup: Setup, task: ClientTask) -> int:
    """How many samples a client's round visits in all phases, each as often as it does."""
    phases = setup.hooks.phases(make_client(setup, task))
    count, size = len(setup.splits[task.client].train), setup.training.batch_size
    samples = sum(batch_sizes(count, size, bool(setup.layers.norm)))
    return samples * sum(epochs_of(setup, phase) for phase in phases)


def start_round(setup: Setup, task: ClientTask, with_context: bool = True) -> LocalRound:
    """A client about to train on its payload; without training it needs no loss context."""
    client = make_client(setup, task)
    return LocalRound(
        context=make_context(setup, task, client) if with_context else {},
        phase=Phase(),
        layers=setup.layers,
        base_loss=partial(base_loss, setup),
        outputs=partial(forward, setup),
        features=partial(features, setup),
        client=client,
        payload=task.payload,
        client_state=task.client_state,
        models=setup.hooks.start(task.payload, task.client_state, client),
        steps=0,
    )


@one_thread()
def personal_model(setup: Setup, task: ClientTask) -> PersonalModel:
    """The model that a client would use now: its starting point after `personalize`."""
    local, phases = start_personal(setup, task)
    for index, phase in enumerate(phases):
        train(setup, task, replace(local, phase=phase), index, PERSONALIZE)
    return chosen_model(setup, task, local)


def chosen_model(setup: Setup, task: ClientTask, local: LocalRound) -> PersonalModel:
    """The model that the method chooses among the client's trained ones."""
    if task.trained:
        name = phases_for_use(setup, local)[0]
    elif setup.method.overrides("choose"):
        name = setup.hooks.choose(local.models, local.client)
    else:
        name = setup.hooks.personal(local.models)
    check_whole(f"{setup.method.label}.start", name, local.models[name], setup.initial)
    return PersonalModel(local.models[name], name)


def make_context(setup: Setup, task: ClientTask, client: Client) -> Tree:
    """The context of the client's loss, copied where BatchNorm would update its statistics."""
    context = setup.hooks.loss_context(task.payload, task.client_state, client)
    return unflatten(clone(flatten(context))) if setup.layers.buffers else context


def start_personal(setup: Setup, task: ClientTask) -> tuple[LocalRound, list[Phase]]:
    """A client, and the phases that train its models before it chooses one.

    Those that name no other model train its personal one. With `task.trained` they are a round's.
    """
    if task.trained:
        local = start_round(setup, task)
        return local, phases_for_use(setup, local)[1]
    phases = setup.hooks.personalize(make_client(setup, task))
    local = start_round(setup, task, with_context=bool(phases))
    used, usual = setup.hooks.personal(local.models), Phase().model
    phases = [replace(phase, model=used) if phase.model == usual else phase for phase in phases]
    for phase in phases:
        _check_phase(setup, phase, local, "personalize")
    return local, phases


def phases_for_use(setup: Setup, local: LocalRound) -> tuple[str, list[Phase]]:
    """The model that a client would use after a round, and the phases of the round that train it.

    It is the personal one, or, if no phase trains that, what the round's last phase trains.
    """
    phases, used = phases_of(setup, local), setup.hooks.personal(local.models)
    models = [phase.model for phase in phases]
    name = used if used in models or not models else models[-1]
    return name, [phase for phase in phases if phase.model == name]


def unpersonalized_model(setup: Setup, task: ClientTask) -> PersonalModel | None:
    """The personal model if it needs no training (it may share the payload's tensors); or None."""
    if task.trained or setup.hooks.personalize(make_client(setup, task)):
        return None
    return chosen_model(setup, task, start_round(setup, task, with_context=False))


def received_model(setup: Setup, task: ClientTask) -> PersonalModel:
    """The personal model before any training."""
    models = setup.hooks.start(task.payload, task.client_state, make_client(setup, task))
    name = setup.hooks.personal(models)
    return PersonalModel(models[name], name)


def phases_of(setup: Setup, local: LocalRound) -> Sequence[Phase]:
    """The phases of a client's round, each of which trains one of its models."""
    phases = setup.hooks.phases(local.client)
    for phase in phases:
        _check_phase(setup, phase, local, "phases")
    return phases


def _check_phase(setup: Setup, phase: Phase, local: LocalRound, hook: str) -> None:
    """Refuse a phase that trains what `start` has not made."""
    label = setup.method.label
    model = local.models[known_model(f"{label}.{hook}", phase.model, local.models)]
    check_whole(f"{label}.start", phase.model, model, setup.initial)
    for entry in (*phase.extra, *phase.frozen):
        if entry not in model:
            raise unknown(f"entry in {label}.{hook}", entry, model)


def try_phases(setup: Setup) -> None:
    """Refuse phases that cannot be, as far as that is seen before a round."""
    client = make_client(setup, ClientTask(0, 0, {}, {}))
    for hook in (setup.hooks.phases, setup.hooks.personalize):
        try:
            hook(client)
        except UserError:
            raise
        except Exception:  # a hook of the user's may fail in any way, and is named when it is due
            continue
