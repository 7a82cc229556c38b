"""Figures that compare methods: readable on half a page, in print and for the colour-blind."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator

from fedhelix.report.labels import (
    add_legend,
    label_rows,
    name_level,
    place_levels,
    rows_room,
)
from fedhelix.report.results import Groups, Result, grouped
from fedhelix.report.scales import spread_out, unit_of
from fedhelix.report.spread import band, explanation
from fedhelix.report.style import (
    COLOURS,
    DASHES,
    GREY,
    HALF_PAGE,
    literal,
    percents,
    save,
    sheet,
    tidy,
    whole_rounds,
)
from fedhelix.report.wording import MIB
from fedhelix.store import RunFolder
from fedhelix.store.records import HOUR

PANEL = 2.9  # inches of a panel with its captions
BAR = 0.34  # inches of a bar with its margin


@dataclass(frozen=True, eq=False)
class Curve:
    """One method: the metric by round as mean and band over seeds, and what it cost so far."""

    label: str
    colour: str
    dashes: Any
    mean: pd.Series
    low: pd.Series
    high: pd.Series
    uploaded: pd.Series
    seconds: pd.Series
    hours: pd.Series  # simulated; empty without a clock
    clients: np.ndarray
    malicious: np.ndarray
    is_share: bool
    is_personal: bool
    seeds: int
    arrival: float  # the first round of newcomers; infinite without them

    @property
    def style(self) -> dict[str, Any]:
        """How its lines look; a run of one evaluated round is a dot, because a line needs two."""
        alone = {"marker": "o", "markersize": 5} if len(self.mean) == 1 else {}
        return {"color": self.colour, "linestyle": self.dashes, "linewidth": 1.7, **alone}

    @property
    def has_band(self) -> bool:
        """Whether its seeds differ."""
        return bool((self.high > self.low).any())


Draw = Callable[[Axes, Sequence[Curve]], None]


def comparison_plot(folders: Sequence[RunFolder | Result], path: Path | str) -> None:
    """Draw runs side by side: metric by rounds, metric by uploads, and every client's final metric.

    The metric is that of the personal models, or of the server's where a method has none. Lines are
    means over seeds, bands their 95 % confidence intervals (of two seeds: from the lower to the
    higher one). The path's suffix chooses the format: .png, .svg or .pdf.
    """
    save(overview(grouped(folders)), path)


def overview(groups: Groups) -> Figure:
    """Three panels: how fast (by the clock, if all have one), at which cost, and who is left
    behind.
    """
    all_curves = curves(groups)
    room = rows_room([curve.label for curve in all_curves])
    figure = sheet(10, max(4.2, room))
    by_round, by_upload, by_client = figure.subplots(1, 3, width_ratios=(1, 1, 1.15))
    by_upload.sharey(by_round)
    drawn = [curve for curve in all_curves if len(curve.mean)]
    timed = bool(drawn) and all(len(curve.hours) for curve in drawn)
    (draw_hours if timed else draw_rounds)(by_round, drawn)
    draw_uploads(by_upload, drawn)
    by_upload.set_ylabel("")
    by_upload.tick_params(labelleft=False)
    draw_clients(by_client, drawn)
    add_legend(figure, by_round, columns=6, room=room)
    place_levels(by_upload)
    return figure


def single(draw: Draw, drawn: Sequence[Curve]) -> Figure:
    """One panel of half a page."""
    if draw is draw_clients:
        figure = sheet(height=max(HALF_PAGE[1], rows_room([curve.label for curve in drawn])))
        draw(figure.subplots(), drawn)
        return figure
    figure = sheet()
    axes = figure.subplots()
    draw(axes, drawn)
    add_legend(figure, axes, columns=3, room=PANEL)
    place_levels(axes)
    return figure


def curves(groups: Groups) -> list[Curve]:
    """A curve for every group of runs, in their order."""
    return [_curve(label, results, place) for place, (label, results) in enumerate(groups.items())]


def _curve(label: str, results: Sequence[Result], place: int) -> Curve:
    column = next(filter(None, (result.main_metric() for result in results)), "accuracy")
    # Only rounds that every seed has: where the seeds of a mean change, it jumps, and no run did.
    values = pd.DataFrame({result.seed: result.series(column) for result in results}).dropna()

    def spent(cost: str) -> pd.Series:
        sums = pd.DataFrame({result.seed: result.series(cost).cumsum() for result in results})
        return sums.mean(axis="columns").reindex(values.index).ffill().fillna(0)

    clocks = pd.DataFrame({result.seed: result.series("clock") for result in results})
    hours = clocks.mean(axis="columns").reindex(values.index) / HOUR
    is_share = column.endswith("accuracy")
    is_personal = column.startswith("personal")
    mean, low, high = band(values, is_share)
    finals = sorted(
        (value, client in result.attackers)
        for result in results
        for client, (round, value) in result.last_values().items()
        if round == result.last_evaluation
    )
    return Curve(
        label=literal(label if is_personal else f"{label}, global model"),
        colour=COLOURS[place % len(COLOURS)],
        dashes=DASHES[place % len(DASHES)],
        mean=mean,
        low=low,
        high=high,
        uploaded=spent("uplink_bytes") / MIB,
        seconds=spent("seconds"),
        hours=hours if hours.notna().all() else hours[:0],
        clients=np.array([value for value, _ in finals]),
        malicious=np.array([malicious for _, malicious in finals], dtype=bool),
        is_share=is_share,
        is_personal=is_personal,
        seeds=len(results),
        arrival=min(result.arrival for result in results),
    )


def draw_rounds(axes: Axes, drawn: Sequence[Curve]) -> None:
    """Metric against rounds."""
    for curve in drawn:
        axes.plot(curve.mean.index, curve.mean, label=curve.label, **curve.style)
        _band(axes, curve.mean.index, curve)
    arrivals = sorted({curve.arrival for curve in drawn if curve.arrival < math.inf})
    for arrival in arrivals:
        axes.axvline(arrival - 1, color=GREY, linewidth=0.9)
    mark = "vertical line: newcomers take over after it" if arrivals else ""
    bands = explanation([curve.seeds for curve in drawn if curve.has_band])
    _metric_axes(axes, "How fast?", "\n".join(filter(None, ("round", bands, mark))), drawn)
    whole_rounds(axes)


def draw_uploads(axes: Axes, drawn: Sequence[Curve]) -> None:
    """Metric against what all clients together have uploaded."""
    senders = [curve for curve in drawn if curve.uploaded.iloc[-1] > 0]
    for curve in senders:
        sent = curve.uploaded > 0  # a logarithmic axis has no zero
        axes.plot(curve.uploaded[sent], curve.mean[sent], label=curve.label, **curve.style)
        _band(axes, curve.uploaded, curve)
    for curve in drawn:
        if curve not in senders:
            height = curve.mean.iloc[-1]
            axes.axhline(height, color=curve.colour, linestyle=curve.dashes, linewidth=1.2)
            name_level(axes, f"{curve.label}: no upload", height)
    spread_out(axes, [curve.uploaded for curve in senders])
    _metric_axes(axes, "At which cost?", "uploaded MiB\n(all clients together)", drawn)


def draw_seconds(axes: Axes, drawn: Sequence[Curve]) -> None:
    """Metric against the time that it took."""
    for curve in drawn:
        axes.plot(curve.seconds, curve.mean, label=curve.label, **curve.style)
        _band(axes, curve.seconds, curve)
    spread_out(axes, [curve.seconds for curve in drawn])
    _metric_axes(
        axes,
        "How long?",
        "seconds of the run, evaluation included\n(on the machine that ran it)",
        drawn,
    )


def draw_hours(axes: Axes, drawn: Sequence[Curve]) -> None:
    """Metric against the time that the simulated devices took."""
    timed = [curve for curve in drawn if len(curve.hours)]
    unit, per_hour = unit_of([curve.hours for curve in timed])
    times = [per_hour * curve.hours for curve in timed]
    for curve, time in zip(timed, times, strict=True):
        axes.plot(time, curve.mean, label=curve.label, **curve.style)
        _band(axes, time, curve)
    spread_out(axes, times)
    _metric_axes(axes, "How soon?", f"simulated {unit}\n(devices, not this machine)", timed)


def draw_clients(axes: Axes, drawn: Sequence[Curve]) -> None:
    """A row per method and a dot per client, higher by rank so that equal clients stay visible."""
    evaluated = [curve for curve in drawn if len(curve.clients)]
    for row, curve in enumerate(evaluated):
        _draw_row(axes, row, curve)
    tidy(axes, "Who is left behind?")
    _say_if_empty(axes, evaluated)
    axes.grid(False, axis="y")
    axes.set_ylim(max(len(evaluated), 1) - 0.4, -0.6)  # the first method on top
    label_rows(axes, [curve.label for curve in evaluated])
    crosses = "\n×: attacker" if any(curve.malicious.any() for curve in evaluated) else ""
    marks = f"bar: median; full colour: bottom 10 %{crosses}"
    axes.set(xlabel=f"final {metric_name(evaluated)} of each client\n{marks}")
    values = {float(f"{value:.4g}") for curve in evaluated for value in curve.clients}
    only = len(values) == 1  # round numbers might all lie elsewhere
    axes.xaxis.set_major_locator(FixedLocator(list(values)) if only else MaxNLocator(5))
    if _are_shares(evaluated):
        percents(axes.xaxis)


def _draw_row(axes: Axes, row: int, curve: Curve) -> None:
    """One method's clients: up to the 10th percentile in full colour, attackers as crosses."""
    rank = (np.arange(len(curve.clients)) + 0.5) / len(curve.clients)
    height = row + 0.32 - 0.64 * rank
    honest = ~curve.malicious
    low = curve.clients <= np.percentile(curve.clients, 10)
    for part, opacity in ((honest & low, 1.0), (honest & ~low, 0.3)):
        axes.scatter(
            curve.clients[part],
            height[part],
            s=10,
            color=curve.colour,
            alpha=opacity,
            linewidths=0,
        )
    axes.scatter(
        curve.clients[~honest],
        height[~honest],
        s=16,
        marker="x",
        color=curve.colour,
        linewidths=1,
    )
    median = np.median(curve.clients)
    axes.plot([median, median], [row - 0.36, row + 0.36], color=curve.colour, linewidth=1.6)


def bytes_plot(groups: Groups) -> Figure:
    """What a whole run sends: up, down and besides, as stacked bars."""
    labels = [literal(label) for label in groups]
    figure = sheet(height=HALF_PAGE[1] / 2)
    axes = figure.subplots()
    kinds = (
        ("uplink_bytes", "up", COLOURS[0]),
        ("downlink_bytes", "down", COLOURS[5]),
        ("other_bytes", "else", GREY),
    )
    left = np.zeros(len(groups))
    for column, word, colour in kinds:
        sizes = np.array(
            [np.mean([result.total(column) for result in runs]) / MIB for runs in groups.values()]
        )
        if sizes.any():
            axes.barh(range(len(groups)), sizes, left=left, color=colour, height=0.62, label=word)
        left += sizes
    for row, total in enumerate(left):
        axes.annotate(
            f"{total:.3g}" if total else "nothing",
            (total, row),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=GREY,
        )
    tidy(axes, "What travels?")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.grid(False, axis="y")
    label_rows(axes, labels)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.set(xlabel="MiB of a whole run, mean of seeds", xlim=(0, max(left.max(), 1e-9) * 1.14))
    add_legend(figure, axes, columns=3, room=rows_room(labels, BAR))
    return figure


def metric_name(drawn: Sequence[Curve]) -> str:
    """What the numbers are."""
    return "accuracy" if _are_shares(drawn) else "score"


def _metric_axes(axes: Axes, title: str, below: str, drawn: Sequence[Curve]) -> None:
    tidy(axes, title)
    _say_if_empty(axes, drawn)
    personal = "personal " if drawn and all(curve.is_personal for curve in drawn) else ""
    axes.set(xlabel=below, ylabel=f"{personal}{metric_name(drawn)}")
    if _are_shares(drawn):
        percents(axes.yaxis)


def _band(axes: Axes, x: Any, curve: Curve) -> None:
    if curve.has_band:
        axes.fill_between(x, curve.low, curve.high, color=curve.colour, alpha=0.16, linewidth=0)


def _are_shares(drawn: Sequence[Curve]) -> bool:
    return all(curve.is_share for curve in drawn)


def _say_if_empty(axes: Axes, drawn: Sequence[Curve]) -> None:
    if not drawn:
        look: dict[str, Any] = {"ha": "center", "color": GREY, "fontsize": 9}
        axes.text(0.5, 0.5, "nothing evaluated yet", transform=axes.transAxes, **look)
