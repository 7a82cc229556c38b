"""Which returned models to drop: those whose removal improves the mean of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

import torch
import torch.nn.functional as F
from torch import Tensor

COPY_WITHIN = 1e-3  # of an update's length; honest clients are never that near to each other
LONGEST = 10.0  # times the median length of an update, where nothing else is known

FEW = (2, 3, 4, 5, 6, 7, 8, 10, 13, 17, 22, 29, 38, 50, 66, 87)  # suspects dropped at once

Losses = Callable[[Sequence[Sequence[int]]], list[float]]  # of the means of some groups of models


def distinct(updates: Tensor) -> tuple[list[int], set[int]]:
    """The first of each group of equal updates, and which of these have copies."""
    updates = updates.double()  # squares of finite floats stay finite
    near = torch.cdist(updates, updates) <= COPY_WITHIN * updates.norm(dim=1)
    first = near.float().argmax(1).tolist()  # the first update that each one is a copy of
    firsts = [i for i, original in enumerate(first) if original == i]
    return firsts, {i for i in firsts if first.count(i) > 1}


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
    among: Sequence[int],
    updates: Tensor,
    losses: Losses,
    before: float,
    margin: float,
    least: int,
    copied: Set[int] = frozenset(),
) -> list[int]:
    """Greedy: drop one model, or several suspects at once, as long as that lowers the loss.

    Suspects are the longest updates and those that agree least with the others. A drop must lower
    the loss by more than `margin` of it, unless the updates oppose the others or were copied, or
    the mean is worse than the model `before` the round.
    """
    kept = list(among)
    (loss,) = losses([kept])
    while len(kept) > least:
        agrees = agreement(updates, kept).tolist()
        lengths = updates[kept].norm(dim=1).tolist()
        groups = suspects(lengths, agrees, least)
        left = [[place for i, place in enumerate(kept) if i not in group] for group in groups]
        found = losses(left)
        doubtful = [all(agrees[i] < 0 or kept[i] in copied for i in group) for group in groups]
        prices = [
            after if doubts else after + abs(after) * margin / (1 - margin)
            for after, doubts in zip(found, doubtful, strict=True)
        ]
        best = min(range(len(groups)), key=lambda i: prices[i])
        if not (found[best] if loss > before else prices[best]) < loss:
            break
        kept, loss = left[best], found[best]
    return kept


def suspects(lengths: Sequence[float], agrees: Sequence[float], least: int) -> list[set[int]]:
    """Every model alone, the few longest updates, and the few that agree least with the others."""
    models = range(len(lengths))
    longest = sorted(models, key=lambda i: -lengths[i])
    opposed = sorted(models, key=lambda i: agrees[i])
    most = len(lengths) - least
    counts = [count for count in FEW if count <= most] + ([most] if most > FEW[-1] else [])
    several = [set(order[:count]) for order in (longest, opposed) for count in counts]
    return [*({i} for i in models), *several]
