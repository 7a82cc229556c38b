"""GENE-FL's rows and columns: methods and partitions with their settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedhelix.papers.cells import Column, Row, Scale
from fedhelix.papers.published import load
from fedhelix.runs.config import flat, layered
from fedhelix.runs.presets import PRESETS

TABLES = load("gene_fl")
DATA = {"C10": "cifar10", "C100": "cifar100", "SVHN": "svhn"}

# Every method is evaluated as it is, and after one round's local training.
EVALUATION = {"eval_every": 5, "eval_trained": True}
GPU = {
    "model": "bn-cnn",
    "newcomers_after": 40,
    "rounds": 60,
    "epochs": 5,
    "train_samples": 20_000,
    # Clients have 183 samples; this leaves no batch of two, too few for BatchNorm's statistics.
    "batch_size": 50,
    "lr": 0.02,
    "gene-fl.gene_budget": 0.25,
    "gene-fl.gene_gamma0": None,
    "gene-fl.gene_gamma_min": None,
    "gene-fl.gen_squared": True,
    "gene-fl.fisher_samples": 64,
}
QUICK = {
    "data": "digits",
    "model": "digits-bn-cnn",
    "clients": 8,
    "cohort": 4,
    "newcomers": 8,
    "newcomers_after": 8,
    "rounds": 18,
    "epochs": 2,
    "batch_size": 32,
    "lr": 0.05,
    "momentum": 0.9,
    "gene-fl.clusters": 2,
    "clustered.clusters": 2,
    "eval_every": 2,
}

# The paper's network on all images, in half precision; at scale `gpu` in fewer rounds and epochs.
LONG = {"eval_every": 10, "checkpoint_every": 10, "precision": "bfloat16"}
SHORTER = {
    "newcomers_after": 60,
    "rounds": 90,
    "epochs": 5,
    "eval_every": 30,
    "checkpoint_every": 30,
    "precision": "bfloat16",
}

METHODS = [
    Row("FedAvg", "clustered+fedavg"),
    Row("FedBN", "clustered+fedbn", {"fedbn.bn_filter": "name"}),
    Row("ParFed", "clustered+partialfed"),
    Row("FedFina", "clustered+fedfina"),
    Row("FedLP", "clustered+fedlp"),
    Row("FedLPS", "clustered+fedlps", {"fedlps.prune_ratio": 0.38}),
    Row("FedLG", "clustered+fedlg"),
    Row("GENE-FL", "gene-fl"),
]
READING_A = {"gene-fl.gene_score": "similarity", "gene-fl.gene_select": "highest"}
READING_B = {"gene-fl.gene_score": "distance", "gene-fl.gene_select": "lowest"}
# Eq. 4 as printed: one norm for all layers.
LITERAL = {"gene-fl.gen_norm": "whole", "gene-fl.gen_squared": False}
# The whole body at first, then fewer units: all that the network of each scale has.
START_WHOLE = flat({"gene-fl": PRESETS["gene-fl.whole"]["gene-fl"]})
WHOLE: dict[Scale, tuple[int, int]] = {"quick": (3, 2), "gpu": (5, 3), "paper": (20, 15)}
# Thresholds of reading B in units, where genes are counted in units.
COUNTED_B = {"gene-fl.gene_gamma0": 4, "gene-fl.gene_gamma_min": 1}

WITHOUT_A_LOSS = [
    Row("without L_gen", "gene-fl", {"gene-fl.lambda_gen": 0.0}),
    Row("without L_elg", "gene-fl", {"gene-fl.lambda_elg": 0.0}),
    Row("full", "gene-fl"),
    Row("full, norms not squared", "gene-fl", {"gene-fl.gen_squared": False}),
    Row("full, Eq. 4 as printed", "gene-fl", LITERAL),
    Row("full, Fisher values by rank", "gene-fl", {"gene-fl.fisher_norm": "layer_rank"}),
    Row(
        "full, high Fisher values held",
        "gene-fl",
        {"gene-fl.fisher_norm": "layer_rank", "gene-fl.elg_mask": "high"},
    ),
]
HYPERPARAMETERS: dict[str, dict[str, Any]] = {
    "K=1": {"gene-fl.clusters": 1},
    "K=4": {},
    "K=10": {"gene-fl.clusters": 10},
    "epsilon=0.1": {"gene-fl.epsilon": 0.1},
    "epsilon=0.9": {"gene-fl.epsilon": 0.9},
    "lambda1=0.05": {"gene-fl.lambda_gen": 0.05, "gene-fl.lambda_elg": 0.0},
    "lambda1=0.1": {"gene-fl.lambda_gen": 0.1, "gene-fl.lambda_elg": 0.0},
    "lambda1=0.5": {"gene-fl.lambda_gen": 0.5, "gene-fl.lambda_elg": 0.0},
    "lambda2=0.05": {"gene-fl.lambda_gen": 0.0, "gene-fl.lambda_elg": 0.05},
    "lambda2=0.1": {"gene-fl.lambda_gen": 0.0, "gene-fl.lambda_elg": 0.1},
    "lambda2=0.5": {"gene-fl.lambda_gen": 0.0, "gene-fl.lambda_elg": 0.5},
}


def column(scale: Scale, name: str) -> Column:
    """A column such as `C10 s=4` (shards) or `C10 b=0.1` (Dirichlet) at a scale."""
    data, _, rule = name.partition(" ")
    kind, _, number = rule.partition("=")
    partition = {"partition": f"shard:{number}" if kind == "s" else f"dirichlet:{number}"}
    if scale == "quick":
        return Column(f"digits {rule}", {**EVALUATION, **QUICK, **partition})
    smaller = {**EVALUATION, **(GPU if scale == "gpu" else {})}
    return Column(name, {**layered("gene-fl.cifar10"), **smaller, "data": DATA[data], **partition})


def columns(scale: Scale, names: Sequence[str]) -> list[Column]:
    """All columns of a table at the paper's scale, otherwise its first."""
    return [column(scale, name) for name in (names if scale == "paper" else names[:1])]


def all_rows(scale: Scale) -> list[Row]:
    """The paper's methods, variants of GENE-FL, and the baselines that the paper leaves out.

    FedPer's and FedBABU's newcomers inherit a body and draw the head.
    """
    reading_b = {**READING_B, **(COUNTED_B if scale == "paper" else {})}
    return [
        *METHODS,
        Row("GENE-FL, reading A", "gene-fl", READING_A),
        Row("GENE-FL, reading B", "gene-fl", reading_b),
        Row("GENE-FL, Eq. 4 as printed", "gene-fl", LITERAL),
        start_whole(scale),
        Row("FedPer", "clustered+fedper"),
        Row("FedBABU", "clustered+fedbabu"),
        Row("FedAvg-FT", "clustered+fedavg-ft"),
        Row("alone, random start", "local", {"local.follow_sampling": True}),
    ]


def full_columns(scale: Scale) -> list[Column]:
    """All images, and on a GPU the paper's network at both scales."""
    if scale == "quick":
        return [column(scale, "C10 s=4")]
    length = SHORTER if scale == "gpu" else LONG
    wanted = [column("paper", name) for name in ("C10 s=4", "C100 s=10")]
    return [Column(one.name, {**one.settings, **length}) for one in wanted]


def full_rows(scale: Scale) -> list[Row]:
    """GENE-FL in three forms, its strongest rivals in the paper, and those that it leaves out."""
    names = ("FedAvg", "FedBN", "ParFed", "FedLP", "FedPer", "FedBABU", "FedAvg-FT")
    forms = ("GENE-FL", "GENE-FL, Eq. 4 as printed", "GENE-FL, whole, then shrinking")
    # The network of scale `gpu` is the paper's too.
    known = {row.name: row for row in all_rows("quick" if scale == "quick" else "paper")}
    wanted = (*names, *forms, "alone, random start")
    return [*(known[name] for name in wanted), Row("Helix", "helix")]


def start_whole(scale: Scale) -> Row:
    """GENE-FL whose first genes are the whole body, in one cluster."""
    first, last = WHOLE[scale]
    units = {"gene-fl.gene_gamma0": first, "gene-fl.gene_gamma_min": last}
    return Row("GENE-FL, whole, then shrinking", "gene-fl", {**START_WHOLE, **units})


def variants(scale: Scale) -> list[Row]:
    """GENE-FL, and what else may decide about a gene or be inherited."""
    return [
        Row("GENE-FL", "gene-fl"),
        start_whole(scale),
        Row("one cluster", "gene-fl", {"gene-fl.clusters": 1}),
        Row("scores decide, not sizes", "gene-fl", {"gene-fl.gene_per": "unit"}),
        Row("rotating", "gene-fl", {"gene-fl.gene_rotate": True}),
        Row("newcomers inherit the body", "gene-fl", {"gene-fl.gene_inherit": "body"}),
    ]
