"""Drawing samples class by class, for hold-outs, subsamples and partitions."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from fedhelix.core.errors import UserError


def apportion(totals: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Whole numbers that sum to each row's total and follow its weights (largest remainders)."""
    # Integers throughout: with floats, rounding errors could change who gets the last sample.
    sums = weights.sum(1, keepdims=True)
    counts, remainders = np.divmod(totals[:, None] * weights, sums)
    missing = totals - counts.sum(1)
    rank = np.argsort(np.argsort(-remainders, axis=1, kind="stable"), axis=1)
    return counts + (rank < missing[:, None])


def affordable(wanted: int, weights: np.ndarray, supply: np.ndarray) -> np.ndarray:
    """For each row the largest total up to `wanted` that exceeds no class's supply."""
    sums = weights.sum(1, keepdims=True)
    limits = np.where(weights > 0, supply * sums // np.maximum(weights, 1), wanted)
    return np.minimum(wanted, limits.min(1))


def segments(flat: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    """The consecutive pieces of an array."""
    ends = np.cumsum(sizes).tolist()
    return [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True, eq=False)
class ClassPool:
    """Sample indices grouped by class, in random order within each class."""

    indices: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of(
        cls, indices: np.ndarray, labels: np.ndarray, classes: int, draw: np.random.Generator
    ) -> ClassPool:
        """A pool of `indices`, whose labels are given in the same order."""
        # Label plus a fraction in [0, 1): one sort groups by class and shuffles within each.
        order = np.argsort(labels + draw.random(len(labels)))
        return cls(indices[order], np.bincount(labels, minlength=classes))

    def take(self, counts: np.ndarray, starts: np.ndarray | int) -> np.ndarray:
        """For each row and class `counts` samples from `starts` on, wrapping at the class's end.

        A window of a random order is a random subset without repeats, so one shuffle serves any
        number of rows. The result holds the rows one after the other.
        """
        rows, classes = counts.shape
        flat = counts.ravel()
        lengths = flat[flat > 0]
        place = np.broadcast_to(starts, counts.shape).ravel()[flat > 0]
        kind = np.tile(np.arange(classes), rows)[flat > 0]
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        offset = (np.repeat(place, lengths) + within) % np.repeat(self.sizes[kind], lengths)
        first = np.cumsum(self.sizes) - self.sizes
        return self.indices[np.repeat(first[kind], lengths) + offset]


def stratified(
    labels: np.ndarray, size: int, draw: np.random.Generator, leave_one: bool = False
) -> np.ndarray:
    """Sorted positions of `size` samples with the class proportions of all.

    `leave_one` never takes a whole class.
    """
    pool = ClassPool.of(np.arange(len(labels)), labels, 1, draw)
    counts = apportion(np.array([size]), pool.sizes[None])
    if leave_one:
        counts = np.minimum(counts, np.maximum(pool.sizes - 1, 0))
    return np.sort(pool.take(counts, 0))


def enough_for(clients: int, supply: np.ndarray) -> None:
    """Refuse more clients than samples."""
    samples = supply.sum()
    if samples < clients:
        raise UserError(
            f"{clients} clients cannot share {samples} samples; lower clients to at most {samples}."
        )


def even(total: int, parts: int) -> np.ndarray:
    """A number cut into parts that differ by at most one."""
    return total // parts + (np.arange(parts) < total % parts)


def top_up(counts: np.ndarray, least: int, draw: np.random.Generator) -> None:
    """Move random samples from the largest clients to those with fewer than `least`, in place."""
    sizes = counts.sum(1)
    donors = [(-int(size), client) for client, size in enumerate(sizes) if size > least]
    heapq.heapify(donors)
    for client in np.flatnonzero(sizes < least):
        while sizes[client] < least:
            _, donor = heapq.heappop(donors)
            given = min(least - sizes[client], sizes[donor] - least)
            moved = draw.multivariate_hypergeometric(counts[donor], given)
            counts[donor] -= moved
            counts[client] += moved
            sizes[client] += given
            sizes[donor] -= given
            if sizes[donor] > least:
                heapq.heappush(donors, (-int(sizes[donor]), int(donor)))
