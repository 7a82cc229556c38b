"""The exact denoiser for a mixture of other clients' vectors: generation without a network.

A client's vector is the truth plus noise. The truth of one client is drawn near the vectors of
others, so what it should be is a posterior mean in closed form. A client's own vectors are left
out: with them in the mixture, it would only get back what it sent.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

WIDTHS = tuple(2.0**power for power in range(-4, 3))  # tried, in units of the vectors' spread


class Known(NamedTuple):
    """Vectors of clients, each of an age in rounds (0 is today's)."""

    vectors: Tensor
    clients: Tensor
    ages: Tensor


def log_weights(known: Known, observed: Known, width: float, noise: Tensor, fade: float) -> Tensor:
    """How well each known vector explains each observed one (rows), as logarithms.

    Both are `width` apart by nature and by the `noise` of the observation besides; ages that differ
    count less, by `fade` a round. A client's own vectors explain nothing.
    """
    variance = width**2 + noise.square()
    gaps = torch.cdist(observed.vectors, known.vectors).square()
    ages = (observed.ages[:, None] - known.ages).abs()
    scores = -gaps / (2 * variance[:, None]) - fade * ages
    own = observed.clients[:, None] == known.clients
    return scores.masked_fill(own, -torch.inf)


def likelihood(known: Known, width: float, noise: Tensor, fade: float) -> float:
    """The mean log-likelihood of the vectors, each under the mixture of other clients'."""
    scores = log_weights(known, known, width, noise, fade)
    variance = width**2 + noise.square()
    dimensions = known.vectors.shape[1]
    others = (known.clients[:, None] != known.clients).sum(1)
    densities = scores.logsumexp(1) - dimensions / 2 * variance.log() - others.log()
    return float(densities.mean())


def fitted_width(known: Known, noise: Tensor, fade: float) -> float:
    """The width under which left-out clients are most likely."""
    spread = float((known.vectors - known.vectors.mean(0)).square().mean().sqrt())
    unit = max(spread, 1e-12)
    return max((unit * width for width in WIDTHS), key=lambda w: likelihood(known, w, noise, fade))


def own_noise(known: Known) -> Tensor:
    """For each vector how far its client's vectors scatter around their mean; clients with a single
    one have the mean of the others'.
    """
    clients, place = known.clients.unique(return_inverse=True)
    place = place.to(known.vectors.device)
    counts = torch.bincount(place, minlength=len(clients)).to(known.vectors)
    sums = torch.zeros(len(clients), known.vectors.shape[1]).to(known.vectors)
    means = sums.index_add(0, place, known.vectors) / counts[:, None]
    squares = (known.vectors - means[place]).square().mean(1)
    totals = torch.zeros_like(counts).index_add(0, place, squares)
    several = counts > 1
    variances = totals / (counts - 1).clamp_min(1)
    usual = variances[several].mean() if several.any() else torch.zeros_like(counts[0])
    return torch.where(several, variances, usual).sqrt()[place]


def denoised(
    known: Known, observed: Known, width: float, noise: Tensor, fade: float, today: bool = True
) -> Tensor:
    """The posterior means of the observed vectors.

    Each known vector pulls the observed one to itself, by the share of the noise in both variances.
    With `today`, what explains it at its own age is replaced by the same client's youngest vector.
    """
    weights = log_weights(known, observed, width, noise, fade).softmax(1)
    share = (width**2 / (width**2 + noise.square()))[:, None]
    age = weights @ known.vectors
    goal = weights @ _youngest(known) if today else age
    return goal + share * (observed.vectors - age)


def _youngest(known: Known) -> Tensor:
    """For each vector the youngest one of its client."""
    latest: dict[int, int] = {}
    ages, clients = known.ages.tolist(), known.clients.tolist()
    for row, client in enumerate(clients):
        if client not in latest or ages[row] <= ages[latest[client]]:
            latest[client] = row
    return known.vectors[[latest[client] for client in clients]]
