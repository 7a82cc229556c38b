"""Figures of the races and of the cost curves, drawn from their numbers.

python benchmarks/speed/plot.py benchmarks/results/race.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

# Of the palette of Okabe and Ito; defaults are hatched, so that colour is not needed to tell them
# apart.
COLOURS = {
    "fedhelix": "#0072B2",
    "flower": "#E69F00",
    "pfl": "#009E73",
    "blazefl": "#CC79A7",
    "plain": "#999999",
}
LABELS = {
    "fedhelix": "fedhelix",
    "flower": "Flower\nbest",
    "flower-default": "Flower\ndefault",
    "pfl": "pfl\nbest",
    "pfl-default": "pfl\ndefault",
    "blazefl": "BlazeFL\nbest",
    "plain": "plain\nloop",
}
TITLES = {
    "W1": "W1: 100 clients, 10 per round, 5 epochs",
    "W2": "W2: 1,000 clients, 50 per round, 1 epoch",
}


def draw_race(report: dict[str, Any], path: Path) -> None:
    """Seconds per round of every contestant, and their ratio to fedhelix's."""
    workloads = [name for name in TITLES if name in report]
    figure = Figure(figsize=(5.2 * len(workloads), 4.2), layout="constrained")
    for axes, workload in zip(
        figure.subplots(1, len(workloads), squeeze=False)[0], workloads, strict=True
    ):
        race = report[workload]
        names = [name for name in LABELS if name in race["seconds_per_round"]]
        for place, name in enumerate(names):
            time = race["seconds_per_round"][name]
            reach = [[time["median"] - time["p10"]], [time["p90"] - time["median"]]]
            axes.bar(
                place,
                time["median"],
                yerr=reach,
                capsize=4,
                color=COLOURS[name.partition("-")[0]],
                hatch="//" if name.endswith("default") else None,
                edgecolor="white",
                ecolor="#333333",
            )
            times = race["ratio_to_fedhelix"].get(name, {}).get("of_medians", 1.0)
            label = f"{time['median']:.2f} s" + (f"\n{times:.2f}×" if name != "fedhelix" else "")
            axes.annotate(
                label,
                (place, time["p90"]),
                (0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=9,
            )
        axes.set_xticks(range(len(names)), [LABELS[name] for name in names], fontsize=9)
        axes.set_title(TITLES[workload], fontsize=11)
        axes.set_ylabel("seconds per round")
        axes.margins(y=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    machine = report["machine"]
    figure.supxlabel(
        f"Fashion-MNIST with evaluation, {machine['cores']} cores ({machine['processor']}).\n"
        "Medians, lines from 10 to 90 %; lower is better.",
        fontsize=8,
    )
    figure.savefig(path, dpi=200)


def draw_cost(report: dict[str, Any], path: Path) -> None:
    """Seconds and memory per round against each of the three sizes."""
    curves = [name for name in ("cohort", "clients", "parameters") if name in report["curves"]]
    labels = {
        "cohort": "clients per round",
        "clients": "clients in the federation",
        "parameters": "model parameters",
    }
    figure = Figure(figsize=(4.2 * len(curves), 6), layout="constrained")
    grid = figure.subplots(2, len(curves), squeeze=False, sharex="col")
    for column, curve in enumerate(curves):
        points = report["curves"][curve]
        engines = list(dict.fromkeys(point["engine"] for point in points))
        for engine, colour, marker in zip(
            engines, ("#0072B2", "#D55E00", "#009E73"), "osD", strict=False
        ):
            curve_points = [point for point in points if point["engine"] == engine]
            x = [point[curve] for point in curve_points]
            seconds = [point["seconds"]["median"] for point in curve_points]
            mebibytes = [point["peak_memory_MiB"]["pss"] for point in curve_points]
            style = {"color": colour, "marker": marker, "label": engine}
            grid[0][column].plot(x, seconds, **style)
            grid[1][column].plot(x, mebibytes, **style)
        for axes, label in zip(
            grid[:, column], ("seconds per round", "peak memory (MiB)"), strict=True
        ):
            axes.set_xscale("log")
            axes.set_ylabel(label)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        grid[0][column].set_yscale("log")
        low, high = grid[0][column].get_ylim()
        if high < 10 * low:  # a flat line should look flat
            grid[0][column].set_ylim(low / 4, high * 4)
        grid[1][column].set_ylim(bottom=0)
        grid[1][column].set_xlabel(labels[curve])
    grid[0][0].legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    numbers = json.loads(source.read_text())
    (draw_cost if "curves" in numbers else draw_race)(numbers, source.with_suffix(".png"))
