"""The cells of GenFed's tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fedhelix.papers.cells import Cell, Column, Row, Scale, cross
from fedhelix.papers.genfed.settings import (
    ADAPTIVE,
    APART,
    ATTACKS,
    BACKDOOR,
    CONTROLS,
    DEFENCES,
    FEW_OR_MANY,
    KNOWING,
    LARGER,
    MOMENTUM,
    OURS,
    SCHEDULES,
    TABLES,
    UNEQUAL_TO_EVEN,
    WITH_BOTH_NETWORKS,
    column,
    columns,
    paper_row,
    supplied,
    told,
    whole,
)
from fedhelix.runs.config import layered


def table_2(scale: Scale) -> list[Cell]:
    """All methods with all schedules on all data sets, and rows that the paper leaves out.

    They are controls, GenFed without supplement, an adaptive schedule, and a fitness that rewards
    diversity.
    """
    table = TABLES["table2"]
    rows = supplied([*map(paper_row, table.rows), *OURS], scale)
    return cross(rows, columns(scale), table)


def table_3(scale: Scale) -> list[Cell]:
    """The rows of Table 2 that Table 3 compares, GenFed's with schedule 3; they share its runs."""
    rows = [
        replace(paper_row(f"{name} (3)" if name.startswith("GenFed") else name), name=name)
        for name in TABLES["table3"].rows
    ]
    return cross(supplied(rows, scale), columns(scale), by_row=True)


def on_cifar(name: str, changed: Callable[[str], Mapping[str, Any]], scale: Scale) -> list[Cell]:
    """Tables 4 to 6: CIFAR-10, with settings that change from column to column, and controls."""
    table, base = TABLES[name], column(scale, "CIFAR-10").settings
    return cross(
        supplied([*map(paper_row, table.rows), *CONTROLS], scale),
        [Column(header, {**base, **changed(header)}) for header in table.columns],
        None if scale == "quick" else table,
        by_row=True,
    )


def table_4(scale: Scale) -> list[Cell]:
    """Attacks by a fifth of the clients."""

    def attack(header: str) -> dict[str, Any]:
        return {} if header == "no attack" else {**ATTACKS[header], "attack_share": 0.2}

    # Nobody attacks the server's own samples.
    return [
        cell
        for cell in on_cifar("table4", attack, scale)
        if cell.column == "no attack" or not cell.settings.get("server_only")
    ]


def table_5(scale: Scale) -> list[Cell]:
    """The number of clients."""
    return on_cifar("table5", lambda header: {"clients": int(header)}, scale)


def table_6(scale: Scale) -> list[Cell]:
    """The concentration parameter of the Dirichlet partition."""
    return on_cifar("table6", lambda header: {"partition": f"dirichlet:{header}"}, scale)


def participation(scale: Scale) -> list[Cell]:
    """Clients whose rates follow from their classes, as in FedAU's paper, beside equal rates."""
    names = ("FedAvg", "FedUmf", "FedAU", "GenFed (1)", "GenFedUmf (1)", "GenFedAU (1)")
    base = column(scale, "Fashion-MNIST")
    by_class = {"participation": "classes", "participation_alpha": 0.1}
    return cross(
        supplied(map(paper_row, names), scale),
        [
            Column(f"{base.name}, equal rates", base.settings),
            Column(f"{base.name}, rates by class", {**base.settings, **by_class}),
        ],
    )


def supplement(scale: Scale) -> list[Cell]:
    """What the supplement, selection and server momentum contribute on all of Fashion-MNIST.

    Supplements come from the whole validation set, as in the preset, or from samples apart. At
    scale `gpu` a second column has the preset's larger network.
    """
    preset = layered("genfed.strong")
    known = [paper_row(name) for name in ("FedAvg", *(f"GenFed ({n})" for n in SCHEDULES))]
    ours = {row.name: row for row in OURS}
    alone = ours["server's samples alone"]
    rows = [ours["FedAvg, no supplement"], alone, *known, ours["GenFed, adaptive"], *MOMENTUM]
    base = column(scale, "Fashion-MNIST")
    shared = {
        **base.settings,
        "valid": preset["valid"],
        "validation_shared": preset["validation_shared"],
        **(whole() if scale == "gpu" else {}),
    }
    cells = cross(rows, [Column(base.name, shared)])
    if scale == "gpu":
        both = [row for row in rows if row.name in WITH_BOTH_NETWORKS]
        cells += cross(both, [Column(LARGER, {**shared, "model": preset["model"]})])
    apart = [replace(row, name=f"{row.name}, apart") for row in known[:2]]
    return cells + cross(apart, [Column(base.name, {**shared, **APART})])


def full(scale: Scale) -> list[Cell]:
    """The paper's setting, its own optimiser included, on all samples of every data set.

    At scale `gpu` steps are ten times as large and rounds a tenth.
    """
    ours = {row.name: row for row in (*OURS, *MOMENTUM)}
    names = ("FedAvg", "GenFed (1)", "GenFed (3)")
    controls = ("FedAvg, no supplement", "server's samples alone", "GenFed, adaptive")
    rows = [
        *(paper_row(name) for name in names),
        *(ours[name] for name in (*controls, "GenFed (1) around FedAvgM 0.8")),
        Row("Helix", "helix"),
    ]
    return cross(rows, _on_all_samples(scale), None if scale == "quick" else TABLES["table2"])


def conditions(scale: Scale) -> list[Cell]:
    """Columns of Tables 4 to 6 in the setting of `full`: attacks, numbers of clients, and
    Dirichlet parameters, for the main rows.
    """
    rows = [*map(paper_row, ("FedAvg", "GenFed (1)")), CONTROLS[0], Row("Helix", "helix")]
    base = next(one for one in _on_all_samples(scale) if one.name in ("CIFAR-10", "digits"))
    changes: dict[str, tuple[str, str, dict[str, Any]]] = {
        "no attack": ("table4", "no attack", {}),
        **{
            name: ("table4", name, {**ATTACKS[name], "attack_share": 0.2})
            for name in ("label flip", "IPM", "mimic")
        },
        **{f"{count} clients": ("table5", count, {"clients": int(count)}) for count in FEW_OR_MANY},
        **{
            f"alpha {alpha}": ("table6", alpha, {"partition": f"dirichlet:{alpha}"})
            for alpha in UNEQUAL_TO_EVEN
        },
    }
    return [
        replace(cell, paper={} if scale == "quick" else TABLES[table].at(cell.row, header))
        for name, (table, header, changed) in changes.items()
        for cell in cross(rows, [Column(name, {**base.settings, **changed})])
    ]


def _on_all_samples(scale: Scale) -> list[Column]:
    if scale == "quick":
        return columns(scale)
    shared = [
        replace(one, settings={**one.settings, "eval_clients": 0}) for one in columns("paper")
    ]
    return [_shortened(one) for one in shared] if scale == "gpu" else shared


def _shortened(column: Column) -> Column:
    """A tenth of the rounds with ten times the learning rate."""
    settings = column.settings
    length = {"lr": 10 * settings["lr"], "rounds": settings["rounds"] // 10}
    return replace(column, settings={**settings, **length, "eval_every": 2})


def attacks(scale: Scale) -> list[Cell]:
    """Every attack by 20 and 40 % of the clients against GenFed and the usual defences.

    Defences that ask for the share of attackers are told the true one, and in further rows the
    wrong one.
    """
    short = {**whole(), "train_samples": 10_000, "rounds": 60} if scale == "gpu" else {}
    base = {**column(scale, "Fashion-MNIST").settings, **APART, **short}
    attacked = [
        Column(f"{name} {share:.0%}", {**base, **attack, "attack_share": share})
        for name, attack in {**ATTACKS, **BACKDOOR}.items()
        for share in (0.2, 0.4)
    ]
    # IPM's attackers all send the same model, and a mimic that of another client. As printed,
    # GenFed may choose such copies together; the last two rows do not.
    once = {"genfed.twins": False}
    rows = [
        Row("FedAvg", "fedavg"),
        Row("GenFed", "genfed"),
        *(Row(defence, defence) for defence in (*DEFENCES, "bucketing+median")),
        Row("GenFed, no copies", "genfed", once),
        Row("GenFed, adaptive, no copies", "genfed", {**once, **ADAPTIVE}),
    ]
    columns = [Column("no attack", base), *attacked]
    mistaken = [Row(f"{defence}, wrong share", defence) for defence in KNOWING]
    return [
        *map(told, cross(rows, columns, by_row=True)),
        *(told(cell, wrong=True) for cell in cross(mistaken, columns, by_row=True)),
    ]
