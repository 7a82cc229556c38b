"""Selection as in a genetic algorithm: the number of parents of a generation, and which ones."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Literal

Schedule = Literal["constant", "power", "linear", "sine", "wave", "adaptive"]
Fitness = tuple[float, float, int]  # metric, minus loss, minus id: the larger, the fitter

ABSURD, LEAST_LOSS = 1e6, 1e-3  # so many times the least loss, or this if that is less


def parents(
    schedule: Schedule,
    t: int,
    rounds: int,
    most: int,
    b: float | None = None,
    c: float | None = None,
) -> float:
    """The number of models that round t should aggregate, before rounding.

    `c` defaults to half of the rounds. `power` reaches `most` at t = c unless b is given.
    `adaptive` does not depend on t; see `effective`.
    """
    c = rounds / 2 if c is None else c
    if schedule == "power":
        # most^(-t/c) instead of (most^(-1/c))^t, because the exponent is then exact at t = c.
        return most * (1 - (most ** (-t / c) if b is None else b**t)) + 1
    if schedule == "linear":
        return most * t / c + 1
    if schedule == "sine":
        return most * math.sin(math.pi * t / (2 * c)) + 1 if t < c else most
    if schedule == "wave":
        return most * math.sin(math.pi * t / c) + 1 if t < c else 1
    return most


def whole(wanted: float, most: int) -> int:
    """The number of parents: rounded down, at least one and at most `most`."""
    return max(1, min(math.floor(wanted + 1e-9), most))


def effective(fitness: Sequence[float]) -> float:
    """The effective number of models by their advantage over the worst one.

    1 if a single model has all the advantage; n if none is better than the others.
    """
    known = [value for value in fitness if math.isfinite(value)]
    values = [value - min(known) for value in known]
    squares = sum(value**2 for value in values)
    return sum(values) ** 2 / squares if squares else len(fitness)


def fitness_of(metric: float, loss: float, client: int) -> Fitness:
    """Better metrics first, then smaller losses, then smaller ids; diverged models come last.

    A model has diverged when its metric or its loss is not finite: outputs that are no numbers may
    still hit some labels.
    """
    finite = math.isfinite(metric) and math.isfinite(loss)
    return (metric, -loss, -client) if finite else (-math.inf, -math.inf, -client)


def not_diverged(fitness: Sequence[Fitness], positions: Sequence[int]) -> list[int]:
    """Those of the positions whose models have not diverged; all of them if all have.

    A loss that is finite but a million times another model's is that of absurd weights.
    """
    finite = [i for i in positions if math.isfinite(fitness[i][0])]
    least = min((-fitness[i][1] for i in finite), default=0.0)
    sane = [i for i in finite if -fitness[i][1] <= ABSURD * max(least, LEAST_LOSS)]
    return sane or list(positions)


def without_copies(fitness: Sequence[Fitness], originals: Sequence[int]) -> list[int]:
    """The positions of all models, but of copies of one original only the fittest."""
    ascending = sorted(range(len(fitness)), key=lambda position: fitness[position])
    return sorted({originals[position]: position for position in ascending}.values())


def fittest(fitness: Sequence[Fitness], count: int) -> list[int]:
    """The positions of the `count` fittest, in ascending order, by a heap of that size."""
    heap: list[tuple[Fitness, int]] = []
    for position, value in enumerate(fitness):
        heapq.heappush(heap, (value, position))
        if len(heap) > count:
            heapq.heappop(heap)
    return sorted(position for _, position in heap)


def diverse(
    fitness: Sequence[Fitness], distances: Sequence[Sequence[float]], count: int, reward: float
) -> list[int]:
    """The positions of `count` models: the fittest, then greedily by fitness and diversity.

    Each step takes the best by metric + reward × distance to the nearest model chosen so far.
    """
    chosen = [max(range(len(fitness)), key=lambda i: fitness[i])]
    while len(chosen) < min(count, len(fitness)):
        others = [i for i in range(len(fitness)) if i not in chosen]
        near = {i: min(distances[i][j] for j in chosen) for i in others}
        chosen.append(
            max(others, key=lambda i: (fitness[i][0] + reward * near[i], *fitness[i][1:]))
        )
    return sorted(chosen)
