"""The server's side: the same federation and the same loop as in a simulation, with sites for clients."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from fedhelix.data import Dataset, from_npz
from fedhelix.deploy.elsewhere import OWN, Elsewhere, common_kind, own_split, stand_in
from fedhelix.deploy.engine import Remote
from fedhelix.deploy.post import Post
from fedhelix.deploy.roster import Card, Roster
from fedhelix.deploy.terms import Terms, cohort_size
from fedhelix.federation import Federation
from fedhelix.options import build
from fedhelix.runs.config import Plan, read_plan
from fedhelix.standing import Run
from fedhelix.store import RunFolder

ROSTER = "sites.json"


def serve(grid: Grid, path: Path, quiet: bool | None = None) -> Run:
    """Play the run in a folder, from its last finished round on."""
    folder = RunFolder.open(path)
    plan, asked = read_plan(folder.config, path), dict(folder.config.get("deployment", {}))
    experiment = asked.pop("experiment")
    post = Post(grid, build(Terms, asked, "the table [deployment]"))
    roster = Roster(path / ROSTER, plan.config.clients + plan.config.newcomers)
    if not roster.cards:
        post.gather(post.terms.begin or plan.config.clients)
        roster.enrol(post.cards, post.connected)
    post.hope_for(roster.sites)
    federation = deployed(plan, post, roster, experiment)
    try:
        return federation.fit(
            plan.config.rounds, out=path, resume=True, eval_every=plan.config.eval_every, quiet=quiet
        )  # a checkpoint after every round: sites keep what an older one would need for one round only
    finally:
        federation.close()


def deployed(plan: Plan, post: Post, roster: Roster, experiment: str) -> Federation:
    """The federation of a plan with sites for clients."""
    config, terms = plan.config, post.terms
    server_data = terms.server_data
    instead: dict[str, Any] = {}
    common = {"experiment": experiment, "plan": json.dumps(_sent(plan))}
    if config.data == OWN:
        kind = common_kind(roster.cards)
        data = stand_in(kind) if server_data is None else _of_kind(from_npz(server_data), kind)
        # A place that nobody has taken yet: at most 0.9 of its samples are for validation, and BatchNorm needs two.
        later = [(20, 0)] * (roster.places - len(roster.cards))
        counts = [(card["train"], card["test"]) for card in roster.cards.values()] + later
        instead |= {"data": data, "partition": Elsewhere(counts, config.valid)}
        if server_data is not None and config.validation_size is None and plan.method.scores:
            instead["validation_size"] = float(len(data.x) - 1)  # all that the server has
        common["classes"] = kind["classes"]
    cohort = cohort_size(config)
    enough = cohort if terms.extra else None
    judges = config.data != OWN or server_data is not None
    federation = config.federation(
        plan.method,
        cohort=min(cohort + terms.extra, config.clients),
        engine=lambda setup: Remote(setup, post, roster, common, enough, judges),
        **instead,
    )
    engine = federation.engine
    assert isinstance(engine, Remote)
    if config.data == OWN:
        engine.supplements = {
            client: {"x": federation.data.x[given].cpu(), "y": federation.data.y[given].cpu()}
            for client, count in federation.supplements.items()
            for given in [federation.splits[client].train[-count:]]
        }

        def joined(client: int, card: Card) -> None:
            federation.splits[client] = own_split(card["train"], card["test"], config.valid, config.seed, client)

        roster.joined = joined
    return federation


def _sent(plan: Plan) -> dict[str, Any]:
    """What sites must know of a plan; what concerns the server's machine is not for them."""
    local = ("versions", "data_dir", "device", "engine", "workers")
    return {key: value for key, value in plan.as_dict().items() if key not in local}


def _of_kind(data: Dataset, kind: Card) -> Dataset:
    return dataclasses.replace(data, name=OWN, classes=kind["classes"])
