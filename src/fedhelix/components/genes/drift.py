"""How far a model has drifted from another, layer by layer (Eqs. 4 and 8)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedhelix.core.cuda import with_triton
from fedhelix.core.tree import State, Tree

Norm = Literal["relative", "rms", "plain", "whole"]
Units = Sequence[Sequence[str]]  # the names of the entries of each unit

FLOOR = 1e-2  # times sqrt(size): layers that start at zero have no length to be relative to
EDGE = 1e-12  # under the root, which has no slope at zero


def scales(centre: State, units: Units, norm: Norm = "relative") -> Tensor:
    """What each unit's drift is divided by: its length at the centre, the root of its size, or one
    (`plain`, and `whole`, which has one norm for all units).
    """
    device = next(iter(centre.values())).device
    counts = tuple(sum(centre[name].numel() for name in entries) for entries in units)
    if norm in ("plain", "whole"):
        return torch.ones(len(units), device=device)
    roots = _roots(counts, device)
    if norm == "rms":
        return roots
    lengths = torch._foreach_norm([centre[name].float() for name in names_of(units)])
    sums = torch.stack(lengths).square() @ members(units, device)
    return torch.maximum(sums.sqrt(), FLOOR * roots)


def names_of(units: Units) -> list[str]:
    """The entries of all units."""
    return [name for entries in units for name in entries]


def members(units: Units, device: torch.device | None = None) -> Tensor:
    """Which entry (row) belongs to which unit (column)."""
    return _one_hot(tuple(len(entries) for entries in units), device)


# Both are asked for in every round of every client, and a GPU would have to wait for the copies.
@cache
def _roots(counts: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([math.sqrt(count) for count in counts], device=device)


@cache
def _one_hot(lengths: tuple[int, ...], device: torch.device | None) -> Tensor:
    unit = torch.tensor([place for place, length in enumerate(lengths) for _ in range(length)])
    return torch.nn.functional.one_hot(unit, len(lengths)).float().to(device)


class _Squares(torch.autograd.Function):
    """For many tensors at once the summed squares of what has moved, and of its masked part."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> Tensor:
        """The tensors are as many models' entries, centres and (or not) masks; a row of sums for
        all that has moved, and one for what the masks hold.
        """
        params, centres, masks = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
        ctx.count, ctx.others = count, len(tensors) - count
        ctx.fused = _kernels(params, centres, masks)
        if ctx.fused is not None:
            ctx.save_for_backward(*tensors)
            return ctx.fused.sums(params, centres, masks)
        kinds = [torch._foreach_sub(params, centres)]
        if masks:
            kinds.append(torch._foreach_mul(kinds[0], masks))
        ctx.save_for_backward(*(value for kind in kinds for value in kind))
        return torch.stack([torch.stack(torch._foreach_norm(kind)).square() for kind in kinds])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        """The slope of a square is twice the value; masks are zeros and ones."""
        count, nothing = ctx.count, [None] * ctx.others
        if ctx.fused is not None:
            params, others = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
            return (
                None,
                *ctx.fused.slopes(params, others[:count], others[count:], slopes),
                *nothing,
            )
        moved, held = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        first, *second = (2 * slopes).unbind()
        grads = [value * slope for value, slope in zip(moved, first, strict=True)]
        if second:
            for grad, value, slope in zip(grads, held, second[0], strict=True):
                grad.addcmul_(value, slope)
        return (None, *grads, *nothing)


def _kernels(
    params: Sequence[Tensor], centres: Sequence[Tensor], masks: Sequence[Tensor]
) -> ModuleType | None:
    """The same in fewer passes over the memory of a GPU, where that is possible."""
    if not params[0].is_cuda:
        return None
    fused = with_triton("fedhelix.components.genes.fused")
    alike = (params, centres, *([masks] if masks else []))
    return fused if fused is not None and fused.can_fuse(*alike) else None


def squares(params: Mapping[str, Tensor], context: Tree, units: Units, masked: bool) -> Tensor:
    """The summed squares of each unit's difference to the centre; a second row for its masked part.

    Differentiable. One model has many entries, of which few operations do all; stacked models have
    small ones, which are joined.
    """
    names = names_of(units)
    parts = [params, context["centre"], *([context["mask"]] if masked else [])]
    if not torch._C._are_functorch_transforms_active():
        sums = _Squares.apply(len(names), *(part[name] for part in parts for name in names))
        return (sums[:, :, None] * context["members"]).sum(1)
    here, centre, *mask = (torch.cat([part[name].flatten() for name in names]) for part in parts)
    kinds = [here - centre, *((here - centre) * held for held in mask)]
    sizes = [sum(params[name].numel() for name in entries) for entries in units]
    return torch.stack(
        [torch.stack([part.square().sum() for part in kind.split(sizes)]) for kind in kinds]
    )


def drift(
    sums: Tensor,
    scale: Tensor,
    squared: bool = False,
    learnt: Tensor | None = None,
    whole: bool = False,
) -> Tensor:
    """The mean over units of the distance to the centre, divided by the unit's scale;
    differentiable. `sums` are those of each unit's squared differences.

    Units that `learnt` marks with 0 do not count. With `whole` it is the distance of all units
    together, which is Eq. 4 as printed.
    """
    counts = torch.ones_like(scale) if learnt is None else learnt
    if whole:
        sums, scale = (sums * counts).sum()[None], torch.ones_like(scale[:1])
        counts = torch.ones_like(scale)
    each = sums / scale.square() if squared else (sums + EDGE).sqrt() / scale
    return (each * counts).sum() / counts.sum().clamp_min(1)


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

    `context` has the cluster's layers (`centre`), which of them it has `learnt`, their `scale`, the
    `members` of each, and the elastic `mask` of zeros and ones.
    """
    if not (lambda_gen or lambda_elg):
        return context["scale"].new_zeros(())
    sums = squares(params, context, units, masked=bool(lambda_elg))
    how = (context["scale"], squared, context["learnt"], whole)
    total = lambda_gen * drift(sums[0], *how)
    return total + lambda_elg * drift(sums[1], *how) if lambda_elg else total
