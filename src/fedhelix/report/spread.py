"""Several seeds of one method: their mean, how sure it is, and which methods tie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from fedhelix.report.results import Result

LEVEL = 0.95  # of confidence
ENOUGH = 3  # seeds for a band that is an interval; of two it is twelve standard errors each way
Band = tuple[pd.Series, pd.Series, pd.Series]


def band(by_seed: pd.DataFrame, is_share: bool = False) -> Band:
    """Mean of the columns, and the 95 % confidence interval of it by Student's t.

    Of two seeds the band reaches from the lower to the higher one. A share ends at 0 and 1.
    """
    mean, seeds = by_seed.mean(axis="columns"), by_seed.shape[1]
    if seeds < ENOUGH:
        return mean, by_seed.min(axis="columns"), by_seed.max(axis="columns")
    low, high = _interval(by_seed)
    return (mean, low.clip(lower=0), high.clip(upper=1)) if is_share else (mean, low, high)


def _interval(by_seed: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """The confidence interval of the columns' mean by Student's t, from two seeds on."""
    mean, seeds = by_seed.mean(axis="columns"), by_seed.shape[1]
    half = stdtrit(seeds - 1, (1 + LEVEL) / 2) * by_seed.sem(axis="columns")
    return mean - half, mean + half


def explanation(seeds: Sequence[int]) -> str:
    """What line and band are, for methods with so many seeds; empty where nothing has a band."""
    kinds = {"two": 2 in seeds, "more": any(number >= ENOUGH for number in seeds)}
    words = {"two": "lowest to highest seed", "more": "95 % confidence interval"}
    bands = " or ".join(words[kind] for kind, there in kinds.items() if there)
    return f"line: mean of seeds; band: {bands}" if bands else ""


def tied(
    best: Mapping[int, float], other: Mapping[int, float], alike: bool, by_ratio: bool = False
) -> bool:
    """Whether two methods, as values by seed, cannot be told apart.

    They tie where the confidence interval of their differences seed by seed holds zero, or that of
    the logarithms of their ratios. Of two seeds it is wide, so that only nearly equal differences
    tell methods apart. Without two seeds in common, they tie where a reader sees the same number
    (`alike`).
    """
    seeds = sorted(best.keys() & other.keys())
    if len(seeds) < 2:
        return alike
    pairs = np.array([[best[seed], other[seed]] for seed in seeds])
    pairs = np.log(pairs) if by_ratio and (pairs > 0).all() else pairs
    differences = pd.DataFrame([pairs[:, 0] - pairs[:, 1]])
    low, high = _interval(differences)
    return bool(low[0] <= 0 <= high[0])


def finals(results: Sequence[Result], column: str) -> dict[int, float]:
    """A column's final value, or a cost of the whole run, by seed."""
    cost = column.endswith(("_bytes", "seconds"))
    values = {
        result.seed: result.total(column) if cost else result.final(column) for result in results
    }
    return {seed: value for seed, value in values.items() if np.isfinite(value)}
