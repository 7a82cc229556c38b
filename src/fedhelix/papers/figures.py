"""A study's report as a figure: lines over rounds, or a dot for each client."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedhelix.report.scales import make_logarithmic
from fedhelix.report.style import (
    COLOURS,
    DASHES,
    GREY,
    literal,
    percents,
    sheet,
    tidy,
    whole_rounds,
)
from fedhelix.store.records import is_number

Cells = Sequence[Mapping[str, Any]]
Panel = Callable[[Axes, Cells, str], None]  # draws the cells of one column
CURVE = "_curve"
MOST_BANDS = 4  # more of them hide each other
MANY = 6  # labelled points that a panel has room for
MOST_BESIDE = 2  # panels side by side, so that they fit on a page
LABELS = {
    "untuned": "before fine-tuning",
    "personal": "after fine-tuning",
    "personal_accuracy": "personal accuracy",
    "uplink_bytes": "bytes uploaded in a round",
}


def figure(report: Mapping[str, Any]) -> Figure | None:
    """One panel for each curve or vector and each column, or a single one of a measure across
    columns; None if the study has nothing to draw.
    """
    drawn = report.get("drawn") or [cell["row"] for cell in report["cells"]]
    done = [cell for cell in report["cells"] if cell["runs"] and cell["row"] in drawn]
    if report.get("across"):
        return _across(done, report["across"], report["title"])
    if report.get("against"):
        return _against(done, *report["against"])
    keys = list(dict.fromkeys(key for cell in done for key in cell))
    curves = [key for key in keys if key.endswith(CURVE)]
    vectors = [key for key in keys if _is_vector(done, key)]
    if not curves and not vectors:
        return None
    panels = [_lines(curve) for curve in curves] + ([_dots(vectors)] if vectors else [])
    columns = list(dict.fromkeys(cell["column"] for cell in done))
    drawings = [(panel, column) for panel in panels for column in columns]
    rows = len({cell["row"] for cell in done})
    wide = min(len(columns), MOST_BESIDE)
    tall = -(-len(drawings) // wide)
    # Lines need a legend above the panels; dots have the rows' names beside them.
    height = 3.2 if curves else 1.2 + 0.42 * rows
    legend = 0.17 * ((rows + 1) // 2) if curves else 0.0
    figure = sheet(5.2 * wide, height * tall + legend)
    grid = figure.subplots(tall, wide, squeeze=False)
    for axes, (panel, column) in zip(grid.flat, drawings, strict=False):
        panel(axes, [cell for cell in done if cell["column"] == column], column)
    for axes in grid.flat[len(drawings) :]:
        axes.set_axis_off()
    _add_legend(figure, 3 if vectors else 2 * wide)
    return figure


def trade_off(axes: Axes, points: Mapping[str, tuple[float, float]], cost: str, gain: str) -> None:
    """What every row gains by what it costs, as labelled points; Helix stands out.

    Labels of many points stand in a list beside the axes.
    """
    dearest = max(x for x, _ in points.values())
    line = {"arrowstyle": "-", "color": GREY, "linewidth": 0.5, "relpos": (0, 0.5)}
    for place, (row, (x, y)) in enumerate(sorted(points.items(), key=lambda point: point[1][1])):
        axes.plot(x, y, "o", color=COLOURS[row.startswith("Helix")], markersize=5)
        if len(points) > MANY:
            aside = (1.03, (place + 0.5) / len(points))
            axes.annotate(
                literal(row), (x, y), aside, textcoords="axes fraction", va="center", fontsize=7,
                arrowprops=line,
            )  # fmt: skip
        else:
            side, off = ("right", -5) if x > dearest / 2 else ("left", 5)
            axes.annotate(
                literal(row), (x, y), (off, 3), textcoords="offset points", ha=side, fontsize=8
            )
    axes.margins(x=0.12)
    axes.set(xlabel=cost, ylabel=gain)


def _against(cells: Cells, cost: str, measures: Sequence[str]) -> Figure:
    """Some measures against a cost, which may differ a lot: a panel for each, of the rows of the
    first column. A row with fewer seeds than others says so.
    """
    column = cells[0]["column"]
    cells = [cell for cell in cells if cell["column"] == column]
    most = max(cell["runs"] for cell in cells)
    figure = sheet(5.2 * len(measures), 4.0)
    for axes, measure in zip(
        figure.subplots(1, len(measures), squeeze=False).flat, measures, strict=True
    ):
        points = {
            _with_seeds(cell, most): (cell[cost]["mean"], cell[measure]["mean"])
            for cell in cells
            if cell[measure]["mean"] is not None
        }
        trade_off(axes, points, cost, f"{measure} in %")
        tidy(axes, f"{column}: {measure}")
        make_logarithmic(axes)
    return figure


def _with_seeds(cell: Mapping[str, Any], most: int) -> str:
    """The name of a row, and how many seeds it has if others have more."""
    runs = cell["runs"]
    return cell["row"] if runs == most else f"{cell['row']} ({runs} seed{'s' * (runs > 1)})"


def _across(cells: Cells, measure: str, title: str) -> Figure:
    """Each row from column to column, with standard errors: lines if the columns are numbers,
    otherwise points side by side.
    """
    columns = list(dict.fromkeys(cell["column"] for cell in cells))
    rows = list(dict.fromkeys(cell["row"] for cell in cells))
    numeric = all(column.replace(".", "", 1).isdigit() for column in columns)
    figure = sheet(6.4, 3.8)
    axes = figure.subplots()
    for index, row in enumerate(rows):
        known = [cell for cell in cells if cell["row"] == row and cell[measure]["mean"] is not None]
        shift = 0 if numeric else 0.6 * ((index + 0.5) / len(rows) - 0.5)
        axes.errorbar(
            [columns.index(cell["column"]) + shift for cell in known],
            [cell[measure]["mean"] for cell in known],
            [cell[measure]["se"] or 0 for cell in known],
            color=COLOURS[index % len(COLOURS)],
            linestyle=DASHES[index % len(DASHES)] if numeric else "none",
            linewidth=1.6,
            marker="o",
            markersize=4,
            capsize=3,
            label=literal(row),
        )
    tidy(axes, literal(title))
    axes.set_xticks(range(len(columns)), [literal(column) for column in columns])
    axes.set(ylabel=measure)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    return figure


def _is_vector(cells: Cells, key: str) -> bool:
    by_seed = cells[0].get(key)
    return isinstance(by_seed, list) and all(isinstance(values, list) for values in by_seed)


def _add_legend(figure: Figure, columns: int) -> None:
    """One legend for all panels."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        lines, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside upper center",
        ncols=columns,
        frameon=False,
        fontsize=9,
    )


def _lines(curve: str) -> Panel:
    """A line for each row, the mean of its seeds; few rows also get a band from the lowest to the
    highest seed.
    """
    name = curve.removesuffix(CURVE)

    def draw(axes: Axes, cells: Cells, column: str) -> None:
        for index, cell in enumerate(cells):
            values = np.array(cell[curve]["by_seed"], dtype=float)
            hours = cell[curve].get("hours")  # of every seed; the figure has their mean
            x = cell[curve]["rounds"] if hours is None else np.mean(hours, 0)
            colour, dash = COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)]
            label = literal(cell["row"])
            axes.plot(x, values.mean(0), label=label, linewidth=1.6, color=colour, linestyle=dash)
            if len(cells) <= MOST_BANDS:
                lowest, highest = values.min(0), values.max(0)
                axes.fill_between(x, lowest, highest, color=colour, alpha=0.15, linewidth=0)
        tidy(axes, literal(column))
        by_time = any("hours" in cell[curve] for cell in cells)
        axes.set(xlabel="simulated hours" if by_time else "round", ylabel=LABELS.get(name, name))
        if not by_time:
            whole_rounds(axes)
        if name.endswith("accuracy"):
            percents(axes.yaxis)
        else:
            axes.set_ylim(bottom=0)

    return draw


def _dots(vectors: Sequence[str]) -> Panel:
    """A line of dots for each row and vector, one dot for each client of each seed."""

    def draw(axes: Axes, cells: Cells, column: str) -> None:
        for index, name in enumerate(vectors):
            shift = (index - (len(vectors) - 1) / 2) * 0.4
            for row, cell in enumerate(cells):
                values = np.sort([v for seed in cell[name] for v in seed if is_number(v)])
                axes.scatter(
                    values,
                    row + shift + np.linspace(0.15, -0.15, len(values)),
                    s=13,
                    color=COLOURS[index],
                    marker="o^sD"[index],
                    linewidths=0,
                    alpha=0.7,
                    label=LABELS.get(name, name) if row == 0 else None,
                )
        tidy(axes, literal(column))
        axes.grid(False, axis="y")
        axes.set_ylim(len(cells) - 0.5, -0.5)
        names = [textwrap.fill(literal(cell["row"]), 20) for cell in cells]
        axes.set_yticks(range(len(cells)), names)
        axes.set(xlabel="accuracy of each client")
        percents(axes.xaxis)

    return draw
