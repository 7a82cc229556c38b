"""GenFed, Expert Systems with Applications 281 (2025): Tables 2 to 6, Figures 3 to 6, and attacks
against the usual defences.

Scale `gpu` takes the preset `genfed.strong` with the small network and the first 10,000 samples of
every data set, `paper` the paper's settings (`genfed.literal`), and `quick` scikit-learn's digits.
All methods get the same supplement unless their row says otherwise.
"""

from __future__ import annotations

from functools import partial

from fedhelix.papers.genfed.cells import (
    attacks,
    conditions,
    full,
    participation,
    supplement,
    table_2,
    table_3,
    table_4,
    table_5,
    table_6,
)
from fedhelix.papers.genfed.comparisons import (
    CHOSEN,
    damage,
    relative_damage,
    relative_time,
    rounds_to_level,
)
from fedhelix.papers.genfed.settings import LARGER
from fedhelix.papers.measures import best_on_test, last_percent, percent, rounds_to
from fedhelix.papers.study import Study

TARGETS = {"MNIST": 97, "SVHN": 89, "Fashion-MNIST": 80, LARGER: 80, "CIFAR-10": 45, "digits": 85}
BEST = {"best on test": best_on_test, CHOSEN: percent("accuracy_at_best")}

STUDIES = [
    Study(
        "genfed-table2",
        "GenFed, Table 2: rounds to target and accuracy",
        table_2,
        {"rounds to target": rounds_to(TARGETS), **BEST},
        curves=("accuracy", "loss"),
        drawn=("GenFed (1)", "GenFed (3)", "GenFed, adaptive", "FedAvg", "FedAvg, no supplement"),
        finish=rounds_to_level,
    ),
    Study(
        "genfed-table3",
        "GenFed, Table 3: time to target",
        table_3,
        {},
        across="relative to FedAvg",
        finish=relative_time,
    ),
    Study(
        "genfed-supplement",
        "GenFed: what the supplement gives, and what selection gives",
        supplement,
        {
            "rounds to target": rounds_to(TARGETS),
            "rounds to stay there": rounds_to(TARGETS, for_good=True),
            "seen every 10 rounds": rounds_to(TARGETS, every=10),
            "best on test": best_on_test,
            "at the end": percent("final_accuracy"),
        },
        seeds={"quick": 3, "gpu": 5, "paper": 5},
        curves=("accuracy", "loss"),
        drawn=(
            "FedAvg, no supplement",
            "FedAvg",
            "GenFed (1)",
            "FedAvgM 0.8",
            "GenFed (1) around FedAvgM 0.8",
        ),
    ),
    Study(
        "genfed-full",
        "GenFed's setting on all samples, without momentum",
        full,
        {
            "rounds to target": rounds_to(TARGETS),
            "best on test": best_on_test,
            "at the end": percent("final_accuracy"),
        },
        seeds={"quick": 3, "gpu": 5, "paper": 5},
        curves=("accuracy", "loss"),
        drawn=("FedAvg, no supplement", "FedAvg", "server's samples alone", "GenFed (1)", "Helix"),
    ),
    Study(
        "genfed-conditions",
        "GenFed, Tables 4 to 6 on all samples, without momentum",
        conditions,
        {"best on test": best_on_test, "at the end": percent("final_accuracy")},
        across="at the end",
        finish=partial(relative_damage, of="best on test"),
    ),
    Study(
        "genfed-participation",
        "GenFed, FedUmf and FedAU: clients whose rates follow from their classes",
        participation,
        {**BEST, "at the end": percent("final_accuracy")},
        seeds={"quick": 3, "gpu": 5, "paper": 5},
    ),
    Study(
        "genfed-table4",
        "GenFed, Table 4: attacks",
        table_4,
        BEST,
        finish=relative_damage,
    ),
    Study(
        "genfed-table5",
        "GenFed, Table 5: number of clients",
        table_5,
        BEST,
        across=CHOSEN,
    ),
    Study(
        "genfed-table6",
        "GenFed, Table 6: Dirichlet alpha",
        table_6,
        BEST,
        across=CHOSEN,
    ),
    Study(
        "genfed-attacks",
        "GenFed against the usual defences",
        attacks,
        {
            "final": percent("final_accuracy"),
            **BEST,
            "backdoor succeeds": last_percent("attack_success"),
        },
        seeds={"quick": 3, "gpu": 5, "paper": 5},
        finish=damage,
    ),
]
