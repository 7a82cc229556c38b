"""What a federation says about itself: for config.toml, clients.json and the
summary of its runs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedhelix.core import toml
from fedhelix.core.errors import UserError
from fedhelix.core.layers import difference
from fedhelix.core.objective import LossOfLabels
from fedhelix.core.options import options_of
from fedhelix.core.registry import is_known
from fedhelix.data import UNSHIFTED, Dataset, Scaling, ServerData, Shift, partitions
from fedhelix.data.datasets import POOLS
from fedhelix.data.scaling import targets_advice
from fedhelix.engines.local import Training
from fedhelix.federation.devices import FILES, RATES, Devices
from fedhelix.federation.sampling import Newcomers, Participation
from fedhelix.federation.setup import FederationSettings, FederationSetup
from fedhelix.federation.sources import (
    METHOD_SOURCE,
    NETWORK_SOURCE,
    check_sources,
    resolved,
    resolved_method,
)
from fedhelix.robust.attacks import Attack
from fedhelix.store import RunFolder
from fedhelix.store.records import ADVICE, GENTLER, Record

GROUPS = {
    "training": Training,
    "server_data": ServerData,
    "scaling": Scaling,
    "shift": Shift,
    "participation": Participation,
    "newcomers": Newcomers,
    "devices": Devices,
    "attack": Attack,
}

SEVERAL = 1000  # samples of a pool that tell it from others
GOLDEN_ANGLE = math.pi * (3 - math.sqrt(5))  # whose multiples never repeat
SAME = 1e-3  # relative difference of two moments that are the same but for rounding

# In clients.json: the shapes of the network's entries, and the names of method and data.
NETWORK, ABOUT = "network", "about"

# Entries that a resumed run may have otherwise; who has which samples is compared by itself.
NOT_CHECKED = ("rounds", "made_from", "partition")

OBJECTIVE = "objective"  # in the config: loss and metric, which older runs do not name


def config(fed: FederationSetup, rounds: int) -> dict[str, Any]:
    """What determines a run, as far as a library user's objects can be written down."""
    settings = {name: options_of(kind, fed.settings) for name, kind in GROUPS.items()}
    training = settings["training"]
    training["optimizer"] = str(training["optimizer"])
    if not isinstance(training["augment"], bool):
        training["augment"] = str(training["augment"])
    settings["devices"] = located(settings["devices"])
    if fed.devices is None:
        del settings["devices"]
    return {
        "library": True,
        **({"made_from": fed.made_from} if fed.made_from else {}),
        "rounds": rounds,
        "seed": fed.seed,
        "data": {"name": fed.data.name},
        "partition": partitions.as_text(fed.partition),
        "clients": fed.clients,
        "cohort": fed.cohort_size,
        OBJECTIVE: {"loss": named(fed.objective.loss), "metric": named(fed.objective.metric)},
        **settings,
        "method": {"name": fed.method.label, **fed.method.options()},
    }


def named(function: Any) -> str:
    """What a loss or a metric is called, the same in every process."""
    if isinstance(function, LossOfLabels):
        return named(function.loss)
    if isinstance(function, partial):
        return named(function.func)
    if isinstance(function, torch.nn.Module):
        return " ".join(str(function).split())
    return str(getattr(function, "__name__", type(function).__name__))


def made_from(settings: FederationSettings, **given: Any) -> dict[str, Any] | None:
    """The arguments of a federation, if all of them are names and numbers; its method is told by
    its file, if it has one.
    """
    own = (
        not isinstance(given["data"], str)
        or not isinstance(given["partition"], str | None)
        or not isinstance(given["model"], str)
        or not isinstance(settings.optimizer, str)
        or not isinstance(settings.augment, bool)
    )
    if own:
        return None
    if isinstance(method := given.pop("method"), str) and not is_known(method):
        given["method"] = resolved_method(method)
    return located({name: value for name, value in given.items() if value is not None})


def located(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings whose files can be found from any folder."""
    settings = dict(values)
    for key, endings in (("data", (".npz",)), ("data_dir", ("",)), ("devices", FILES)):
        place = settings.get(key)
        if isinstance(place, str) and place.endswith(endings):
            settings[key] = str(Path(place).expanduser().resolve())
    if isinstance(model := settings.get("model"), str):
        settings["model"] = resolved(model)
    return settings


def as_command(its: Mapping[str, Any]) -> dict[str, Any]:
    """A run that was made in Python from names alone, as the command line would describe it."""
    settings = {key: value for name in GROUPS for key, value in its.get(name, {}).items()}
    common = {name: its[name] for name in ("seed", "rounds", "cohort")}
    given = its["made_from"]
    method = {**its["method"], "name": given.get("method", its["method"]["name"])}
    return {**settings, **common, **given, "method": method}


def facts(fed: FederationSetup) -> dict[str, Any]:
    """What a summary says about the federation."""
    return {
        "method": fed.method.label,
        "options": fed.method.options(),
        "parameters": sum(fed.layers.sizes[name] for name in fed.layers.parameters),
        "data": fed.data.name,
        "clients": fed.clients,
        "seed": fed.seed,
        **({} if fed.settings.target is None else {"target": fed.settings.target}),
        "engine": f"{fed.engine.used} ({fed.engine.why})",
    }


def cluster_agreement(fed: FederationSetup, records: Sequence[Record]) -> dict[str, float]:
    """The adjusted Rand index of clusters and class sets: 1 where clients with the same classes,
    and no others, are together; about 0 by chance. Empty without clusters or classes.
    """
    clusters = records[0].get("metadata", {}).get("clusters") if records else None
    classes = census(fed).get("classes")
    if not clusters or classes is None:
        return {}
    from sklearn.metrics import adjusted_rand_score  # slow to import, and few runs need it

    held = [str(np.flatnonzero(classes[int(client)])) for client in clusters]
    return {"cluster_agreement": float(adjusted_rand_score(held, list(clusters.values())))}


def census(fed: FederationSetup) -> dict[str, Any]:
    """Training samples per client (and class), who is malicious, who is evaluated, who has which
    shift, and how fast devices are.
    """
    unknown = () if fed.data_is_here else fed.untaken  # what sites will have that come later
    table: dict[str, Any] = {
        "samples": [
            0 if client in unknown else len(split.train) for client, split in enumerate(fed.splits)
        ],
        "attackers": sorted(fed.attackers.ids),
        "evaluated": fed.evaluated,
    }
    if fed.names is not None:
        table["names"] = list(fed.names)
    if fed.data_is_here and (classes := fed.data.classes) is not None:
        labels = fed.data.y.cpu().numpy()
        counts = [np.bincount(labels[split.train], minlength=classes) for split in fed.splits]
        table["classes"] = [count.tolist() for count in counts]
        if fed.data.labels is not None:
            table["class_names"] = list(fed.data.labels)
    if any(name != UNSHIFTED for name in fed.shifts):
        table["shift"] = fed.shifts
    if fed.devices is not None:
        devices = [fed.devices.device(client) for client in range(fed.clients)]
        table["devices"] = {name: [getattr(one, name) for one in devices] for name in RATES}
    return table


def check_same(fed: FederationSetup, folder: RunFolder, goes_on: bool = False) -> None:
    """A run from Python objects is resumed only by a federation with the same description.

    Where the file of the network was edited since, a run that `goes_on` is refused too.
    """
    mine, its = toml.loads(toml.dumps(config(fed, 1))), folder.config
    if fed.joined and its.get("clients") != fed.clients:
        raise UserError(
            f"{fed.joined} client{'s' * (fed.joined > 1)} joined this federation after the run "
            f"'{folder.path}'; run_rounds(rounds=..., state=run.state) goes on with all clients, a "
            "Federation whose clients include the new ones begins a new folder, and one built "
            "again without them goes on with this one."
        )
    if goes_on:
        _note_lambdas(mine[OBJECTIVE])
    for key in mine if its.get("library") else ():
        if key not in NOT_CHECKED and not _agree(key, mine[key], its.get(key)):
            raise UserError(f"'{folder.path}' was run with {_difference(key, mine[key], its)}.")
    if "deployment" not in its and folder.clients:
        _check_clients(fed, folder)
    _check_network(fed, folder)
    check_sources(fed.sources, folder, goes_on)


def _note_lambdas(objective: Mapping[str, str]) -> None:
    """Say which of loss and metric cannot be told from another one."""
    unnamed = " and ".join(what for what, name in objective.items() if name == "<lambda>")
    if unnamed:
        warnings.warn(
            f"{unnamed} without a name (lambda) cannot be compared with that of the run so far; "
            "make sure that it is the same, or write it as a function (def).",
            stacklevel=3,
        )


def _check_clients(fed: FederationSetup, folder: RunFolder) -> None:
    """Refuse clients with other samples."""
    mine = {"names": None, "class_names": None, **census(fed)}
    its = {key: mine[key] for key in ("names", "class_names")} | folder.clients  # older lack them
    for key in (NETWORK, NETWORK_SOURCE, METHOD_SOURCE, ABOUT):
        its.pop(key, None)
    _check_moments(fed.data, its.pop("moments", {}), folder.path)
    if its != mine:
        advice = "give the same data, partition and seed."
        raise UserError(
            f"the clients of '{folder.path}' had other samples than they have now; "
            + (advice if folder.config.get("library") else "was config.toml changed?")
        )


def _check_network(fed: FederationSetup, folder: RunFolder) -> None:
    """Refuse a network whose entries have other names or shapes."""
    its, shapes = folder.config, fed.layers.shapes
    known = folder.clients.get(NETWORK)
    if known is None and "parameters" in its:  # older runs of Python had them there
        known, shapes = its["parameters"], {name: shapes[name] for name in fed.layers.parameters}
    if known is None and (saved := folder.state()):  # still older ones have their models alone
        model = saved[1].get("model", {})
        known = {name: value.shape for name, value in model.items() if not name.startswith("(")}
        shapes = {name: shape for name, shape in shapes.items() if name in known}
    if known is None or not (other := difference(shapes, known)):
        return
    model = its.get("model") or its.get("made_from", {}).get("model")
    advice = f"give the network that it was run with{f', {model}' if model else ''}"
    if model and ".py" in model:
        advice = f"restore the file of its model, '{model.partition(':')[0]}', as it was then"
    raise UserError(f"the network is not that of '{folder.path}': {other}; {advice}.")


def clients_file(fed: FederationSetup) -> dict[str, Any]:
    """The content of clients.json: who has what, and what tells data and network from others."""
    network: dict[str, Any] = {
        NETWORK: {name: list(shape) for name, shape in fed.layers.shapes.items()}
    }
    about = {"method": fed.method.label, "data": fed.data.name}
    values = {"moments": moments(fed.data)} if fed.data_is_here else {}
    return census(fed) | network | fed.sources.as_dict() | {ABOUT: about} | values


def moments(data: Dataset) -> dict[str, list[float]]:
    """Mean, standard deviation and trend of some samples of each pool, and a sum with a weight of
    its own for every place, which changes with any value and any order. Unlike a hash they are
    nearly the same on another machine, whose rounding may differ.
    """
    found = {}
    for name in POOLS:
        pool = getattr(data, name)
        values = pool[:: max(1, len(pool) // SEVERAL)].double().flatten()
        place = torch.linspace(-1, 1, len(values), dtype=values.dtype, device=values.device)
        weights = (torch.arange(len(values), device=values.device) * GOLDEN_ANGLE).cos()
        mixed = values @ weights.to(values.dtype) / max(1, len(values)) ** 0.5
        four = (values.mean(), values.std(correction=0), (values * place).mean(), mixed)
        found[name] = [float(value) for value in four]
    return found


def _check_moments(data: Dataset, its: Mapping[str, Sequence[float]], path: Path) -> None:
    """Refuse data whose values are other ones; older runs say nothing about theirs."""
    for name, values in (moments(data) if its else {}).items():
        known = its[name]  # of older runs, only the first three
        if not np.allclose(values[: len(known)], known, rtol=SAME, atol=SAME * values[1]):
            (mean, std, *_), (old_mean, old_std, *_) = values, known
            was, now = f"{old_mean:.4g} and {old_std:.4g}", f"{mean:.4g} and {std:.4g}"
            what = f"its mean and standard deviation were {was}, and are {now}"
            if was == now:
                what = "single values, or the order of its samples or columns, differ"
            raise UserError(f"{name} is not that of '{path}': {what}; give the data of the run.")


def _difference(key: str, mine: Any, its: Mapping[str, Any]) -> str:
    """The first entry that differs."""
    theirs = its.get(key)
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        for name, value in mine.items():
            if name in theirs and theirs[name] != value:
                return f"{key if name == 'name' else name} = {theirs[name]}, not {value}"
    return f"{key} = {theirs}, not {mine}"


def _agree(key: str, mine: Any, its: Any) -> bool:
    """Whether two entries are equal; an older run lacks options that were not there yet."""
    if key == OBJECTIVE and its is None:
        return True
    if key in GROUPS:
        usual = toml.loads(toml.dumps(options_of(GROUPS[key], FederationSettings())))
        its = located({**usual, **(its or {})})
    return bool(mine == its)


def advice(fed: FederationSetup) -> str:
    """What may help when training diverges: the method's own words, or those for all."""
    if own := fed.method.capabilities.if_loss_rises:
        return own
    if targets := targets_advice(fed.data):
        return f"what may help: {targets} and large inputs (standardize), {GENTLER}"
    return f"what may help: {ADVICE}"
