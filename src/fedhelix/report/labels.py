"""Labels of figures: folded into lines, and given the room that they need."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

LABEL, HANDLE, PER_INCH = 36, 8, 11  # characters of a label, beside it, and of a legend per inch
TICK, MANY = 22, 10  # characters of a label at an axis, unless there are so many rows
WHOLE = 1.25  # times the width of a line: words up to this length are not broken
PER_LETTER = 0.06  # inches of a name at an axis, also below it and turned by 45 degrees
LINE = 1.2 / 72  # inches of a line, per point of its letters
LEGEND, TICKS, SMALL_TICKS = 9.0, 8.5, 7.5  # points
BETWEEN, MARGIN = 0.065, 0.1  # inches between two entries of a legend, and around it
ROW, ABOVE_AND_BELOW = 0.3, 1.1  # inches of a row, and of title and captions
POINT = 4.8  # points from the middle of a mark to its edge
# Where the name of a point may stand, in points from its middle, best first.
SIDES = ((4, 3), (-4, 3), (4, -3), (-4, -3), (0, 6), (0, -6), (6, 0), (-6, 0))
# Where the words on a level line may stand: how far along it, and in points from it, best first.
Place = tuple[float, tuple[float, str]]
ALONG, ABOVE, BELOW = np.linspace(0.02, 0.98, 25), (2, "bottom"), (-4, "top")
LEVEL = "level"  # marks such words
TALL = 1.5  # inches: a longer legend stands below the panels


def folded(text: str, width: int) -> str:
    """Text in lines of so many characters; a word that is a little longer stays whole."""
    longest = max(map(len, text.split()), default=0)
    if width < longest <= WHOLE * width:
        width = longest
    return textwrap.fill(text, width, break_on_hyphens=False)


def shortened(names: Sequence[str], most: int) -> list[str]:
    """Names of at most so many characters, with an ellipsis in the middle of longer ones; of more
    where two would be the same.
    """
    for width in range(most, max(map(len, names), default=0)):
        cut = [
            name if len(name) <= width else f"{name[: width // 2]}…{name[-((width - 1) // 2) :]}"
            for name in names
        ]
        if len(set(cut)) == len(set(names)):
            return cut
    return list(names)


def cell_in_points(axes: Axes, columns: float, rows: float) -> float:
    """The shorter side of a cell of a table in axes, once everything has its place."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    box = axes.get_window_extent()
    return 72 / figure.dpi * min(box.width / columns, box.height / rows)


def label_points(axes: Axes, places: Mapping[str, tuple[float, float]], colour: str) -> None:
    """Write its name beside each point, on the side where it covers least of other points and
    names. It comes last: what changes the axes afterwards would move points and names apart.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    half = POINT * figure.dpi / 72
    written: list[Bbox] = []
    marks = {
        name: Bbox.from_extents(*(centre - half), *(centre + half))
        for name, centre in zip(
            places, axes.transData.transform(list(places.values())), strict=True
        )
    }
    for name, place in places.items():
        text = axes.annotate(
            name, place, (0, 0), textcoords="offset points", fontsize=7, color=colour
        )
        others = [*written, *(box for other, box in marks.items() if other != name)]

        def beside(side: tuple[float, float], text: Annotation = text) -> Bbox:
            x, y = side
            text.set(
                position=side,
                ha="left" if x > 0 else "right" if x < 0 else "center",
                va="bottom" if y > 0 else "top" if y < 0 else "center",
            )
            return text.get_window_extent()

        boxes = {side: beside(side) for side in SIDES}
        best = min(SIDES, key=lambda side: sum(_shared(boxes[side], box) for box in others))
        written.append(beside(best))


def name_level(axes: Axes, words: str, height: float) -> None:
    """Name the level line at a height; `place_levels` finds where there is room."""
    axes.annotate(
        words,
        (ALONG[0], height),
        (0, ABOVE[0]),
        va="bottom",
        gid=LEVEL,
        textcoords="offset points",
        xycoords=("axes fraction", "data"),
        fontsize=8,
        zorder=5,  # above the curves, on a ground of its own
        bbox={"boxstyle": "square,pad=0.1", "color": axes.get_facecolor(), "alpha": 0.8},
    )


def place_levels(axes: Axes) -> None:
    """Move the names of level lines to where they cover least of curves and of each other. It comes
    last, as `label_points`.
    """
    named = [text for text in axes.texts if text.get_gid() == LEVEL]
    figure = axes.get_figure(root=True)
    if not named or figure is None:
        return
    figure.draw_without_rendering()
    panel, points = axes.get_window_extent(), _points_of_lines(axes)
    written: list[Bbox] = []
    for text in named:
        assert isinstance(text, Annotation)

        def at(place: Place, text: Annotation = text) -> Bbox:
            along, (offset, side) = place
            text.xy = (along, text.xy[1])
            text.set(position=(0, offset), va=side)
            return text.get_window_extent().padded(figure.dpi / 72)

        def covered(place: Place) -> float:
            box = at(place)
            outside = box.width * box.height - _shared(box, panel)
            return outside + box.count_contains(points) + sum(_shared(box, one) for one in written)

        best = min(itertools.product(ALONG, (ABOVE, BELOW)), key=covered)
        written.append(at(best))


def _points_of_lines(axes: Axes) -> np.ndarray:
    """The pixels that lines go through."""
    found = [np.empty((0, 2))]
    for line in axes.lines:
        corners = line.get_transform().transform(line.get_xydata())
        for one, other in itertools.pairwise(corners[np.isfinite(corners).all(1)]):
            found.append(np.linspace(one, other, 2 + int(np.abs(other - one).max())))
    return np.concatenate(found)


def _shared(one: Bbox, other: Bbox) -> float:
    """The area that two boxes share."""
    both = Bbox.intersection(one, other)
    return float(both.width * both.height) if both is not None else 0.0


def label_rows(axes: Axes, labels: Sequence[str]) -> None:
    """Label the rows of a panel, the first one on top."""
    axes.set_yticks(range(len(labels)), _row_labels(labels))
    axes.tick_params(axis="y", length=0, labelsize=_row_points(labels))


def rows_room(labels: Sequence[str], row: float = ROW) -> float:
    """The inches of a panel in whose rows these labels, and dots of at least a row, have room."""
    lines = max((text.count("\n") + 1 for text in _row_labels(labels)), default=1)
    return ABOVE_AND_BELOW + len(labels) * max(row, (lines + 0.3) * LINE * _row_points(labels))


def _row_labels(labels: Sequence[str]) -> list[str]:
    width = TICK if len(labels) < MANY else LABEL  # wider labels have fewer lines
    return [folded(label, width) for label in labels]


def _row_points(labels: Sequence[str]) -> float:
    return TICKS if len(labels) < MANY else SMALL_TICKS


def add_legend(figure: Figure, axes: Axes, columns: int, room: float) -> None:
    """A legend in up to so many columns; the sheet grows until it leaves the panels their room."""
    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    labels = [folded(label, LABEL) for label in labels]
    longest = max(len(line) for label in labels for line in label.split("\n"))
    fitting = int(PER_INCH * max(figure.get_figwidth() - 0.6, 1) / (longest + HANDLE))
    columns = max(1, min(columns, fitting, len(labels)))
    heights = [BETWEEN + LINE * LEGEND * (label.count("\n") + 1) for label in labels]
    height = MARGIN + max(map(sum, np.array_split(heights, columns)))  # as Matplotlib fills them
    figure.set_figheight(max(figure.get_figheight(), room + height))
    figure.legend(
        handles,
        labels,
        loc="outside upper center" if height <= TALL else "outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=LEGEND,
        handlelength=2.8,
    )
