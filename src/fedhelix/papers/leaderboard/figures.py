"""Figures of the leaderboard: the diagram of critical differences, and accuracy against cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from fedhelix.papers.figures import trade_off
from fedhelix.papers.leaderboard.ranks import indistinct
from fedhelix.report.style import COLOURS, GREY, literal, sheet, tidy

COSTS = {"bytes": "traffic in MiB", "seconds": "seconds"}
BASELINE = "FedAvg"


def draw(report: Mapping[str, Any]) -> dict[str, Figure]:
    """The figures by name; none before a setting is complete."""
    if report["ranking"] is None:
        return {}
    figures = {"ranks": critical_differences(report["ranking"])}
    return figures | {name: trade_offs(report, measure) for name, measure in COSTS.items()}


def critical_differences(ranking: Mapping[str, Any]) -> Figure:
    """Mean ranks with intervals, best first; bars join methods that Nemenyi's test cannot tell
    apart.
    """
    rows = sorted(ranking["rows"].items(), key=lambda row: row[1]["rank"])
    ranks = [row["rank"] for _, row in rows]
    difference = ranking["critical_difference"]
    bars = indistinct(ranks, difference) if difference is not None else []
    figure = sheet(6.4, 1.2 + 0.26 * len(rows))
    axes = figure.subplots()
    for at, (_, row) in enumerate(rows):
        axes.plot(row["interval"], [at, at], color=COLOURS[0], linewidth=1.4)
        axes.plot(row["rank"], at, "o", color=COLOURS[0], markersize=5)
    edge = max(row["interval"][1] for _, row in rows)
    for number, (first, last) in enumerate(bars):
        place = edge + 0.3 + 0.25 * number
        axes.plot([place, place], [first - 0.2, last + 0.2], color=GREY, linewidth=3)
    title = f"Mean rank over {ranking['settings']} settings"
    if difference is not None:
        title += f"; critical difference {difference:.2f}"
    tidy(axes, title)
    axes.set_yticks(range(len(rows)), [literal(name) for name, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set(xlabel="rank (1 is best), 95 % interval; grey bars: not told apart")
    return figure


def relative_costs(report: Mapping[str, Any], measure: str) -> dict[str, tuple[float, float]]:
    """Of every method the cost, in times FedAvg's, and the mean accuracy, over the settings that
    all methods have.
    """
    by_row: dict[str, dict[str, tuple[float, float]]] = {}
    for cell in report["cells"]:
        cost, accuracy = cell[measure]["mean"], cell["accuracy"]["mean"]
        if cost is not None and accuracy is not None:
            by_row.setdefault(cell["row"], {})[cell["column"]] = (cost, accuracy)
    base = by_row.get(BASELINE, {})
    everywhere = [
        column
        for column, (cost, _) in base.items()
        if cost > 0 and all(column in cells for cells in by_row.values())
    ]
    costs: dict[str, tuple[float, float]] = {}
    for row, cells in by_row.items():
        ratios = [cells[column][0] / base[column][0] for column in everywhere]
        if ratios:
            cost = math.exp(statistics.fmean(map(math.log, ratios))) if min(ratios) > 0 else 0.0
            costs[row] = cost, statistics.fmean(cells[column][1] for column in everywhere)
    return costs


def trade_offs(report: Mapping[str, Any], measure: str) -> Figure:
    """Mean accuracy against cost, one labelled point for each method."""
    figure, cost = sheet(6.4, 4.2), measure.removesuffix(" in MiB")
    axes = figure.subplots()
    trade_off(
        axes,
        relative_costs(report, measure),
        f"{cost}, times {BASELINE}'s (geometric mean)",
        "accuracy in %, mean over settings",
    )
    tidy(axes, f"Accuracy against {cost}")
    axes.set_xscale("symlog", linthresh=0.05)
    return figure
