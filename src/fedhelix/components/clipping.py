"""Updates of bounded length, and a bound that follows their lengths."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedhelix.core.tree import State, wide

CLIP_STEP = 0.2  # how fast an adaptive clip moves, as in Andrew et al., arXiv:1905.03871


def flat_update(model: Mapping[str, Tensor], origin: State) -> Tensor:
    """How far a model has moved, as one row; entries that it lacks have not.

    Half precision would round the row, and with it its length.
    """
    whole = {**origin, **model}
    return torch.cat([(wide(whole[name]) - wide(old)).flatten() for name, old in origin.items()])


def clipped(updates: Tensor, clip: Tensor) -> Tensor:
    """Updates in rows, none longer than the clip."""
    return updates * (clip / updates.norm(dim=-1, keepdim=True)).clamp(max=1)


def moved(origin: State, update: Tensor) -> State:
    """A state plus an update in one row; every entry keeps its type, and half precision rounds."""
    parts = update.split([value.numel() for value in origin.values()])
    return {
        name: (wide(value) + part.view_as(value)).to(value.dtype)
        for (name, value), part in zip(origin.items(), parts, strict=True)
    }


def next_clip(clip: Tensor, share: Tensor, quantile: float) -> Tensor:
    """The clip after a round in which that share of the updates was shorter."""
    return clip * torch.exp(-CLIP_STEP * (share - quantile))
