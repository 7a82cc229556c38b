"""The cells of pFedGPA's tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fedhelix.papers.cells import Cell, Column, Row, Scale, cross
from fedhelix.papers.pfedgpa.settings import (
    CLIENTS,
    METHODS,
    OURS,
    RIVALS,
    SHIFTED,
    SIZES,
    STARTS,
    TABLES,
    data_sets,
    fedpac_settings,
    inversion,
    prefixed,
    settings,
)


def table_1(scale: Scale) -> list[Cell]:
    """All methods on all data sets with 20, 10 and 100 clients; with 20 also ours."""
    cells = []
    for data in data_sets(scale):
        for clients in CLIENTS[:1] if scale == "quick" else CLIENTS:
            name = data if scale == "quick" else f"{data} {clients}"
            rows = [*METHODS, *OURS] if clients == CLIENTS[0] else METHODS
            column = Column(name, settings(scale, data, clients))
            cells += [*cross(rows, [column], TABLES["table1"]), _one_by_one(column)]
    if scale != "quick":
        cells += _as_fedpac(scale)
    return cells


def _one_by_one(column: Column) -> Cell:
    """pFedHN as its reference works: one client after the other, each with a whole step of the
    hypernetwork; as many visits to clients as in the other rows.
    """
    cohort, rounds = (int(column.settings[key]) for key in ("cohort", "rounds"))
    alone = {
        **column.settings,
        "cohort": 1,
        "rounds": cohort * rounds,
        "eval_every": cohort * int(column.settings.get("eval_every", 1)),
        "pfedhn.server_lr": 0.01,
    }
    paper = TABLES["table1"].at("pFedHN", column.name)
    return Cell("pFedHN, client after client", column.name, "pfedhn", alone, paper)


def _as_fedpac(scale: Scale) -> list[Cell]:
    """The columns of EMNIST once more, with FedPAC's partition, beside the same published ones."""
    cells = []
    for clients in CLIENTS:
        column = Column(f"EMNIST {clients}", fedpac_settings(scale, clients))
        cells += [*cross(METHODS, [column], TABLES["table1"]), _one_by_one(column)]
    return [replace(cell, column=f"{cell.column}, FedPAC's partition") for cell in cells]


def table_2(scale: Scale) -> list[Cell]:
    """With inversion and without."""
    return cross(
        [inversion("inversion"), inversion("no inversion")],
        [Column(data, settings(scale, data)) for data in data_sets(scale)],
        TABLES["table2"],
    )


def figure_4(scale: Scale) -> list[Cell]:
    """Generators of several sizes, client by client; on Fashion-MNIST also of the last layers."""
    cells = []
    for data in data_sets(scale)[::2]:
        column = Column(data, settings(scale, data))
        rows = [
            replace(inversion(way, size=size), name=f"{way}, {size}")
            for size in SIZES[scale]
            if size != "paper" or data == "Fashion-MNIST"
            for way in ("inversion", "no inversion")
        ]
        if data != "CIFAR-10":
            rows.append(Row("inversion, last two layers", "pfedgpa", {"pfedgpa.slice": "last:2"}))
        cells += cross(rows, [column])
    return cells


def rivals(scale: Scale) -> list[Cell]:
    """Ways to generate models, without fine-tuning; a tenth of the samples tells the best one."""
    rows = [
        Row(name, "pfedgpa", prefixed("pfedgpa", **options))
        for name, options in RIVALS.items()
        if scale != "quick" or "size" not in options
    ]
    return cross([*rows, *SHIFTED], [_untuned(scale, data) for data in data_sets(scale)])


def _untuned(scale: Scale, data: str) -> Column:
    """A data set without fine-tuning; its name says which part of the network is generated."""
    common = {**settings(scale, data), "valid": 0.1, "pfedgpa.ft_epochs": 0}
    part = common.get("pfedgpa.slice", "all")
    return Column(data if part == "all" else f"{data}, slice {part}", common)


def fine_tuning(scale: Scale) -> list[Cell]:
    """Learning rates of fine-tuning; a tenth of the samples tells the best one."""
    data = data_sets(scale)[0]
    common = {**settings(scale, data), "valid": 0.1}
    cells = []
    for row in (Row("pFedGPA", "pfedgpa"), Row("FedAvg-FT", "fedavg-ft")):
        key = f"{row.method}.ft_rate"
        rates = [Column(f"{rate:g}", {**common, key: rate}) for rate in (1.0, 0.3, 0.1, 0.03)]
        cells += cross([row], rates)
    return cells


def arrivals(newcomers: Mapping[Scale, int], classes: float, scale: Scale) -> list[Cell]:
    """Clients that arrive when the others have finished, by the model that they start from."""
    data = data_sets(scale)[0]
    known, after = (10, 5) if scale == "quick" else (100, 30)
    common = {
        **settings(scale, data),
        "newcomers": newcomers[scale],
        "newcomers_after": known,
        "newcomers_classes": classes,
        "rounds": known + after,
        "eval_every": 1,
        # Newcomers are evaluated as they are after each round; nothing is generated for them.
        "pfedgpa.ft_epochs": 0,
        "pfedgpa.generate": "own",
    }
    rows = [
        Row(name, "pfedgpa", prefixed("pfedgpa", **options)) for name, options in STARTS.items()
    ]
    return cross([*rows, Row("pFedHN", "pfedhn")], [Column(data, common)])
