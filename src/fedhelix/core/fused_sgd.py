"""A step of SGD for many clients as one Triton kernel, which reads and writes every value once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZE = 1024  # values that a program handles


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    weights, grads, velocity, lr, momentum, decay, count, stride,
    VELOCITY: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside, at = place < count, client * count + place
    value = tl.load(weights + at, mask=inside)
    slope = tl.load(grads + at, mask=inside) + tl.load(decay + client * stride) * value
    if VELOCITY:
        slope += tl.load(momentum + client * stride) * tl.load(velocity + at, mask=inside)
        tl.store(velocity + at, slope, mask=inside)
    tl.store(weights + at, value - tl.load(lr + client * stride) * slope, mask=inside)


def can_fuse(params: list[Tensor], *settings: float | Tensor) -> bool:
    """Whether these are the rows of many clients on a GPU, with columns of settings."""
    rows = params[0]
    return (
        len(params) == 1
        and rows.is_cuda
        and rows.dtype == torch.float32
        and rows.dim() == 2
        and rows.is_contiguous()
        and all(isinstance(value, Tensor) and value.shape == (len(rows), 1) for value in settings)
        and len({value.stride(0) for value in settings if isinstance(value, Tensor)}) == 1
    )


def step(
    params: Tensor,
    grads: Tensor,
    velocity: Tensor | None,
    lr: Tensor,
    momentum: Tensor,
    weight_decay: Tensor,
) -> None:
    """v = momentum * v + gradient + weight_decay * parameter; parameter -= lr * v; in place."""
    clients, count = params.shape
    _step[(triton.cdiv(count, SIZE), clients)](
        params, grads, params if velocity is None else velocity, lr, momentum, weight_decay,
        count, lr.stride(0), VELOCITY=velocity is not None, SIZE=SIZE,
    )  # fmt: skip
