"""Accuracy against epsilon: sample-level differential privacy on Fashion-MNIST.

    python benchmarks/privacy.py [--jobs 4] [--out benchmarks/results/privacy.json]
    python benchmarks/privacy.py --draw

The comparisons are ordinary commands, which the file records; `--draw` makes the figure of the
documentation from the file. Helix calibrates its clients in training, by class shares that would
need noise of their own, so `dp-sgd` has its other parts: calibration of the models in use, a
personal finish, ancestors and momentum.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from compared import main

from fedhelix.report.style import COLOURS, save, sheet, tidy

EPSILONS = (1, 3, 8)
ROOT = Path(__file__).parents[1]
RESULT, FIGURE = ROOT / "benchmarks/results/privacy.json", ROOT / "docs/figures/privacy.png"

TASK = "--data fashion-mnist --clients 10 --partition dirichlet:0.3 --rounds 20"
SEEDS = "--seeds 3 --eval-every 5"
# Large batches, since the noise of a step is per batch; and small steps, or FedPer diverges.
NOISY = "--epochs 1 --batch-size 512 --lr 0.2 --momentum 0 --engine serial"
USUAL = "--epochs 1 --batch-size 64 --lr 0.1 --momentum 0.5"
SCORE = "personal_accuracy_at_best"  # in the round that validation samples choose
PARTS = "finish+calibrated+ancestors+{}fedavgm@trained=false"


def commands() -> dict[str, str]:
    """The commands by epsilon, and those without noise."""
    private = f"fedhelix compare dp-sgd dp-sgd+fedper {PARTS.format('dp-sgd+')}"
    found = {
        f"epsilon {epsilon}": f"{private} --epsilon {epsilon} {TASK} {NOISY} {SEEDS}"
        for epsilon in EPSILONS
    }
    plain = f"fedhelix compare fedavg fedper {PARTS.format('')} helix"
    return {**found, "no noise": f"{plain} {TASK} {USUAL} {SEEDS}"}


def draw() -> None:
    """The personal accuracy of each method against epsilon."""
    measured = json.loads(RESULT.read_text(encoding="utf-8"))
    names = ("FedAvg", "FedPer", "parts of Helix")
    figure = sheet()
    axis = figure.subplots()
    for place, name in enumerate(names):
        rows = [measured[f"epsilon {epsilon}"]["table"][place] for epsilon in EPSILONS]
        values = [100 * row[SCORE] for row in rows]
        errors = [100 * row[f"{SCORE}_se"] for row in rows]
        axis.errorbar(EPSILONS, values, errors, marker="o", color=COLOURS[place], label=name)
        plain = measured["no noise"]["table"][place]
        axis.axhline(100 * plain[SCORE], color=COLOURS[place], linestyle=":")
    tidy(axis, "Sample-level privacy, Fashion-MNIST")
    axis.set_xscale("log")
    axis.set_xticks(EPSILONS, [str(epsilon) for epsilon in EPSILONS])
    axis.set_xticks([], minor=True)
    axis.set_xlabel("epsilon of a sample (delta = 1e-5); dotted: without noise")
    axis.set_ylabel("personal accuracy %")
    axis.legend(frameon=False, loc="lower right")
    save(figure, FIGURE)


if __name__ == "__main__":
    if "--draw" in sys.argv:
        draw()
    else:
        main(__doc__ or "", "privacy", commands())
