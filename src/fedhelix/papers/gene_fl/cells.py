"""The cells of GENE-FL's tables."""

from __future__ import annotations

from dataclasses import replace

from fedhelix.papers.cells import Cell, Column, Row, Scale, cross
from fedhelix.papers.gene_fl.settings import (
    HYPERPARAMETERS,
    METHODS,
    READING_A,
    READING_B,
    TABLES,
    WITHOUT_A_LOSS,
    all_rows,
    column,
    columns,
    full_columns,
    full_rows,
    variants,
)


def all_methods(name: str, scale: Scale) -> list[Cell]:
    """Tables I to IV; III and IV share the runs of I and II."""
    table = TABLES[name]
    return cross(all_rows(scale), columns(scale, table.columns), table)


def figure_3(scale: Scale) -> list[Cell]:
    """The first column of Table III."""
    return cross(all_rows(scale), [column(scale, "C10 s=4")], TABLES["table3"])


def without_a_loss(scale: Scale) -> list[Cell]:
    """Table V."""
    names = ("C10 s=4", "SVHN s=4", "C100 s=10")
    return cross(WITHOUT_A_LOSS, columns(scale, names), TABLES["table5"])


def hyperparameters(scale: Scale) -> list[Cell]:
    """Table VI, one row for each value of a hyperparameter."""
    # Eight clients do not make ten clusters.
    fewer = {"K=10": {"gene-fl.clusters": 4}} if scale == "quick" else {}
    rows = [Row(name, "gene-fl", changed) for name, changed in {**HYPERPARAMETERS, **fewer}.items()]
    return cross(rows, [column(scale, "C10 s=4")], TABLES["table6"])


def clusters_or_not(scale: Scale) -> list[Cell]:
    """Table VII."""
    table = TABLES["table7"]
    base = column(scale, "C100 s=20" if scale == "paper" else "C10 s=4").settings
    return cross(
        [row for row in METHODS if row.name in table.rows],
        [Column("K=1", {**base, "clustered.clusters": 1}), Column("K=4", base)],
        table if scale == "paper" else None,
        by_row=True,
    )


def gene_sizes(scale: Scale) -> list[Cell]:
    """Accuracy by the share of the model that a gene may take, in both readings."""
    uncounted = {"gene-fl.gene_gamma0": None, "gene-fl.gene_gamma_min": None}
    base = {**column(scale, "C10 s=4").settings, **uncounted}
    return cross(
        [Row("reading A", "gene-fl", READING_A), Row("reading B", "gene-fl", READING_B)],
        [
            Column(f"{share:.0%}", {**base, "gene-fl.gene_budget": share})
            for share in (0.1, 0.25, 0.5)
        ],
        by_row=True,
    )


def gene_variants(scale: Scale) -> list[Cell]:
    """GENE-FL with other genes and other inheritances."""
    return cross(variants(scale), [column(scale, "C10 s=4")])


def full(scale: Scale) -> list[Cell]:
    """The paper's network on all images, with what it prints in Tables I and III."""
    newcomers = TABLES["table3"]
    return [
        replace(cell, paper={**cell.paper, **newcomers.at(cell.row, cell.column)})
        for cell in cross(full_rows(scale), full_columns(scale), TABLES["table1"])
    ]


def against(rival: str, scale: Scale) -> list[Cell]:
    """Figures 5 and 6: GENE-FL and one other method where every client holds all classes of its
    half.
    """
    rows = {row.name: row for row in METHODS}
    return cross([rows[rival], rows["GENE-FL"]], [column(scale, "C10 s=5")])
