"""Which returned models to drop: those whose removal improves the mean of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

COPY_WITHIN = 1e-3  # of an update's length; honest clients are never that near to each other
LONGEST = 10.0  # times the median length of an update, where nothing else is known

Losses = Callable[[Sequence[Sequence[int]]], list[float]]  # of the means of some groups of models


def distinct(updates: Tensor) -> list[int]:
    """The first of each group of equal updates."""
    updates = updates.double()  # squares of finite floats stay finite
    near = torch.cdist(updates, updates) <= COPY_WITHIN * updates.norm(dim=1)
    first = near.float().argmax(1).tolist()  # the first update that each one is a copy of
    return [i for i, original in enumerate(first) if original == i]


def agreement(updates: Tensor, among: Sequence[int]) -> Tensor:
    """The cosine of each update with the sum of the others' directions."""
    directions = F.normalize(updates[list(among)])
    others = directions.sum(0) - directions
    return F.cosine_similarity(directions, others)


def agreeing(updates: Tensor, among: Sequence[int], least: int) -> list[int]:
    """The updates that point where the others point and are not far too long; at least some."""
    lengths = updates[list(among)].norm(dim=1)
    score = agreement(updates, among)
    score[lengths > LONGEST * lengths.median()] = -torch.inf
    order = score.argsort(descending=True).tolist()
    count = max(least, int((score >= 0).sum()))
    return sorted(among[i] for i in order[:count])


def culled(
    among: Sequence[int], updates: Tensor, losses: Losses, margin: float, least: int
) -> list[int]:
    """Greedy: drop one model, or several suspects at once, as long as that lowers the loss.

    Suspects are the longest updates and those that agree least with the others. Dropping a model
    must lower the loss by more than `margin` of it, unless its update opposes the others.
    """
    kept = list(among)
    (loss,) = losses([kept])
    while len(kept) > least:
        agrees = agreement(updates, kept).tolist()
        lengths = updates[kept].norm(dim=1).tolist()
        groups = suspects(lengths, agrees, least)
        left = [[place for i, place in enumerate(kept) if i not in group] for group in groups]
        found = losses(left)
        opposing = [all(agrees[i] < 0 for i in group) for group in groups]
        prices = [
            after if opposes else after + abs(after) * margin / (1 - margin)
            for after, opposes in zip(found, opposing, strict=True)
        ]
        best = min(range(len(groups)), key=lambda i: prices[i])
        if not prices[best] < loss:
            break
        kept, loss = left[best], found[best]
    return kept


def suspects(lengths: Sequence[float], agrees: Sequence[float], least: int) -> list[set[int]]:
    """Every model alone, the few longest updates, and the few that agree least with the others."""
    models = range(len(lengths))
    longest = sorted(models, key=lambda i: -lengths[i])
    opposed = sorted(models, key=lambda i: agrees[i])
    counts = range(2, len(lengths) - least + 1)
    several = [set(order[:count]) for order in (longest, opposed) for count in counts]
    return [*({i} for i in models), *several]
