"""All figures of a set of runs, each with a sentence on how to read it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from fedhelix.core.errors import UserError
from fedhelix.report import diagnostics, plots
from fedhelix.report.results import Groups, Result, grouped
from fedhelix.report.style import save
from fedhelix.store import RunFolder

MOST_CLIENTS, MOST_CLASSES = 200, 100  # a bubble chart of more shows nothing


@dataclass(frozen=True)
class Inside:
    """A figure of one run: what it draws of a method's metadata, and how to read it."""

    draw: Callable[[Result], Figure | None]
    title: str
    caption: str
    key: str  # of the metadata that has to be there; any number where it is empty


INSIDE = {
    "fitness": Inside(
        diagnostics.fitness,
        "Fitness and selection",
        "Each dot is an uploaded model, scored on the server's validation set. "
        "Filled ones were selected; the lower panel counts how many.",
        "fitness",
    ),
    "units": Inside(
        diagnostics.units,
        "Layers that were sent",
        "The stronger the colour, the more clients of the round sent this layer.",
        "units",
    ),
    "clusters": Inside(
        diagnostics.clusters,
        "Clusters of clients",
        "Each point is a client; clients with similar data lie close to each other.",
        "positions",
    ),
    "distances": Inside(
        diagnostics.distances,
        "Generated models",
        "A generated model at zero distance from an upload would be a copy; one much "
        "further away than the uploads lie from each other would be none of their kind.",
        "distances",
    ),
    "numbers": Inside(
        diagnostics.numbers, "Recorded by the method", "Every number that it records per round.", ""
    ),
}

# Figures of all methods together: file name, drawing function, title and how to read it.
BY_COST: tuple[tuple[str, plots.Draw, str, str], ...] = (
    ("rounds", plots.draw_rounds, "by round", "Higher and further left is better."),
    (
        "bytes",
        plots.draw_uploads,
        "by bytes",
        "What a given traffic buys; all clients' uploads together.",
    ),
    (
        "seconds",
        plots.draw_seconds,
        "by time",
        "Seconds of all rounds; in a simulation one computer works for all clients.",
    ),
)


@dataclass(frozen=True, eq=False)
class ReportFigure:
    """One figure: its file name, its title, and a caption that says how to read it."""

    name: str
    title: str
    caption: str
    figure: Figure


def figures(runs: Sequence[RunFolder | Result], overview: bool = True) -> Iterator[ReportFigure]:
    """Every figure for which there are data; the overview repeats what others show one by one."""
    groups = grouped(runs)
    if overview:
        caption = "How fast each method learns, what it sends for it, and how each client fares."
        yield ReportFigure("overview", "Overview", caption, plots.overview(groups))
    yield from _side_by_side(groups)
    yield from _partitions(groups)
    for label, results in groups.items():
        first = min(results, key=lambda result: result.seed)
        for name, one in INSIDE.items():
            if (figure := one.draw(first)) is not None:
                title = f"{one.title}: {label}, seed {first.seed}"
                yield ReportFigure(f"{name}-{_slug(label)}", title, one.caption, figure)


def write_all(runs: Sequence[RunFolder | Result], out: Path, form: str) -> list[Path]:
    """Write every figure into a folder."""
    if form not in ("png", "svg", "pdf"):
        raise UserError(f"--format must be png, svg or pdf, not '{form}'.")
    written = []
    for figure in figures(runs):
        written.append(out / f"{figure.name}.{form}")
        save(figure.figure, written[-1])
    return written


def _side_by_side(groups: Groups) -> Iterator[ReportFigure]:
    drawn = [curve for curve in plots.curves(groups) if len(curve.mean)]
    if drawn:
        metric = plots.metric_name(drawn)
        if any(len(curve.hours) for curve in drawn):
            yield ReportFigure(
                f"{metric}-hours",
                f"{metric.capitalize()} by simulated time",
                "What the devices of the simulation need, whatever machine simulates them.",
                plots.single(plots.draw_hours, drawn),
            )
        for name, draw, by, caption in BY_COST:
            title = f"{metric.capitalize()} {by}"
            yield ReportFigure(f"{metric}-{name}", title, caption, plots.single(draw, drawn))
        if any(len(curve.clients) for curve in drawn):
            yield ReportFigure(
                "clients",
                "Client by client",
                "Each dot is a client of the last evaluation with its own model on its own test "
                "data; "
                "dots in full colour lie at or below the 10th percentile of a method's clients.",
                plots.single(plots.draw_clients, drawn),
            )
    caption = "Every value counts in its own type; refused uploads count too."
    yield ReportFigure("traffic", "Traffic", caption, plots.bytes_plot(groups))


def _partitions(groups: Groups) -> Iterator[ReportFigure]:
    """One bubble chart for the first run; other methods of a comparison have the same clients."""
    result = next(iter(groups.values()))[0]
    try:
        counts = np.asarray(result.census.get("classes", []), dtype=int)
    except (ValueError, TypeError, OverflowError):
        return
    listed = result.census.get("class_names")
    class_names = list(map(str, listed)) if isinstance(listed, list) else []
    if counts.ndim == 2 and 0 < len(counts) <= MOST_CLIENTS and 0 < counts.shape[1] <= MOST_CLASSES:
        yield ReportFigure(
            "partition",
            f"Samples by client and class, seed {result.seed}",
            "A bubble's area is the number of training samples of one class that a client has.",
            diagnostics.partition(
                np.clip(counts, 0, None), result.attackers, result.names, class_names
            ),
        )


def _slug(text: str) -> str:
    """Text as part of a file name that neither leaves its folder nor starts with a dot."""
    return re.sub(r"[^\w+=.-]+", "-", text).strip("-.")[:80] or "run"
