"""How alike two pictures are; both have values between 0 and 1."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

WINDOW = 7  # pixels


def psnr(found: Tensor, truth: Tensor) -> Tensor:
    """The peak signal-to-noise ratio of each picture in decibels; a high one means that the secret
    is out.
    """
    error = (found.clamp(0, 1) - truth).square().flatten(1).mean(1)
    return 10 * (1 / error.clamp_min(1e-12)).log10()


def ssim(found: Tensor, truth: Tensor) -> Tensor:
    """The structural similarity of each picture, by means over small windows: 1 for equal pictures."""
    found, size = found.clamp(0, 1), min(WINDOW, *truth.shape[-2:])
    count = size * size

    def mean(values: Tensor) -> Tensor:
        return F.avg_pool2d(values, size, stride=1)

    mine, its = mean(found), mean(truth)
    unbiased = count / (count - 1)
    var_mine, var_its = (
        (mean(found * found) - mine * mine) * unbiased,
        (mean(truth * truth) - its * its) * unbiased,
    )
    shared = (mean(found * truth) - mine * its) * unbiased
    small, less_small = 0.01**2, 0.03**2
    top = (2 * mine * its + small) * (2 * shared + less_small)
    return (
        (top / ((mine**2 + its**2 + small) * (var_mine + var_its + less_small))).flatten(1).mean(1)
    )


def median(values: Tensor) -> float:
    """The middle value, or the mean of the two."""
    return float(torch.quantile(values.double(), 0.5))
