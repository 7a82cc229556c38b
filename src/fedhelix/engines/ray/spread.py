"""Which clients an actor works on next: longest first, many short ones in one call.

Knows nothing of Ray.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

PART = 0.5  # of an equal share, so that actors that are done early find something left to do
LEAST = 1 / 20  # of an equal share of everything: a call costs about a millisecond
ATTEMPTS = 3  # at a task whose actors die


class TaskQueue:
    """The tasks that no actor has taken yet, by their places in the list of all tasks."""

    def __init__(self, sizes: Sequence[int]):
        self.sizes = [max(1, size) for size in sizes]  # proportional to the duration
        order = sorted(range(len(sizes)), key=lambda index: (self.sizes[index], -index))
        self.waiting = order  # longest last
        self.left = self.total = sum(self.sizes)
        self.deaths: Counter[int] = Counter()

    def __bool__(self) -> bool:
        return bool(self.waiting)

    def take(self, actors: int, whole: bool = False) -> list[int]:
        """The next tasks for one of so many actors: the longest ones.

        They are half of an equal share of what is left, or an equal share of all tasks if there
        is more to gain from few calls (`whole`). A task whose actor died comes alone, so that the
        next death tells which one is to blame.
        """
        actors = max(actors, 1)
        share = max(self.left * PART, self.total * (1 if whole else LEAST)) / actors
        taken: list[int] = []
        size = 0
        while self.waiting:
            index = self.waiting[-1]
            if taken and (size + self.sizes[index] > share or self.deaths[index]):
                break
            taken.append(self.waiting.pop())
            size += self.sizes[index]
            if self.deaths[index]:
                break
        self.left -= size
        return taken

    def give_back(self, taken: Sequence[int], died: bool = True) -> int | None:
        """Tasks of a lost actor wait again; returns one that was lost too often, if there is one.

        Tasks that the actor had not begun are not to blame (`died` is false).
        """
        self.waiting += reversed(taken)
        self.left += sum(self.sizes[index] for index in taken)
        if died:
            self.deaths.update(taken)
        return next((index for index in taken if self.deaths[index] >= ATTEMPTS), None)
