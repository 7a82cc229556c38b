"""Who takes part in the leaderboard, in which settings, and what each method may try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fedhelix.papers.cells import Cell, Column

BoardScale = Literal["quick", "gpu"]
TRIALS: Mapping[BoardScale, int] = {"quick": 4, "gpu": 6}  # settings that every method tries
SEEDS: Mapping[BoardScale, int] = {"quick": 3, "gpu": 3}


@dataclass(frozen=True)
class Entrant:
    """A method, and the values of its main option that it tries besides learning rates."""

    row: str
    method: str
    option: str = ""
    values: Sequence[Any] = ()
    quick: bool = True  # it takes part on a CPU
    fixed: Mapping[str, Any] = field(default_factory=dict)  # what all its trials have in common

    def trials(self, column: Column, count: int) -> list[Cell]:
        """So many settings: every value with as many learning rates as that leaves, from a third of
        the column's to three times as much.
        """
        rates = column.settings["lr"] * np.logspace(-0.5, 0.5, count // max(1, len(self.values)))
        options = [{self.option: value} for value in self.values] or [{}]
        return [
            Cell(
                self.row,
                column.name,
                self.method,
                {**column.settings, **self.fixed, **option, "lr": float(f"{rate:.3g}")},
            )
            for option in options
            for rate in rates
        ]

    def tried(self, cell: Cell) -> dict[str, Any]:
        """What tells one of its trials from the others."""
        keys = ["lr", self.option] if self.option else ["lr"]
        return {key.rpartition(".")[2]: cell.settings[key] for key in keys}


# The first value of an option is its default.
ENTRANTS = [
    Entrant("Local", "local"),
    Entrant("FedAvg", "fedavg"),
    Entrant("FedAvg-FT", "fedavg-ft", "fedavg-ft.ft_rate", (1.0, 0.1)),
    Entrant("FedProx", "fedprox", "fedprox.mu", (0.01, 0.1), quick=False),
    Entrant("SCAFFOLD", "scaffold", quick=False),
    Entrant("FedDyn", "feddyn", "feddyn.alpha", (0.03, 0.1), quick=False),
    Entrant("FedNova", "fednova", quick=False),
    Entrant("MOON", "moon", "moon.mu", (1.0, 5.0), quick=False),
    Entrant("FedLC", "fedlc", "fedlc.tau", (1.0, 0.5), quick=False),
    Entrant("Ditto", "ditto", "ditto.mu", (0.1, 1.0)),
    Entrant("pFedMe", "pfedme", "pfedme.mu", (0.1, 1.0), quick=False),
    Entrant("APFL", "apfl", "apfl.alpha", (0.5, 0.9), quick=False),
    Entrant("FedPer", "fedper", quick=False),
    Entrant("FedRep", "fedrep", "fedrep.head_epochs", (1, 4)),
    Entrant("FedBABU", "fedbabu", "fedbabu.ft_rate", (0.1, 1.0), quick=False),
    Entrant("LG-FedAvg", "lg-fedavg", quick=False),
    Entrant("FedProto", "fedproto", "fedproto.strength", (1.0, 0.1), quick=False),
    Entrant("FedALA", "fedala", "fedala.share_lr", (1.0, 0.1)),
    Entrant("FedDBE", "feddbe", "feddbe.kappa", (10.0, 1.0)),
    Entrant("FedPAC", "fedpac", "fedpac.strength", (1.0, 0.1)),
    Entrant("FedAMP", "fedamp", "fedamp.own_weight", (0.5, 0.2), quick=False),
    Entrant("IFCA", "ifca", "ifca.models", (2, 4)),
    Entrant("kNN-Per", "knn-per", "knn-per.neighbours", (10, 5)),
    Entrant("FedCP", "fedcp", "fedcp.strength", (1.0, 5.0)),
    Entrant("GPFL", "gpfl", "gpfl.magnitude", (0.01, 0.1)),
    Entrant("pFedHN", "pfedhn", "pfedhn.server_lr", (0.03, 0.01), quick=False),
    Entrant("Helix", "helix", "helix.ft_rate", (0.15, 0.5)),
    Entrant(
        "Helix, own heads",
        "helix",
        "helix.ft_rate",
        (0.15, 0.5),
        fixed={"helix.heads": "denoised"},
    ),
]

COMMON: dict[str, Any] = {"valid": 0.2, "epochs": 2, "lr": 0.1}
SMALL = {**COMMON, "clients": 8, "cohort": 4, "rounds": 12, "eval_every": 4, "batch_size": 32}
LARGE = {**COMMON, "clients": 20, "cohort": 10, "rounds": 60, "eval_every": 5, "batch_size": 32}
TEXT = {"data": "synthetic-text"}
FEW = {"train_samples": 1280, "test_samples": 320}  # those of eight owners
QUICK: dict[str, dict[str, Any]] = {
    "digits": {**SMALL, "data": "digits"},
    "table": {**SMALL, "data": "breast-cancer", "batch_size": 16},
    "series": {**SMALL, **FEW, "data": "synthetic-series"},
    "text": {**SMALL, **FEW, **TEXT},
}
PICTURES = {"train_samples": 12_000, "test_samples": 4_000, "lr": 0.05}
GPU: dict[str, dict[str, Any]] = {
    "Fashion-MNIST": {**LARGE, **PICTURES, "data": "fashion-mnist", "model": "w1-cnn"},
    "CIFAR-10": {**LARGE, **PICTURES, "data": "cifar10", "model": "fedpac-cnn"},
    "text": {**LARGE, **TEXT},
    "table": {**LARGE, "data": "breast-cancer", "clients": 10, "batch_size": 16},
    "series": {**LARGE, "data": "synthetic-series"},
}
IMAGES = ("digits", "Fashion-MNIST", "CIFAR-10")


def _kinds(data: str) -> dict[str, dict[str, Any]]:
    """How the clients of a data set differ, one kind after the other."""
    skew = "dirichlet:0.1" if data in ("Fashion-MNIST", "CIFAR-10") else "dirichlet:0.3"
    groups = 2 if data == "table" else 3
    kinds: dict[str, dict[str, Any]] = {
        "label skew": {"partition": skew},
        "concept shift": {"partition": "iid", "shift": f"concept:{groups}"},
    }
    if data in IMAGES:
        kinds["feature shift"] = {"partition": "iid", "shift": "rotation:4"}
    elif data == "table":
        kinds["feature shift"] = {"partition": "iid", "shift": "scale:3"}
    elif data == "series":
        kinds["feature shift"] = {"partition": "natural"}  # sensors differ in gain, offset and rate
    else:
        kinds["authors"] = {"partition": "natural"}  # tokens have no other features
    return kinds


def columns(scale: BoardScale) -> list[Column]:
    """Every data set with every kind of difference between clients."""
    return [
        Column(f"{data}, {kind}", {**settings, **differences})
        for data, settings in (QUICK if scale == "quick" else GPU).items()
        for kind, differences in _kinds(data).items()
    ]


def entrants(scale: BoardScale) -> list[Entrant]:
    """The methods that take part."""
    return [entrant for entrant in ENTRANTS if entrant.quick or scale == "gpu"]
