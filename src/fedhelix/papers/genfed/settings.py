"""GenFed's rows and columns: methods and data sets with their settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fedhelix.papers.cells import Cell, Column, Row, Scale
from fedhelix.papers.published import load
from fedhelix.runs.config import layered

TABLES = load("genfed")
METHODS = {
    "FedAvg": "fedavg",
    "FedUmf": "fedumf",
    "FedAU": "fedau",
    "GenFed": "genfed",
    "GenFedUmf": "genfed+fedumf",
    "GenFedAU": "genfed+fedau",
}
SCHEDULES = {1: "constant", 2: "power", 3: "linear", 4: "sine", 5: "wave"}
DATA = {"MNIST": "mnist", "SVHN": "svhn", "Fashion-MNIST": "fashion-mnist", "CIFAR-10": "cifar10"}
LARGER = "Fashion-MNIST, larger network"
# The outer columns of Tables 5 and 6, and one between.
FEW_OR_MANY = ("20", "180")
UNEQUAL_TO_EVEN = ("0.05", "0.5", "5")

AS_PRINTED = {"genfed.twins": True}
# The preset's clients train on all samples; the tables keep a tenth to choose a round on.
KEPT = {"valid": 0.1}
# Models are scored on samples that no client receives: an attacker must not know them.
APART = {"valid": 0.1, "validation_shared": False}
# With at most three parents the adaptive schedule would never choose fewer.
ADAPTIVE = {"genfed.schedule": "adaptive", "genfed.rho_max": 10}
NO_SUPPLEMENT = {"supplement_size": 0.0}
# About a sixth of the data makes a sixth of the steps per round, so the steps are larger.
GPU = {
    "model": "w1-cnn",
    "train_samples": 10_000,
    "test_samples": 5_000,
    "lr": 0.005,
    "eval_clients": 50,
}
QUICK = {
    "data": "digits",
    "model": "digits-cnn",
    "clients": 20,
    "rounds": 30,
    "genfed.c": 10.0,
    "epochs": 2,
    "batch_size": 16,
    "lr": 0.1,
    "lr_decay": 1.0,
    "momentum": 0.5,
}


def column(scale: Scale, data: str) -> Column:
    """A data set at a scale; at scale `quick` it is always digits."""
    if scale == "paper":
        rounds = 4000 if data == "CIFAR-10" else 2000
        return Column(data, {**layered("genfed.literal"), "data": DATA[data], "rounds": rounds})
    strong = {**layered("genfed.strong"), **AS_PRINTED, **KEPT}
    if scale == "quick":
        return Column("digits", {**strong, **QUICK})
    rounds, eval_every = (300, 5) if data == "CIFAR-10" else (150, 2)
    length = {"rounds": rounds, "eval_every": eval_every}
    return Column(data, {**strong, **GPU, "data": DATA[data], **length})


def columns(scale: Scale) -> list[Column]:
    """All data sets of a scale."""
    return [column(scale, data) for data in (["digits"] if scale == "quick" else DATA)]


def paper_row(name: str) -> Row:
    """A row as the paper names it: `GenFedUmf (3)` is GenFed around FedUmf with schedule 3."""
    method, _, schedule = name.removesuffix(")").partition(" (")
    settings = {"genfed.schedule": SCHEDULES[int(schedule)]} if schedule else {}
    return Row(name, METHODS[method], settings)


def supplied(rows: Iterable[Row], scale: Scale) -> list[Row]:
    """Rows as the paper has them at its scale: only GenFed's clients get a supplement, and FedAvg
    once more for comparison. At other scales all methods get the same.
    """
    if scale != "paper":
        return list(rows)
    size = {"supplement_size": layered("genfed.literal")["supplement_size"]}
    printed = [
        row if "genfed" in row.method else replace(row, settings={**NO_SUPPLEMENT, **row.settings})
        for row in rows
    ]
    return [*printed, Row("FedAvg, same supplement", "fedavg", size)]


def whole() -> dict[str, Any]:
    """All samples of a data set, with the preset's learning rate."""
    return {
        "train_samples": None,
        "test_samples": None,
        "lr": layered("genfed.strong")["lr"],
        "eval_clients": 20,
    }


CONTROLS = [
    Row("FedAvg, no supplement", "fedavg", NO_SUPPLEMENT),
    Row("server's samples alone", "fedavg", {"server_only": True, "cohort": 1}),
    Row("FedAvgM 0.8", "fedavgm", {"fedavgm.server_momentum": 0.8}),
]
OURS = [
    *CONTROLS,
    Row("GenFed (1), no supplement", "genfed", {**NO_SUPPLEMENT, "genfed.schedule": "constant"}),
    Row("GenFed, adaptive", "genfed", ADAPTIVE),
    Row("GenFed (3), diverse", "genfed", {"genfed.schedule": "linear", "genfed.diversity": 0.1}),
]
MOMENTUM = [
    Row(f"{name} {momentum}", method, {**settings, "fedavgm.server_momentum": momentum})
    for name, method, settings in (
        ("FedAvgM", "fedavgm", {}),
        ("GenFed (1) around FedAvgM", "genfed+fedavgm", paper_row("GenFed (1)").settings),
        ("GenFed, adaptive, around FedAvgM", "genfed+fedavgm", ADAPTIVE),
    )
    for momentum in (0.5, 0.8, 0.9)
]
WITH_BOTH_NETWORKS = (
    "FedAvg, no supplement",
    "FedAvg",
    "GenFed (1)",
    "GenFed (3)",
    "GenFed, adaptive",
    "FedAvgM 0.8",
    "GenFed (1) around FedAvgM 0.8",
    "GenFed, adaptive, around FedAvgM 0.8",
)
# Defences know the share of attackers; centred clipping carries its centre, as in its paper.
KNOWING = ("trimmed-mean", "krum", "multi-krum")
DEFENCES = (
    *("median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "centred-clipping"),
    *("norm-bound", "nnm+krum", "nnm+trimmed-mean"),
)
ATTACKS: dict[str, dict[str, Any]] = {
    "label flip": {"attack": "label-flip"},
    "mimic": {"attack": "mimic"},
    "IPM": {"attack": "ipm"},
    "ALIE": {"attack": "alie"},
    "min-max": {"attack": "min-max"},
    "4x sign flip": {"attack": "sign-flip", "attack_scale": 4.0},
    "adaptive": {"attack": "adaptive"},
    "adaptive, top": {"attack": "adaptive-top"},
}
BACKDOOR = {"backdoor": {"attack": "backdoor"}}


def told(cell: Cell, wrong: bool = False) -> Cell:
    """Tell a defence how many attackers there are: 20 or 40 % of all, or the other of the two."""
    knowing = cell.method.rpartition("+")[2]
    if knowing not in KNOWING:
        return cell
    share = cell.settings.get("attack_share", 0.2)
    share = {0.2: 0.4, 0.4: 0.2}[share] if wrong else share
    return replace(cell, settings={**cell.settings, f"{knowing}.withstand": share})
