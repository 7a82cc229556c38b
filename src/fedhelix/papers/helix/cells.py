"""The cells of Helix's tables."""

from __future__ import annotations

from dataclasses import replace

from fedhelix.papers.cells import Cell, Column, Row, Scale, cross
from fedhelix.papers.genfed.settings import DEFENCES, told
from fedhelix.papers.helix.settings import (
    CODES,
    COLD_HELIX,
    GENE_FL,
    GENFED,
    HELIX,
    NO_SERVER_DATA,
    PFEDGPA,
    WITHOUT,
    attacked_columns,
    gene_fl_columns,
    genfed_column,
    more_gene_fl_columns,
    pfedgpa_columns,
)


def in_genfed(scale: Scale) -> list[Cell]:
    """GenFed's setting; SVHN was held out when all defaults but the warm start were chosen."""
    names = ["digits"] if scale == "quick" else ["Fashion-MNIST", "CIFAR-10", "SVHN"]
    return cross(GENFED, [genfed_column(scale, name) for name in names])


def under_attack(scale: Scale) -> list[Cell]:
    """Every attack by 20 and 40 % of the clients, against defences that know the share."""
    rows = [
        HELIX,
        COLD_HELIX,
        Row("GenFed", "genfed", {"genfed.twins": False}),
        Row("FedAvg", "fedavg"),
        *(Row(name, name) for name in DEFENCES),
    ]
    cells = cross(rows, attacked_columns(scale), by_row=True)
    return [told(cell) for cell in cells]


def in_pfedgpa(scale: Scale) -> list[Cell]:
    """pFedGPA's Table 1 with Helix and its strongest rivals."""
    return cross(PFEDGPA, pfedgpa_columns(scale))


def in_gene_fl(scale: Scale) -> list[Cell]:
    """GENE-FL's Tables I and III with Helix and its strongest rivals."""
    return cross(
        GENE_FL, [*gene_fl_columns(scale, eval_trained=True), *more_gene_fl_columns(scale)]
    )


def ablation(scale: Scale) -> list[Cell]:
    """Helix, always with a cold start, without each of its parts, in all three papers' settings."""
    base = genfed_column(scale, "Fashion-MNIST")
    apart = {**base.settings, **NO_SERVER_DATA}
    columns = [
        replace(base, name="GenFed's"),
        Column("GenFed's, no server data", apart),
        *(replace(column, name=f"pFedGPA's, {column.name}") for column in _twenty(scale)),
        *(replace(column, name="GENE-FL's") for column in gene_fl_columns(scale)),
    ]
    return cross(WITHOUT, columns)


def _twenty(scale: Scale) -> list[Column]:
    columns = pfedgpa_columns(scale)
    return [column for column in columns if scale == "quick" or column.name.endswith(" 20")]


def in_bits(scale: Scale) -> list[Cell]:
    """Accuracy by the number of bits that a value of an update takes, with a cold start."""
    columns = [
        replace(genfed_column(scale, "Fashion-MNIST"), name="GenFed's"),
        *(replace(column, name=f"pFedGPA's, {column.name}") for column in _twenty(scale)),
        *(replace(column, name="GENE-FL's") for column in gene_fl_columns(scale)),
    ]
    return cross(CODES, columns)
