"""Measures of GenFed's tables that compare cells with FedAvg, or with themselves unattacked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedhelix.papers.genfed.settings import TABLES
from fedhelix.papers.measures import add_measure, spread

LEVEL = "rounds to 90 % of FedAvg's best"
CHOSEN = "chosen on validation"


def rounds_to_level(report: dict[str, Any]) -> None:
    """The first round with nine tenths of FedAvg's best accuracy of the same seed.

    The paper's targets are 90 (CIFAR-10) to 99.5 % (MNIST, SVHN) of FedAvg's best; small scales
    reach this level too.
    """
    report["measures"].append(LEVEL)
    best = _best_of_fedavg(report)
    for cell in report["cells"]:
        keys = [(cell["column"], seed) for seed in cell["seeds"]]
        # Without FedAvg's run of every seed there is nothing to compare with yet.
        levels = [0.9 * best[key] for key in keys] if all(key in best for key in keys) else []
        curve = cell.get("accuracy_curve", {"rounds": [], "by_seed": []})
        by_seed = [
            _first_round(curve["rounds"], accuracies, level)
            for level, accuracies in zip(levels, curve["by_seed"], strict=False)
        ]
        cell[LEVEL] = {"by_seed": by_seed, **spread(by_seed), "paper": None}


def relative_time(report: dict[str, Any]) -> None:
    """Those rounds relative to FedAvg's.

    The paper's times are the ratios of its rounds, so they leave out the scoring.
    """
    rounds_to_level(report)
    name = "relative to FedAvg"
    add_measure(
        report,
        name,
        lambda cell, other: other["row"] == "FedAvg" and other["column"] == cell["column"],
        lambda rounds, fedavg: rounds / fedavg,
        of=LEVEL,
        paper=TABLES["table3"].numbers[name] if report["scale"] != "quick" else {},
    )


def damage(report: dict[str, Any], of: str = CHOSEN) -> None:
    """The change that an attack makes, in points of accuracy."""
    add_measure(
        report,
        "change in points",
        _is_unattacked,
        lambda attacked, unattacked: attacked - unattacked,
        of=of,
    )


def relative_damage(report: dict[str, Any], of: str = CHOSEN) -> None:
    """The change in points, and in percent of the accuracy without attack, as the paper has it."""
    damage(report, of)
    printed = TABLES["table4"].numbers["best on test"]
    paper = {
        (row, column): _change_in_percent(accuracy, printed[row, "no attack"])
        for (row, column), accuracy in printed.items()
    }
    add_measure(
        report,
        "change in percent",
        _is_unattacked,
        _change_in_percent,
        of=of,
        paper=paper if report["scale"] != "quick" else {},
    )


def _best_of_fedavg(report: Mapping[str, Any]) -> dict[tuple[str, int], float]:
    """FedAvg's best accuracy by column and seed."""
    return {
        (cell["column"], seed): max(accuracies)
        for cell in report["cells"]
        if cell["row"] == "FedAvg" and cell["seeds"]
        for seed, accuracies in zip(cell["seeds"], cell["accuracy_curve"]["by_seed"], strict=True)
    }


def _first_round(rounds: list[int], accuracies: list[float], level: float) -> int | None:
    reached = (t for t, accuracy in zip(rounds, accuracies, strict=True) if accuracy >= level)
    return next(reached, None)


def _is_unattacked(cell: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return other["column"] == "no attack" and other["row"] == cell["row"]


def _change_in_percent(attacked: float, unattacked: float) -> float:
    return 100 * (attacked - unattacked) / unattacked
