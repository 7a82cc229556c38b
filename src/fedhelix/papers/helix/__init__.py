"""Helix in the settings of the three papers, beside the strongest rivals of each.

Every table says how far each row is from Helix, seed by seed, with a 95 % interval. The defaults of
Helix were chosen on validation samples of Fashion-MNIST, CIFAR-10 and EMNIST; SVHN was held out.
The warm start became a default later, when its results were known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fedhelix.papers.cells import Scale
from fedhelix.papers.gene_fl.measures import MIB, TRAINED
from fedhelix.papers.genfed import TARGETS
from fedhelix.papers.helix.cells import (
    ablation,
    in_bits,
    in_gene_fl,
    in_genfed,
    in_pfedgpa,
    under_attack,
)
from fedhelix.papers.helix.settings import COLD_HELIX, HELIX
from fedhelix.papers.measures import Measure, in_units, percent, rounds_to
from fedhelix.papers.study import Study
from fedhelix.papers.verdicts import differences

SEVERAL: Mapping[Scale, int] = {"quick": 3, "gpu": 3, "paper": 5}
PERSONAL: dict[str, Measure] = {"personal accuracy": percent("personal_accuracy")}
UPLOADS: dict[str, Measure] = {"uploads in MiB": in_units("uplink_bytes", MIB)}
TARGET = {**TARGETS, "SVHN": 80, "GenFed's": 80, "GenFed's, no server data": 80}


def against_helix(*measures: str, row: str = HELIX.name) -> Callable[[dict[str, Any]], None]:
    """Adds how far Helix is ahead of every row of the same column."""

    def finish(report: dict[str, Any]) -> None:
        for measure in measures:
            differences(report, measure, row)

    return finish


STUDIES = [
    Study(
        "helix-genfed",
        "Helix in GenFed's setting",
        in_genfed,
        {
            "rounds to target": rounds_to(TARGET),
            "at the end": percent("final_accuracy"),
            **PERSONAL,
            **UPLOADS,
        },
        SEVERAL,
        finish=against_helix("at the end"),
    ),
    Study(
        "helix-attacks",
        "Helix under attack, against defences that know the share of attackers",
        under_attack,
        {"at the end": percent("final_accuracy")},
        SEVERAL,
        curves=(),
        finish=against_helix("at the end"),
    ),
    Study(
        "helix-pfedgpa",
        "Helix in pFedGPA's Table 1",
        in_pfedgpa,
        {**PERSONAL, **UPLOADS},
        SEVERAL,
        curves=(),
        finish=against_helix("personal accuracy"),
    ),
    Study(
        "helix-gene-fl",
        "Helix in GENE-FL's Tables I and III",
        in_gene_fl,
        {
            "accuracy of the known": percent("known_accuracy"),
            "the known after one training": percent(f"known_{TRAINED}"),
            "accuracy of newcomers": percent("newcomer_accuracy"),
            "newcomers after one training": percent(f"newcomer_{TRAINED}"),
            "at arrival": percent("arrival_accuracy"),
            "uploads of the known in MiB": in_units("known_uplink_bytes", MIB),
            "downloads of the known in MiB": in_units("known_downlink_bytes", MIB),
        },
        SEVERAL,
        curves=(),
        against=("uploads of the known in MiB", ("accuracy of the known", "accuracy of newcomers")),
        finish=against_helix("accuracy of the known", "accuracy of newcomers"),
    ),
    Study(
        "helix-ablation",
        "Helix without each of its parts",
        ablation,
        {"at the end": percent("final_accuracy"), **PERSONAL, **UPLOADS},
        SEVERAL,
        curves=(),
        finish=against_helix("at the end", "personal accuracy", row=COLD_HELIX.name),
    ),
    Study(
        "helix-bytes",
        "Helix with few bits or many",
        in_bits,
        {"at the end": percent("final_accuracy"), **PERSONAL, **UPLOADS},
        SEVERAL,
        curves=(),
        finish=partial(differences, of="personal accuracy", row="1 bit"),
    ),
]
