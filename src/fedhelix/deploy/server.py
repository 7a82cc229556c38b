"""The server's side: the same federation and the same loop as in a simulation, with sites for
clients.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from fedhelix.core.options import build
from fedhelix.data import Dataset, from_npz
from fedhelix.deploy.engine import Remote
from fedhelix.deploy.policy import RoundPolicy, cohort_size
from fedhelix.deploy.registry import Card, SiteRegistry
from fedhelix.deploy.remote_data import OWN, RemotePartition, common_kind, own_split, stand_in
from fedhelix.deploy.transport import Transport
from fedhelix.federation.federation import Federation
from fedhelix.federation.run import Run
from fedhelix.runs.spec import RunSpec, read_spec
from fedhelix.store import RunFolder

ROSTER = "sites.json"


def serve(grid: Grid, path: Path, quiet: bool | None = None) -> Run:
    """Play the run in a folder, from its last finished round on."""
    folder = RunFolder.open(path)
    spec, requested = read_spec(folder.config, path), dict(folder.config.get("deployment", {}))
    experiment = requested.pop("experiment")
    transport = Transport(grid, build(RoundPolicy, requested, "the table [deployment]"))
    registry = SiteRegistry(path / ROSTER, spec.config.clients + spec.config.newcomers)
    if not registry.cards:
        transport.gather(transport.policy.begin or spec.config.clients)
        registry.enrol(transport.cards, transport.connected)
    transport.hope_for(registry.sites)
    federation = deployed(spec, transport, registry, experiment)
    try:
        return federation.fit(
            spec.config.rounds,
            out=path,
            resume=True,
            eval_every=spec.config.eval_every,
            quiet=quiet,
        )  # a checkpoint after every round: sites keep what an older one would need for one round only
    finally:
        federation.close()


def deployed(
    spec: RunSpec, transport: Transport, registry: SiteRegistry, experiment: str
) -> Federation:
    """The federation of a plan with sites for clients."""
    config, policy = spec.config, transport.policy
    server_data = policy.server_data
    instead: dict[str, Any] = {}
    common = {"experiment": experiment, "plan": json.dumps(_sent(spec))}
    if config.data == OWN:
        kind = common_kind(registry.cards)
        data = stand_in(kind) if server_data is None else _of_kind(from_npz(server_data), kind)
        # A place that nobody has taken yet: at most 0.9 of its samples are for validation, and
        # BatchNorm needs two.
        later = [(20, 0)] * (registry.places - len(registry.cards))
        counts = [(card["train"], card["test"]) for card in registry.cards.values()] + later
        instead |= {"data": data, "partition": RemotePartition(counts, config.valid)}
        if (
            server_data is not None
            and config.validation_size is None
            and spec.method.capabilities.server_validation
        ):
            instead["validation_size"] = float(len(data.x) - 1)  # all that the server has
        common["classes"] = kind["classes"]
    cohort = cohort_size(config)
    enough = cohort if policy.extra else None
    judges = config.data != OWN or server_data is not None
    federation = config.federation(
        spec.method,
        cohort=min(cohort + policy.extra, config.clients),
        engine=lambda setup: Remote(setup, transport, registry, common, enough, judges),
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
            federation.splits[client] = own_split(
                card["train"], card["test"], config.valid, config.seed, client
            )

        registry.joined = joined
    return federation


def _sent(spec: RunSpec) -> dict[str, Any]:
    """What sites must know of a plan; what concerns the server's machine is not for them."""
    local = ("versions", "data_dir", "device", "engine", "workers")
    return {key: value for key, value in spec.as_dict().items() if key not in local}


def _of_kind(data: Dataset, kind: Card) -> Dataset:
    return dataclasses.replace(data, name=OWN, classes=kind["classes"])
