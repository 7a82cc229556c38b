"""The squares of `drift` and their slopes in Triton: one kernel per tensor each way, which reads
every value once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZE = 2048  # values that a program handles at a time
SHARES = 128  # of a tensor, whose sums are added up in a fixed order so that two runs are identical


@triton.jit
def _sums(param, centre, mask, sums, others, count, share, MASK: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    first, second = tl.zeros((SIZE,), tl.float32), tl.zeros((SIZE,), tl.float32)
    for start in range(program * share, tl.minimum((program + 1) * share, count), SIZE):
        at = start + tl.arange(0, SIZE)
        inside = at < count
        moved = tl.load(param + at, mask=inside, other=0.0)
        moved -= tl.load(centre + at, mask=inside, other=0.0)
        first += moved * moved
        if MASK:
            held = moved * tl.load(mask + at, mask=inside, other=0.0)
            second += held * held
    tl.store(sums + program, tl.sum(first, 0))
    if MASK:
        tl.store(others + program, tl.sum(second, 0))


@triton.jit
def _slopes(  # type: ignore[no-untyped-def]
    param, centre, mask, out, slope, other, count, MASK: tl.constexpr, SIZE: tl.constexpr
):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    moved = tl.load(param + at, mask=inside) - tl.load(centre + at, mask=inside)
    factor = tl.load(slope)
    if MASK:
        factor += tl.load(other) * tl.load(mask + at, mask=inside)
    tl.store(out + at, 2 * factor * moved, mask=inside)


def can_fuse(*alike: Sequence[Tensor]) -> bool:
    """Whether the tensors at each place lie in memory alike, without gaps."""
    return all(
        value.is_cuda
        and value.dtype == torch.float32
        and value.stride() == group[0].stride()
        and value.shape == group[0].shape
        and _is_dense(value)
        for group in zip(*alike, strict=True)
        for value in group
    )


def _is_dense(value: Tensor) -> bool:
    last = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
    return last or value.is_contiguous()


def sums(params: Sequence[Tensor], centres: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
    """The summed squares of what has moved, and (or not) of what the masks hold of it."""
    kinds = 2 if masks else 1
    parts = params[0].new_empty(kinds, len(params), SHARES)
    for place, (param, centre) in enumerate(zip(params, centres, strict=True)):
        share = triton.cdiv(triton.cdiv(param.numel(), SHARES), SIZE) * SIZE
        _sums[(SHARES,)](
            param, centre, masks[place] if masks else param, parts[0, place], parts[-1, place],
            param.numel(), share, MASK=bool(masks), SIZE=SIZE,
        )  # fmt: skip
    return parts.sum(-1)


def slopes(
    params: Sequence[Tensor], centres: Sequence[Tensor], masks: Sequence[Tensor], of_sums: Tensor
) -> list[Tensor]:
    """The slopes of the parameters, from those of the sums."""
    grads = [torch.empty_like(param) for param in params]
    for place, (param, centre, grad) in enumerate(zip(params, centres, grads, strict=True)):
        _slopes[(triton.cdiv(param.numel(), SIZE),)](
            param, centre, masks[place] if masks else param, grad, of_sums[0, place],
            of_sums[-1, place], param.numel(), MASK=bool(masks), SIZE=SIZE,
        )  # fmt: skip
    return grads
