"""Scores of units, the choice of a gene, and how a gene shrinks (Eq. 9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

Measure = Literal["distance", "similarity", "l1", "l2", "emd"]
Select = Literal["lowest", "highest"]
Per = Literal["value", "unit"]


def unit_scores(
    after: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
    units: Mapping[str, Sequence[str]],
    measure: Measure,
    per: Per = "value",
) -> Tensor:
    """For each unit how it changed, divided by its size; the scores sum to one in magnitude.

    Sizes differ by far more than cosines, so per value the size decides; per `unit` nothing is
    divided. `distance` is one minus the cosine, `similarity` the cosine, `emd` the earth mover's
    distance between the values.
    """
    raw = []
    for entries in units.values():
        new, old = (
            torch.cat([state[name].flatten().double() for name in entries])
            for state in (after, before)
        )
        raw.append(_measure(new, old, measure) / (len(new) if per == "value" else 1))
    scores = torch.stack(raw)
    return scores / scores.abs().sum().clamp_min(torch.finfo(scores.dtype).tiny)


def _measure(new: Tensor, old: Tensor, measure: Measure) -> Tensor:
    if measure == "l1":
        return (new - old).abs().sum()
    if measure == "l2":
        return (new - old).norm()
    if measure == "emd":
        return (new.sort().values - old.sort().values).abs().mean()
    lengths = new.norm() * old.norm()
    cosine = torch.where(
        lengths > 0, new @ old / lengths.clamp_min(1e-300), (new.norm() == old.norm()).double()
    )
    return cosine if measure == "similarity" else (1 - cosine).clamp_min(0)


def choose(
    scores: Sequence[float],
    sizes: Sequence[int],
    select: Select,
    gamma: int | None,
    budget: float | None = None,
    waiting: Sequence[float] | None = None,
) -> list[int]:
    """The places of the chosen units, in their order: the `gamma` best, of these as many as fit
    into `budget`.

    Those that have waited longest come first, then those with the best scores, then the earlier
    ones. A budget that no unit fits into gets the smallest one.
    """
    sign = 1 if select == "lowest" else -1
    waited = waiting or [0.0] * len(scores)
    order = sorted(
        range(len(scores)), key=lambda place: (-waited[place], sign * scores[place], place)
    )
    if budget is None:
        return sorted(order[:gamma])
    chosen: list[int] = []
    left = budget
    for place in order:
        if sizes[place] <= left and (gamma is None or len(chosen) < gamma):
            chosen.append(place)
            left -= sizes[place]
    return sorted(chosen) or [min(range(len(sizes)), key=lambda place: (sizes[place], place))]


def shrunk(gamma: int, least: int, before: float, now: float, tolerance: float) -> int:
    """One unit fewer, unless accuracy fell by more than the tolerance against the window before."""
    return gamma if now < before - tolerance else max(least, gamma - 1)
