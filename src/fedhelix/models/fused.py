"""The kernels of `norm`: BatchNorm in training, a sum and perhaps a ReLU, in Triton.

Images are matrices of places (image, row, column) and channels. Each way there are two kernels:
one sums over shares of the places, in a fixed order so that two runs are identical; one applies
what follows from the sums to all places.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 128  # places that a program handles at a time
TURNS = 4  # how often, where it applies
PARTS = 32  # shares of the places that are summed apart, at most
CHANNELS = 64  # that a program handles

# M, C: places and channels; R, K: the block of them in a program; P: shares, as a power of two.


@triton.jit
def _load(x, row, channel, inside, C):  # type: ignore[no-untyped-def]
    at = row[:, None].to(tl.int64) * C + channel[None, :]
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _sums(x, sums, M, C, share, R: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of all values and of their squares; from the first value on, which keeps the digits."""
    channel, part = tl.program_id(0) * K + tl.arange(0, K), tl.program_id(1)
    here = channel < C
    origin = tl.load(x + channel, mask=here, other=0.0).to(tl.float32)
    first, second = tl.zeros((R, K), tl.float32), tl.zeros((R, K), tl.float32)
    for start in range(part * share, tl.minimum((part + 1) * share, M), R):
        row = start + tl.arange(0, R)
        inside = (row < M)[:, None] & here[None, :]
        value = tl.where(inside, _load(x, row, channel, inside, C) - origin[None, :], 0.0)
        first += value
        second += value * value
    at = sums + part * 2 * C + channel
    tl.store(at, tl.sum(first, 0), mask=here)
    tl.store(at + C, tl.sum(second, 0), mask=here)


@triton.jit
def _total(sums, channel, C, PARTS: tl.constexpr, P: tl.constexpr):  # type: ignore[no-untyped-def]
    part = tl.arange(0, P)
    at = sums + part[:, None] * (2 * C) + channel[None, :]
    inside = (part < PARTS)[:, None] & (channel < C)[None, :]
    first = tl.sum(tl.load(at, mask=inside, other=0.0), 0)
    second = tl.sum(tl.load(at + C, mask=inside, other=0.0), 0)
    return first, second


@triton.jit
def _line(weight, bias, channel, here, mean, rstd):  # type: ignore[no-untyped-def]
    """Normalising is a straight line: scale * x + shift."""
    scale = tl.load(weight + channel, mask=here, other=0.0) * rstd
    return scale, tl.load(bias + channel, mask=here, other=0.0) - mean * scale


@triton.jit
def _move(running, channel, here, value, momentum):  # type: ignore[no-untyped-def]
    old = tl.load(running + channel, mask=here, other=0.0)
    tl.store(running + channel, old + momentum * (value - old), mask=here)


@triton.jit
def _apply(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    x, shortcut, out, sums, weight, bias, statistics, running_mean, running_var, batches, M, C,
    momentum, eps, SHORTCUT: tl.constexpr, RELU: tl.constexpr, PARTS: tl.constexpr, P: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * K + tl.arange(0, K)
    here = channel < C
    first, second = _total(sums, channel, C, PARTS, P)
    first, second = first / M, second / M
    mean = tl.load(x + channel, mask=here, other=0.0).to(tl.float32) + first
    variance = tl.maximum(second - first * first, 0.0, propagate_nan=tl.PropagateNan.ALL)
    rstd = 1 / tl.sqrt(variance + eps)
    scale, shift = _line(weight, bias, channel, here, mean, rstd)
    if tl.program_id(1) == 0:
        tl.store(statistics + channel, mean, mask=here)
        tl.store(statistics + C + channel, rstd, mask=here)
        _move(running_mean, channel, here, mean, momentum)
        _move(running_var, channel, here, variance * (M / (M - 1.0)), momentum)
        if tl.program_id(0) == 0:
            tl.store(batches, tl.load(batches) + 1)
    for turn in range(TURNS):
        row = (tl.program_id(1) * TURNS + turn) * R + tl.arange(0, R)
        inside = (row < M)[:, None] & here[None, :]
        value = _load(x, row, channel, inside, C) * scale[None, :] + shift[None, :]
        if SHORTCUT:
            value += _load(shortcut, row, channel, inside, C)
        if RELU:  # a diverged client must stay visible
            value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out + row[:, None].to(tl.int64) * C + channel[None, :], value, mask=inside)


@triton.jit
def _back(  # type: ignore[no-untyped-def]
    x, out, gradient, row, channel, inside, C, scale, shift,
    SHORTCUT: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """The values, and the gradient that the ReLU lets through."""
    value, back = _load(x, row, channel, inside, C), _load(gradient, row, channel, inside, C)
    if RELU:
        if SHORTCUT:
            passed = _load(out, row, channel, inside, C)
        else:
            passed = value * scale[None, :] + shift[None, :]
        back = tl.where(passed <= 0, 0.0, back)
    return value, back


@triton.jit
def _back_sums(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    x, out, gradient, sums, weight, bias, statistics, M, C, share,
    SHORTCUT: tl.constexpr, RELU: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Sums of the gradient, and of its product with the normalised values."""
    channel, part = tl.program_id(0) * K + tl.arange(0, K), tl.program_id(1)
    here = channel < C
    mean = tl.load(statistics + channel, mask=here, other=0.0)
    rstd = tl.load(statistics + C + channel, mask=here, other=0.0)
    scale, shift = _line(weight, bias, channel, here, mean, rstd)
    first, second = tl.zeros((R, K), tl.float32), tl.zeros((R, K), tl.float32)
    for start in range(part * share, tl.minimum((part + 1) * share, M), R):
        row = start + tl.arange(0, R)
        inside = (row < M)[:, None] & here[None, :]
        value, back = _back(x, out, gradient, row, channel, inside, C, scale, shift, SHORTCUT, RELU)
        first += back
        second += back * (value - mean[None, :])
    at = sums + part * 2 * C + channel
    tl.store(at, tl.sum(first, 0), mask=here)
    tl.store(at + C, tl.sum(second, 0) * rstd, mask=here)


@triton.jit
def _back_apply(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    x, out, gradient, to_x, to_shortcut, sums, weight, bias, statistics, to_weight, to_bias, M, C,
    SHORTCUT: tl.constexpr, RELU: tl.constexpr, PARTS: tl.constexpr, P: tl.constexpr,
    R: tl.constexpr, K: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * K + tl.arange(0, K)
    here = channel < C
    first, second = _total(sums, channel, C, PARTS, P)
    mean = tl.load(statistics + channel, mask=here, other=0.0)
    rstd = tl.load(statistics + C + channel, mask=here, other=0.0)
    scale, shift = _line(weight, bias, channel, here, mean, rstd)
    if tl.program_id(1) == 0:
        tl.store(to_bias + channel, first, mask=here)
        tl.store(to_weight + channel, second, mask=here)
    first, second = first / M, second / M * rstd
    for turn in range(TURNS):
        row = (tl.program_id(1) * TURNS + turn) * R + tl.arange(0, R)
        inside = (row < M)[:, None] & here[None, :]
        value, back = _back(x, out, gradient, row, channel, inside, C, scale, shift, SHORTCUT, RELU)
        at = row[:, None].to(tl.int64) * C + channel[None, :]
        if SHORTCUT:
            tl.store(to_shortcut + at, back, mask=inside)
        slope = back - first[None, :] - (value - mean[None, :]) * second[None, :]
        tl.store(to_x + at, scale[None, :] * slope, mask=inside)


class _Plan(NamedTuple):
    """How the places and channels are shared out to programs."""

    places: int
    channels: int
    share: int  # places in one of the shares
    few: tuple[int, int]  # programs that sum
    many: tuple[int, int]  # programs that apply
    block: dict[str, int]

    @classmethod
    def of(cls, x: Tensor) -> _Plan:
        channels = x.shape[1]
        places = x.numel() // channels
        k = min(CHANNELS, triton.next_power_of_2(channels))
        r = ROWS * CHANNELS // k
        parts = min(PARTS, triton.cdiv(places, r * TURNS))
        share = triton.cdiv(triton.cdiv(places, parts), r) * r
        columns = triton.cdiv(channels, k)
        few = (columns, triton.cdiv(places, share))
        many = (columns, triton.cdiv(places, r * TURNS))
        return cls(places, channels, share, few, many, {"R": r, "K": k})

    @property
    def totals(self) -> dict[str, int]:
        """For the kernels that add the shares up."""
        parts = self.few[1]
        return {**self.block, "PARTS": parts, "P": triton.next_power_of_2(parts), "TURNS": TURNS}


class FusedNorm(torch.autograd.Function):
    """norm(x) + shortcut, with or without a ReLU; the shortcut may be None."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        shortcut: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        batches: Tensor,
        momentum: float,
        eps: float,
        relu: bool,
    ) -> Tensor:
        """Updates the running statistics, and the number of batches, in place."""
        plan, has = _Plan.of(x), shortcut is not None
        added = (
            shortcut.contiguous(memory_format=torch.channels_last) if shortcut is not None else x
        )
        sums = x.new_empty(plan.few[1], 2, plan.channels, dtype=torch.float32)
        statistics, out = torch.empty_like(sums[0]), torch.empty_like(x)
        _sums[plan.few](x, sums, plan.places, plan.channels, plan.share, **plan.block)
        _apply[plan.many](
            x, added, out, sums, weight, bias, statistics, running_mean, running_var,
            batches, plan.places, plan.channels, momentum, eps, SHORTCUT=has, RELU=relu,
            **plan.totals,
        )  # fmt: skip
        ctx.save_for_backward(x, out if has and relu else x, weight, bias, statistics)
        ctx.has_shortcut, ctx.relu = has, relu
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, the shortcut, the weight and the bias."""
        x, out, weight, bias, statistics = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        plan, how = _Plan.of(x), {"SHORTCUT": ctx.has_shortcut, "RELU": ctx.relu}
        sums = x.new_empty(plan.few[1], 2, plan.channels, dtype=torch.float32)
        to_x = torch.empty_like(x)
        to_shortcut = torch.empty_like(x) if ctx.has_shortcut else None
        to_weight, to_bias = torch.empty_like(weight), torch.empty_like(bias)
        size = (plan.places, plan.channels)
        _back_sums[plan.few](
            x, out, gradient, sums, weight, bias, statistics, *size, plan.share,
            **how, **plan.block,
        )  # fmt: skip
        _back_apply[plan.many](
            x, out, gradient, to_x, to_x if to_shortcut is None else to_shortcut, sums, weight,
            bias, statistics, to_weight, to_bias, *size, **how, **plan.totals,
        )  # fmt: skip
        return to_x, to_shortcut, to_weight, to_bias, *[None] * 6
