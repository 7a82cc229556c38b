"""Which returned models to drop: those whose removal improves the mean of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhelix.core.tree import State, copies_of

LONGEST = 10.0  # times the median length of an update, where nothing else is known

FEW = (2, 3, 4, 5, 6, 7, 8, 10, 13, 17, 22, 29, 38, 50, 66, 87)  # suspects dropped at once

# Validation samples on which every candidate is tried, and on which the best ones are checked.
TRIED_ON, CHECKED_ON = 64, 500
BEST = 2  # candidates that are checked

# Losses of the means of some groups of models, on about so many samples.
Losses = Callable[[Sequence[Sequence[int]], int], list[float]]


def uncopied(updates: Tensor, origin: State) -> list[int]:
    """The models that nobody copied, since no two honest clients send the same one; if there is
    none, the first of each group of equal models.
    """
    originals = copies_of(updates, origin)
    alone = [i for i, original in enumerate(originals) if originals.count(original) == 1]
    return alone or [i for i, original in enumerate(originals) if original == i]


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
    before: Callable[[], float],
    margin: float,
    least: int,
) -> list[int]:
    """Greedy: drop one model, or several suspects at once, as long as that lowers the loss.

    Suspects are the longest updates and those that agree least with the others. A drop must lower
    the loss by more than `margin` of it, unless the updates oppose the others or the mean is worse
    than the model `before` the round, which is only asked for where the margin decides. Candidates
    are tried on few samples, and the best are checked on more.
    """
    kept, losses = list(among), _distinct(losses)
    loss: float | None = None  # of the kept ones; it is asked for with the first best candidates
    while len(kept) > least:
        agrees = agreement(updates, kept).tolist()
        lengths = updates[kept].norm(dim=1).tolist()
        groups = suspects(lengths, agrees, least)
        left = [[place for i, place in enumerate(kept) if i not in group] for group in groups]
        margins = [0.0 if all(agrees[i] < 0 for i in group) else margin for group in groups]
        tried = prices(losses(left, TRIED_ON), margins)
        best = sorted(range(len(groups)), key=lambda i: tried[i])[:BEST]
        asked = [left[i] for i in best] + ([kept] if loss is None else [])
        found = losses(asked, CHECKED_ON)
        loss = found.pop() if loss is None else loss
        checked = prices(found, [margins[i] for i in best])
        at = min(range(len(best)), key=lambda i: checked[i])
        if not found[at] < loss:
            break
        if not checked[at] < loss and not loss > before():
            break
        kept, loss = left[best[at]], found[at]
    return kept


def _distinct(losses: Losses) -> Losses:
    """The same losses, but every group of models once: suspects for two reasons come up twice."""

    def distinct(groups: Sequence[Sequence[int]], count: int) -> list[float]:
        places = {group: i for i, group in enumerate(dict.fromkeys(map(tuple, groups)))}
        found = losses(list(places), count)
        return [found[places[tuple(group)]] for group in groups]

    return distinct


def prices(losses: Sequence[float], margins: Sequence[float]) -> list[float]:
    """What the loss must be above, so that each of these losses is lower by more than a margin."""
    return [
        loss + abs(loss) * margin / (1 - margin)
        for loss, margin in zip(losses, margins, strict=True)
    ]


def suspects(lengths: Sequence[float], agrees: Sequence[float], least: int) -> list[set[int]]:
    """Every model alone, the few longest updates, and the few that agree least with the others."""
    models = range(len(lengths))
    longest = sorted(models, key=lambda i: -lengths[i])
    opposed = sorted(models, key=lambda i: agrees[i])
    most = len(lengths) - least
    counts = [count for count in FEW if count <= most] + ([most] if most > FEW[-1] else [])
    several = [set(order[:count]) for order in (longest, opposed) for count in counts]
    return [*({i} for i in models), *several]
