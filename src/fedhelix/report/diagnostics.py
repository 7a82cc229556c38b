"""Figures of one run: who has what, who was selected, what was sent, what was generated."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedhelix.core.errors import UserError
from fedhelix.report.labels import PER_LETTER, cell_in_points, label_points, shortened
from fedhelix.report.results import Result
from fedhelix.report.style import (
    ALARM,
    COLOURS,
    GREY,
    PALE,
    Percent,
    literal,
    percents,
    save,
    sheet,
    tidy,
    whole_rounds,
)
from fedhelix.store.records import is_number

MOST_TICKS = 25
MOST_MARKS = 4000  # of a scatter plot; of more, only some rounds are drawn
MOST_NAMES = 60  # of clients beside their points
LONGEST = 16  # letters of a client's name below a figure
MOST_NUMBERS = 6  # that a method records, drawn below each other
# From nothing to blue, so that the background may be white or dark.
INK = LinearSegmentedColormap.from_list("ink", [(*to_rgb(COLOURS[0]), 0), to_rgb(COLOURS[0])])

# Numbers that methods record, in words.
RECORDED = {
    "mask_density": "Fisher mask density",
    "gamma": "units in a gene (γ)",
    "noise": "noise",
    "clip": "clipping bound",
    "own_heads": "share of own heads that is kept",
}
IN_OTHER_FIGURES = ("rho", "other_bytes")
MARKERS = "osD^vPXph*"


def partition_plot(counts: np.ndarray, path: Path | str) -> None:
    """Draw who has what: a bubble per client and class whose area is the number of samples."""
    save(partition(counts), path)


def partition(
    counts: Any,
    attackers: frozenset[int] = frozenset(),
    names: Sequence[str] = (),
    class_names: Sequence[str] = (),
) -> Figure:
    """A bubble per client and class, by name where they have some; attackers in orange."""
    counts = np.asarray(counts)
    if counts.ndim != 2 or not counts.size or not (counts >= 0).all():
        raise UserError(
            "counts must be a table of sample numbers, clients × classes, "
            f"but its shape is {counts.shape}."
        )
    clients, classes = counts.shape
    width, height = float(np.clip(0.26 * clients, 3.5, 13)), float(np.clip(0.26 * classes, 1.5, 8))
    steps = -(-clients // MOST_TICKS), -(-classes // MOST_TICKS)
    below, beside = (
        list(map(literal, shortened(called, LONGEST)))[::step] if len(called) == count else []
        for called, count, step in ((names, clients, steps[0]), (class_names, classes, steps[1]))
    )
    room = [PER_LETTER * max(map(len, called), default=0) for called in (beside, below)]
    figure = sheet(width + 0.9 + room[0], height + 1.0 + room[1])
    axes = figure.subplots()
    axes.set(xlim=(-0.7, clients - 0.3), xlabel="client")
    axes.set(ylim=(-0.7, classes - 0.3), ylabel="class")
    tidy(axes, "Samples by client and class")
    axes.set_title(f"largest bubble: {counts.max()} samples", loc="right", fontsize=8, color=GREY)
    axes.grid(True, color="#eeeeee")
    axes.set_xticks(range(0, clients, steps[0]), below or None)
    axes.set_yticks(range(0, classes, steps[1]), beside or None)
    axes.tick_params(axis="x", labelrotation=45 if below else 0)
    client, label = np.nonzero(counts)
    # The largest bubble just fits its cell; `s` is an area in square points.
    cell = cell_in_points(axes, clients + 0.4, classes + 0.4)
    area = (0.95 * cell) ** 2 * counts[client, label] / max(counts.max(), 1)
    colour = [ALARM if one in attackers else COLOURS[0] for one in client]
    axes.scatter(client, label, s=area, color=colour, linewidths=0)
    if malicious := sorted(attackers & set(range(clients))):
        axes.scatter(
            malicious, [1.0] * len(malicious), transform=axes.get_xaxis_transform(), marker="x",
            s=22, color=ALARM, clip_on=False,
        )  # fmt: skip
        axes.set_xlabel("client   (× and orange: attacker)")
    return figure


def fitness(result: Result) -> Figure | None:
    """GenFed: the fitness of every returned model, the selected ones filled, and their number."""
    scored = [
        (round, int(client), float(value))
        for round, scores in result.metadata("fitness")
        if isinstance(scores, Mapping)
        for client, value in scores.items()
        if re.fullmatch(r"\d{1,9}", str(client)) and is_number(value)
    ]
    if not scored:
        return None
    scored = _thinned(scored)
    figure = sheet(height=4.0)
    above, below = figure.subplots(2, 1, height_ratios=(3, 1), sharex=True)
    _draw_fitness(above, result, scored)
    several = len(above.get_legend_handles_labels()[1]) > 3  # too wide for a row on a phone
    figure.legend(
        loc="outside upper center", ncols=2 if several else 3, fontsize=8.5, frameon=False,
        handletextpad=0.1,
    )  # fmt: skip
    rho = _numbers(result, "rho")
    if rho:
        below.step(*zip(*rho, strict=True), where="mid", color=COLOURS[0], linewidth=1.6)
        below.set_ylim(0, max(value for _, value in rho) + 0.6)
    below.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    tidy(below, "")
    below.set(xlabel="round", ylabel="chosen\n(ρ)")
    whole_rounds(below)
    return figure


def _thinned(scored: list[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
    """All marks, or those of every n-th round where there are too many to draw."""
    step = -(-len(scored) // MOST_MARKS)
    rounds = sorted({round for round, *_ in scored})
    kept = set(rounds[::-step])  # counted from the last one, which is drawn in any case
    return [mark for mark in scored if mark[0] in kept][-MOST_MARKS:]


def _draw_fitness(axes: Axes, result: Result, scored: list[tuple[int, int, float]]) -> None:
    """A mark for every scored model: selected or not, attacker or not."""
    selected = {
        round: clients
        for round, clients in result.metadata("selected")
        if isinstance(clients, list)
    }
    is_in = np.array([client in selected.get(round, ()) for round, client, _ in scored])
    is_bad = np.array([client in result.attackers for _, client, _ in scored])
    x = np.array([round for round, _, _ in scored])
    y = np.array([value for *_, value in scored])
    hollow = {"s": 13, "facecolors": "none", "edgecolors": PALE, "linewidths": 0.8}
    cross = {"s": 17, "marker": "x", "color": ALARM, "linewidths": 1.0}
    filled = {"s": 16, "color": COLOURS[0], "linewidths": 0}
    filled_cross = {"s": 30, "marker": "X", "color": ALARM, "linewidths": 0}
    marks: list[tuple[np.ndarray, str, dict[str, Any]]] = [
        (~is_in & ~is_bad, "left out", hollow),
        (~is_in & is_bad, "attacker, left out", cross),
        (is_in & ~is_bad, "chosen", filled),
        (is_in & is_bad, "attacker, chosen", filled_cross),
    ]
    for part, label, mark in marks:
        if part.any():
            axes.scatter(x[part], y[part], label=label, **mark)
    tidy(axes, "Fitness and selection")
    axes.set(ylabel="fitness: metric on the\nserver's validation set")
    if (result.main_metric() or "").endswith("accuracy"):
        percents(axes.yaxis)


def units(result: Result) -> Figure | None:
    """GENE-FL: the share of a round's clients that sent each unit, as a heat map."""
    sent = [
        (round, table)
        for round, table in result.metadata("units")
        if isinstance(table, Mapping) and table
    ]
    ordered = sorted(
        {str(name) for _, table in sent for units in table.values() for name in _listed(units)},
        key=_natural,
    )
    if not ordered:
        return None
    rounds = [round for round, _ in sent]
    shares = np.zeros((len(ordered), len(rounds)))
    place = {name: row for row, name in enumerate(ordered)}
    for column, (_, table) in enumerate(sent):
        for listed in table.values():
            for name in _listed(listed):
                shares[place[str(name)], column] += 1 / len(table)
    figure = sheet(height=float(np.clip(1.5 + 0.2 * len(ordered), 2.4, 8)))
    axes = figure.subplots()
    image = axes.imshow(
        shares,
        aspect="auto",
        cmap=INK,
        vmin=0,
        vmax=1,
        interpolation="nearest",
        extent=(rounds[0] - 0.5, rounds[-1] + 0.5, len(ordered) - 0.5, -0.5),
    )
    bar = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.05, format=Percent())
    bar.ax.tick_params(labelsize=8)
    bar.set_label("of the round's clients sent it", fontsize=8)
    tidy(axes, "Layers that were sent")
    axes.grid(False)
    axes.set_yticks(
        range(len(ordered)),
        [literal(name[-40:]) for name in ordered],
        fontsize=8 if len(ordered) < 25 else 6,
    )
    axes.set(xlabel="round")
    whole_rounds(axes)
    return figure


def clusters(result: Result) -> Figure | None:
    """GENE-FL: the clients by their first two components, a colour and a shape per cluster."""
    places = next(iter(_tables(result, "positions")), {})
    cluster_of: dict[str, Any] = {}
    for table in _tables(result, "clusters"):
        cluster_of |= table
    known = {
        str(client): (float(xy[0]), float(xy[1]))
        for client, xy in places.items()
        if isinstance(xy, list) and len(xy) == 2 and all(map(is_number, xy))
    }
    if not known:
        return None
    figure = sheet()
    axes = figure.subplots()
    groups = sorted({str(cluster_of.get(client, "none")) for client in known})
    for place, group in enumerate(groups):
        members = [client for client in known if str(cluster_of.get(client, "none")) == group]
        x, y = zip(*(known[client] for client in members), strict=True)
        axes.scatter(
            x,
            y,
            s=42,
            marker=MARKERS[place % len(MARKERS)],
            color=COLOURS[place % len(COLOURS)],
            label=f"cluster {literal(group)}",
            linewidths=0,
        )
    bad = [known[str(client)] for client in sorted(result.attackers) if str(client) in known]
    if bad:
        x, y = zip(*bad, strict=True)
        axes.scatter(x, y, s=110, marker="x", color=ALARM, label="attacker", linewidths=1.2)
    tidy(axes, "Clusters of clients")
    axes.set(xlabel="first component", ylabel="second component")
    figure.legend(
        loc="outside upper center", ncols=3, fontsize=8.5, frameon=False, handletextpad=0.1
    )
    axes.margins(0.12)
    if len(known) <= MOST_NAMES:
        label_points(axes, {literal(client): place for client, place in known.items()}, GREY)
    return figure


def numbers(result: Result) -> Figure | None:
    """Every number that the method records in each round, below each other."""
    keys = dict.fromkeys(str(key) for _, table in result.metadata() for key in table)
    known = {key: _numbers(result, key) for key in keys if key not in IN_OTHER_FIGURES}
    drawn = {key: series for key, series in known.items() if len(series) > 1}
    drawn = dict(list(drawn.items())[:MOST_NUMBERS])
    if not drawn:
        return None
    figure = sheet(height=1.1 + 1.1 * len(drawn))
    panels = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
    for place, (axes, (key, series)) in enumerate(zip(panels, drawn.items(), strict=True)):
        axes.plot(*zip(*series, strict=True), color=COLOURS[0], linewidth=1.7)
        tidy(axes, "" if place else "What the method records", above=16)
        words = literal(RECORDED.get(key, key.replace("_", " "))[:40])
        axes.annotate(
            words, (0, 1), (2, 3), xycoords="axes fraction", textcoords="offset points", fontsize=8
        )
        values = [value for _, value in series]
        whole = all(float(value).is_integer() for value in values)
        axes.yaxis.set_major_locator(MaxNLocator(3, integer=whole))
        if min(values) == max(values):
            axes.set_ylim(values[0] - 1, values[0] + 1)
        if key.endswith("density"):
            percents(axes.yaxis)
    panels[-1].set(xlabel="round")
    whole_rounds(panels[-1])
    return figure


def distances(result: Result) -> Figure | None:
    """pFedGPA: how far generated models are from the nearest upload, beside the uploads' own.

    A generated model at zero distance would be a copy.
    """
    kinds = {
        "uploads_spread": "uploads: to their mean",
        "nearest_upload": "uploads: to the nearest other",
        "generated_to_nearest": "generated: to the nearest upload",
    }
    *_, last = ({}, *_tables(result, "distances"))
    rows = [
        (words, sorted(filter(is_number, _listed(last.get(key))))) for key, words in kinds.items()
    ]
    rows = [(words, values) for words, values in rows if values]
    if not rows:
        return None
    figure = sheet(height=1.2 + 0.62 * len(rows))
    axes = figure.subplots()
    for row, (_, values) in enumerate(rows):
        height = row + 0.3 - 0.6 * (np.arange(len(values)) + 0.5) / len(values)
        axes.scatter(values, height, s=13, color=COLOURS[row], alpha=0.55, linewidths=0)
        axes.plot(
            [np.median(values)] * 2, [row - 0.36, row + 0.36], color=COLOURS[row], linewidth=1.6
        )
    tidy(axes, "Generated models")
    axes.grid(False, axis="y")
    axes.set_yticks(range(len(rows)), [words.replace(": ", ":\n") for words, _ in rows])
    axes.set(
        ylim=(len(rows) - 0.5, -0.5), xlabel="distance between parameter vectors\n(bar: median)"
    )
    axes.set_xlim(left=0)
    return figure


def _tables(result: Result, key: str) -> Iterator[Mapping[str, Any]]:
    return (table for _, table in result.metadata(key) if isinstance(table, Mapping) and table)


def _numbers(result: Result, key: str) -> list[tuple[int, float]]:
    """A number that the method recorded, with the round."""
    return [(round, value) for round, value in result.metadata(key) if is_number(value)]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sorts layer2 before layer10."""
    return [
        (part.isdecimal(), int(part) if part.isdecimal() else 0, part)
        for part in re.split(r"(\d{1,9})", name)
    ]
