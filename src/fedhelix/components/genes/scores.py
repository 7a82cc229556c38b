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
    sizes = [sum(after[name].numel() for name in entries) for entries in units.values()]
    new, old = (
        torch.cat(
            [state[name].flatten() for entries in units.values() for name in entries]
        ).double()
        for state in (after, before)
    )
    scores = _measure(new, old, sizes, measure)
    if per == "value":
        scores = scores / torch.tensor(sizes, device=scores.device)
    return scores / scores.abs().sum().clamp_min(torch.finfo(scores.dtype).tiny)


def _measure(new: Tensor, old: Tensor, sizes: Sequence[int], measure: Measure) -> Tensor:
    """How each of the parts with these sizes changed."""
    if measure == "l1":
        return _sums((new - old).abs(), sizes)
    if measure == "l2":
        return _lengths(new - old, sizes)
    if measure == "emd":
        pairs = zip(new.split(list(sizes)), old.split(list(sizes)), strict=True)
        return torch.stack([(a.sort().values - b.sort().values).abs().mean() for a, b in pairs])
    one, other = _lengths(new, sizes), _lengths(old, sizes)
    cosine = torch.where(
        one * other > 0,
        _sums(new * old, sizes) / (one * other).clamp_min(1e-300),
        (one == other).double(),
    )
    return cosine if measure == "similarity" else (1 - cosine).clamp_min(0)


def _sums(values: Tensor, sizes: Sequence[int]) -> Tensor:
    return torch.stack([part.sum() for part in values.split(list(sizes))])


def _lengths(values: Tensor, sizes: Sequence[int]) -> Tensor:
    return torch.stack(torch._foreach_norm(values.split(list(sizes))))


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
