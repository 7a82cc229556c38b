"""Finished runs for notebooks, on one machine or across sites: `load_run(FOLDER)`.

It needs no Flower: a run across sites keeps in its folder what the server knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from fedhelix.core.errors import UserError
from fedhelix.core.objective import Metric
from fedhelix.deploy.registry import SITES_FILE, SiteRegistry, read_sites, site_names
from fedhelix.deploy.remote_data import OWN, common_description, data_of_sites
from fedhelix.federation import Federation, Run
from fedhelix.federation.description import check_same
from fedhelix.runs.finished import last_checkpoint, run_here
from fedhelix.runs.spec import read_spec
from fedhelix.store import RunFolder

AT_SITES = "write a site's own one there with `fedhelix site model`"


class SitesRun(Run):
    """A run across sites: what the server has of it."""

    def network(self, client: int | str | None = None) -> nn.Module:
        """The server's model."""
        if client is not None:
            self.personal(client)
        if (module := self.model()) is None:
            raise UserError(f"{self.federation.method.label} has no global model; {AT_SITES}.")
        return module

    def personal(self, client: int | str) -> NoReturn:
        """Refused: the sites keep these models."""
        raise UserError(f"personal models stay at the sites of a deployment; {AT_SITES}.")

    personal_model = personal

    def evaluate(self, metrics: Mapping[str, Metric]) -> NoReturn:
        """Refused: the sites keep the test samples."""
        raise UserError(
            "the sites of a deployment keep their test samples; run.records has what they measured."
        )

    def onboard(self, data: Any, name: str | int | None = None) -> NoReturn:
        """Refused: newcomers of a deployment are sites."""
        raise UserError(
            "a newcomer to a deployment joins as a site; admit it with `fedhelix deploy admit`."
        )

    def inherit(self, module: nn.Module, data: Any) -> NoReturn:
        """Refused, as is `onboard`."""
        self.onboard(data)


def load_run(path: str | Path, federation: Federation | None = None) -> Run:
    """A run from its folder, with its models: `load_run("runs/demo/helix-seed0").model()`.

    A run that was made in Python with data, a network or a method of your own also needs the
    `Federation` that made it. Of a run across sites it has the server's model; personal models stay
    at the sites.
    """
    folder = RunFolder.open(path)
    if "deployment" not in folder.config:
        return run_here(folder, path, federation)
    if federation is not None:
        raise UserError(
            f"'{path}' is a run across sites, whose folder says how to set it up; call "
            f"load_run({str(path)!r}) without a federation."
        )
    return run_of_sites(folder)


def run_of_sites(folder: RunFolder) -> SitesRun:
    """What the server has of a run across sites after its last round; nothing is written, so the
    run may go on meanwhile.
    """
    path = folder.path
    if not (sites := read_sites(path / SITES_FILE)) or not folder.rounds_saved:
        raise UserError(f"'{path}' has no checkpoint yet; let it finish a round first.")
    spec = read_spec(folder.config, path)
    places: dict[str, Any] = {"device": "cpu", "workers": None, "kernels": "onednn"}
    if spec.config.data == OWN:
        registry = SiteRegistry(None, spec.config.client_count + spec.config.newcomers)
        registry.descriptions = sites
        server_data = folder.config["deployment"].get("server_data")
        places |= data_of_sites(spec, server_data, registry, common_description(sites))
    federation = spec.config.federation(spec.method, engine="serial", **places)
    federation.names = site_names(list(sites), federation.clients)
    check_same(federation, folder)
    restored = last_checkpoint(folder, "cpu")
    assert restored is not None  # it has rounds
    run = SitesRun(federation, *restored, folder)
    run.made_by = (folder.summary or {}).get("engine", "sites")
    return run
