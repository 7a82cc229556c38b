"""How far a model has drifted from another, layer by layer (Eqs. 4 and 8)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from fedhelix.core.tree import Tree

Norm = Literal["relative", "rms", "plain"]

FLOOR = 1e-2  # times sqrt(size): layers that start at zero have no length to be relative to
EDGE = 1e-12  # under the root, which has no slope at zero


def scales(
    centre: Mapping[str, Tensor], units: Sequence[Sequence[str]], norm: Norm = "relative"
) -> Tensor:
    """What each unit's drift is divided by: its length at the centre, the root of
    its size, or one.
    """
    sizes = [math.sqrt(sum(centre[name].numel() for name in entries)) for entries in units]
    if norm == "plain":
        return torch.ones(len(units), device=_device(centre))
    roots = torch.tensor(sizes, device=_device(centre))
    if norm == "rms":
        return roots
    lengths = [
        torch.stack([centre[name].float().square().sum() for name in entries]).sum().sqrt()
        for entries in units
    ]
    return torch.maximum(torch.stack(lengths), FLOOR * roots)


def drift(
    params: Mapping[str, Tensor],
    centre: Mapping[str, Tensor],
    units: Sequence[Sequence[str]],
    scale: Tensor,
    mask: Mapping[str, Tensor] | None = None,
    squared: bool = False,
) -> Tensor:
    """The mean over units of the (masked) distance to the centre, divided by the unit's scale;
    differentiable.
    """
    total = []
    for entries in units:
        apart = {name: params[name] - centre[name] for name in entries}
        if mask is not None:
            apart = {name: value * mask[name] for name, value in apart.items()}
        total.append(
            sum((value.square().sum() for value in apart.values()), torch.zeros_like(scale[0]))
        )
    squares = torch.stack(total)
    return (squares / scale.square() if squared else (squares + EDGE).sqrt() / scale).mean()


def _device(state: Mapping[str, Tensor]) -> torch.device:
    return next(iter(state.values())).device


def pull(
    params: Mapping[str, Tensor],
    context: Tree,
    entries: Sequence[Sequence[str]],
    lambda_gen: float,
    lambda_elg: float,
    squared: bool,
) -> Tensor:
    """`lambda_gen` times the drift of all layers, plus `lambda_elg` times that of the elastic part.

    `context` has the cluster's layers (`centre`), their `scale` and the elastic `mask`.
    """
    centre, scale = context["centre"], context["scale"]
    total = scale.new_zeros(())
    if lambda_gen:
        total = total + lambda_gen * drift(params, centre, entries, scale, None, squared)
    if lambda_elg:
        total = total + lambda_elg * drift(params, centre, entries, scale, context["mask"], squared)
    return total
