"""Pictures of runs and of data: readable in half a page, in print and by colour-blind eyes."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedhelix.errors import BadInput
from fedhelix.report.results import Result, grouped
from fedhelix.store import RunFolder
from fedhelix.tree import write_atomically

# The palette of Okabe and Ito without its yellow, which is hard to see on white. Seven colours and four dashes repeat
# together only after 28 methods, and neighbours differ in both.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
GREY = "#666666"
MIB = 2**20
DOTS_PER_INCH = 200
MOST_TICKS = 25
FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True, eq=False)
class _Curve:
    """One method: mean, lowest and highest metric over seeds per evaluated round."""

    label: str
    colour: str
    dashes: Any
    mean: pd.Series
    low: pd.Series
    high: pd.Series
    uploaded: pd.Series
    clients: np.ndarray
    is_share: bool

    @property
    def style(self) -> dict[str, Any]:
        return {"color": self.colour, "linestyle": self.dashes, "linewidth": 1.7}


def comparison_plot(folders: Sequence[RunFolder], path: Path | str) -> None:
    """Draw runs side by side: metric against rounds, metric against uploads, and every client's final metric.

    The metric is that of the personal models, or of the server's where a method has none. Lines are means over seeds,
    bands reach from the lowest to the highest seed. The path's suffix chooses the format: .png, .svg or .pdf.
    """
    curves = [_curve(label, results, place) for place, (label, results) in enumerate(grouped(folders).items())]
    figure = Figure(figsize=(10, 4.2 + 0.17 * max(0, len(curves) - 8)), layout="constrained")
    by_round, by_upload, by_client = figure.subplots(1, 3, width_ratios=(1, 1, 1.15))
    by_upload.sharey(by_round)
    drawn = [curve for curve in curves if len(curve.mean)]
    _draw_rounds(by_round, drawn)
    _draw_uploads(by_upload, drawn)
    _draw_clients(by_client, [curve for curve in drawn if len(curve.clients)])
    if drawn:
        # Constrained layout makes room for the legend above the panels, however many rows it has.
        handles = by_round.get_legend_handles_labels()
        columns = min(6, len(drawn))
        figure.legend(*handles, loc="outside upper center", ncols=columns, frameon=False, fontsize=9, handlelength=2.8)
    _save(figure, path)


def partition_plot(counts: np.ndarray, path: Path | str) -> None:
    """Draw who has what: a bubble per client and class whose area is the number of samples."""
    counts = np.asarray(counts)
    if counts.ndim != 2 or not counts.size or not (counts >= 0).all():
        raise BadInput(f"counts must be a table of sample numbers, clients × classes, but its shape is {counts.shape}.")
    clients, classes = counts.shape
    width, height = float(np.clip(0.26 * clients, 3.5, 13)), float(np.clip(0.26 * classes, 1.5, 8))
    figure = Figure(figsize=(width + 0.9, height + 1.0), layout="constrained")
    axes = figure.subplots()
    client, label = np.nonzero(counts)
    # The largest bubble just fits its cell; `s` is an area in square points.
    cell_in_points = 72 * min(width / clients, height / classes)
    area = (0.95 * cell_in_points) ** 2 * counts[client, label] / max(counts.max(), 1)
    axes.scatter(client, label, s=area, color=COLOURS[0], linewidths=0)
    axes.set(xlim=(-0.7, clients - 0.3), ylim=(-0.7, classes - 0.3), xlabel="client", ylabel="class")
    _tidy(axes, "Samples per client and class")
    axes.set_title(f"largest bubble: {counts.max()}", loc="right", fontsize=8, color=GREY)
    axes.grid(True, color="#eeeeee")
    axes.set_xticks(range(0, clients, -(-clients // MOST_TICKS)))
    axes.set_yticks(range(0, classes, -(-classes // MOST_TICKS)))
    _save(figure, path)


def _curve(label: str, results: Sequence[Result], place: int) -> _Curve:
    column = next((result.judged_by() for result in results if result.judged_by()), None) or "accuracy"
    # Only rounds that every seed has: a mean whose members change half way shows a jump that no run made.
    values = pd.DataFrame({result.seed: result.series(column) for result in results}).dropna()
    uploaded = pd.DataFrame({result.seed: result.series("uplink_bytes").cumsum() for result in results})
    finals = sorted(value for result in results for value in result.client_finals())
    return _Curve(
        label=label if column.startswith("personal") else f"{label}, global model",
        colour=COLOURS[place % len(COLOURS)],
        dashes=DASHES[place % len(DASHES)],
        mean=values.mean(axis="columns"),
        low=values.min(axis="columns"),
        high=values.max(axis="columns"),
        uploaded=uploaded.mean(axis="columns").reindex(values.index).ffill().fillna(0) / MIB,
        clients=np.array(finals),
        is_share=column.endswith("accuracy"),
    )


def _draw_rounds(axes: Axes, curves: Sequence[_Curve]) -> None:
    for curve in curves:
        axes.plot(curve.mean.index, curve.mean, label=curve.label, **curve.style, **_marker(curve))
        _band(axes, curve.mean.index, curve)
    _tidy(axes, "How fast?", curves)
    has_band = any((curve.high > curve.low).any() for curve in curves)
    explanation = "\n(line: mean of seeds, band: lowest to highest)" if has_band else ""
    axes.set(xlabel=f"round{explanation}", ylabel=_metric_name(curves))
    if _are_shares(curves):
        axes.yaxis.set_major_formatter(_percent)


def _draw_uploads(axes: Axes, curves: Sequence[_Curve]) -> None:
    senders = [curve for curve in curves if curve.uploaded.iloc[-1] > 0]
    for curve in senders:
        sent = curve.uploaded > 0  # a logarithmic axis has no zero
        axes.plot(curve.uploaded[sent], curve.mean[sent], **curve.style, **_marker(curve))
        _band(axes, curve.uploaded, curve)
    for curve in curves:
        if curve not in senders:
            height = curve.mean.iloc[-1]
            axes.axhline(height, color=curve.colour, linestyle="--", linewidth=1.2)
            axes.annotate(f"{curve.label} sends nothing", (0.02, height), (0, 3), textcoords="offset points",
                          xycoords=("axes fraction", "data"), fontsize=8, color=curve.colour)  # fmt: skip
    totals = [curve.uploaded.iloc[-1] for curve in senders]
    if totals and max(totals) > 5 * min(totals):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    _tidy(axes, "At which cost?", curves)
    axes.set(xlabel="uploaded MiB\n(all clients together)")
    axes.tick_params(labelleft=False)


def _draw_clients(axes: Axes, curves: Sequence[_Curve]) -> None:
    """A row per method, a dot per client, risen by rank so that equal clients do not hide each other."""
    for row, curve in enumerate(curves):
        rank = (np.arange(len(curve.clients)) + 0.5) / len(curve.clients)
        height = row + 0.32 - 0.64 * rank
        for part, opacity in ((rank <= 0.1, 1.0), (rank > 0.1, 0.3)):
            axes.scatter(curve.clients[part], height[part], s=10, color=curve.colour, alpha=opacity, linewidths=0)
        median = np.median(curve.clients)
        axes.plot([median, median], [row - 0.36, row + 0.36], color=curve.colour, linewidth=1.6)
    _tidy(axes, "Who is left behind?", curves)
    axes.grid(False, axis="y")
    axes.set_ylim(max(len(curves), 1) - 0.4, -0.6)  # the first method on top
    axes.set_yticks(range(len(curves)), [textwrap.fill(curve.label, 18) for curve in curves])
    axes.tick_params(axis="y", length=0, labelsize=8.5 if len(curves) < 10 else 7.5)
    for text, curve in zip(axes.get_yticklabels(), curves, strict=True):
        text.set_color(curve.colour)
    axes.set(xlabel=f"final {_metric_name(curves)} of each client\n(bar: median, dark: worst tenth)")
    if _are_shares(curves):
        axes.xaxis.set_major_formatter(_percent)


def _marker(curve: _Curve) -> dict[str, Any]:
    # A line needs two points; a run of one evaluated round is shown by a dot.
    return {"marker": "o", "markersize": 5} if len(curve.mean) == 1 else {}


def _band(axes: Axes, x: Any, curve: _Curve) -> None:
    if (curve.high > curve.low).any():
        axes.fill_between(x, curve.low, curve.high, color=curve.colour, alpha=0.16, linewidth=0)


def _metric_name(curves: Sequence[_Curve]) -> str:
    return "accuracy" if _are_shares(curves) else "score"


def _are_shares(curves: Sequence[_Curve]) -> bool:
    return all(curve.is_share for curve in curves)


def _percent(value: float, _: float) -> str:
    return f"{100 * value:.0f} %"


def _tidy(axes: Axes, title: str, curves: Sequence[_Curve] | None = None) -> None:
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8.5)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
    axes.grid(True, color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    if curves is not None and not curves:
        axes.text(0.5, 0.5, "nothing evaluated yet", transform=axes.transAxes, ha="center", color=GREY, fontsize=9)


def _save(figure: Figure, path: Path | str) -> None:
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise BadInput(f"'{target}' must end in {', '.join(FORMATS)}, so that it is clear which format to write.")
    content = io.BytesIO()
    figure.savefig(content, format=target.suffix[1:].lower(), dpi=DOTS_PER_INCH)
    try:
        write_atomically(target, content.getvalue())
    except OSError as problem:
        raise BadInput(f"'{target}' cannot be written: {problem.strerror}.") from None
