"""The server of a deployment: the federation and round loop of a simulation, with remote sites."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from fedhelix.core.options import build
from fedhelix.deploy.audit_log import AuditLog
from fedhelix.deploy.code import code_files, file_hash, public_names
from fedhelix.deploy.engine import RemoteEngine
from fedhelix.deploy.keys import make_site_key
from fedhelix.deploy.masking_engine import MaskingEngine
from fedhelix.deploy.policy import RoundPolicy, cohort_size, sampled
from fedhelix.deploy.readiness import wait_for_count, wait_for_return
from fedhelix.deploy.registry import SITES_FILE, SiteDescription, SiteRegistry, site_names
from fedhelix.deploy.remote_data import (
    OWN,
    common_description,
    data_of_sites,
    difference,
    odd_sites,
    remote_split,
)
from fedhelix.deploy.transport import Transport
from fedhelix.deploy.waiting import Waiting
from fedhelix.federation.federation import Federation
from fedhelix.federation.run import Run
from fedhelix.runs.config import Config
from fedhelix.runs.spec import RunSpec, read_spec
from fedhelix.store import RunFolder
from fedhelix.store.records import Record

AUDIT_FILE = "audit.jsonl"


def serve_run(grid: Grid, path: Path, quiet: bool | None = None) -> Run:
    """Run the rounds of the run in a folder, from its last finished round on."""
    folder = RunFolder.open(path)
    spec, deployment = read_spec(folder.config, path), dict(folder.config.get("deployment", {}))
    experiment, _ = deployment.pop("experiment"), deployment.pop("where", "")
    transport = Transport(grid, build(RoundPolicy, deployment, "the table [deployment]"))
    transport.waiting = Waiting(path)
    registry = open_registry(path / SITES_FILE, spec.config, transport)
    wait_for_return(transport, registry.sites)
    federation = make_federation(spec, transport, registry, experiment)
    remember_spent(transport, folder, registry)
    log = AuditLog(path / AUDIT_FILE, make_site_key(path, "audit"))
    try:
        # With a checkpoint after every round, since sites keep only one older state.
        return federation.fit(
            spec.config.rounds,
            out=path,
            resume=True,
            eval_every=spec.config.eval_every,
            quiet=quiet,
            watch=keep_log(federation, log),
        )
    finally:
        federation.close()


def remember_spent(transport: Transport, folder: RunFolder, registry: SiteRegistry) -> None:
    """In a run that goes on, the last record says what every site has spent."""
    last = (folder.records() or [{}])[-1].get("metadata", {})
    spent, over = last.get("epsilon", {}), last.get("budget_spent", [])
    spending = transport.spending
    spending.epsilon = {registry.sites[int(client)]: epsilon for client, epsilon in spent.items()}
    spending.exhausted = {registry.sites[client] for client in over if str(client) in spent}


def keep_log(federation: Federation, log: AuditLog) -> Callable[[Record], None]:
    """Have every exchange with sites logged; the result logs a round's record, with epsilon."""
    assert isinstance(federation.engine, RemoteEngine)
    federation.engine.transport.exchanges.log = log

    def aggregated(record: Record) -> None:
        spent = record["metadata"].get("epsilon")
        delta = federation.method.options().get("delta") if spent else None
        entry = {"kind": "aggregate", "round": record["round"], "epsilon": spent, "delta": delta}
        log.append(entry)

    return aggregated


def open_registry(path: Path, config: Config, transport: Transport) -> SiteRegistry:
    """The registry of a run; a new one waits for the sites of the first round."""
    registry = SiteRegistry(path, config.client_count + config.newcomers)
    if not registry.sites:
        wait_for_count(transport, transport.policy.begin or config.client_count)
        if config.data == OWN:
            here = {site: transport.descriptions[site] for site in transport.connected}
            for site, why in odd_sites(here).items():
                transport.turn_away(site, why)
        registry.enrol(transport.descriptions, transport.connected)
    return registry


def make_federation(
    spec: RunSpec, transport: Transport, registry: SiteRegistry, experiment: str
) -> Federation:
    """The federation of a run spec whose clients are sites."""
    config, policy = spec.config, transport.policy
    header: dict[str, Any] = {"experiment": experiment, "spec": json.dumps(_public(spec))}
    if files := code_files(spec):
        header["code"] = {name: file_hash(path) for name, path in files.items()}
    overrides: dict[str, Any] = {}
    if config.data == OWN:
        description = common_description(registry.descriptions)
        overrides = data_of_sites(spec, policy.server_data, registry, description)
        header["classes"] = description["classes"]
        transport.unfit = partial(difference, other=description, other_name="the run")
        for site in sorted(transport.connected):  # in a run that goes on its data may be others
            if why := transport.unfit(transport.descriptions[site]):
                transport.turn_away(site, why)
    enough = cohort_size(config) if policy.extra else None
    evaluates = config.data != OWN or policy.server_data is not None
    kind = RemoteEngine if spec.method.capabilities.masks is None else MaskingEngine
    federation = config.federation(
        spec.method,
        cohort=sampled(config, policy.extra),
        engine=lambda setup: kind(setup, transport, registry, header, enough, evaluates),
        **overrides,
    )
    if config.data == OWN:
        _hand_out_supplements(federation)

    def name_clients() -> None:
        federation.names = site_names(registry.sites, federation.clients)
        federation.untaken = range(len(registry.sites), federation.clients)

    def joined(client: int, site: SiteDescription) -> None:
        name_clients()
        if config.data == OWN:
            federation.splits[client] = remote_split(site["train"], site["test"], config.valid)

    name_clients()
    registry.on_join = joined
    return federation


def _hand_out_supplements(federation: Federation) -> None:
    """Give the engine the samples that it sends to clients."""
    engine = federation.engine
    assert isinstance(engine, RemoteEngine)
    for client, count in federation.supplements.items():
        rows = federation.splits[client].train[-count:]
        x, y = federation.data.x[rows].cpu(), federation.data.y[rows].cpu()
        engine.supplements[client] = {"x": x, "y": y}


def _public(spec: RunSpec) -> dict[str, Any]:
    """What sites must know of a run spec, without what concerns the server's machine only."""
    private = ("versions", "data_dir", "device", "engine", "workers", "address")
    public = {key: value for key, value in spec.as_dict().items() if key not in private}
    method, model = public_names(spec)
    return public | {"method": {**public["method"], "name": method}, "model": model}
