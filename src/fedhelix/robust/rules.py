"""Robust means of updates, as plain functions of a matrix with one row per client."""

from __future__ import annotations

import torch
from torch import Tensor


def median(updates: Tensor) -> Tensor:
    """The median of every coordinate; of an even number of clients the mean of the middle two."""
    return _middle(updates, (len(updates) - 1) // 2)


def trimmed_mean(updates: Tensor, trim: int) -> Tensor:
    """The mean of every coordinate without its `trim` largest and smallest values.

    At least one value is left.
    """
    return _middle(updates, min(trim, (len(updates) - 1) // 2))


def _middle(updates: Tensor, cut: int) -> Tensor:
    return updates.sort(0).values[cut : len(updates) - cut].mean(0)


def krum_scores(updates: Tensor, attackers: int) -> Tensor:
    """For every row, the sum of squared distances to its n - attackers - 2 nearest others.

    At least one other row counts.
    """
    squares = torch.cdist(updates, updates, compute_mode="donot_use_mm_for_euclid_dist").square()
    near = max(1, len(updates) - attackers - 2)
    return squares.sort(1).values[:, 1 : near + 1].sum(1)


def multi_krum(updates: Tensor, attackers: int, kept: int) -> Tensor:
    """The mean of the `kept` rows with the best scores; of equal rows the first."""
    best = krum_scores(updates, attackers).argsort(stable=True)[:kept]
    return updates[best].mean(0)


def geometric_median(updates: Tensor, steps: int = 50, smooth: float = 1e-6) -> Tensor:
    """The point with the smallest sum of distances to the rows, by Weiszfeld's algorithm."""
    centre = updates.mean(0)
    for _ in range(steps):
        closeness = 1 / (updates - centre).norm(dim=1).clamp(min=smooth)
        centre = (closeness[:, None] * updates).sum(0) / closeness.sum()
    return centre


def clipped(updates: Tensor, radius: float | None, times: float = 1.0) -> Tensor:
    """The rows, none longer than the radius (None: the median of their lengths, so many times)."""
    lengths = updates.norm(dim=1)
    limit = (
        times * lengths.quantile(0.5)
        if radius is None
        else torch.as_tensor(radius, device=updates.device)
    )
    return updates * (limit / lengths.clamp(min=1e-12)).clamp(max=1)[:, None]


def centred_clipping(
    updates: Tensor, radius: float | None, steps: int, centre: Tensor | None = None
) -> Tensor:
    """Move `steps` times, starting at a centre (None: zero), to the mean of the rows.

    Each row is clipped to the radius around the current centre.
    """
    centre = torch.zeros_like(updates[0]) if centre is None else centre
    for _ in range(steps):
        centre = centre + clipped(updates - centre, radius).mean(0)
    return centre


def nearest_mixed(updates: Tensor, attackers: int) -> Tensor:
    """For every row, the mean of the n - attackers rows that are nearest to it.

    It is one of them itself, and always counts.
    """
    distances = torch.cdist(updates, updates, compute_mode="donot_use_mm_for_euclid_dist")
    nearest = distances.argsort(dim=1, stable=True)[:, : max(1, len(updates) - attackers)]
    return torch.stack([updates[rows].mean(0) for rows in nearest])


def bucket_means(updates: Tensor, order: Tensor, size: int) -> Tensor:
    """The means of the rows in buckets of `size`, filled in the given order; the last may hold
    fewer.
    """
    return torch.stack([updates[bucket].mean(0) for bucket in order.split(size)])
