"""THE round loop. No method, engine or sink has another one."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from fedhelix.core.cpu import one_thread
from fedhelix.core.hooks import checked, other_bytes, recorded
from fedhelix.core.tree import Tree, copied_levels, payload_bytes
from fedhelix.core.views import Context
from fedhelix.engines.local import ClientResult, ClientTask
from fedhelix.federation import guard
from fedhelix.federation.evaluation import evaluate, keep_models
from fedhelix.federation.newcomers import onboard_all
from fedhelix.federation.setup import FederationSetup
from fedhelix.federation.state import FederationState
from fedhelix.federation.uploads import (
    check_some_received,
    check_some_sent,
    decode_uploads,
    keep_states,
    send_forged,
    traffic,
    validate_uploads,
)
from fedhelix.store.records import Record

# A loss so many times the median of the others, and of the least that is taken for one, is out of
# place: as with inputs on another scale.
OUTLYING, LEAST_LOSS = 1000, 0.1


@one_thread()
def initialize(fed: FederationSetup, rounds: int) -> FederationState:
    """Before round 0: clients send what they have to, the server makes its first state."""
    ctx = fed.context(0, rounds)
    tasks = [ClientTask(i, 0, {}, {}) for i in range(ctx.clients)]
    inits = fed.engine.client_init(tasks) if fed.method.capabilities.client_init else {}
    server, replies, harmful = guard.server_init(fed.method, inits, ctx, fed.engine.deployed)
    for client, why in harmful.items():
        warnings.warn(f"the first message of client {client} {why}.", stacklevel=2)
    sent = sum(payload_bytes(tree) for trees in (inits, replies) for tree in trees.values())
    supplements = fed.data.sample_bytes * sum(fed.supplements.values())
    return FederationState(0, server, dict(replies), set(replies), sent + supplements)


def run_rounds(
    fed: FederationSetup, rounds: int, state: FederationState, eval_every: int = 1
) -> Iterator[tuple[Record, FederationState]]:
    """Yields a record and the new state after every round."""
    for t in range(state.round, rounds):
        record, state = run_round(fed, t, rounds, state, (t + 1) % eval_every == 0)
        yield record, state


@one_thread()
def run_round(
    fed: FederationSetup, t: int, rounds: int, state: FederationState, evaluated: bool
) -> tuple[Record, FederationState]:
    """The record of round t and the state after it; the last round is evaluated in any case."""
    method, started = checked(fed.method), fed.engine.start_seconds
    began, ctx, arrival = _work_clock(fed), fed.context(t, rounds), Record()
    if fed.settings.newcomers and t == fed.settings.newcomers_after:
        state, arrival = onboard_all(fed, state, ctx)
    pending = [work for work in state.pending if work.task.client in ctx.present]
    candidates = set(method.candidates(state.server, ctx)).difference(fed.engine.spent)
    cohort = fed.schedule.cohort(fed.sampler(t), t, state.clock, pending, candidates)
    ctx = replace(ctx, cohort=partial(fed.cohort, drawn={t: cohort}))
    busy = {work.task.client for work in pending}
    clients = [i for i in method.select_clients(state.server, cohort, ctx) if i not in busy]
    payloads = _downloads(fed, t, state, clients, ctx)
    tasks = [ClientTask(i, t, payloads[i], state.client_states.get(i, {})) for i in clients]
    spent = {*ctx.metadata.get("budget_spent", ()), *fed.engine.spent}
    fed.engine.able = set(ctx.present).difference(spent) if spent else None
    results = fed.engine.run_clients(tasks)
    missing = {str(client): why for client, why in fed.engine.missing.items()}
    turn = fed.schedule.turn(t, state.clock, pending, tasks, results)
    strangers = fed.engine.deployed
    if not t and not strangers:
        check_some_sent(fed.method, results, method.shared_params(fed.layers), ctx)
    plain, refused = decode_uploads(fed.method, turn.results, turn.payloads, ctx, strangers)
    known = {result.client for result in plain}
    answered = [work.task for work in turn.arrived if work.task.client in known]
    if fed.settings.forges:
        plain = fed.attackers.forge(plain, answered, fed.scorer(fed.studied), fed.initial)
        plain, unread = send_forged(fed.method, plain, fed.attackers.ids, turn.payloads, ctx)
        refused |= unread
    uploads, invalid = validate_uploads(plain, fed.initial, fed.needed)
    if fed.settings.client_weights == "equal":
        uploads = [upload._replace(samples=1) for upload in uploads]
    server, setup_bytes, weightless = state.server, state.setup_bytes, False
    if uploads:
        uploads = turn.dated(uploads, t)
        server, harmful, weightless = guard.aggregate(fed.method, server, uploads, ctx, strangers)
        invalid |= harmful
    elif fed.engine.exchanged is not None:
        ctx.metadata["other_bytes"] = fed.engine.exchanged
    state = FederationState(
        t + 1,
        server,
        state.client_states | keep_states(turn.results, state.client_states, uploads),
        state.changed | {result.client for result in turn.results},
        clock=turn.clock or 0.0,
        pending=turn.pending,
    )
    reached = turn.sent if fed.engine.reached is None else fed.engine.reached
    sent = {client: payload for client, payload in turn.sent.items() if client in reached}
    uploaded = [*(result.upload for result in turn.results), *fed.engine.unused]
    record: Record = {
        "round": t + 1,
        **_train_loss(turn.results),
        **traffic(sent, results, uploaded, setup_bytes + other_bytes(fed.method, ctx)),
        "participants": [i for i in turn.participants if i not in fed.untaken],
        "refused": refused | invalid,
        "missing": missing,
        **({"weightless": True} if weightless else {}),
        **turn.record(t),
        **arrival,
    }
    if evaluated or t + 1 == rounds:
        record |= evaluate(fed, state, ctx)
    keep_models(fed, state, ctx)
    record |= fed.engine.report(recorded(fed.method, ctx))
    record["seconds"] = _work_clock(fed) - began
    if fed.engine.start_seconds > started:
        record["start_seconds"] = fed.engine.start_seconds - started
    return record, state


def _work_clock(fed: FederationSetup) -> float:
    """Seconds that leave out those in which the engine starts processes: they serve later rounds
    and later runs too.
    """
    return time.perf_counter() - fed.engine.start_seconds


def _downloads(
    fed: FederationSetup, t: int, state: FederationState, clients: Sequence[int], ctx: Context
) -> dict[int, Tree]:
    """What the clients receive in round t."""
    method = checked(fed.method)
    if fed.method.overrides("download"):
        payloads = {client: method.download(state.server, client, ctx) for client in clients}
    else:  # everybody receives the same
        one = method.download(state.server, clients[0], ctx) if clients else {}
        payloads = {client: copied_levels(one) for client in clients}
    if t and not fed.engine.deployed:  # what sites keep is not known here
        shared = method.shared_params(fed.layers)
        check_some_received(fed.method, payloads, state.client_states, shared)
    return payloads


def _train_loss(results: Sequence[ClientResult]) -> Record:
    """The mean loss of those who report theirs, and whose is no number; no entry where all keep it
    to themselves.
    """
    losses = {result.client: result.loss for result in results if result.loss is not None}
    if results and not losses:
        return {}
    mean = float(np.mean(list(losses.values()))) if losses else math.nan
    bad = sorted(client for client, loss in losses.items() if not math.isfinite(loss))
    odd = _outlying(losses)
    return {
        "train_loss": mean,
        **({"nonfinite_losses": bad} if bad else {}),
        **({"outlying_losses": odd} if odd else {}),
    }


def _outlying(losses: Mapping[int, float]) -> list[int]:
    """Whose losses are far beyond those of the others, or no numbers where these are some."""
    found = []
    for client, loss in losses.items():
        if loss <= OUTLYING * LEAST_LOSS:
            continue
        others = [other for one, other in losses.items() if one != client]
        usual = float(np.median(others)) if others else math.nan
        if math.isfinite(usual) and not loss <= OUTLYING * max(usual, LEAST_LOSS):
            found.append(client)
    return sorted(found)
