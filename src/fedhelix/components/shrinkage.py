"""Noise is removed from a matrix by shrinking its singular values (Gavish and Donoho, 2017).

If a matrix is one of low rank plus independent noise, noise alone fills the singular values up to
an edge that random matrix theory knows (Marchenko and Pastur, 1967). What is beyond the edge is
signal, made longer by the noise. The shrinkage here is the one with the least expected squared
error.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

POINTS = 20_001  # of the integral


@cache
def marchenko_pastur_median(ratio: float) -> float:
    """The median of the squared singular values of noise, divided by the longer side and by the
    variance; `ratio` is the shorter side by the longer one.
    """
    angle = torch.linspace(0, math.pi, POINTS, dtype=torch.float64)
    value = 1 + ratio + 2 * math.sqrt(ratio) * angle.cos()  # from the upper end to the lower one
    weight = torch.where(value > 0, angle.sin().square() / value, 0.0)
    mass = torch.cumulative_trapezoid(weight, angle)
    return float(value[1:][torch.searchsorted(mass, mass[-1] / 2)])


def shrunk(values: Tensor, ratio: float) -> Tensor:
    """Singular values without noise, in units in which the edge of noise is at 1 + sqrt(ratio)."""
    square = values.square()
    inside = (square - ratio - 1).square() - 4 * ratio
    beyond = values > 1 + math.sqrt(ratio)
    return torch.where(beyond, inside.clamp(min=0).sqrt() / values, 0.0)


def denoised(rows: Tensor) -> Tensor:
    """Rows around their mean, less what may be noise: its size follows from the median of the
    singular values, most of which it fills.
    """
    apart = (rows - rows.mean(0)).double()
    count, length = len(rows) - 1, rows.shape[1]  # around their mean, they have one rank less
    rank = min(count, length)
    if rank < 2:
        return torch.zeros_like(rows)
    ratio = rank / max(count, length)
    wide = len(rows) <= length
    squares, vectors = torch.linalg.eigh(apart @ apart.T if wide else apart.T @ apart)
    values, vectors = squares[-rank:].clamp(min=0).sqrt(), vectors[:, -rank:]
    unit = values.median() / math.sqrt(marchenko_pastur_median(ratio))
    kept = shrunk(values / unit.clamp(min=1e-300), ratio) * unit / values.clamp(min=1e-300)
    if wide:
        signal = vectors @ (kept[:, None] * (vectors.T @ apart))
    else:
        signal = (apart @ vectors * kept) @ vectors.T
    return signal.to(rows.dtype)
