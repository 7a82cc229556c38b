"""Accuracy by simulated time, where a tenth of the devices are ten times slower than the others.

The digits are small and so is their network; speeds are chosen so that training and sending an
upload of FedAvg each take a usual device about a minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedhelix.papers.cells import Cell, Column, Row, Scale, cross
from fedhelix.papers.measures import hours_to, in_units, percent
from fedhelix.papers.study import Study
from fedhelix.store.records import HOUR

LEVEL = 80  # per cent
SEEDS: Mapping[Scale, int] = {"quick": 3, "gpu": 3, "paper": 3}
SETTINGS: dict[str, Any] = {
    "data": "digits",
    "model": "digits-cnn",
    "clients": 50,
    "cohort": 10,
    "partition": "dirichlet:0.3",
    "devices": "slow:0.1:10",
    "device_speed": 1.0,
    "device_upload": 500.0,
    "device_download": 5_000.0,
    "eval_clients": 0,
}
# As many rounds as fit into some hours; one of FedBuff takes 5 uploads, one of FedAsync a single.
WAITING: dict[str, Any] = {"rounds": 30}
OVER: dict[str, Any] = {"rounds": 75, "eval_every": 3, "over_select": 1.3}
BUFFERED: dict[str, Any] = {"rounds": 150, "eval_every": 5}
LONGER: dict[str, Any] = {**BUFFERED, "rounds": 250}
SINGLE: dict[str, Any] = {"rounds": 750, "eval_every": 15}
ROWS = [
    Row("FedAvg", "fedavg", WAITING),
    Row("FedAvg, 1.3 times selected", "fedavg", OVER),
    Row("FedBuff", "fedbuff", BUFFERED),
    Row("FedAsync", "fedasync", SINGLE),
    Row("FedAsync, mixing 0.2", "fedasync", {**SINGLE, "fedasync.mixing": 0.2}),
    Row("Helix", "helix", WAITING),
    Row("Helix, 1.3 times selected", "helix", OVER),
    Row("FedBuff around Helix", "fedbuff+helix", LONGER),
    Row(
        "FedBuff around Helix, no momentum",
        "fedbuff+helix",
        {**LONGER, "helix.server_momentum": 0.0},
    ),
]


def by_time(scale: Scale) -> list[Cell]:
    """Every method in one column, the same at every scale."""
    return cross(ROWS, [Column("a tenth of the devices ten times slower", SETTINGS)])


STUDIES = [
    Study(
        "devices",
        "Accuracy by simulated time",
        by_time,
        {
            f"hours to {LEVEL} %": hours_to(LEVEL),
            "at the end": percent("final_accuracy"),
            "simulated hours": in_units("clock", HOUR),
        },
        SEEDS,
    ),
]
