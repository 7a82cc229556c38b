"""A study's report as a picture: what happened round by round as lines, what each client has in the
end as dots.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedhelix.report.style import COLOURS, DASHES, literal, percent, sheet, tidy
from fedhelix.store.records import is_number

Cells = Sequence[Mapping[str, Any]]
CURVE = "_curve"
BANDS = 4  # more of them hide each other
BROADEST = 2  # panels side by side, so that a page can hold them
WORDS = {
    "untuned": "before fine-tuning",
    "personal": "after fine-tuning",
    "personal_accuracy": "personal accuracy",
    "uplink_bytes": "bytes uploaded in a round",
}


def figure(report: Mapping[str, Any]) -> Figure | None:
    """A panel for each kind of curve or vector and each column of the table, or one of a measure
    across columns.

    None where a study has nothing of the kind.
    """
    drawn = report.get("drawn") or [cell["row"] for cell in report["cells"]]
    done = [cell for cell in report["cells"] if cell["runs"] and cell["row"] in drawn]
    if report.get("across"):
        return _across(done, report["across"], report["title"])
    columns = list(dict.fromkeys(cell["column"] for cell in done))
    kinds = list(dict.fromkeys(key for cell in done for key in cell if key.endswith(CURVE)))
    vectors = [
        key for key in dict.fromkeys(key for cell in done for key in cell) if _is_vector(done, key)
    ]
    panels: list[Callable[[Axes, Cells, str], None]] = [_lines(kind) for kind in kinds]
    panels += [_dots(vectors)] if vectors else []
    if not panels:
        return None
    rows = len({cell["row"] for cell in done})
    # Names beside dots need no legend; lines have one below each other on top.
    legend = 0.0 if not kinds else 0.17 * ((rows + 1) // 2)
    broad = min(len(columns), BROADEST)
    drawings = [(draw, column) for draw in panels for column in columns]
    tall = -(-len(drawings) // broad)
    figure = sheet(5.2 * broad, (3.2 if kinds else 1.2 + 0.42 * rows) * tall + legend)
    grid = figure.subplots(tall, broad, squeeze=False)
    for axes, (draw, column) in zip(grid.flat, drawings, strict=False):
        draw(axes, [cell for cell in done if cell["column"] == column], column)
    for axes in grid.flat[len(drawings) :]:
        axes.set_axis_off()
    handles = {
        label: handle for axes in grid.flat for handle, label in zip(*_legend(axes), strict=True)
    }
    places = 3 if vectors else 2 * broad
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside upper center",
        ncols=places,
        frameon=False,
        fontsize=9,
    )
    return figure


def _across(cells: Cells, measure: str, title: str) -> Figure:
    """Each row from column to column, with standard errors: a line where columns are numbers, else
    side by side.
    """
    columns = list(dict.fromkeys(cell["column"] for cell in cells))
    figure = sheet(6.4, 3.8)
    axes = figure.subplots()
    ordered = all(column.replace(".", "", 1).isdigit() for column in columns)
    rows = list(dict.fromkeys(cell["row"] for cell in cells))
    for place, row in enumerate(rows):
        known = [cell for cell in cells if cell["row"] == row and cell[measure]["mean"] is not None]
        dash = DASHES[place % len(DASHES)] if ordered else "none"
        aside = 0 if ordered else 0.6 * ((place + 0.5) / len(rows) - 0.5)
        axes.errorbar(
            [columns.index(cell["column"]) + aside for cell in known],
            [cell[measure]["mean"] for cell in known],
            [cell[measure]["se"] or 0 for cell in known],
            color=COLOURS[place % len(COLOURS)], linestyle=dash, linewidth=1.6, marker="o", markersize=4, capsize=3,
            label=literal(row),
        )  # fmt: skip
    tidy(axes, literal(title))
    axes.set_xticks(range(len(columns)), [literal(column) for column in columns])
    axes.set(ylabel=measure)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    return figure


def _is_vector(cells: Cells, key: str) -> bool:
    found = cells[0].get(key)
    return isinstance(found, list) and all(isinstance(values, list) for values in found)


def _legend(axes: Axes) -> tuple[list[Any], list[Any]]:
    return axes.get_legend_handles_labels()


def _lines(kind: str) -> Callable[[Axes, Cells, str], None]:
    """A line for each row: the mean of its seeds; as long as they are few, in a band from the
    lowest to the highest.
    """
    name = kind.removesuffix(CURVE)

    def draw(axes: Axes, cells: Cells, column: str) -> None:
        for place, cell in enumerate(cells):
            rounds, values = cell[kind]["rounds"], np.array(cell[kind]["by_seed"], dtype=float)
            look = {
                "color": COLOURS[place % len(COLOURS)],
                "linestyle": DASHES[place % len(DASHES)],
            }
            axes.plot(rounds, values.mean(0), label=literal(cell["row"]), linewidth=1.6, **look)
            if len(cells) <= BANDS:
                axes.fill_between(
                    rounds,
                    values.min(0),
                    values.max(0),
                    color=look["color"],
                    alpha=0.15,
                    linewidth=0,
                )
        tidy(axes, literal(column))
        axes.set(xlabel="round", ylabel=WORDS.get(name, name))
        if name.endswith("accuracy"):
            axes.yaxis.set_major_formatter(percent)
        else:
            axes.set_ylim(bottom=0)

    return draw


def _dots(kinds: Sequence[str]) -> Callable[[Axes, Cells, str], None]:
    """A row for each row, and in it a dot for each client of each seed."""

    def draw(axes: Axes, cells: Cells, column: str) -> None:
        for place, kind in enumerate(kinds):
            for row, cell in enumerate(cells):
                values = np.sort(
                    [value for seed in cell[kind] for value in seed if is_number(value)]
                )
                height = (
                    row
                    + (place - (len(kinds) - 1) / 2) * 0.4
                    + np.linspace(0.15, -0.15, len(values))
                )
                axes.scatter(values, height, s=13, color=COLOURS[place], marker="o^sD"[place], linewidths=0, alpha=0.7,
                             label=WORDS.get(kind, kind) if not row else None)  # fmt: skip
        tidy(axes, literal(column))
        axes.grid(False, axis="y")
        axes.set_ylim(len(cells) - 0.5, -0.5)
        axes.set_yticks(
            range(len(cells)), [textwrap.fill(literal(cell["row"]), 20) for cell in cells]
        )
        axes.set(xlabel="accuracy of each client")
        axes.xaxis.set_major_formatter(percent)

    return draw
