"""Unseen clients: a dialogue with the server gives each of them its first state."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fedhelix.components.subnetworks import resized
from fedhelix.core.copies import copied
from fedhelix.core.errors import UnusableMessage, UserError
from fedhelix.core.hooks import checked
from fedhelix.core.layers import Layers
from fedhelix.core.method import Context
from fedhelix.core.metrics import IGNORED
from fedhelix.core.parts import each
from fedhelix.core.tree import Tree, payload_bytes, take, to_device
from fedhelix.data import UNSHIFTED, Dataset, Split, from_clients
from fedhelix.data.class_names import with_names
from fedhelix.data.columns import features_of, pair_of
from fedhelix.data.fields import Fields, Parts, fitted, width
from fedhelix.data.labels import numbered
from fedhelix.data.owners import Names, read_owners
from fedhelix.data.reading import read_inputs
from fedhelix.engines.local import ClientTask, Setup
from fedhelix.federation import guard
from fedhelix.federation.evaluation import after_training
from fedhelix.federation.sampling import class_shares
from fedhelix.federation.setup import FederationSetup
from fedhelix.federation.state import FederationState
from fedhelix.store.records import Record


def onboard_all(
    fed: FederationSetup, state: FederationState, ctx: Context
) -> tuple[FederationState, Record]:
    """Onboard the newcomers one after the other, and evaluate them after one local training."""
    received = []
    for client in range(fed.known, fed.known + fed.settings.newcomers):
        state, size = onboard_one(fed, state, client, ctx)
        received.append(size)
    record = Record(arrival_bytes=float(np.mean(received)))
    clients = [client for client in fed.evaluated if client in ctx.present]
    tests = after_training(fed, fed.tasks(state, clients, ctx))
    if tests:
        record[f"arrival_{fed.objective.name}"] = float(np.mean(list(tests.values())))
    return state, record


def onboard_one(
    fed: FederationSetup, state: FederationState, client: int, ctx: Context
) -> tuple[FederationState, int]:
    """The server's dialogue with one unseen client: the next state, and the bytes it received."""
    talk = _represented(fed, state.server, client, replace(ctx, clients=client))
    try:
        first = fed.engine.onboard_state(ClientTask(client, ctx.round, talk.payload, {}))
    except UnusableMessage as problem:
        warnings.warn(f"newcomer {client} starts without a state: {problem}.", stacklevel=2)
        first = Tree()
    kept = {client: first} if first else {}
    after = replace(
        state,
        server=talk.server,
        client_states=state.client_states | kept,
        changed=state.changed | set(kept),
        setup_bytes=state.setup_bytes + talk.sent + talk.received,
    )
    return after, talk.received


class Dialogue(NamedTuple):
    """What came of a dialogue: the server's next state, the last payload, and the bytes."""

    server: Tree
    payload: Tree
    sent: int
    received: int


def _represented(fed: FederationSetup, server: Tree, client: int, ctx: Context) -> Dialogue:
    """The dialogue with a newcomer; where its messages cannot be used, the first known client whose
    messages can speaks for it, as before round 0.
    """
    problem = None
    for speaker in (client, *range(fed.known)):
        try:
            return _dialogue(fed, server, speaker, ctx)
        except UnusableMessage as why:
            if problem is None:
                warnings.warn(f"another client speaks for newcomer {client}: {why}.", stacklevel=2)
            problem = problem or why
    assert problem is not None
    raise problem


def _dialogue(fed: FederationSetup, server: Tree, speaker: int, ctx: Context) -> Dialogue:
    payload, done = Tree(), False
    sent = received = 0
    while not done:
        message = fed.engine.onboard_client(ClientTask(speaker, ctx.round, payload, {}))
        strangers = fed.engine.deployed
        server, payload, done = guard.onboard(fed.method, server, message, ctx, strangers)
        sent, received = sent + payload_bytes(message), received + payload_bytes(payload)
    return Dialogue(server, payload, sent, received)


def inherit(
    fed: FederationSetup, data: Any, state: FederationState, module: nn.Module
) -> nn.Module:
    """A copy of a network of another width that begins with what an unseen client with these data
    would receive; the client does not join.
    """
    if not isinstance(module, nn.Module):
        raise UserError(
            "inherit takes a network that is made already, such as digits_bn_cnn((1, 8, 8), 10, "
            f"width=0.5), not {type(module).__name__}."
        )
    setup, ctx = fed.engine.setup, fed.context(state.round, state.round)
    wider = with_client(fed, data)
    fed.change_setup(wider)
    try:
        dialogue = _dialogue(fed, state.server, fed.clients, replace(ctx, clients=fed.clients))
    finally:
        fed.change_setup(setup)
    heir, example = copied(module).cpu(), fed.data.prepare(fed.data.x[:8])
    target = Layers.of(heir, each(lambda part: part.cpu(), example))
    sent = dialogue.payload.get("model", {})
    if fed.method.capabilities.packed_downloads:  # which may be a part, of another width again
        sent = checked(fed.method).model(dialogue.server, ctx) or {}
    received = to_device(take(sent, fed.layers.names), "cpu")
    heir.load_state_dict(resized(received, fed.layers, target), strict=False)
    return heir


def onboard(
    fed: FederationSetup, data: Any, state: FederationState, name: str | int | None = None
) -> tuple[int, FederationState]:
    """An unseen client with its own data joins: its number (where owners are whole numbers: its
    name), and the next state.

    From the next round on it may be sampled and is evaluated; a fifth of its samples become its
    test part.
    """
    setup, number = fed.engine.setup, fed.clients
    names = _names_with(fed.names, number, name)
    wider = with_client(fed, data)
    if fed.devices is not None:
        fed.devices.device(number)  # a trace may not know it
    fed.change_setup(wider)
    try:
        state, _ = onboard_one(fed, state, number, fed.context(state.round, state.round))
    except BaseException:  # it is turned away, and all others go on as before
        fed.change_setup(setup)
        raise
    pool, splits = wider.data, list(wider.splits)
    fed.splits, fed.clients, fed.joined = splits, number + 1, fed.joined + 1
    fed.shifts = [*fed.shifts, UNSHIFTED]
    fed.evaluated = [*fed.evaluated, number]
    members = [(*sampler.members, number) for sampler in fed.samplers]
    if fed.cohort_is_auto:
        fed.cohort_size = min(10, number + 1)
    fed.samplers = [
        replace(
            sampler,
            members=group,
            size=min(fed.settings.places(fed.cohort_size), len(group)),
            class_shares=None
            if sampler.class_shares is None
            else class_shares(pool, splits, group),
        )
        for sampler, group in zip(fed.samplers, members, strict=True)
    ]
    fed.names = names
    last = None if names is None else names[-1]
    return last if isinstance(last, int) else number, state


def _names_with(names: Names | None, number: int, name: str | int | None) -> Names | None:
    """The clients' names with that of a newcomer; one that has none gets a free one."""
    if names is None:
        if name is not None:
            raise UserError(
                f"these clients have no names, only numbers, and the newcomer is {number}; leave "
                "name out."
            )
        return None
    numbered = isinstance(names[0], int)
    if name is None:
        name = max(number, 1 + max(map(int, names))) if numbered else f"newcomer-{number}"
    if isinstance(name, bool) or not isinstance(name, int | np.integer | str):
        raise UserError(f"name is text or a whole number, not {name!r}.")
    (own,) = read_owners([name], "the newcomer").tolist()
    if numbered and not isinstance(own, int):
        raise UserError(f"the names of these clients are whole numbers, not '{own}'.")
    own = own if numbered else str(own)
    if own in names:
        raise UserError(f"there is a client '{own}' already; give the newcomer another name.")
    return (*names, own)


def with_client(fed: FederationSetup, data: Any) -> Setup:
    """The engine's setup with one more client; a fifth of its samples become its test part."""
    setup = fed.engine.setup
    pool = setup.data.joined(_read(data, setup.data, fed.seed))
    train = np.arange(len(setup.data.y), len(pool.y))
    test = np.arange(len(setup.data.y_test), len(pool.y_test))
    if fed.layers.norm and len(train) < 2:
        raise UserError(
            "the newcomer has only one training sample, but BatchNorm needs two; give at least "
            "three samples, of which one is held out to test with."
        )
    return replace(setup, data=pool, splits=[*fed.splits, Split(train, train[:0], test)])


def _read(data: Any, known: Dataset, seed: int) -> Dataset:
    """A newcomer's data, whose columns and labels mean what they mean in the known data."""
    fields = known.fields
    parts = None if fields is None else fields.keywords
    x, y = pair_of(data, "the newcomer", known.columns or parts, named=parts is not None)
    if known.labels:
        y = with_names(y, data, "the newcomer")  # its numbers may mean other classes
    x = features_of(x, known.columns, parts)
    samples = read_inputs(x, "x of the newcomer")
    if fields is None and isinstance(samples, Parts):
        raise UserError(
            f"the newcomer has samples of the parts {Fields.of(samples)}, but a sample of "
            f"'{known.name}' has the shape {known.shape}; give N of them."
        )
    same = samples if fields is None else fitted(samples, fields, f"'{known.name}'")
    if len(samples) == 1:
        raise UserError(
            "the newcomer has a single sample, and one is held out to test with; give a second "
            "one, or make a federation with this client among the others, where it trains untested."
        )
    y = numbered((x, y), known.labels, "the newcomer")
    mine = from_clients([(same, y)], classes=known.classes, name="newcomer", seed=seed)
    if fields is not None and known.y.dim() == mine.y.dim() == 2 and known.y.dtype == torch.int64:
        lacking = (fields.length or 0) - (width(samples) or 0)
        if lacking > 0 and mine.y.shape[1] + lacking == known.y.shape[1]:  # classes of tokens
            longer = [F.pad(part, (0, lacking), value=IGNORED) for part in (mine.y, mine.y_test)]
            mine = replace(mine, y=longer[0], y_test=longer[1])
    if mine.y.dtype == known.y.dtype or mine.y.shape[1:] != known.y.shape[1:]:
        return mine
    for targets in (mine.y, mine.y_test):  # labels, or classes of tokens or pixels
        outside = (targets < 0) & (targets != IGNORED) | (targets >= known.outputs)
        wrong = outside if known.y.dtype == torch.int64 else (targets != 0) & (targets != 1)
        if wrong.any():
            raise UserError(
                f"y of the newcomer has {float(targets[wrong][0]):g}, but the targets of "
                f"'{known.name}' are "
                + ("0 or 1." if known.y.dtype == torch.bool else f"0 to {known.outputs - 1}.")
            )
    return replace(mine, y=mine.y.to(known.y.dtype), y_test=mine.y_test.to(known.y.dtype))
