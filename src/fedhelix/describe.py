"""What a federation says about itself: for the config.toml, the clients.json and the summary of its runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedhelix import toml
from fedhelix.errors import BadInput
from fedhelix.store import RunFolder

if TYPE_CHECKING:
    from fedhelix.federation import Federation


def config(federation: Federation, rounds: int) -> dict[str, Any]:
    """What determines a run, as far as a library user's objects can be written down."""
    return {
        "library": True,
        "rounds": rounds,
        "seed": federation.seed,
        "data": {"name": federation.data.name},
        "parameters": {name: list(federation.initial[name].shape) for name in federation.units.parameters},
        "clients": federation.clients,
        "cohort": federation.cohort_size,
        "training": vars(federation.training),
        "server_data": vars(federation.server_data),
        "participation": vars(federation.participation),
        "newcomers": vars(federation.newcomers),
        "attack": vars(federation.attack),
        "method": {"name": federation.method.label, **federation.method.options()},
    }


def facts(federation: Federation) -> dict[str, Any]:
    """What a summary says about the federation."""
    return {
        "method": federation.method.label,
        "options": federation.method.options(),
        "parameters": sum(federation.units.sizes[name] for name in federation.units.parameters),
        "data": federation.data.name,
        "clients": federation.clients,
        "seed": federation.seed,
        "engine": f"{federation.engine.name} ({federation.engine.why})",
    }


def census(federation: Federation) -> dict[str, Any]:
    """Who has what: training samples per client (and class), who is malicious, and whose models are judged."""
    found: dict[str, Any] = {
        "samples": [len(split.train) for split in federation.splits],
        "attackers": sorted(federation.attackers.ids),
        "judged": federation.judged,
    }
    if federation.here and (classes := federation.data.classes) is not None:
        labels = federation.data.y.cpu().numpy()
        found["classes"] = [np.bincount(labels[split.train], minlength=classes).tolist() for split in federation.splits]
    return found


def check_same(federation: Federation, folder: RunFolder) -> None:
    """A run from Python objects can only be resumed by a federation that describes itself in the same way."""
    mine, its = toml.loads(toml.dumps(config(federation, 1))), folder.config
    for key in mine if its.get("library") else ():
        if key != "rounds" and mine[key] != its.get(key):
            raise BadInput(f"'{folder.path}' was run with {key} = {its.get(key)}, not {mine[key]}.")
    if "deployment" not in its and folder.clients and folder.clients != census(federation):
        raise BadInput(f"the clients of '{folder.path}' had other samples than they have now; was config.toml changed?")
