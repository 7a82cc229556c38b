"""GenFed, Expert Systems with Applications 281 (2025): Tables 2 to 6, the attacks and defences, and
Figures 3 to 6.

At scale `gpu` the settings are those of the preset `genfed.strong` with the small network and the
first 10,000 samples of every data set; `paper` takes the paper's own (`genfed.literal`), and
`quick` stays on scikit-learn's digits. All methods get the same supplement unless their row says
otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedhelix.papers.study import (
    Cell,
    Scale,
    Study,
    add_measure,
    best_on_test,
    percent,
    rounds_to,
    spread,
)
from fedhelix.runs.config import layered

SCHEDULES = {1: "constant", 2: "power", 3: "linear", 4: "sine", 5: "wave"}
DATA = {"MNIST": "mnist", "SVHN": "svhn", "Fashion-MNIST": "fashion-mnist", "CIFAR-10": "cifar10"}
LARGER = "Fashion-MNIST, larger network"
TARGETS = {"MNIST": 97, "SVHN": 89, "Fashion-MNIST": 80, LARGER: 80, "CIFAR-10": 45, "digits": 85}
AS_PRINTED = {"genfed.twins": True}
# With three parents at most it would never choose fewer.
ADAPTIVE = {"genfed.schedule": "adaptive", "genfed.rho_max": 10}
# The preset's clients train on all they have; the tables keep a tenth, so that a round can be
# chosen on it.
KEPT = {"valid": 0.1}
# Scale `gpu` takes about a sixth of the data, so a client makes a sixth of the steps; they are
# longer instead.
SMALL = {
    "model": "w1-cnn",
    "train_samples": 10_000,
    "test_samples": 5_000,
    "lr": 0.005,
    "eval_clients": 50,
}
# Models judged by samples that nobody was given: an attacker must not know what he is judged by.
APART = {"valid": 0.1, "validation_shared": False}
ROUNDS = {
    "MNIST": (150, 2000),
    "SVHN": (150, 2000),
    "Fashion-MNIST": (150, 2000),
    "CIFAR-10": (300, 4000),
}

# Rounds to the target and best accuracy, for MNIST, SVHN, Fashion-MNIST and CIFAR-10.
TABLE_2 = """
GenFed (1)      250 98.640   170 91.828   140 90.680   470 54.298
GenFed (2)       90 98.656    50 91.101    30 91.212   200 53.645
GenFed (3)       90 98.656    50 91.026    30 91.217   150 53.918
GenFed (4)       90 98.667    50 91.157    30 91.270   150 53.999
GenFed (5)      140 98.270    50 91.202    30 91.185   220 54.127
FedAvg         1350 97.491  1710 89.409  1070 83.512  2350 49.939
GenFedUmf (1)    50 98.948    40 92.433    30 92.282   100 55.950
GenFedUmf (2)    40 98.889    20 92.231    20 92.249    40 56.595
GenFedUmf (3)    40 98.878    30 92.445    30 91.197    40 56.185
GenFedUmf (4)    40 98.883    30 92.164    20 92.307    40 56.512
GenFedUmf (5)    40 98.899    20 92.256    30 91.218    40 56.151
FedUmf          280 98.778   320 91.072   160 89.499   450 55.180
GenFedAU (1)     80 98.556    50 91.411    40 91.449   100 54.595
GenFedAU (2)     70 98.575    50 91.129    30 91.143   290 51.806
GenFedAU (3)     70 98.742    60 92.894    30 91.197   190 55.467
GenFedAU (4)     70 98.652    50 92.256    30 91.639   190 54.241
GenFedAU (5)     70 98.606    30 92.137    30 91.218   200 55.801
FedAU          1350 97.565  1650 90.977  1070 83.744  2340 50.724
"""

# Time to the target relative to FedAvg's, schedule (3).
TABLE_3 = """
FedAvg     1.00 1.00 1.00 1.00
GenFed     0.07 0.03 0.03 0.07
FedUmf     0.21 0.19 0.15 0.20
GenFedUmf  0.03 0.02 0.02 0.02
FedAU      1.00 0.97 1.01 1.01
GenFedAU   0.05 0.04 0.03 0.08
"""

# Best accuracy on CIFAR-10 without attackers and under three attacks. The paper prints 54.478 for
# mimic of (2), which
# its own change of -0.311 % says is a misprint for 53.478.
TABLE_4 = """
GenFed (1)  54.298 52.373 53.975 53.529
GenFed (2)  53.645 53.231 53.607 53.478
GenFed (3)  53.918 52.295 53.502 53.175
GenFed (4)  53.999 51.861 53.201 53.151
GenFed (5)  54.127 54.638 53.889 53.880
FedAvg      49.939 46.995 48.477 47.960
"""
ATTACKS = {"no attack": "none", "label flip": "label-flip", "IPM": "ipm", "mimic": "mimic"}

CLIENTS = (20, 40, 60, 80, 100, 120, 140, 160, 180)
TABLE_5 = """
GenFed (1)  60.367 57.570 55.591 55.425 54.298 52.087 55.337 56.747 56.740
GenFed (2)  56.970 55.293 55.127 54.911 53.645 53.349 56.238 57.065 57.899
GenFed (3)  57.528 53.623 54.783 55.036 53.918 53.536 56.189 57.090 58.077
GenFed (4)  57.682 54.621 54.783 55.665 53.999 53.600 56.754 56.788 57.729
GenFed (5)  57.659 56.917 56.296 54.430 54.127 53.852 56.082 56.649 57.401
FedAvg      58.258 54.827 56.063 53.457 49.939 49.932 48.195 46.043 44.931
"""

ALPHAS = (0.05, 0.1, 0.5, 1, 5)
TABLE_6 = """
GenFed (1)  56.898 54.298 54.381 55.761 57.125
GenFed (2)  57.939 53.645 54.350 55.778 57.249
GenFed (3)  58.081 53.918 54.724 56.037 57.439
GenFed (4)  57.999 53.999 54.852 56.037 57.320
GenFed (5)  57.523 54.127 46.970 55.711 52.671
FedAvg      46.777 49.939 54.048 56.053 57.202
"""

LEVEL = "rounds to 90 % of FedAvg's best"
BEST = {"best on test": best_on_test, "chosen on validation": percent("accuracy_at_best")}


def rows_of(table: str) -> dict[str, list[float]]:
    """A table as it stands above: the name, then its figures."""
    found = {}
    for line in table.strip().splitlines():
        words = line.split()
        first = next(place for place, word in enumerate(words) if word[0].isdigit())
        found[" ".join(words[:first])] = [float(word) for word in words[first:]]
    return found


def method_of(row: str) -> tuple[str, dict[str, Any]]:
    """What a row of the paper runs: the method, and its own settings."""
    name, _, variant = row.partition(" (")
    inner = {"Umf": "+fedumf", "AU": "+fedau", "Avg": "", "": ""}[
        name.removeprefix("Gen").removeprefix("Fed")
    ]
    if not name.startswith("Gen"):
        return inner.removeprefix("+") or "fedavg", {}
    schedule = SCHEDULES[int(variant[0])] if variant else "linear"
    return f"genfed{inner}", {"genfed.schedule": schedule}


def settings(scale: Scale, column: str) -> dict[str, Any]:
    """The settings of a data set at a scale."""
    if scale == "paper":
        return {**layered("genfed.literal"), "data": DATA[column], "rounds": ROUNDS[column][1]}
    strong = {**layered("genfed.strong"), **AS_PRINTED, **KEPT}
    if scale == "gpu":
        rounds = ROUNDS[column][0]
        return {
            **strong,
            **SMALL,
            "data": DATA[column],
            "rounds": rounds,
            "eval_every": 2 if rounds == 150 else 5,
        }
    quick = {"data": "digits", "model": "digits-cnn", "clients": 20, "rounds": 30, "genfed.c": 10.0}
    return {
        **strong,
        **quick,
        "epochs": 2,
        "batch_size": 16,
        "lr": 0.1,
        "lr_decay": 1.0,
        "momentum": 0.5,
    }


def columns(scale: Scale) -> list[str]:
    """The data sets of a scale."""
    return ["digits"] if scale == "quick" else list(DATA)


def on_cifar(scale: Scale) -> tuple[str, dict[str, Any]]:
    """The data set of Tables 4 to 6, and its settings; at scale `quick` it is digits."""
    column = "digits" if scale == "quick" else "CIFAR-10"
    return column, settings(scale, column)


def table_2(scale: Scale) -> list[Cell]:
    """All methods with all schedules on all data sets, and what the paper leaves out: FedAvg
    without supplement, a schedule that adapts by itself, and a fitness that rewards diversity.
    """
    cells = []
    for place, column in enumerate(columns(scale)):
        common = settings(scale, column)
        for row, figures in rows_of(TABLE_2).items():
            method, own = method_of(row)
            known = scale != "quick"
            paper = (
                {"rounds to target": figures[2 * place], "best on test": figures[2 * place + 1]}
                if known
                else {}
            )
            cells.append(Cell(row, column, method, {**common, **own}, paper))
        for row, method, own in OURS:
            cells.append(Cell(row, column, method, {**common, **own}))
    return cells


OURS: list[tuple[str, str, dict[str, Any]]] = [
    ("FedAvg, no supplement", "fedavg", {"supplement_size": 0.0}),
    (
        "GenFed (1), no supplement",
        "genfed",
        {"supplement_size": 0.0, "genfed.schedule": "constant"},
    ),
    ("GenFed, adaptive", "genfed", ADAPTIVE),
    ("GenFed (3), diverse", "genfed", {"genfed.schedule": "linear", "genfed.diversity": 0.1}),
]


OF_BOTH_NETWORKS = (
    "FedAvg, no supplement", "FedAvg", "GenFed (1)", "GenFed (3)", "GenFed, adaptive", "FedAvgM 0.8",
    "GenFed (1) around FedAvgM 0.8", "GenFed, adaptive, around FedAvgM 0.8",
)  # fmt: skip


def supplement(scale: Scale) -> list[Cell]:
    """What the supplement gives, what selection gives beyond it, and what momentum on the server
    gives to both, on all of Fashion-MNIST; supplements come from all of the validation set, as
    in the preset, or from samples apart. At scale `gpu` the preset's own network is a column
    beside the small one.
    """
    column = "digits" if scale == "quick" else "Fashion-MNIST"
    rows = {"FedAvg": method_of("FedAvg")} | {
        f"GenFed ({n})": method_of(f"GenFed ({n})") for n in SCHEDULES
    }
    rows["GenFed, adaptive"] = ("genfed", ADAPTIVE)
    faster = {
        f"{row} {momentum}": (method, {**own, "fedavgm.server_momentum": momentum})
        for row, method, own in (
            ("FedAvgM", "fedavgm", {}),
            ("GenFed (1) around FedAvgM", "genfed+fedavgm", method_of("GenFed (1)")[1]),
            ("GenFed, adaptive, around FedAvgM", "genfed+fedavgm", ADAPTIVE),
        )
        for momentum in (0.5, 0.8, 0.9)
    }
    preset = {key: layered("genfed.strong")[key] for key in ("valid", "validation_shared")}
    shared = {**settings(scale, column), **preset, **(whole() if scale == "gpu" else {})}
    rows = {"FedAvg, no supplement": ("fedavg", {"supplement_size": 0.0})} | rows | faster
    larger = {**shared, "model": layered("genfed.strong")["model"]}
    return [
        *(Cell(row, column, method, {**shared, **own}) for row, (method, own) in rows.items()),
        *(
            Cell(row, LARGER, method, {**larger, **own})
            for row, (method, own) in rows.items()
            if scale == "gpu" and row in OF_BOTH_NETWORKS
        ),
        *(
            Cell(f"{row}, apart", column, rows[row][0], {**shared, **APART, **rows[row][1]})
            for row in ("FedAvg", "GenFed (1)")
        ),
    ]


def whole() -> dict[str, Any]:
    """All samples of a data set, with the preset's own learning rate."""
    return {
        "train_samples": None,
        "test_samples": None,
        "lr": layered("genfed.strong")["lr"],
        "eval_clients": 20,
    }


def table_3(scale: Scale) -> list[Cell]:
    """The rows of Table 2 that Table 3 compares, which share its runs."""
    wanted = {
        row: row if row in ("FedAvg", "FedUmf", "FedAU") else f"{row} (3)"
        for row in rows_of(TABLE_3)
    }
    cells = {(cell.row, cell.column): cell for cell in table_2(scale)}
    found = [
        (row, cells[long, column]) for row, long in wanted.items() for column in columns(scale)
    ]
    return [Cell(row, cell.column, cell.method, cell.settings) for row, cell in found]


def rounds_to_level(report: dict[str, Any]) -> None:
    """The first round with nine tenths of FedAvg's best accuracy, seed by seed, which small scales
    reach too.

    The paper's targets are 90 (CIFAR-10) to 99.5 % (MNIST, SVHN) of what FedAvg reaches there.
    """
    report["measures"].append(LEVEL)
    best = {
        (cell["column"], seed): max(curve)
        for cell in report["cells"]
        if cell["row"] == "FedAvg" and cell["seeds"]
        for seed, curve in zip(cell["seeds"], cell["accuracy_curve"]["by_seed"], strict=True)
    }
    for cell in report["cells"]:
        levels = {
            seed: 0.9 * best[cell["column"], seed]
            for seed in cell["seeds"]
            if (cell["column"], seed) in best
        }
        if len(levels) < len(cell["seeds"]):
            levels = {}  # nothing to compare with yet
        curve = cell.get("accuracy_curve", {"rounds": [], "by_seed": []})
        by_seed = [
            next(
                (t for t, seen in zip(curve["rounds"], accuracies, strict=True) if seen >= level),
                None,
            )
            for level, accuracies in zip(levels.values(), curve["by_seed"], strict=False)
        ]
        cell[LEVEL] = {"by_seed": by_seed, **spread(by_seed), "paper": None}


def relative_time(report: dict[str, Any]) -> None:
    """Those rounds over FedAvg's: the paper's times are the ratios of its rounds, so they leave out
    the scoring.
    """
    rounds_to_level(report)
    paper = {
        (row, column): figure
        for row, figures in rows_of(TABLE_3).items()
        for column, figure in zip(DATA, figures, strict=True)
    }
    add_measure(
        report,
        "relative to FedAvg",
        lambda cell, other: other["row"] == "FedAvg" and other["column"] == cell["column"],
        lambda mine, its: mine / its,
        of=LEVEL,
        paper=paper if report["scale"] != "quick" else {},
    )


def table_4(scale: Scale) -> list[Cell]:
    """Attacks by a fifth of the clients."""
    _, common = on_cifar(scale)
    return [
        Cell(
            row,
            column,
            method_of(row)[0],
            {
                **common,
                **method_of(row)[1],
                **({"attack": attack, "attack_share": 0.2} if attack != "none" else {}),
            },
            {"best on test": figure} if scale != "quick" else {},
        )
        for row, figures in rows_of(TABLE_4).items()
        for (column, attack), figure in zip(ATTACKS.items(), figures, strict=True)
    ]


def damage(report: dict[str, Any]) -> None:
    """The change that an attack makes, in points of accuracy."""
    add_measure(
        report,
        "change in points",
        _unharmed,
        lambda mine, its: mine - its,
        of="chosen on validation",
    )


def relative_damage(report: dict[str, Any]) -> None:
    """The change in points, and in percent of what was reached without the attack, as the paper has
    it.
    """
    damage(report)
    paper = {
        (row, column): 100 * (figure - figures[0]) / figures[0]
        for row, figures in rows_of(TABLE_4).items()
        for column, figure in zip(ATTACKS, figures, strict=True)
    }
    add_measure(
        report,
        "change in percent",
        _unharmed,
        lambda mine, its: 100 * (mine - its) / its,
        of="chosen on validation",
        paper=paper if report["scale"] != "quick" else {},
    )


def _unharmed(cell: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return other["column"] == "no attack" and other["row"] == cell["row"]


def by_setting(table: str, key: str, values: tuple[Any, ...], scale: Scale) -> list[Cell]:
    """A table whose columns are the values of one setting."""
    _, common = on_cifar(scale)
    return [
        Cell(
            row,
            str(value),
            method_of(row)[0],
            {
                **common,
                **method_of(row)[1],
                key: f"dirichlet:{value}" if key == "partition" else value,
            },
            {"best on test": figure} if scale != "quick" else {},
        )
        for row, figures in rows_of(table).items()
        for value, figure in zip(values, figures, strict=True)
    ]


DEFENCES = (
    "median",
    "trimmed-mean",
    "krum",
    "multi-krum",
    "geometric-median",
    "centred-clipping",
    "norm-bound",
)
HARM: dict[str, Mapping[str, Any]] = {
    "label flip": {"attack": "label-flip"},
    "mimic": {"attack": "mimic"},
    "IPM": {"attack": "ipm"},
    "4x sign flip": {"attack": "sign-flip", "attack_scale": 4.0},
    "adaptive": {"attack": "adaptive"},
}


def attacks(scale: Scale) -> list[Cell]:
    """Every attack by 20 and 40 % of the clients against GenFed and the usual defences."""
    column = "digits" if scale == "quick" else "Fashion-MNIST"
    short = {**whole(), "train_samples": 10_000, "rounds": 60} if scale == "gpu" else {}
    common = {**settings(scale, column), **APART, **short}
    rows = {"FedAvg": "fedavg", "GenFed": "genfed", **{name: name for name in DEFENCES}}
    harm: dict[str, Mapping[str, Any]] = {"no attack": {}} | {
        f"{name} {share:.0%}": {**what, "attack_share": share}
        for name, what in HARM.items()
        for share in (0.2, 0.4)
    }
    cells = [
        Cell(row, name, method, {**common, **what})
        for row, method in rows.items()
        for name, what in harm.items()
    ]
    # IPM's attackers all send the same model, and mimics that of somebody else: as printed, such
    # copies count.
    once = {**common, "genfed.twins": False}
    return cells + [
        Cell(row, name, "genfed", {**once, **own, **what})
        for row, own in (("GenFed, no copies", {}), ("GenFed, adaptive, no copies", ADAPTIVE))
        for name, what in harm.items()
    ]


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
        seeds={"quick": 3, "gpu": 3, "paper": 5},
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
        "genfed-table4",
        "GenFed, Table 4: attacks on CIFAR-10",
        table_4,
        BEST,
        finish=relative_damage,
    ),
    Study(
        "genfed-table5",
        "GenFed, Table 5: number of clients, CIFAR-10",
        lambda scale: by_setting(TABLE_5, "clients", CLIENTS, scale),
        BEST,
        across="chosen on validation",
    ),
    Study(
        "genfed-table6",
        "GenFed, Table 6: Dirichlet alpha, CIFAR-10",
        lambda scale: by_setting(TABLE_6, "partition", ALPHAS, scale),
        BEST,
        across="chosen on validation",
    ),
    Study(
        "genfed-attacks",
        "GenFed against the usual defences",
        attacks,
        {"final": percent("final_accuracy"), **BEST},
        seeds={"quick": 3, "gpu": 3, "paper": 5},
        finish=damage,
    ),
]
