"""GENE-FL, arXiv:2504.14628: Tables I to VII, and the curves of Figures 3, 5 and 6; Figure 4 is
`fedhelix audit idlg`.

Known clients train first; then newcomers with classes that nobody has seen arrive, and only they go
on. Every method works inside the same one-shot clusters. `paper` takes the paper's setting (preset
gene-fl.cifar10), `gpu` a ResNet with 78 thousand parameters and fewer rounds, `quick`
scikit-learn's digits. Beside the paper's rows stand those that it leaves out: FedAvg among the
newcomers, FedAvg-FT, and clients that learn alone from a random start.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from fedhelix.papers.study import Cell, Finished, Measure, Scale, Study, percent
from fedhelix.runs.config import layered

MIB, GIB = 2**20, 2**30

DATA = {"C10": "cifar10", "C100": "cifar100", "SVHN": "svhn"}
SHARDS = ("C10 s=4", "C10 s=5", "C100 s=10", "C100 s=20", "SVHN s=4", "SVHN s=5")
DIRICHLET = ("C10 b=0.1", "C10 b=0.5", "C100 b=0.1", "C100 b=0.5", "SVHN b=0.1", "SVHN b=0.5")

# Uploads in GiB and accuracy of the known clients.
TABLE_1 = """
FedAvg   41.66 60.89  41.66 58.99  41.83 21.68  41.83 21.29  41.66 72.03  41.66 76.93
FedBN    41.60 70.93  41.60 66.90  41.78 40.22  41.78 28.60  41.60 82.17  41.60 78.23
ParFed   11.67 68.13  11.67 63.23  11.67 45.20  11.67 32.53  11.67 83.24  11.67 81.20
FedFina  30.76 65.12  30.76 61.06  30.76 40.72  30.76 31.10  30.76 78.01  30.76 74.76
FedLP    27.22 62.16  16.24 67.68  13.18 42.76  13.35 33.48  36.31 86.73  13.96 82.62
FedLPS   16.11 41.19  13.72 36.90  13.72 40.63  13.72 28.37  13.72 83.77  13.72 75.77
FedLG    17.85 66.05  17.85 64.91  17.85 41.63  17.85 32.07  17.85 83.71  17.85 78.45
GENE-FL   8.78 71.45  10.33 71.22  10.26 46.84  10.45 33.35  11.19 87.30  11.22 83.64
"""
TABLE_2 = """
FedAvg   41.66 45.69  41.66 32.15  41.83 12.02  41.83 13.23  41.66 40.25  41.66 45.78
FedBN    41.60 50.92  41.60 48.47  41.78 18.44  41.78 16.40  41.60 53.95  41.60 61.15
ParFed   11.67 63.76  11.67 53.12  11.67 22.49  11.67 17.04  11.67 62.26  11.67 42.16
FedFina  30.76 60.35  30.76 48.44  30.76 23.20  30.76 17.16  30.76 59.98  30.76 38.81
FedLP    33.67 57.46  32.01 66.45  24.74 17.07  24.05 20.74  37.09 60.74  36.18 71.81
FedLPS   16.11 48.25  16.11 35.40  16.18 13.02  16.18 16.58  13.06 52.88  16.11 29.86
FedLG    17.85 62.25  17.85 51.95  17.85 22.49  17.85 15.48  17.85 59.28  17.85 51.19
GENE-FL  11.54 64.85  15.73 65.61  10.73 22.74  12.45 22.46  12.51 63.53  10.54 70.79
"""

# The initial download in MiB, and accuracy of the newcomers.
TABLE_3 = """
FedBN    42.60  61.54 57.96 44.01 32.04 88.82 89.80
ParFed   11.95  61.43 61.75 47.94 35.82 81.74 89.50
FedFina  31.50  54.94 51.81 41.62 30.94 87.81 86.84
FedLP    42.66  63.46 65.37 40.69 34.47 90.95 92.58
FedLPS   42.66  59.10 45.85 44.38 32.06 87.78 77.32
FedLG    18.28  60.34 57.83 44.04 30.62 88.20 89.52
GENE-FL   9.04  66.90 67.76 49.84 37.85 89.03 90.47
"""
TABLE_4 = """
FedBN    42.60  56.33 49.79 17.35 16.44 55.63 72.42
ParFed   11.95  59.62 51.29 21.77 16.31 67.34 65.58
FedFina  31.50  58.10 47.65 21.04 15.47 61.67 58.78
FedLP    42.66  52.39 58.12 13.70 22.80 69.41 70.96
FedLPS   42.66  60.37 51.96 22.49 18.60 57.40 79.63
FedLG    18.28  59.05 49.65 21.02 14.56 64.87 74.64
GENE-FL   9.04  63.85 61.44 23.62 18.73 69.86 77.11
"""

# Newcomers without one of the losses: SVHN s=4, C10 s=4, C100 s=10.
TABLE_5: dict[str, tuple[dict[str, Any], tuple[float | None, ...]]] = {
    "without L_gen": ({"gene-fl.lambda_gen": 0.0}, (84.78, 64.69, 47.25)),
    "without L_elg": ({"gene-fl.lambda_elg": 0.0}, (87.25, 65.54, 48.74)),
    "full": ({}, (89.03, 66.90, 49.84)),
    "full, norms not squared": ({"gene-fl.gen_squared": False}, (None, None, None)),
}

# Newcomers, C10 s=4. The paper's figures show that it swept each lambda with the other loss off.
TABLE_6: dict[str, tuple[dict[str, Any], float]] = {
    "K=1": ({"gene-fl.clusters": 1}, 64.89),
    "K=4": ({}, 66.90),
    "K=10": ({"gene-fl.clusters": 10}, 62.29),
    "epsilon=0.1": ({"gene-fl.epsilon": 0.1}, 65.17),
    "epsilon=0.9": ({"gene-fl.epsilon": 0.9}, 63.11),
    "lambda1=0.05": ({"gene-fl.lambda_gen": 0.05, "gene-fl.lambda_elg": 0.0}, 64.24),
    "lambda1=0.1": ({"gene-fl.lambda_gen": 0.1, "gene-fl.lambda_elg": 0.0}, 63.49),
    "lambda1=0.5": ({"gene-fl.lambda_gen": 0.5, "gene-fl.lambda_elg": 0.0}, 65.54),
    "lambda2=0.05": ({"gene-fl.lambda_gen": 0.0, "gene-fl.lambda_elg": 0.05}, 64.49),
    "lambda2=0.1": ({"gene-fl.lambda_gen": 0.0, "gene-fl.lambda_elg": 0.1}, 63.06),
    "lambda2=0.5": ({"gene-fl.lambda_gen": 0.0, "gene-fl.lambda_elg": 0.5}, 60.56),
}

# Newcomers, C100 s=20, without clusters and with four.
TABLE_7 = """
FedBN    30.97 32.04
ParFed   35.40 35.82
FedFina  28.35 30.94
FedLP    33.61 34.47
FedLPS   29.23 32.06
FedLG    30.20 30.62
"""

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg": ("clustered+fedavg", {}),
    "FedBN": ("clustered+fedbn", {"fedbn.bn_filter": "name"}),
    "ParFed": ("clustered+partialfed", {}),
    "FedFina": ("clustered+fedfina", {}),
    "FedLP": ("clustered+fedlp", {}),
    "FedLPS": ("clustered+fedlps", {"fedlps.prune_ratio": 0.38}),
    "FedLG": ("clustered+fedlg", {}),
    "GENE-FL": ("gene-fl", {}),
}
READING_A = {"gene-fl.gene_score": "similarity", "gene-fl.gene_select": "highest"}
READING_B = {"gene-fl.gene_score": "distance", "gene-fl.gene_select": "lowest"}
COUNTED_B = {
    "gene-fl.gene_gamma0": 4,
    "gene-fl.gene_gamma_min": 1,
}  # units, where genes are counted in them
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "GENE-FL, reading A": ("gene-fl", READING_A),
    "GENE-FL, reading B": ("gene-fl", READING_B),
    "FedAvg-FT": ("clustered+fedavg-ft", {}),
    "alone, random start": ("local", {"local.follow_sampling": True}),
}


def settings(scale: Scale, column: str) -> dict[str, Any]:
    """The settings of a column such as `C10 s=4` at a scale."""
    name, _, rule = column.partition(" ")
    kind, _, number = rule.partition("=")
    partition = f"shard:{number}" if kind == "s" else f"dirichlet:{number}"
    if scale == "paper":
        return {**layered("gene-fl.cifar10"), "data": DATA[name], "partition": partition}
    if scale == "gpu":
        smaller = {
            "model": "bn-cnn",
            "newcomers_after": 40,
            "rounds": 60,
            "epochs": 5,
            "eval_every": 5,
        }
        smaller |= {"train_samples": 20_000}
        steps = {
            "batch_size": 50,
            "lr": 0.02,
        }  # clients have 183 samples: no batch of two, which BatchNorm dislikes
        genes = {
            "gene-fl.gene_budget": 0.25,
            "gene-fl.gen_squared": True,
            "gene-fl.fisher_samples": 64,
        }
        common = {**layered("gene-fl.cifar10"), **smaller, **steps, **genes}
        return {**common, "data": DATA[name], "partition": partition}
    few = {
        "clients": 8,
        "cohort": 4,
        "newcomers": 8,
        "newcomers_after": 8,
        "rounds": 18,
        "epochs": 2,
    }
    quick = {
        "data": "digits",
        "model": "digits-bn-cnn",
        "batch_size": 32,
        "lr": 0.05,
        "momentum": 0.9,
    }
    clusters = {"gene-fl.clusters": 2, "clustered.clusters": 2, "eval_every": 2}
    return {**few, **quick, **clusters, "partition": partition}


def cell(
    row: str,
    column: str,
    scale: Scale,
    own: Mapping[str, Any] | None = None,
    paper: Mapping[str, float | None] | None = None,
) -> Cell:
    """One method in one column, with further settings of its own."""
    method, mine = (METHODS | OURS).get(row, METHODS["GENE-FL"])
    counted = COUNTED_B if scale == "paper" and mine is READING_B else {}
    figures = {
        key: value for key, value in (paper or {}).items() if value is not None and scale != "quick"
    }
    shown = column.replace(column.split()[0], "digits") if scale == "quick" else column
    return Cell(
        row, shown, method, {**settings(scale, column), **mine, **counted, **(own or {})}, figures
    )


def columns(scale: Scale, every: tuple[str, ...]) -> tuple[str, ...]:
    """All columns of a table at the paper's scale, otherwise its first."""
    return every if scale == "paper" else every[:1]


def rows_of(table: str) -> dict[str, list[float]]:
    """The rows of a table as it stands above."""
    return {
        line.split()[0]: [float(word) for word in line.split()[1:]]
        for line in table.strip().splitlines()
    }


def known(table: str, every: tuple[str, ...], scale: Scale) -> list[Cell]:
    """Tables I and II."""
    figures = rows_of(table)
    found = []
    for place, column in enumerate(columns(scale, every)):
        for row in (*METHODS, *OURS):
            sent, accuracy = (
                figures[row][2 * place : 2 * place + 2] if row in figures else (None, None)
            )
            found.append(cell(row, column, scale, paper={KNOWN[0]: accuracy, KNOWN[1]: sent}))
    return found


def unseen(table: str, every: tuple[str, ...], scale: Scale) -> list[Cell]:
    """Tables III and IV, which share the runs of I and II."""
    figures = rows_of(table)
    found = []
    for place, column in enumerate(columns(scale, every)):
        for row in (*METHODS, *OURS):
            size, accuracy = (
                (figures[row][0], figures[row][1 + place]) if row in figures else (None, None)
            )
            found.append(cell(row, column, scale, paper={LATE: accuracy, SIZE: size}))
    return found


def without_a_loss(scale: Scale) -> list[Cell]:
    """Table V."""
    every = {"C10 s=4": 1, "SVHN s=4": 0, "C100 s=10": 2}
    return [
        cell(row, column, scale, own, {LATE: paper[every[column]]})
        for column in columns(scale, tuple(every))
        for row, (own, paper) in TABLE_5.items()
    ]


def sensitivity(scale: Scale) -> list[Cell]:
    """Table VI, one row for each value of a hyperparameter."""
    column = "C10 s=4"
    few = (
        {"gene-fl.clusters": 4} if scale == "quick" else {}
    )  # ten clusters of eight clients there are not
    return [
        cell(row, column, scale, {**own, **(few if row == "K=10" else {})}, {LATE: paper})
        for row, (own, paper) in TABLE_6.items()
    ]


def clusters_or_not(scale: Scale) -> list[Cell]:
    """Table VII."""
    setting = "C100 s=20" if scale == "paper" else "C10 s=4"
    found = []
    for row, figures in rows_of(TABLE_7).items():
        for count, figure in zip((1, 4), figures, strict=True):
            clusters = {} if count == 4 else {"clustered.clusters": 1}
            made = cell(row, setting, scale, clusters, {LATE: figure if scale == "paper" else None})
            found.append(Cell(row, f"K={count}", made.method, made.settings, made.paper))
    return found


def sizes(scale: Scale) -> list[Cell]:
    """How large a gene has to be: accuracy against the share of the model that it may weigh, in
    both readings.
    """
    rows = {"reading A": READING_A, "reading B": READING_B}
    return [
        Cell(
            row,
            f"{share:.0%}",
            "gene-fl",
            {**settings(scale, "C10 s=4"), **own, "gene-fl.gene_budget": share},
        )
        for row, own in rows.items()
        for share in (0.1, 0.25, 0.5)
    ]


def two(rival: str, scale: Scale) -> list[Cell]:
    """Figures 5 and 6: GENE-FL and one other method where every client holds all classes of its
    half.
    """
    return [cell(row, SHARDS[1], scale) for row in (rival, "GENE-FL")]


def after_rounds(count: int) -> Measure:
    """The newcomers' accuracy in percent so many rounds after they arrived, or in the next
    evaluated round.
    """

    def measure(run: Finished) -> float | None:
        arrived = next(
            (record["round"] for record in run.records if "arrival_bytes" in record), None
        )
        later = [
            record
            for record in run.records
            if arrived is not None and record["round"] >= arrived + count - 1
        ]
        return next((100 * record[CURVE] for record in later if CURVE in record), None)

    return measure


def amount(key: str, unit: int) -> Measure:
    """A figure of the summary in larger units."""
    return lambda run: None if run.summary.get(key) is None else run.summary[key] / unit


CURVE = "personal_accuracy"
KNOWN = ("accuracy of the known", "uploads in GiB")
LATE, SIZE = "accuracy of newcomers", "initial download in MiB"
OF_KNOWN: dict[str, Measure] = {
    KNOWN[0]: percent("known_accuracy"),
    KNOWN[1]: amount("known_uplink_bytes", GIB),
    "MiB of all uploads": amount("known_uplink_bytes", MIB),
}
OF_NEWCOMERS: dict[str, Measure] = {
    LATE: percent("newcomer_accuracy"),
    "at arrival": percent("arrival_accuracy"),
    "after 10 rounds": after_rounds(10),
    "rounds to 95 % of the peak": lambda run: run.summary.get("newcomer_rounds_to_peak"),
    SIZE: amount("arrival_bytes", MIB),
}
OF_BOTH = {**OF_NEWCOMERS, **OF_KNOWN}
SEEDS: dict[Scale, int] = {"quick": 1, "gpu": 2, "paper": 3}
ONCE: dict[Scale, int] = {"quick": 1, "gpu": 1, "paper": 3}


STUDIES = [
    Study(f"gene-fl-{name}", f"GENE-FL, {title}", cells, measures, seeds, curves)
    for name, title, cells, measures, seeds, curves in (
        (
            "table1",
            "Table I: known clients, shards",
            partial(known, TABLE_1, SHARDS),
            OF_KNOWN,
            SEEDS,
            [CURVE],
        ),
        (
            "table2",
            "Table II: known clients, Dirichlet",
            partial(known, TABLE_2, DIRICHLET),
            OF_KNOWN,
            SEEDS,
            [CURVE],
        ),
        (
            "table3",
            "Table III: newcomers, shards",
            partial(unseen, TABLE_3, SHARDS),
            OF_NEWCOMERS,
            SEEDS,
            [CURVE],
        ),
        (
            "table4",
            "Table IV: newcomers, Dirichlet",
            partial(unseen, TABLE_4, DIRICHLET),
            OF_NEWCOMERS,
            SEEDS,
            [CURVE],
        ),
        ("table5", "Table V: without one of the losses", without_a_loss, OF_BOTH, ONCE, [CURVE]),
        ("table6", "Table VI: hyperparameters", sensitivity, OF_BOTH, ONCE, [CURVE]),
        ("table7", "Table VII: clusters or not", clusters_or_not, OF_NEWCOMERS, ONCE, [CURVE]),
        (
            "figure3",
            "Figure 3: newcomers over rounds",
            partial(unseen, TABLE_3, SHARDS[:1]),
            OF_BOTH,
            SEEDS,
            [CURVE],
        ),
        (
            "figure5",
            "Figure 5: uploads over rounds",
            partial(two, "FedAvg"),
            OF_KNOWN,
            ONCE,
            ["uplink_bytes", CURVE],
        ),
        (
            "figure6",
            "Figure 6: accuracy over rounds",
            partial(two, "FedLP"),
            OF_BOTH,
            ONCE,
            [CURVE],
        ),
        ("sizes", "accuracy against the size of a gene", sizes, OF_BOTH, ONCE, [CURVE]),
    )
]
