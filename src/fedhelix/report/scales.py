"""Axes of costs: a unit that suits their numbers, a scale, and as many labels as there is room."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import Locator, LogLocator, MaxNLocator, NullFormatter

FAR_APART = 5  # times: totals that differ by more are drawn on a logarithmic axis
FEW = 500  # times: over so many, multiples of powers of ten are labelled too
CHARACTER, BETWEEN = 0.64, 0.8  # of a label's size: the width of a digit, and what keeps two apart
TICKS = 8.5  # points
UNITS = {"hours": 1.0, "minutes": 60.0, "seconds": 3600.0}  # of an hour
ENOUGH = 3  # the least that the longest time is in its unit


class Roomy(Locator):
    """The first of some locators whose labels keep apart at the axis; else the last one."""

    def __init__(self, *choices: Locator):
        self.choices = choices

    def set_axis(self, axis: Any) -> None:
        """The axis, for all of them."""
        super().set_axis(axis)
        for choice in self.choices:
            choice.set_axis(axis)

    def nonsingular(self, v0: float, v1: float) -> tuple[float, float]:
        """Limits that this scale can have."""
        return self.choices[0].nonsingular(v0, v1)

    def __call__(self) -> Sequence[float]:
        """The places of the ticks."""
        places: Sequence[float] = ()
        for choice in self.choices:
            places = choice()
            if self._keep_apart(np.asarray(places)):
                break
        return places

    def _keep_apart(self, places: np.ndarray) -> bool:
        axis: Any = self.axis
        axes = axis.axes
        low, high = sorted(axis.get_view_interval())
        shown = places[(low <= places) & (places <= high)]
        labels = axis.get_major_formatter().format_ticks(shown)
        at = axes.transData.transform(np.column_stack([shown, np.zeros_like(shown)]))[:, 0]
        points = at * 72 / axes.figure.dpi
        widths = [TICKS * CHARACTER * len(label) for label in labels]
        room = [(one + other) / 2 + TICKS * BETWEEN for one, other in pairwise(widths)]
        return bool((np.diff(points) >= room).all())


def spread_out(axes: Axes, costs: Sequence[pd.Series]) -> None:
    """A logarithmic axis where one method takes many times what another does."""
    totals = [cost.iloc[-1] for cost in costs if len(cost)]
    if totals and max(totals) > FAR_APART * min(totals) > 0:
        make_logarithmic(axes)
    else:
        axes.xaxis.set_major_locator(Roomy(*(MaxNLocator(number) for number in (6, 4, 3, 2))))


def make_logarithmic(axes: Axes) -> None:
    """A logarithmic horizontal axis with plain numbers."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    finer = [(1, 2, 5), (1, 3)] if high < FEW * low else []
    axes.xaxis.set_major_locator(Roomy(*(LogLocator(subs=subs) for subs in (*finer, (1,)))))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def unit_of(costs: Sequence[pd.Series]) -> tuple[str, float]:
    """The unit in which hours are small numbers but no fractions, and how many make an hour."""
    longest = max((cost.iloc[-1] for cost in costs if len(cost)), default=ENOUGH)
    fitting = (unit for unit in UNITS.items() if longest * unit[1] >= ENOUGH)
    return next(fitting, ("seconds", UNITS["seconds"]))
