"""pFedGPA, arXiv:2409.05701: Tables 1 and 2, Figure 4, newcomers, and whether cheaper ways would do
as well.

At scale `gpu` the settings are the paper's, as far as it states them (presets `pfedgpa.*`); `paper`
adds p-diff's size of the generator, and `quick` stays on scikit-learn's digits with few clients and
rounds. What stands first in a table is run first.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedhelix.components.generative.generator import SizeName
from fedhelix.papers.study import Cell, Finished, Measure, Scale, Study, percent
from fedhelix.runs.config import layered
from fedhelix.store.records import is_number

DATA = {"Fashion-MNIST": "fashion-mnist", "EMNIST": "emnist", "CIFAR-10": "cifar10"}
CLIENTS = (20, 10, 100)
FAILED = 0.6  # an accuracy below this counts as a failed generation
SEEDS: Mapping[Scale, int] = {"quick": 1, "gpu": 3, "paper": 3}
# Sizes of the generator. The paper's takes a minute on a GPU, the largest before it a quarter of
# that.
FIGURE_4: Mapping[Scale, Sequence[SizeName]] = {
    "quick": ("fast",),
    "gpu": ("linear", "fast", "default"),
    "paper": ("linear", "fast", "default", "paper"),
}

METHODS = {
    "pFedGPA": "pfedgpa",
    "FedAvg-FT": "fedavg-ft",
    "FedAvg": "fedavg",
    "Local-only": "local",
    "FedPer": "fedper",
    "FedRep": "fedrep",
    "LG-FedAvg": "lg-fedavg",
    "FedBABU": "fedbabu",
    "pFedHN": "pfedhn",
}

# Final accuracy for EMNIST, Fashion-MNIST and CIFAR-10, each with 10, 20 and 100 clients.
TABLE_1 = {
    "Local-only": (70.85, 70.45, 73.73, 85.11, 84.89, 85.48, 63.83, 64.38, 65.41),
    "FedAvg": (71.10, 72.89, 74.60, 81.90, 82.96, 83.93, 64.13, 68.51, 69.87),
    "FedAvg-FT": (81.91, 85.09, 86.52, 88.45, 89.39, 89.28, 71.76, 76.46, 76.55),
    "FedPer": (74.56, 76.61, 77.08, 87.13, 87.20, 88.65, 63.20, 63.68, 69.43),
    "FedRep": (74.22, 74.37, 76.54, 88.69, 88.27, 88.42, 64.71, 65.85, 67.63),
    "LG-FedAvg": (71.23, 70.90, 76.25, 85.28, 85.25, 85.96, 64.20, 64.94, 65.41),
    "FedBABU": (80.28, 83.92, 84.39, 87.44, 88.86, 89.43, 69.42, 74.25, 75.32),
    "pFedHN": (77.33, 81.79, 77.23, 87.69, 86.84, 86.25, 71.43, 75.41, 77.12),
    "pFedGPA": (82.53, 84.70, 88.22, 88.90, 89.18, 90.08, 72.95, 78.54, 78.33),
}
PAPER_ORDER = [
    (name, clients) for name in ("EMNIST", "Fashion-MNIST", "CIFAR-10") for clients in (10, 20, 100)
]

# Before and after fine-tuning, without and with inversion.
TABLE_2 = {
    "EMNIST": (69.38, 81.09, 83.54, 84.70),
    "Fashion-MNIST": (68.48, 87.24, 83.82, 89.37),
    "CIFAR-10": (68.9, 74.77, 76.28, 75.72),
}
ACCURACY, BEFORE, AFTER = "accuracy", "before fine-tuning", "after fine-tuning"

# The paper's clients fine-tune like in any round. Ours: what a client has uploaded on average tells
# more of it than
# its last upload alone, and what is generated is so good that small steps do it more good, which is
# the default.
AS_PRINTED = {"pfedgpa.ft_rate": 1.0, "fedbabu.ft_rate": 1.0}
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "pFedGPA, of means": ("pfedgpa", {"pfedgpa.inverted": "mean", "pfedgpa.inversion_samples": 8}),
    "pFedGPA, small steps": ("pfedgpa", {"pfedgpa.ft_rate": 0.1}),
    "FedAvg-FT, small steps": ("fedavg-ft", {"fedavg-ft.ft_rate": 0.1}),
    "FedBABU, small steps": ("fedbabu", {"fedbabu.ft_rate": 0.1}),
}


def settings(scale: Scale, column: str, clients: int = 20) -> dict[str, Any]:
    """The settings of a data set at a scale."""
    if scale == "quick":
        return {
            **layered("pfedgpa.digits"),
            **AS_PRINTED,
            "clients": 10,
            "cohort": 10,
            "rounds": 15,
            "pfedgpa.buffer_rounds": 10,
        }
    common = layered(f"pfedgpa.{DATA[column]}")
    size = {"pfedgpa.size": "paper"} if scale == "paper" else {}
    cohort = clients * 3 // 10 if clients == 100 else clients
    rare = {
        "eval_every": common["rounds"],
        "checkpoint_every": 100,
    }  # the buffer of uploads is large
    return {**common, **AS_PRINTED, "clients": clients, "cohort": cohort, **rare, **size}


def columns(scale: Scale) -> list[str]:
    """The data sets of a scale."""
    return ["digits"] if scale == "quick" else list(DATA)


# Measures
# -------------------------------------------------------------------------------------------------------


def last(key: str) -> Measure:
    """A figure of the last round, in percent."""
    return lambda run: None if run.records[-1].get(key) is None else 100 * run.records[-1][key]


def failed(key: str) -> Measure:
    """The share of clients whose accuracy in the last round counts as failed, in percent."""

    def measure(run: Finished) -> float | None:
        found = [accuracy for accuracy in run.records[-1].get(key) or () if is_number(accuracy)]
        return (
            None if not found else 100 * statistics.fmean(accuracy < FAILED for accuracy in found)
        )

    return measure


def reconstruction(run: Finished) -> float | None:
    """The share of the uploads' spread that the autoencoder keeps, in percent."""
    found = run.records[-1]["metadata"].get("reconstruction")
    return None if found is None else 100 * found


def distance(name: str) -> Measure:
    """A kind of distance in the last round, on average, in units of the uploads' distance from
    their mean.
    """

    def measure(run: Finished) -> float | None:
        found = run.records[-1]["metadata"].get("distances")
        return found and statistics.fmean(found[name]) / statistics.fmean(found["uploads_spread"])

    return measure


def summary(key: str) -> Measure:
    """A figure of the summary as it is."""
    return lambda run: run.summary.get(key)


FINAL = {ACCURACY: percent("personal_accuracy"), BEFORE: last("untuned_accuracy")}
TUNED = {BEFORE: last("untuned_accuracy"), AFTER: percent("personal_accuracy")}


# Tables
# ---------------------------------------------------------------------------------------------------------


def table_1(scale: Scale) -> list[Cell]:
    """All methods on all data sets with 20, 10 and 100 clients; with 20 also ours."""
    cells = []
    for column in columns(scale):
        for clients in CLIENTS[:1] if scale == "quick" else CLIENTS:
            common = settings(scale, column, clients)
            place = None if scale == "quick" else PAPER_ORDER.index((column, clients))
            title = column if place is None else f"{column} {clients}"
            for row, method in METHODS.items():
                paper = {} if place is None else {ACCURACY: TABLE_1[row][place]}
                cells.append(Cell(row, title, method, common, paper))
            for row, (method, own) in OURS.items() if clients == CLIENTS[0] else ():
                cells.append(Cell(row, title, method, {**common, **own}))
    return cells


def table_2(scale: Scale) -> list[Cell]:
    """With inversion and without."""
    cells = []
    for column in columns(scale):
        common, paper = settings(scale, column), TABLE_2.get(column)
        for row, way, place in (("inversion", "invert", 2), ("no inversion", "direct", 0)):
            figures = {} if paper is None else {BEFORE: paper[place], AFTER: paper[place + 1]}
            cells.append(Cell(row, column, "pfedgpa", {**common, "pfedgpa.generate": way}, figures))
    return cells


def figure_4(scale: Scale) -> list[Cell]:
    """Client by client, with generators of several sizes; on Fashion-MNIST also its last layers
    alone.
    """
    cells = []
    for column in columns(scale)[::2]:
        common = settings(scale, column)
        for size in FIGURE_4[scale]:
            for row, way in (("inversion", "invert"), ("no inversion", "direct")):
                own = {"pfedgpa.generate": way, "pfedgpa.size": size}
                if size == "paper" and column != "Fashion-MNIST":
                    continue
                cells.append(Cell(f"{row}, {size}", column, "pfedgpa", {**common, **own}))
        if column != "CIFAR-10":
            cells.append(
                Cell(
                    "inversion, last two layers",
                    column,
                    "pfedgpa",
                    {**common, "pfedgpa.slice": "last:2"},
                )
            )
    return cells


RIVALS: list[tuple[str, dict[str, Any]]] = [
    ("reconstruction", {"generate": "reconstruct"}),
    ("inversion", {}),
    ("inversion of means", {"inverted": "mean", "inversion_samples": 8}),
    ("inversion of the four nearest", {"inverted": "near", "inversion_samples": 8}),
    ("no inversion", {"generate": "direct"}),
    ("own upload", {"generate": "own"}),
    ("mean of own uploads", {"generate": "own_mean", "learn": "upload"}),
    ("mean of own updates", {"generate": "own_mean"}),
    ("four nearest", {"generate": "neighbours"}),
    ("half-way to the four nearest", {"generate": "shrink"}),
    ("own upload and noise", {"generate": "noise", "amount": 0.2}),
    ("inversion from 100", {"inversion_start": 100}),
    ("inversion from 400", {"inversion_start": 400}),
    ("inversion from 1000", {"inversion_start": 1000}),
    (
        "inversion of means from 400",
        {"inverted": "mean", "inversion_samples": 8, "inversion_start": 400},
    ),
    ("inversion, fresh noise", {"inversion_mode": "fresh"}),
    ("inversion, DPM-Encoder", {"inversion_mode": "dpm_encoder"}),
    ("inversion of uploads", {"learn": "upload"}),
    ("inversion, one mean per tensor", {"learn": "upload", "normalise": "tensor"}),
    ("reconstruction, autoencoder", {"generate": "reconstruct", "size": "default"}),
    ("inversion, autoencoder", {"size": "default"}),
]


def rivals(scale: Scale) -> list[Cell]:
    """What clients get, without fine-tuning; a tenth of their samples says which way is the best."""
    column = columns(scale)[0]
    common = {**settings(scale, column), "valid": 0.1, "pfedgpa.ft_epochs": 0}
    chosen = [rival for rival in RIVALS if scale != "quick" or "size" not in rival[1]]
    return [
        Cell(
            row,
            column,
            "pfedgpa",
            {**common, **{f"pfedgpa.{key}": value for key, value in own.items()}},
        )
        for row, own in chosen
    ]


def tuning(scale: Scale) -> list[Cell]:
    """How large the steps of fine-tuning should be; a tenth of the samples says so."""
    column = columns(scale)[0]
    common = {**settings(scale, column), "valid": 0.1}
    return [
        Cell(row, f"{rate:g}", method, {**common, f"{method}.ft_rate": rate})
        for row, method in (("pFedGPA", "pfedgpa"), ("FedAvg-FT", "fedavg-ft"))
        for rate in (1.0, 0.3, 0.1, 0.03)
    ]


STARTS: list[tuple[str, str, dict[str, Any]]] = [
    ("guided", "pfedgpa", {"newcomer": "guide"}),
    ("trained alone as long", "pfedgpa", {"newcomer": "alone"}),
    ("guided from the initial model", "pfedgpa", {"newcomer": "guide", "guide_from": "random"}),
    ("guided once", "pfedgpa", {"newcomer": "guide", "guide_turns": 1}),
    ("nearest client", "pfedgpa", {"newcomer": "nearest"}),
    ("average", "pfedgpa", {"newcomer": "model"}),
    ("random", "pfedgpa", {"newcomer": "random"}),
    ("pFedHN", "pfedhn", {}),
]


def arrivals(scale: Scale, newcomers: int, classes: float) -> list[Cell]:
    """Clients that come when the others have finished, by what they start from."""
    column = columns(scale)[0]
    known, after = (10, 5) if scale == "quick" else (100, 30)
    common = {
        **settings(scale, column),
        "newcomers": newcomers,
        "newcomers_after": known,
        "newcomers_classes": classes,
        "rounds": known + after,
        "eval_every": 1,
        # Newcomers are judged as they are after each round; nothing is generated for them in the
        # end.
        "pfedgpa.ft_epochs": 0,
        "pfedgpa.generate": "own",
    }
    return [
        Cell(
            row,
            column,
            method,
            {**common, **{f"{method}.{key}": value for key, value in own.items()}},
        )
        for row, method, own in STARTS
    ]


ARRIVED = {
    "after one local training": percent("arrival_accuracy"),
    "last ten rounds": percent("newcomer_accuracy"),
    "peak": percent("newcomer_peak_accuracy"),
    "rounds to 95 % of the peak": summary("newcomer_rounds_to_peak"),
}

STUDIES = [
    Study(
        "pfedgpa-table1",
        "pFedGPA, Table 1: accuracy of all methods",
        table_1,
        FINAL,
        SEEDS,
        curves=(),
    ),
    Study(
        "pfedgpa-table2",
        "pFedGPA, Table 2: with and without inversion",
        table_2,
        TUNED,
        SEEDS,
        curves=(),
    ),
    Study(
        "pfedgpa-rivals",
        "pFedGPA against what costs nothing, without fine-tuning",
        rivals,
        {
            "validation": last("valid_accuracy"),
            "test": percent("personal_accuracy"),
            "kept by the autoencoder": reconstruction,
            "distance to the nearest upload": distance("generated_to_nearest"),
            "between uploads": distance("nearest_upload"),
        },
        SEEDS,
        curves=(),
    ),
    Study(
        "pfedgpa-tuning",
        "pFedGPA: fine-tuning in large or small steps",
        tuning,
        {"validation": last("valid_accuracy"), "test": percent("personal_accuracy")},
        SEEDS,
        curves=(),
    ),
    Study(
        "pfedgpa-figure4",
        "pFedGPA, Figure 4: client by client, and failures by the generator's size",
        figure_4,
        {
            **TUNED,
            "% failed before fine-tuning": failed("untuned"),
            "% failed after it": failed("personal"),
        },
        {"quick": 1, "gpu": 1, "paper": 3},
        curves=(),
        vectors=("untuned", "personal"),
    ),
    Study(
        "pfedgpa-newcomers",
        "pFedGPA: five newcomers with other classes",
        lambda scale: arrivals(scale, 5, 0.5),
        ARRIVED,
        SEEDS,
        curves=("personal_accuracy",),
    ),
    Study(
        "pfedgpa-initialisation",
        "pFedGPA: a fresh federation that starts from another one's generator",
        lambda scale: arrivals(scale, 5 if scale == "quick" else 20, 0.0),
        ARRIVED,
        {"quick": 1, "gpu": 1, "paper": 3},
        curves=("personal_accuracy",),
    ),
]
