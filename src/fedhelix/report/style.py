"""What all figures share: colours that everybody can tell apart, sizes, and how they are saved."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.figure import Figure
from matplotlib.ticker import Formatter, MaxNLocator

from fedhelix.core.errors import UserError
from fedhelix.core.files import writable_file, write_atomically

# The colour-blind safe palette of Okabe and Ito, without its yellow, which is hard to see on white.
# Seven colours and six dashes repeat together only after 42 methods; neighbours differ in both.
# The last one is not quite black: SVG files name no fill for black, so a page could not change it.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#111111")
DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 1.5)),
    (0, (1.2, 1.2)),
    (0, (6, 1.5, 1.2, 1.5)),
    (0, (2.5, 3)),
    (0, (6, 1.5, 1.2, 1.5, 1.2, 1.5)),
)
GREY = "#666666"
PALE = "#b8b8b8"
ALARM = COLOURS[1]  # attackers, always with a shape of their own too
HALF_PAGE = (4.8, 3.4)
DOTS_PER_INCH = 200
MOST_DECIMALS = 6
ROOM = 0.02  # of an axis, beyond 0 and 100 %
FORMATS = (".png", ".svg", ".pdf")
# All threads of a process share the settings, fonts and caches of Matplotlib: one draws at a time.
DRAWING = threading.RLock()


class Sheet(Figure):
    """A figure that a notebook shows where it is the last value of a cell."""

    def _repr_png_(self) -> bytes:
        return content(self, "png")


def sheet(width: float = HALF_PAGE[0], height: float = HALF_PAGE[1]) -> Figure:
    """An empty figure without a display, so that threads can draw it too, one at a time."""
    return Sheet(figsize=(width, height), layout="constrained")


def tidy(axes: Axes, title: str, above: float | None = None) -> None:
    """The look that all panels have in common; so many points may be between panel and title."""
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", pad=above)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8.5)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
    axes.grid(True, color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)


def whole_rounds(axes: Axes) -> None:
    """Whole numbers below the axis of the rounds, also of a short run."""
    steps = (1, 2, 2.5, 5, 10)
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=steps, integer=True, min_n_ticks=1))


def percents(axis: Axis) -> None:
    """Shares at an axis that ends at 0 and 100 %, with the room that a line or a dot needs; to call
    once everything is drawn.
    """
    axis.set_major_formatter(Percent())
    low, high = axis.get_view_interval()
    room = ROOM * (high - low)
    limits = max(low, -room), min(high, 1 + room)
    (axis.axes.set_xlim if isinstance(axis, XAxis) else axis.axes.set_ylim)(limits)


class Percent(Formatter):
    """Shares at an axis, with the decimals that its ticks need."""

    def __call__(self, value: float, pos: int | None = None) -> str:
        """The label of a single tick."""
        return self.format_ticks([value])[0]

    def format_ticks(self, values: Iterable[float]) -> list[str]:
        """The labels of all ticks."""
        shares = 100 * np.asarray(list(values))
        exact = (n for n in range(MOST_DECIMALS) if np.allclose(shares, shares.round(n), 0, 1e-9))
        decimals = next(exact, MOST_DECIMALS)
        return [f"{share:.{decimals}f} %" for share in shares]


def literal(text: str) -> str:
    """Text with escaped dollar signs, which matplotlib would read as formulas."""
    return text.replace("$", r"\$")


def content(figure: Figure, form: str) -> bytes:
    """A figure as the bytes of a file: the same figure gives the same bytes."""
    stream = io.BytesIO()
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with DRAWING, matplotlib.rc_context({"svg.hashsalt": "fedhelix"}):
        figure.savefig(stream, format=form, dpi=DOTS_PER_INCH, metadata=dates.get(form))
    return stream.getvalue()


def save(figure: Figure, path: Path | str) -> None:
    """Write a figure; the path's suffix chooses the format."""
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise UserError(
            f"'{target}' must end in {', '.join(FORMATS)}, "
            "so that it is clear which format to write."
        )
    write(target, content(figure, target.suffix[1:].lower()))


def write(path: Path, whole: bytes) -> None:
    """Write a file atomically, or raise an error that says why not."""
    writable_file(path)
    try:
        write_atomically(path, whole)
    except OSError as problem:
        raise UserError(f"'{path}' cannot be written: {problem.strerror}.") from None
