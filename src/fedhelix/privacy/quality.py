"""The similarity of two images with values between 0 and 1."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

WINDOW = 7  # pixels


def psnr(rebuilt: Tensor, truth: Tensor) -> Tensor:
    """The peak signal-to-noise ratio of each image in decibels; high if the image has leaked."""
    error = (rebuilt.clamp(0, 1) - truth).square().flatten(1).mean(1)
    return 10 * (1 / error.clamp_min(1e-12)).log10()


def ssim(rebuilt: Tensor, truth: Tensor) -> Tensor:
    """The structural similarity of each image over small windows; 1 for equal images."""
    rebuilt, size = rebuilt.clamp(0, 1), min(WINDOW, *truth.shape[-2:])
    count = size * size

    def mean(values: Tensor) -> Tensor:
        return F.avg_pool2d(values, size, stride=1)

    mean_x, mean_y = mean(rebuilt), mean(truth)
    unbiased = count / (count - 1)
    var_x = (mean(rebuilt * rebuilt) - mean_x * mean_x) * unbiased
    var_y = (mean(truth * truth) - mean_y * mean_y) * unbiased
    covariance = (mean(rebuilt * truth) - mean_x * mean_y) * unbiased
    c1, c2 = 0.01**2, 0.03**2  # keep the quotients stable
    top = (2 * mean_x * mean_y + c1) * (2 * covariance + c2)
    bottom = (mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2)
    return (top / bottom).flatten(1).mean(1)


def median(values: Tensor) -> float:
    """The middle value, or the mean of the two middle values."""
    return float(torch.quantile(values.double(), 0.5))
