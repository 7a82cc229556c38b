"""Differences between rows of a report, seed by seed, with intervals, and verdicts on claims."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from scipy.stats import t as student

from fedhelix.papers.measures import add_measure

Verdict = Literal["reproduced", "partly", "not reproduced", "inconclusive"]
FEWEST_SEEDS = 5  # fewer decide nothing


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


def verdict(margins: Sequence[float | None]) -> Verdict:
    """Whether a claim holds that wants its margin, known seed by seed, to be positive.

    It is decided if the 95 % interval of at least five seeds does not contain zero.
    """
    bounds = interval(margins) if len(margins) >= FEWEST_SEEDS else None
    if bounds is None or bounds[0] <= 0 <= bounds[1]:
        return "inconclusive"
    return "reproduced" if bounds[0] > 0 else "not reproduced"


def together(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict on a claim about several settings.

    It is partly reproduced if it holds in some of them, and not reproduced if it fails in some and
    is known to hold in none.
    """
    kinds = set(verdicts)
    if len(kinds) == 1:
        return kinds.pop()
    return "partly" if "reproduced" in kinds else "not reproduced"
