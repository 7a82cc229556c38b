"""How far a model has drifted from another, layer by layer (Eqs. 4 and 8)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from fedhelix.core.tree import State, Tree

Norm = Literal["relative", "rms", "plain", "whole"]
Units = Sequence[Sequence[str]]  # the names of the entries of each unit

FLOOR = 1e-2  # times sqrt(size): layers that start at zero have no length to be relative to
EDGE = 1e-12  # under the root, which has no slope at zero


def scales(centre: Mapping[str, Tensor], units: Units, norm: Norm = "relative") -> Tensor:
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


def flat(state: Mapping[str, Tensor], units: Units) -> Tensor:
    """The entries of all units in one vector, which takes fewer operations than one by one."""
    return torch.cat([state[name].flatten() for entries in units for name in entries])


def unflat(vector: Tensor, units: Units, like: Mapping[str, Tensor]) -> State:
    """The inverse of `flat`: views with the shapes of another state."""
    names = [name for entries in units for name in entries]
    parts = vector.split([like[name].numel() for name in names])
    return {name: part.view(like[name].shape) for name, part in zip(names, parts, strict=True)}


def drift(
    squares: Tensor,
    sizes: Sequence[int],
    scale: Tensor,
    squared: bool = False,
    learnt: Tensor | None = None,
    whole: bool = False,
) -> Tensor:
    """The mean over units of the distance to the centre, divided by the unit's scale;
    differentiable. `squares` are those of all differences, `sizes` how many of them a unit has.

    Units that `learnt` marks with 0 do not count. With `whole` it is the distance of all units
    together, which is Eq. 4 as printed.
    """
    sums = torch.stack([part.sum() for part in squares.split(list(sizes))])
    counts = torch.ones_like(scale) if learnt is None else learnt
    if whole:
        sums, scale = (sums * counts).sum()[None], torch.ones_like(scale[:1])
        counts = torch.ones_like(scale)
    each = sums / scale.square() if squared else (sums + EDGE).sqrt() / scale
    return (each * counts).sum() / counts.sum().clamp_min(1)


def _device(state: Mapping[str, Tensor]) -> torch.device:
    return next(iter(state.values())).device


def pull(
    params: Mapping[str, Tensor],
    context: Tree,
    units: Units,
    lambda_gen: float,
    lambda_elg: float,
    squared: bool,
    whole: bool,
) -> Tensor:
    """`lambda_gen` times the drift of all layers, plus `lambda_elg` times that of the elastic part.

    `context` has the cluster's layers (`centre`) as one vector, which of them it has `learnt`,
    their `scale` and the elastic `mask`, a vector of zeros and ones.
    """
    scale = context["scale"]
    total = scale.new_zeros(())
    if not (lambda_gen or lambda_elg):
        return total
    squares = (flat(params, units) - context["centre"]).square()
    sizes = [sum(params[name].numel() for name in entries) for entries in units]
    how = (sizes, scale, squared, context["learnt"], whole)
    if lambda_gen:
        total = total + lambda_gen * drift(squares, *how)
    if lambda_elg:
        total = total + lambda_elg * drift(squares * context["mask"], *how)
    return total
