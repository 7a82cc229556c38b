"""Random crops and flips of images, for a whole stack of batches at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhelix.core.errors import UserError


def draw_crops(n: int, generator: torch.Generator, pad: int = 4) -> Tensor:
    """The crop corners and flips of n images: n×3 whole numbers (dy, dx, flip)."""
    corners = torch.randint(2 * pad + 1, (n, 2), generator=generator, device=generator.device)
    flips = torch.randint(2, (n, 1), generator=generator, device=generator.device)
    return torch.cat([corners, flips], dim=1)


def crop_and_flip(x: Tensor, crops: Tensor, pad: int = 4) -> Tensor:
    """Pad each image with zeros, crop it at (dy, dx), and flip it left to right where flip is 1.

    `x` has the shape (..., B, C, H, W) and `crops` (..., B, 3). Give raw images, before
    `Dataset.prepare`, so that the border is black.
    """
    if x.dim() < 4 or crops.shape != (*x.shape[:-3], 3):
        raise UserError(
            f"crops need images of shape (..., B, C, H, W) and one (dy, dx, flip) for each, "
            f"not shapes {tuple(x.shape)} and {tuple(crops.shape)}."
        )
    channels, height, width = x.shape[-3:]
    padded = F.pad(x.reshape(-1, channels, height, width), [pad] * 4)
    dy, dx, flip = crops.to(x.device).reshape(-1, 3, 1).unbind(1)
    along = torch.arange(width, device=x.device)
    rows = torch.arange(height, device=x.device) + dy
    columns = torch.where(flip == 1, width - 1 - along, along) + dx
    image = torch.arange(len(padded), device=x.device)[:, None, None, None]
    channel = torch.arange(channels, device=x.device)[:, None, None]
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]].reshape(
        x.shape
    )
