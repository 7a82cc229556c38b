"""Random changes of training samples, drawn anew in every epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhelix.core.errors import UserError
from fedhelix.core.options import check_frozen


@dataclass(frozen=True)
class Augmentation:
    """Subclass it for random changes of your own and pass it as `Federation(augment=Mine())`.

    It must be a frozen dataclass of numbers, and `apply` must not look at values (no `if` on
    tensors) nor draw anything itself, since it may be recorded as a CUDA graph. It does not see
    targets, so where these belong to pixels it must not move pixels.
    """

    numbers: ClassVar[int] = 1

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """A row for each sample: by default so many `numbers`, uniform between 0 and 1."""
        return torch.rand(count, self.numbers, generator=generator)

    def apply(self, x: Tensor, drawn: Tensor) -> Tensor:
        """The changed samples (N×..., of the same type and shape); `drawn` has a row for each."""
        raise TypeError(f"{type(self).__name__} must define apply(x, drawn).")


@dataclass(frozen=True)
class CropAndFlip(Augmentation):
    """Random crops of images with a border of four pixels, half of them flipped left to right."""

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Corners and flips."""
        return draw_crops(count, generator)

    def apply(self, x: Tensor, drawn: Tensor) -> Tensor:
        """The crops."""
        return crop_and_flip(x, drawn)


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


def check_augmentation(augmentation: Augmentation, x: Tensor) -> None:
    """Refuse an augmentation that fails, or that changes shape or type of samples."""
    check_frozen("augment", augmentation)
    try:
        drawn = augmentation.draw(len(x), torch.Generator()).to(x.device)
        changed = augmentation.apply(x, drawn)
    except UserError:
        raise
    except Exception as problem:  # a user's own augmentation may fail in any way
        raise UserError(
            f"augment fails for samples of shape {tuple(x.shape)} with '{problem}'."
        ) from problem
    if not isinstance(changed, Tensor):
        raise UserError(
            f"{augmentation}.apply must return the changed samples, not a {type(changed).__name__}."
        )
    if changed.shape != x.shape or changed.dtype != x.dtype:
        raise UserError(
            f"augment turns samples of shape {tuple(x.shape)} and {x.dtype} into "
            f"{tuple(changed.shape)} and {changed.dtype}; both must stay the same."
        )
