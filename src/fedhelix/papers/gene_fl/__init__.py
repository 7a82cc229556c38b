"""GENE-FL, arXiv:2504.14628: Tables I to VII and the curves of Figures 3, 5 and 6 (Figure 4 is
`fedhelix audit idlg`).

Known clients train first. Then newcomers with unseen classes arrive, and only they go on. Every
method works inside the same one-shot clusters. Scale `paper` takes the paper's settings (preset
gene-fl.cifar10), `gpu` a ResNet with 78 thousand parameters and fewer rounds, and `quick`
scikit-learn's digits. Baselines that the paper leaves out are added: FedAvg among the newcomers,
FedAvg-FT, FedPer and FedBABU (a body and a fresh head), and clients that train alone from a random
start. Every row has two accuracies: of the model that a client uses, and of that model after one
round's local training, which is the same state for every method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fedhelix.papers.cells import Cell, Scale
from fedhelix.papers.gene_fl.cells import (
    against,
    all_methods,
    clusters_or_not,
    figure_3,
    full,
    gene_sizes,
    gene_variants,
    hyperparameters,
    without_a_loss,
)
from fedhelix.papers.gene_fl.measures import CURVE, OF_BOTH, OF_KNOWN, OF_NEWCOMERS
from fedhelix.papers.measures import Measure
from fedhelix.papers.study import Study

SEVERAL: dict[Scale, int] = {"quick": 1, "gpu": 2, "paper": 3}
ONCE: dict[Scale, int] = {"quick": 1, "gpu": 1, "paper": 3}
# GENE-FL reads its score as in reading A: one line would hide the other.
DRAWN = ("FedAvg", "FedBN", "ParFed", "FedLP", "FedLG", "GENE-FL", "alone, random start")


def study(
    name: str,
    title: str,
    cells: Callable[[Scale], list[Cell]],
    measures: Mapping[str, Measure],
    seeds: Mapping[Scale, int] = ONCE,
    curves: Sequence[str] = (CURVE,),
    **drawing: Any,
) -> Study:
    """A study of this paper."""
    title = f"GENE-FL, {title}"
    return Study(f"gene-fl-{name}", title, cells, measures, seeds, curves, **drawing)


STUDIES = [
    *(
        study(
            f"table{number}",
            f"Table {title}",
            partial(all_methods, f"table{number}"),
            measures,
            SEVERAL,
            drawn=DRAWN,
        )
        for number, title, measures in (
            (1, "I: known clients, shards", OF_KNOWN),
            (2, "II: known clients, Dirichlet", OF_KNOWN),
            (3, "III: newcomers, shards", OF_NEWCOMERS),
            (4, "IV: newcomers, Dirichlet", OF_NEWCOMERS),
        )
    ),
    study("table5", "Table V: without one of the losses", without_a_loss, OF_BOTH),
    study("table6", "Table VI: hyperparameters", hyperparameters, OF_BOTH),
    study("table7", "Table VII: clusters or not", clusters_or_not, OF_NEWCOMERS),
    study("figure3", "Figure 3: newcomers over rounds", figure_3, OF_BOTH, SEVERAL),
    study(
        "figure5",
        "Figure 5: uploads over rounds",
        partial(against, "FedAvg"),
        OF_KNOWN,
        curves=("uplink_bytes", CURVE),
    ),
    study("figure6", "Figure 6: accuracy over rounds", partial(against, "FedLP"), OF_BOTH),
    study(
        "full",
        "the paper's network on all images",
        full,
        OF_BOTH,
        SEVERAL,
        drawn=("FedAvg", "FedBN", "ParFed", "FedLP", "GENE-FL", "Helix"),
        against=("uploads in GiB", ("accuracy of the known", "accuracy of newcomers")),
    ),
    study("sizes", "accuracy against the size of a gene", gene_sizes, OF_BOTH),
    study("variants", "other genes, and other inheritances", gene_variants, OF_BOTH),
]
