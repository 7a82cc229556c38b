"""Accuracy against epsilon: sample-level differential privacy on Fashion-MNIST.

    python benchmarks/privacy.py [--seeds 3] [--rounds 20] [--samples N] [--device auto] [--jobs 1]
        [--out FILE]
    python benchmarks/privacy.py --draw

Every method's learning rate is chosen by its clients' validation samples at seed 0, for every
epsilon; so is the round whose test accuracy counts. `--draw` makes the figure of the documentation
from the file.

Helix calibrates its clients in training, by class shares that would need noise of their own, so
`dp-sgd` has its other parts: calibration of the models in use, a personal finish, ancestors and
momentum.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measured import origin, write

from fedhelix.federation.provenance import device_name
from fedhelix.report.style import COLOURS, save, sheet, tidy
from fedhelix.runs.spec import make_spec

EPSILONS = (1.0, 3.0, 8.0)
ROOT = Path(__file__).parents[1]
RESULT, FIGURE = ROOT / "benchmarks/results/privacy.json", ROOT / "docs/figures/privacy.png"

PARTS = "finish+calibrated+ancestors+{}fedavgm@trained=false"
METHODS = {"FedAvg": "{}fedavg", "FedPer": "{}fedper", "parts of Helix": PARTS}
ONLY_PLAIN = {"Helix": "helix"}
# A small network and large batches, since noise grows with the one and falls with the other.
TASK: dict[str, Any] = {
    "model": "w1-cnn", "clients": 10, "partition": "dirichlet:0.3", "epochs": 2, "momentum": 0.0,
    "eval_every": 2,
}  # fmt: skip
NOISY: dict[str, Any] = {"batch_size": 512, "engine": "serial"}
NOISY_RATES, PLAIN_RATES = (0.1, 0.3, 1.0), (0.03, 0.1, 0.3)


class Job(NamedTuple):
    """One run; without epsilon there is no noise."""

    name: str
    epsilon: float | None
    lr: float
    seed: int


def measured(job: Job, settings: dict[str, Any]) -> dict[str, Any]:
    """Validation and test accuracy of the personal models in the round with the best validation."""
    torch.set_num_threads(1)
    noisy = job.epsilon is not None
    method = {**METHODS, **ONLY_PLAIN}[job.name].format("dp-sgd+" if noisy else "")
    more = {**NOISY, "dp-sgd.epsilon": job.epsilon} if noisy else {"batch_size": 64}
    spec = make_spec(method, {**settings, **more, "lr": job.lr, "seed": job.seed})
    run = spec.config.federation(spec.method).fit(
        spec.config.rounds, eval_every=spec.config.eval_every, quiet=True
    )
    best = max((record.get("valid_accuracy", 0.0), -record["round"]) for record in run.records)
    record = run.records[-best[1] - 1]
    scores = {"validation": best[0], "round": record["round"]}
    return {**job._asdict(), **scores, "personal_accuracy": record.get("personal_accuracy")}


def chosen(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each method and epsilon, the run with the best validation accuracy."""
    best: dict[Any, dict[str, Any]] = {}
    for row in rows:
        key = row["name"], row["epsilon"]
        if key not in best or row["validation"] > best[key]["validation"]:
            best[key] = row
    return list(best.values())


def run_all(given: argparse.Namespace) -> dict[str, Any]:
    """Choose the learning rates at seed 0, then run the other seeds with them."""
    settings = {
        **TASK, "data": "fashion-mnist", "train_samples": given.samples, "rounds": given.rounds,
        "device": given.device,
    }  # fmt: skip
    tried = [
        Job(name, epsilon, lr, 0)
        for epsilon in (*EPSILONS, None)
        for name in (METHODS if epsilon else {**METHODS, **ONLY_PLAIN})
        for lr in (NOISY_RATES if epsilon else PLAIN_RATES)
    ]
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, mp_context=spawned) as pool:
        rates = list(pool.map(measured, tried, [settings] * len(tried)))
        first = chosen(rates)
        others = [
            Job(row["name"], row["epsilon"], row["lr"], seed)
            for seed in range(1, given.seeds)
            for row in first
        ]
        rows = [*first, *pool.map(measured, others, [settings] * len(others))]
    return {"device": device_name(given.device), "settings": settings, "rates": rates, "rows": rows}


def mean_and_error(rows: list[dict[str, Any]], name: str, epsilon: float | None) -> torch.Tensor:
    """The personal accuracy in percent and its standard error over the seeds."""
    found = [row for row in rows if (row["name"], row["epsilon"]) == (name, epsilon)]
    values = 100 * torch.tensor([row["personal_accuracy"] for row in found])
    return torch.stack([values.mean(), values.std() / len(values) ** 0.5])


def draw() -> None:
    """The personal accuracy of each method against epsilon."""
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["rows"]
    figure = sheet()
    axis = figure.subplots()
    for colour, name in zip(COLOURS, METHODS, strict=False):
        points = torch.stack([mean_and_error(rows, name, epsilon) for epsilon in EPSILONS])
        axis.errorbar(EPSILONS, *points.T.numpy(), marker="o", color=colour, label=name)
        plain, _ = mean_and_error(rows, name, None)
        axis.axhline(float(plain), color=colour, linestyle=":")
    tidy(axis, "Sample-level privacy, Fashion-MNIST")
    axis.set_xscale("log")
    axis.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    axis.set_xticks([], minor=True)
    axis.set_xlabel("epsilon of a sample (delta = 1e-5); dotted: without noise")
    axis.set_ylabel("personal accuracy %")
    axis.legend(frameon=False, loc="lower right")
    save(figure, FIGURE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, help="training samples; all of them by default")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--draw", action="store_true")
    given = parser.parse_args()
    if given.draw:
        draw()
    else:
        write(given.out, {**origin(), **run_all(given)})


if __name__ == "__main__":
    sys.exit(main())
