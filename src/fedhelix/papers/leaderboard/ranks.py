"""Ranks of methods over settings, with intervals, and which differences are significant."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import friedmanchisquare, rankdata, studentized_range

from fedhelix.core.seeds import numpy_draw

LEVEL = 0.05
RESAMPLED = 2000


def nemenyi(methods: int, settings: int, level: float = LEVEL) -> float:
    """The critical difference of mean ranks (Demsar 2006, Nemenyi's test)."""
    quantile = float(studentized_range.ppf(1 - level, methods, np.inf)) / math.sqrt(2)
    return quantile * math.sqrt(methods * (methods + 1) / (6 * settings))


def ranking(scores: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Mean ranks of methods, 1 is best, from their scores (settings x seeds).

    A setting's score is the mean of its seeds. Intervals come from drawing settings, and seeds
    within each, with replacement.
    """
    table = np.stack(list(scores.values()))  # methods x settings x seeds
    methods, settings, seeds = table.shape
    means = _ranks(table.mean(2)).mean(1)
    draw = numpy_draw(0, "leaderboard")
    drawn = np.empty((RESAMPLED, methods))
    for turn in range(RESAMPLED):
        rows = draw.integers(settings, size=(settings, 1))
        columns = draw.integers(seeds, size=(settings, seeds))
        chosen = table.reshape(methods, -1)[:, (rows * seeds + columns).ravel()]
        means_drawn = chosen.reshape(table.shape).mean(2)
        drawn[turn] = _ranks(means_drawn).mean(1)
    low, high = np.quantile(drawn, (LEVEL / 2, 1 - LEVEL / 2), axis=0)
    testable = methods > 2 and settings > 1
    return {
        "settings": settings,
        "rows": {
            row: {"rank": float(means[at]), "interval": [float(low[at]), float(high[at])]}
            for at, row in enumerate(scores)
        },
        "friedman_p": float(friedmanchisquare(*table.mean(2)).pvalue) if testable else None,
        "critical_difference": nemenyi(methods, settings) if testable else None,
    }


def _ranks(scores: np.ndarray) -> np.ndarray:
    """Ranks within each column, equal scores sharing theirs."""
    return rankdata(-scores, axis=0)


def indistinct(ranks: Sequence[float], difference: float) -> list[tuple[int, int]]:
    """The widest stretches of sorted ranks in which no two differ by more than the difference."""
    stretches: list[tuple[int, int]] = []
    for first, low in enumerate(ranks):
        last = max(at for at, rank in enumerate(ranks) if rank - low <= difference)
        if last > first and (not stretches or last > stretches[-1][1]):
            stretches.append((first, last))
    return stretches
