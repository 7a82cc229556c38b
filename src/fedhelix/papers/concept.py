"""Generation where groups of clients disagree about the labels, beside clusters and neighbours.

The oracle knows the groups: since they differ in the labels alone, that is a federation of one
group's clients. FedAvg carries all rows of pFedGPA.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from fedhelix.papers.cells import Cell, Column, Row, Scale, cross
from fedhelix.papers.measures import percent
from fedhelix.papers.study import Study
from fedhelix.papers.verdicts import differences

GROUPS = 4
SEEDS: Mapping[Scale, int] = {"quick": 3, "gpu": 5, "paper": 5}
# Three quarters of a client's samples train: 60 of 80 with a hundred clients.
COMMON: dict[str, Any] = {
    "partition": "iid",
    "shift": f"concept:{GROUPS}",
    "valid": 0.25,
    "lr": 0.05,
    "epochs": 2,
    "batch_size": 20,
}
QUICK: dict[str, Any] = {**COMMON, "data": "digits", "clients": 20, "rounds": 30, "eval_every": 30}
GPU: dict[str, Any] = {
    **COMMON,
    "data": "fashion-mnist",
    "model": "small-cnn",
    "train_samples": 8_000,
    "test_samples": 8_000,
    "clients": 100,
    "rounds": 100,
    "eval_every": 100,
}
ORACLE = "oracle groups"
NEAREST = "four nearest"


def _generated(**options: Any) -> dict[str, Any]:
    return {f"pfedgpa.{key}": value for key, value in options.items()}


ROWS = [
    Row("Local", "local"),
    Row("FedAvg-FT", "fedavg-ft"),
    Row("clusters of inputs", "clustered+fedavg", {"clustered.clusters": GROUPS}),
    Row("IFCA", "ifca", {"ifca.models": GROUPS}),
    Row("Helix", "helix"),
    Row("Helix, own heads", "helix", {"helix.heads": "denoised"}),
    Row("FedAvg-FT, own heads", "denoised-heads+fedavg-ft"),
    Row(NEAREST, "pfedgpa", _generated(generate="neighbours")),
    Row("inversion", "pfedgpa"),
    Row("inversion, one training step", "pfedgpa", _generated(fit_steps=1)),
    Row("inversion in every round", "pfedgpa", _generated(mode="online")),
    Row("mixture of others", "pfedgpa", _generated(generate="mixture", by_age=False)),
    Row("mixture of others, by age", "pfedgpa", _generated(generate="mixture")),
]


def _column(scale: Scale, share: int) -> Column:
    base = QUICK if scale == "quick" else GPU
    return Column(f"{share} % take part", {**base, "cohort": base["clients"] * share // 100})


def _oracle(column: Column) -> Cell:
    """FedAvg-FT within one group."""
    settings = {**column.settings, "shift": "none"}
    for key in ("clients", "cohort", "train_samples", "test_samples"):
        if key in settings:
            settings[key] = max(2, settings[key] // GROUPS)
    if "train_samples" not in settings:
        settings["train_samples"] = 1438 // GROUPS  # of digits
    return Cell(ORACLE, column.name, "fedavg-ft", settings)


def by_concept(scale: Scale) -> list[Cell]:
    """All ways with few and with more clients in a round."""
    columns = [_column(scale, share) for share in (10, 30)]
    return [*cross(ROWS, columns), *map(_oracle, columns)]


STUDIES = [
    Study(
        "concept",
        "Clients who disagree about the labels",
        by_concept,
        {"personal accuracy": percent("personal_accuracy")},
        SEEDS,
        curves=(),
        finish=partial(differences, of="personal accuracy", row=NEAREST),
    ),
]
