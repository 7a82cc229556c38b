"""Differences between rows of a report, seed by seed, with intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from scipy.stats import t as student

from fedhelix.papers.measures import add_measure


def differences(report: dict[str, Any], of: str, row: str) -> None:
    """How far one row is ahead of every row of the same column: positive where it wins."""
    name = f"{row} ahead, {of}"
    add_measure(
        report,
        name,
        lambda cell, other: other["row"] == row and other["column"] == cell["column"],
        lambda value, reference: reference - value,
        of=of,
    )
    for cell in report["cells"]:
        cell[name]["interval"] = interval(cell[name]["by_seed"])


def interval(values: Sequence[float | None], level: float = 0.95) -> list[float] | None:
    """Student's interval of the mean; None for fewer than two values."""
    known = [value for value in values if value is not None]
    if len(known) < 2 or len(known) < len(values):
        return None
    mean, error = statistics.fmean(known), statistics.stdev(known) / math.sqrt(len(known))
    reach = float(student.ppf((1 + level) / 2, len(known) - 1)) * error
    return [mean - reach, mean + reach]
