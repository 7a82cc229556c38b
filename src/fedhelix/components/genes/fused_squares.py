"""The squares of `drift` as Triton kernels, which keep no differences in memory."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

SIZE = 1024  # values that a program handles at a time
PROGRAMS = 128  # for an entry, at most


@triton.jit
def _moved(weights, centre, at, inside):  # type: ignore[no-untyped-def]
    here = tl.load(weights + at, mask=inside, other=0.0)
    return here - tl.load(centre + at, mask=inside, other=0.0)


@triton.jit
def _sums(  # type: ignore[no-untyped-def]
    weights, centre, held, sums, count, step, HELD: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """A program's share of an entry: the summed squares of all that moved, and of what is held."""
    first, second = tl.zeros((SIZE,), tl.float32), tl.zeros((SIZE,), tl.float32)
    for start in range(tl.program_id(0) * SIZE, count, step):
        at = start + tl.arange(0, SIZE)
        moved = _moved(weights, centre, at, at < count)
        first += moved * moved
        if HELD:
            moved *= tl.load(held + at, mask=at < count, other=0.0)
            second += moved * moved
    tl.store(sums + 2 * tl.program_id(0), tl.sum(first))
    tl.store(sums + 2 * tl.program_id(0) + 1, tl.sum(second))


@triton.jit
def _slopes(  # type: ignore[no-untyped-def]
    weights, centre, held, slopes, out, count, entries, HELD: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    slope = tl.load(slopes)
    if HELD:
        slope += tl.load(slopes + entries) * tl.load(held + at, mask=inside, other=0.0)
    tl.store(out + at, 2 * slope * _moved(weights, centre, at, inside), mask=inside)


def can_fuse(count: int, tensors: tuple[Tensor, ...]) -> bool:
    """Whether the values of models, centres and masks lie in the same order, on a GPU."""
    return all(
        value.is_cuda
        and value.dtype == torch.float32
        and value.stride() == tensors[place % count].stride()
        and (value.is_contiguous() or value.is_contiguous(memory_format=torch.channels_last))
        for place, value in enumerate(tensors)
    )


class FusedSquares(torch.autograd.Function):
    """For many tensors at once the summed squares of what has moved, and of its masked part."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> Tensor:
        """The tensors are as many models' entries, centres and (or not) masks; a row of sums for
        all that has moved, and one for what the masks hold.
        """
        ctx.save_for_backward(*tensors)
        ctx.count, has = count, len(tensors) > 2 * count
        sums = torch.zeros(count, PROGRAMS, 2, device=tensors[0].device)
        for place in range(count):
            mine = tensors[place::count]
            size = mine[0].numel()
            programs = min(PROGRAMS, triton.cdiv(size, SIZE))
            _sums[(programs,)](
                mine[0], mine[1], mine[-1], sums[place], size, programs * SIZE, HELD=has, SIZE=SIZE
            )
        return sums.sum(1).T[: 1 + has]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        """The slope of a square is twice the value; masks are zeros and ones."""
        tensors, slopes = ctx.saved_tensors, slopes.contiguous()
        grads = [torch.empty_like(value) for value in tensors[: ctx.count]]
        for place, grad in enumerate(grads):
            mine = tensors[place :: ctx.count]
            _slopes[(triton.cdiv(grad.numel(), SIZE),)](
                mine[0], mine[1], mine[-1], slopes[:, place], grad, grad.numel(), ctx.count,
                HELD=len(slopes) > 1, SIZE=SIZE,
            )  # fmt: skip
        return (None, *grads, *[None] * (len(tensors) - ctx.count))
