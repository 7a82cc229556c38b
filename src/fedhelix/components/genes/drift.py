"""How far a model has drifted from another, layer by layer (Eqs. 4 and 8)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from fedhelix.core.tree import Tree

Norm = Literal["relative", "rms", "plain", "whole"]

FLOOR = 1e-2  # times sqrt(size): layers that start at zero have no length to be relative to
EDGE = 1e-12  # under the root, which has no slope at zero


def scales(
    centre: Mapping[str, Tensor], units: Sequence[Sequence[str]], norm: Norm = "relative"
) -> Tensor:
    """What each unit's drift is divided by: its length at the centre, the root of its size, or one
    (`plain`, and `whole`, which has one norm for all units).
    """
    sizes = [math.sqrt(sum(centre[name].numel() for name in entries)) for entries in units]
    if norm in ("plain", "whole"):
        return torch.ones(len(units), device=_device(centre))
    roots = torch.tensor(sizes, device=_device(centre))
    if norm == "rms":
        return roots
    lengths = [
        torch.stack([centre[name].float().square().sum() for name in entries]).sum().sqrt()
        for entries in units
    ]
    return torch.maximum(torch.stack(lengths), FLOOR * roots)


def flat(state: Mapping[str, Tensor], units: Sequence[Sequence[str]]) -> Tensor:
    """The entries of all units in one vector, which takes fewer operations than one by one."""
    return torch.cat([state[name].flatten() for entries in units for name in entries])


def drift(
    params: Mapping[str, Tensor],
    centre: Mapping[str, Tensor],
    units: Sequence[Sequence[str]],
    scale: Tensor,
    mask: Mapping[str, Tensor] | None = None,
    squared: bool = False,
    learnt: Tensor | None = None,
    whole: bool = False,
) -> Tensor:
    """The mean over units of the (masked) distance to the centre, divided by the unit's scale;
    differentiable.

    Units that `learnt` marks with 0 do not count. With `whole` it is the distance of all units
    together, which is Eq. 4 as printed.
    """
    apart = flat(params, units) - flat(centre, units)
    if mask is not None:
        apart = apart * flat(mask, units)
    sizes = [sum(params[name].numel() for name in entries) for entries in units]
    squares = torch.stack([part.sum() for part in apart.square().split(sizes)])
    counts = torch.ones_like(scale) if learnt is None else learnt
    if whole:
        squares, scale = (squares * counts).sum()[None], torch.ones_like(scale[:1])
        counts = torch.ones_like(scale)
    each = squares / scale.square() if squared else (squares + EDGE).sqrt() / scale
    return (each * counts).sum() / counts.sum().clamp_min(1)


def _device(state: Mapping[str, Tensor]) -> torch.device:
    return next(iter(state.values())).device


def pull(
    params: Mapping[str, Tensor],
    context: Tree,
    entries: Sequence[Sequence[str]],
    lambda_gen: float,
    lambda_elg: float,
    squared: bool,
    whole: bool,
) -> Tensor:
    """`lambda_gen` times the drift of all layers, plus `lambda_elg` times that of the elastic part.

    `context` has the cluster's layers (`centre`), which of them it has `learnt`, their `scale` and
    the elastic `mask`.
    """
    scale = context["scale"]
    total = scale.new_zeros(())
    for strength, mask in ((lambda_gen, None), (lambda_elg, context.get("mask"))):
        if strength:
            how = (scale, mask, squared, context["learnt"], whole)
            total = total + strength * drift(params, context["centre"], entries, *how)
    return total
