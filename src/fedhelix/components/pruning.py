"""Channel pruning: which channels are kept, and means over clients that kept different ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedhelix.core.layers import Layers
from fedhelix.core.tree import State, wide

# For each pruned weight, the masks of the outputs and inputs that are kept.
Channels = dict[str, dict[str, Tensor]]


def prunable(layers: Layers) -> list[str]:
    """The weights of the hidden layers behind the first stage, but for 1×1 shortcuts."""
    first = layers.stages[0][-1] if layers.stages else None
    behind = (
        layers.weighted[layers.weighted.index(first) + 1 : -1] if first in layers.weighted else ()
    )
    return [
        layer.entries[0]
        for layer in behind
        if layer.kind in ("conv", "linear") and not layer.pointwise
    ]


def encoder(layers: Layers) -> list[str]:
    """Everything before the first layer that can be pruned."""
    start = prunable(layers)[0]
    place = next(at for at, layer in enumerate(layers.all) if start in layer.entries)
    return [name for layer in layers.all[:place] for name in layer.entries]


def strongest(weight: Tensor, ratio: float) -> Tensor:
    """A mask of the output channels with the largest L1 norms; at least one channel is kept."""
    keep = max(1, math.ceil(round((1 - ratio) * len(weight), 6)))
    mask = torch.zeros(len(weight), device=weight.device)
    mask[weight.abs().flatten(1).sum(1).argsort(descending=True, stable=True)[:keep]] = 1
    return mask


def channels(model: State, names: Sequence[str], ratio: float) -> Channels:
    """The kept channels of each weight; inputs follow the outputs of the previous layer, if the
    numbers match.
    """
    kept: Channels = {}
    before = torch.zeros(0)
    for name in names:
        weight = model[name]
        same = len(before) == weight.shape[1]
        kept[name] = {
            "outputs": strongest(weight, ratio),
            "inputs": before if same else torch.ones(weight.shape[1], device=weight.device),
        }
        before = kept[name]["outputs"]
    return kept


def mask_of(kept: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """A mask of the coordinates that are kept, in the type of the weights."""
    mask = kept["outputs"][:, None] * kept["inputs"][None, :]
    return mask.view(*mask.shape, *[1] * (like.dim() - 2)).expand_as(like).to(like)


def unpacked(values: Tensor, mask: Tensor) -> Tensor:
    """The kept values at their places, zeros elsewhere."""
    whole = torch.zeros_like(mask)
    whole[mask > 0] = values.to(mask.device)
    return whole


def coordinate_mean(
    values: Sequence[Tensor], masks: Sequence[Tensor], weights: Sequence[float], old: Tensor
) -> Tensor:
    """For each coordinate, the weighted mean over clients that kept it; otherwise the old value."""
    total, weight = torch.zeros_like(wide(old)), torch.zeros_like(wide(old))
    for value, mask, share in zip(values, masks, weights, strict=True):
        total, weight = total + share * value * mask, weight + share * mask
    return torch.where(weight > 0, total / weight.clamp_min(1e-12), old).to(old.dtype)
