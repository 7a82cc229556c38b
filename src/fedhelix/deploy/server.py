"""The server of a deployment: the federation and round loop of a simulation, with remote sites."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid
from torch import nn

from fedhelix.core.errors import UserError
from fedhelix.core.options import build
from fedhelix.data import Dataset, from_npz
from fedhelix.deploy.audit_log import AuditLog
from fedhelix.deploy.code import code_files, file_hash, public_names
from fedhelix.deploy.engine import RemoteEngine
from fedhelix.deploy.keys import make_site_key
from fedhelix.deploy.masking_engine import MaskingEngine
from fedhelix.deploy.policy import RoundPolicy, cohort_size, sampled
from fedhelix.deploy.registry import SITES_FILE, SiteDescription, SiteRegistry, read_sites
from fedhelix.deploy.remote_data import (
    OWN,
    UNKNOWN_COUNTS,
    RemotePartition,
    common_description,
    difference,
    odd_sites,
    placeholder_data,
    remote_split,
)
from fedhelix.deploy.transport import Transport
from fedhelix.deploy.waiting import Waiting
from fedhelix.federation.description import check_same
from fedhelix.federation.federation import Federation
from fedhelix.federation.run import Run
from fedhelix.runs.config import Config
from fedhelix.runs.finished import last_checkpoint
from fedhelix.runs.spec import RunSpec, read_spec
from fedhelix.store import RunFolder
from fedhelix.store.records import Record, has_effect

AUDIT_FILE = "audit.jsonl"


def serve_run(grid: Grid, path: Path, quiet: bool | None = None) -> Run:
    """Run the rounds of the run in a folder, from its last finished round on."""
    folder = RunFolder.open(path)
    spec, deployment = read_spec(folder.config, path), dict(folder.config.get("deployment", {}))
    experiment = deployment.pop("experiment")
    transport = Transport(grid, build(RoundPolicy, deployment, "the table [deployment]"))
    transport.waiting = Waiting(path)
    registry = open_registry(path / SITES_FILE, spec.config, transport)
    transport.wait_for_return(registry.sites)
    federation = make_federation(spec, transport, registry, experiment)
    transport.spent = spent_before(folder, registry)
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


def server_model(path: Path) -> tuple[nn.Module, str]:
    """The server's model after the last round of a run across sites, and in words which one it is;
    nothing is written, so the run may go on meanwhile.
    """
    folder = RunFolder.open(path)
    if "deployment" not in folder.config:
        raise UserError(
            f"'{path}' is no run of a deployment; in Python, load_run({str(path)!r}).model() is "
            "its server's model."
        )
    if not (sites := read_sites(path / SITES_FILE)) or not folder.rounds_saved:
        raise UserError(f"'{path}' has no checkpoint yet; let it finish a round first.")
    spec = read_spec(folder.config, path)
    places: dict[str, Any] = {"device": "cpu", "workers": None, "kernels": "onednn"}
    if spec.config.data == OWN:
        registry = SiteRegistry(None, spec.config.client_count + spec.config.newcomers)
        registry.descriptions = sites
        server_data = folder.config["deployment"].get("server_data")
        places |= _data_of_sites(spec, server_data, registry, common_description(sites))
    federation = spec.config.federation(spec.method, engine="serial", **places)
    check_same(federation, folder)
    restored = last_checkpoint(folder, "cpu")
    assert restored is not None  # it has rounds
    run = Run(federation, *restored, folder)
    module, rounds = run.model(), run.state.round
    effective = sum(map(has_effect, run.records))
    if module is None:
        raise UserError(
            f"{spec.method.label} has no global model; write a site's own one there with "
            "`fedhelix site model`."
        )
    words = f"{rounds} round{'s' * (rounds != 1)} of {spec.method.label}"
    if effective < rounds:
        words += f", {effective} of which changed it"
    return module, f"the server's model after {words}"


def spent_before(folder: RunFolder, registry: SiteRegistry) -> dict[str, float]:
    """The epsilon of every site by the last record of a run that goes on."""
    last = (folder.records() or [{}])[-1]
    spent = last.get("metadata", {}).get("epsilon", {})
    return {registry.sites[int(client)]: epsilon for client, epsilon in spent.items()}


def keep_log(federation: Federation, log: AuditLog) -> Callable[[Record], None]:
    """Have every exchange with sites logged; the result logs a round's record, with epsilon."""
    assert isinstance(federation.engine, RemoteEngine)
    federation.engine.transport.exchanges.log = log

    def aggregated(record: Record) -> None:
        spent = record["metadata"].get("epsilon")
        log.append({"kind": "aggregate", "round": record["round"], "epsilon": spent})

    return aggregated


def open_registry(path: Path, config: Config, transport: Transport) -> SiteRegistry:
    """The registry of a run; a new one waits for the sites of the first round."""
    registry = SiteRegistry(path, config.client_count + config.newcomers)
    if not registry.sites:
        transport.wait_for_count(transport.policy.begin or config.client_count)
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
        overrides = _data_of_sites(spec, policy.server_data, registry, description)
        header["classes"] = description["classes"]
        transport.unfit = partial(difference, other=description, other_name="the run")
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

    def joined(client: int, site: SiteDescription) -> None:
        _name_clients(federation, registry)
        if config.data == OWN:
            federation.splits[client] = remote_split(site["train"], site["test"], config.valid)

    _name_clients(federation, registry)
    registry.on_join = joined
    return federation


def _name_clients(federation: Federation, registry: SiteRegistry) -> None:
    """Clients are called by their sites; places that no site has taken, by their numbers."""
    later = map(str, range(len(registry.sites), federation.clients))
    federation.names = (*registry.sites, *later)


def _data_of_sites(
    spec: RunSpec,
    server_data: str | None,
    registry: SiteRegistry,
    description: SiteDescription,
) -> dict[str, Any]:
    """The federation's settings about data where sites have their own samples."""
    config = spec.config
    sites = registry.descriptions.values()
    counts = [(site["train"], site["test"]) for site in sites]
    counts += [UNKNOWN_COUNTS] * (registry.capacity - len(counts))
    settings: dict[str, Any] = {"partition": RemotePartition(counts, config.valid)}
    if server_data is None:
        return settings | {"data": placeholder_data(description)}
    data = _as_classified(from_npz(server_data), description)
    if config.validation_size is None and spec.method.capabilities.server_validation:
        settings["validation_size"] = float(len(data.x) - 1)  # all that the server has
    return settings | {"data": data}


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


def _as_classified(data: Dataset, description: SiteDescription) -> Dataset:
    """The server's samples under the sites' name and number of classes."""
    return dataclasses.replace(data, name=OWN, classes=description["classes"])
