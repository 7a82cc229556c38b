"""Selection as in a genetic algorithm: how many parents a generation has, and which ones. Plain
numbers only.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Literal

Schedule = Literal["constant", "power", "linear", "sine", "wave", "adaptive"]
Fitness = tuple[float, float, int]  # metric, minus loss, minus id: the larger, the fitter


def parents(
    schedule: Schedule,
    t: int,
    rounds: int,
    most: int,
    b: float | None = None,
    c: float | None = None,
) -> float:
    """How many models round t should merge, before rounding; c is half of the rounds unless it is
    given.

    `power` reaches `most` at t = c unless b is given. `adaptive` does not depend on t; see
    `effective`.
    """
    c = rounds / 2 if c is None else c
    if schedule == "power":
        # most^(-t/c) and not (most^(-1/c))^t: the exponent is exact at t = c.
        return most * (1 - (most ** (-t / c) if b is None else b**t)) + 1
    if schedule == "linear":
        return most * t / c + 1
    if schedule == "sine":
        return most * math.sin(math.pi * t / (2 * c)) + 1 if t < c else most
    if schedule == "wave":
        return most * math.sin(math.pi * t / c) + 1 if t < c else 1
    return most


def whole(wanted: float, most: int) -> int:
    """A number of parents: rounded down, at least one and at most so many."""
    return max(1, min(math.floor(wanted + 1e-9), most))


def effective(fitness: Sequence[float]) -> float:
    """How many models have what all of these are better by than the worst one: 1 if one alone is; n
    if none is.
    """
    known = [value for value in fitness if math.isfinite(value)]
    values = [value - min(known) for value in known]
    squares = sum(value**2 for value in values)
    return sum(values) ** 2 / squares if squares else len(fitness)


def fitness_of(metric: float, loss: float, client: int) -> Fitness:
    """Better metrics first, then smaller losses, then smaller ids; a model that has diverged comes
    last.
    """
    return (
        -math.inf if math.isnan(metric) else metric,
        -math.inf if math.isnan(loss) else -loss,
        -client,
    )


def without_copies(fitness: Sequence[Fitness], originals: Sequence[int]) -> list[int]:
    """Positions of all models, but of those with one original only that of the fittest."""
    ascending = sorted(range(len(fitness)), key=lambda position: fitness[position])
    return sorted({originals[position]: position for position in ascending}.values())


def fittest(fitness: Sequence[Fitness], count: int) -> list[int]:
    """Positions of the `count` fittest, in ascending order, found with a heap that never holds more
    than that.
    """
    heap: list[tuple[Fitness, int]] = []
    for position, value in enumerate(fitness):
        heapq.heappush(heap, (value, position))
        if len(heap) > count:
            heapq.heappop(heap)
    return sorted(position for _, position in heap)


def diverse(
    fitness: Sequence[Fitness], distances: Sequence[Sequence[float]], count: int, reward: float
) -> list[int]:
    """Positions of `count` models: the fittest, then whoever is best by metric + reward × distance
    to the chosen.
    """
    chosen = [max(range(len(fitness)), key=lambda i: fitness[i])]
    while len(chosen) < min(count, len(fitness)):
        others = [i for i in range(len(fitness)) if i not in chosen]
        near = {i: min(distances[i][j] for j in chosen) for i in others}
        chosen.append(
            max(others, key=lambda i: (fitness[i][0] + reward * near[i], *fitness[i][1:]))
        )
    return sorted(chosen)
