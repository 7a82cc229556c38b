"""pFedGPA, arXiv:2409.05701: Tables 1 and 2, Figure 4, newcomers, and cheaper alternatives.

Scale `gpu` takes the paper's settings as far as it states them (presets `pfedgpa.*`), `paper` adds
a generator of p-diff's size, and `quick` takes scikit-learn's digits with few clients and rounds.
The first cells of a table run first.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from fedhelix.papers.cells import Scale
from fedhelix.papers.measures import percent
from fedhelix.papers.pfedgpa.cells import arrivals, figure_4, fine_tuning, rivals, table_1, table_2
from fedhelix.papers.pfedgpa.measures import (
    AFTER,
    ARRIVED,
    BEFORE,
    CHOICE,
    distance,
    failed,
    reconstruction,
)
from fedhelix.papers.study import Study

SEVERAL: Mapping[Scale, int] = {"quick": 1, "gpu": 5, "paper": 5}  # a verdict needs five

STUDIES = [
    Study(
        "pfedgpa-table1",
        "pFedGPA, Table 1: accuracy of all methods",
        table_1,
        {"accuracy": percent("personal_accuracy"), **BEFORE},
        SEVERAL,
        curves=(),
    ),
    Study(
        "pfedgpa-table2",
        "pFedGPA, Table 2: with and without inversion",
        table_2,
        {**BEFORE, **AFTER},
        SEVERAL,
        curves=(),
    ),
    Study(
        "pfedgpa-rivals",
        "pFedGPA against what costs nothing, without fine-tuning",
        rivals,
        {
            **CHOICE,
            "kept by the autoencoder": reconstruction,
            "distance to the nearest upload": distance("generated_to_nearest"),
            "between uploads": distance("nearest_upload"),
        },
        SEVERAL,
        curves=(),
    ),
    Study(
        "pfedgpa-tuning",
        "pFedGPA: fine-tuning in large or small steps",
        fine_tuning,
        CHOICE,
        SEVERAL,
        curves=(),
    ),
    Study(
        "pfedgpa-figure4",
        "pFedGPA, Figure 4: client by client, and failures by the generator's size",
        figure_4,
        {
            **BEFORE,
            **AFTER,
            "% failed before fine-tuning": failed("untuned"),
            "% failed after it": failed("personal"),
        },
        SEVERAL,
        curves=(),
        vectors=("untuned", "personal"),
    ),
    Study(
        "pfedgpa-newcomers",
        "pFedGPA: five newcomers with other classes",
        partial(arrivals, {"quick": 5, "gpu": 5, "paper": 5}, 0.5),
        ARRIVED,
        SEVERAL,
        curves=("personal_accuracy",),
        drawn=("guided", "trained alone as long", "average", "random", "pFedHN"),
    ),
    Study(
        "pfedgpa-initialisation",
        "pFedGPA: a fresh federation that starts from another one's generator",
        partial(arrivals, {"quick": 5, "gpu": 20, "paper": 20}, 0.0),
        ARRIVED,
        SEVERAL,
        curves=("personal_accuracy",),
        drawn=("guided", "trained alone as long", "average", "random", "pFedHN"),
    ),
]
