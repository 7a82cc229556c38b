"""Clients of equal size with dominant classes: the partitions of pFedGPA's and FedPAC's papers."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

from fedhelix.core.errors import UserError
from fedhelix.core.options import option
from fedhelix.data.datasets import Dataset
from fedhelix.data.partitions.base import Partition, class_list
from fedhelix.data.sampling import ClassPool, affordable, apportion, segments


@dataclass(frozen=True)
class Dominant(Partition):
    """Clients of equal size: a share spread evenly over all classes, the rest over dominant ones.

    Client i belongs to group i modulo the number of groups. Clients get different samples while the
    supply lasts and share them afterwards; where a class has not enough samples for one client, all
    clients of its group get fewer.
    """

    share: float = option(
        0.2,
        "share that is spread over all classes; above 1 it is read as per cent",
        low=0,
        high=100,
    )
    samples: int = option(600, "samples of each client", low=1)
    groups: tuple[tuple[int, ...], ...] | None = option(None, "the dominant classes of each group")

    def __post_init__(self) -> None:
        if self.groups is not None:
            groups = tuple(class_list("each of groups", group) for group in self.groups)
            object.__setattr__(self, "groups", groups or None)
        super().__post_init__()
        if self.share > 1:
            object.__setattr__(self, "share", self.share / 100)

    def counts(
        self, present: np.ndarray, supply: np.ndarray, draw: np.random.Generator
    ) -> np.ndarray:
        """The groups' proportions, in whole numbers; a warning says where clients share samples or
        differ in size.
        """
        counts = self._counts(self.samples, supply, present)
        wanted, sizes = counts.sum(0), counts.sum(1)
        few, differ = int((wanted > supply).sum()), len(set(sizes.tolist())) > 1
        if not few and not differ:
            return counts
        said = []
        if few:
            said.append(
                f"share samples of {few} of {len(supply)} classes, which have too few for all "
                "(validation samples, too)"
            )
        if differ:
            said.append(
                f"have {sizes.min()} to {sizes.max()} samples instead of {self.samples} each, "
                "since groups have too few of their classes"
            )
        ways = ["take fewer clients"] if few and not differ else []
        if most := self._most(supply, present):
            line = f", on the command line {self.name}:{self.share:.12g}:{most}"
            how = f"partition.{self.name}(samples={most}){'' if self.groups else line}"
            ways.append(f"give each {most} samples, the most that fit: {how}")
        elif few:
            ways = ["take fewer clients"]
        advice = f"; {', or '.join(ways)}" if ways else ""
        warnings.warn(f"clients {', and '.join(said)}{advice}.", stacklevel=2)
        return counts

    def _most(self, supply: np.ndarray, present: np.ndarray) -> int:
        """The most samples of each client of which none is shared and that all can have."""
        weights = self._weights(present)
        shares = (weights / weights.sum(1, keepdims=True))[self._groups_of_clients(weights)].sum(0)
        held = shares > 0
        # Rounding gives each client less than one sample of a class more or fewer than its share.
        highest = ((supply[held] + self.clients) / shares[held]).min()
        for most in range(min(self.samples, int(highest)), 0, -1):
            counts = self._counts(most, supply, present)
            if (counts.sum(0) <= supply).all() and (counts.sum(1) == most).all():
                return most
        return 0

    def _counts(self, samples: int, supply: np.ndarray, present: np.ndarray) -> np.ndarray:
        weights = self._weights(present)
        counts = apportion(affordable(samples, weights, supply), weights)
        return counts[self._groups_of_clients(weights)]

    def _groups_of_clients(self, weights: np.ndarray) -> np.ndarray:
        return np.arange(self.clients) % len(weights)

    def _weights(self, present: np.ndarray) -> np.ndarray:
        """The classes' weights, a row for each group."""
        parts = 1_000_000  # whole-number weights keep the apportionment exact
        even_parts = round(self.share * parts)
        return np.array(
            [
                even_parts * dominant.sum() + (parts - even_parts) * len(present) * dominant
                for dominant in self.dominant_classes(present)
            ]
        )

    def dominant_classes(self, present: np.ndarray) -> list[np.ndarray]:
        """For each group which of the present classes dominate."""
        masks = []
        for row, group in enumerate(self.groups or usual_groups(present)):
            dominant = np.isin(present, group)
            if dominant.sum() != len(set(group)):
                raise UserError(
                    f"group {row} is {list(group)}, "
                    f"but the data have samples of {present.tolist()} only."
                )
            masks.append(dominant)
        return masks

    def usual_test(self, data: Dataset, clients: int, available: int) -> int:
        """As in the experiments that this partition comes from."""
        return 300 if data.shape == (3, 32, 32) else 600


@dataclass(frozen=True)
class FedPACDominant(Dominant):
    """The dominant partition as FedPAC's code has it.

    What an even share leaves over goes to the last class of a part. Test parts follow the same rule
    with their own remainder, so their last class weighs more than in training. Where a class has
    too few test samples, they are smaller.
    """

    samples: int = option(1000, "samples of each client", low=1)

    @property
    def name(self) -> str:
        """The name that `parse` knows."""
        return "fedpac"

    def counts(
        self, present: np.ndarray, supply: np.ndarray, draw: np.random.Generator
    ) -> np.ndarray:
        """Every client's counts by the rule."""
        return self.rule(self.samples, present)

    def rule(self, samples: int, present: np.ndarray) -> np.ndarray:
        """So many samples for each client, of the present classes."""
        common = int(samples * self.share)
        even_part = remainder_last(common, np.ones(len(present), dtype=bool))
        masks = self.dominant_classes(present)
        rows = [even_part + remainder_last(samples - common, dominant) for dominant in masks]
        return np.array(rows)[np.arange(self.clients) % len(rows)]

    def tests(
        self, data: Dataset, members: np.ndarray, sizes: np.ndarray, draw: np.random.Generator
    ) -> list[np.ndarray]:
        """Test samples by the rule, whatever the supply of training samples."""
        usable = self.usable(data, data.y_test)
        present, of_class = np.unique(data.codes(data.y_test)[usable], return_inverse=True)
        pool = ClassPool.of(usable, of_class, len(present), draw)
        total = self.test_samples or self.possible_test(data, present, pool.sizes)
        counts = self.checked(self.rule(total, present), pool.sizes)
        return segments(pool.take(counts, np.cumsum(counts, axis=0) - counts), counts.sum(1))

    def possible_test(self, data: Dataset, present: np.ndarray, supply: np.ndarray) -> int:
        """The usual number of test samples, or the next smaller one that all classes can give."""
        usual = self.usual_test(data, self.clients, int(supply.sum()))
        fits = (n for n in range(usual, 0, -1) if (self.rule(n, present) <= supply).all())
        return next(fits, usual)


def remainder_last(total: int, among: np.ndarray) -> np.ndarray:
    """`total` samples spread evenly over some classes; the last of them gets the remainder."""
    each = np.where(among, total // among.sum(), 0)
    each[np.flatnonzero(among)[-1]] += total - each.sum()
    return each


def usual_groups(present: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Five groups that overlap in a ring: {0,1,2}, {2,3,4} .. {8,9,0} for ten classes.

    The 62 classes of EMNIST are grouped into digits, upper case and lower case.
    """
    classes = len(present)
    if classes == 62:
        spans = [(0, 10), (10, 26), (36, 26)]
    else:
        spans = [(group * classes // 5, max(1, round(0.3 * classes))) for group in range(5)]
    return tuple(
        tuple(present[(start + np.arange(width)) % classes].tolist()) for start, width in spans
    )
