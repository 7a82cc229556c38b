"""The kernels of `norm`: BatchNorm in training, a sum and perhaps a ReLU, in Triton.

Images are matrices of places (image, row, column) and channels. Each way there are two kernels:
one sums over shares of the places, and its last program adds the shares up, in a fixed order so
that two runs are identical; one applies what follows from the sums to all places.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

CHANNELS = 128  # that a program handles
PARTS = 64  # shares of the places that are summed apart, at most


class _Block(NamedTuple):
    """What a program handles, measured on an H200 with the norms of ten ResNet-18s."""

    rows: int  # places at a time
    turns: int  # how often; where sums are made, at least
    warps: int

    def of(self, k: int) -> dict[str, int]:
        """The same number of values if there are only so many channels."""
        return {"R": self.rows * CHANNELS // k, "K": k, "num_warps": self.warps}


SUM, APPLY = _Block(32, 4, 4), _Block(32, 2, 4)

# M, C: places and channels; R, K: the block of them in a program; P: shares, as a power of two.


@triton.jit
def _load(x, row, channel, inside, C):  # type: ignore[no-untyped-def]
    at = row[:, None].to(tl.int64) * C + channel[None, :]
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _is_last(sums, first, second, channel, here, done, C, PARTS):  # type: ignore[no-untyped-def]
    """Write a share's sums; whether all other shares have been written."""
    at = sums + tl.program_id(1) * 2 * C + channel
    tl.store(at, first, mask=here)
    tl.store(at + C, second, mask=here)
    tl.debug_barrier()  # the count says that all threads have written
    return tl.atomic_add(done + tl.program_id(0), 1) == PARTS - 1


@triton.jit
def _total(sums, channel, here, done, C, PARTS, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums of all shares, read from where other programs have written them."""
    tl.debug_barrier()
    tl.store(done + tl.program_id(0), 0)  # ready for another backward pass
    part = tl.arange(0, P)
    at = sums + part[:, None] * (2 * C) + channel[None, :]
    inside = (part < PARTS)[:, None] & here[None, :]
    first = tl.sum(tl.load(at, mask=inside, other=0.0, cache_modifier=".cg"), 0)
    second = tl.sum(tl.load(at + C, mask=inside, other=0.0, cache_modifier=".cg"), 0)
    return first, second


@triton.jit
def _move(running, channel, here, value, momentum):  # type: ignore[no-untyped-def]
    old = tl.load(running + channel, mask=here, other=0.0)
    tl.store(running + channel, old + momentum * (value - old), mask=here)


@triton.jit
def _sums(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    x, sums, done, statistics, running_mean, running_var, batches, M, C, share, momentum, eps,
    PARTS, P: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Mean and deviation; from the first value on, which keeps the digits."""
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
    first, second = tl.sum(first, 0), tl.sum(second, 0)
    if _is_last(sums, first, second, channel, here, done, C, PARTS):
        first, second = _total(sums, channel, here, done, C, PARTS, P)
        first, second = first / M, second / M
        mean = origin + first
        variance = tl.maximum(second - first * first, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(statistics + channel, mean, mask=here)
        tl.store(statistics + C + channel, 1 / tl.sqrt(variance + eps), mask=here)
        _move(running_mean, channel, here, mean, momentum)
        _move(running_var, channel, here, variance * (M / (M - 1.0)), momentum)
        if tl.program_id(0) == 0:
            tl.store(batches, tl.load(batches) + 1)


@triton.jit
def _line(weight, bias, statistics, channel, here, C):  # type: ignore[no-untyped-def]
    """Normalising is a straight line: scale * x + shift; with the mean and 1 / deviation."""
    mean = tl.load(statistics + channel, mask=here, other=0.0)
    rstd = tl.load(statistics + C + channel, mask=here, other=0.0)
    scale = tl.load(weight + channel, mask=here, other=0.0) * rstd
    return scale, tl.load(bias + channel, mask=here, other=0.0) - mean * scale, mean, rstd


@triton.jit
def _apply(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    x, shortcut, out, weight, bias, statistics, M, C,
    SHORTCUT: tl.constexpr, RELU: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    TURNS: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * K + tl.arange(0, K)
    here = channel < C
    scale, shift, _, _ = _line(weight, bias, statistics, channel, here, C)
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
    x, out, gradient, sums, done, weight, bias, statistics, to_weight, to_bias, M, C, share,
    PARTS, SHORTCUT: tl.constexpr, RELU: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """Sums of the gradient, and of its product with the normalised values."""
    channel, part = tl.program_id(0) * K + tl.arange(0, K), tl.program_id(1)
    here = channel < C
    scale, shift, mean, rstd = _line(weight, bias, statistics, channel, here, C)
    first, second = tl.zeros((R, K), tl.float32), tl.zeros((R, K), tl.float32)
    for start in range(part * share, tl.minimum((part + 1) * share, M), R):
        row = start + tl.arange(0, R)
        inside = (row < M)[:, None] & here[None, :]
        value, back = _back(x, out, gradient, row, channel, inside, C, scale, shift, SHORTCUT, RELU)
        first += back
        second += back * (value - mean[None, :])
    first, second = tl.sum(first, 0), tl.sum(second, 0) * rstd
    if _is_last(sums, first, second, channel, here, done, C, PARTS):
        first, second = _total(sums, channel, here, done, C, PARTS, P)
        tl.store(to_bias + channel, first, mask=here)
        tl.store(to_weight + channel, second, mask=here)


@triton.jit
def _back_apply(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    x, out, gradient, to_x, to_shortcut, weight, bias, statistics, to_weight, to_bias, M, C,
    SHORTCUT: tl.constexpr, RELU: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    TURNS: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * K + tl.arange(0, K)
    here = channel < C
    scale, shift, mean, rstd = _line(weight, bias, statistics, channel, here, C)
    first = tl.load(to_bias + channel, mask=here, other=0.0) / M
    second = tl.load(to_weight + channel, mask=here, other=0.0) / M * rstd
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
    shares: dict[str, int]  # how the kernels that sum divide their work
    turns: dict[str, int]  # how those that apply do

    @classmethod
    def of(cls, x: Tensor) -> _Plan:
        channels = x.shape[1]
        places = x.numel() // channels
        k = min(CHANNELS, triton.next_power_of_2(channels))
        columns, summed, applied = triton.cdiv(channels, k), SUM.of(k), APPLY.of(k)
        parts = min(PARTS, triton.cdiv(places, summed["R"] * SUM.turns))
        share = triton.cdiv(triton.cdiv(places, parts), summed["R"]) * summed["R"]
        parts = triton.cdiv(places, share)
        many = (columns, triton.cdiv(places, applied["R"] * APPLY.turns))
        summed |= {"PARTS": parts, "P": triton.next_power_of_2(parts)}
        applied |= {"TURNS": APPLY.turns}
        return cls(places, channels, share, (columns, parts), many, summed, applied)

    @property
    def size(self) -> tuple[int, int]:
        """Places and channels."""
        return self.places, self.channels


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
        # How many shares are done, each way.
        done, back_done = x.new_zeros(2, plan.few[0], dtype=torch.int32)
        sums = x.new_empty(plan.few[1], 2, plan.channels, dtype=torch.float32)
        statistics, out = torch.empty_like(sums[0]), torch.empty_like(x)
        _sums[plan.few](
            x, sums, done, statistics, running_mean, running_var, batches, *plan.size, plan.share,
            momentum, eps, **plan.shares,
        )  # fmt: skip
        _apply[plan.many](
            x, added, out, weight, bias, statistics, *plan.size, SHORTCUT=has, RELU=relu,
            **plan.turns,
        )  # fmt: skip
        last = out if has and relu else x
        ctx.save_for_backward(x, last, weight, bias, statistics, back_done)
        ctx.has_shortcut, ctx.relu = has, relu
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x, the shortcut, the weight and the bias."""
        x, out, weight, bias, statistics, done = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        plan, how = _Plan.of(x), {"SHORTCUT": ctx.has_shortcut, "RELU": ctx.relu}
        sums = x.new_empty(plan.few[1], 2, plan.channels, dtype=torch.float32)
        to_x = torch.empty_like(x)
        to_shortcut = torch.empty_like(x) if ctx.has_shortcut else None
        to_weight, to_bias = torch.empty_like(weight), torch.empty_like(bias)
        _back_sums[plan.few](
            x, out, gradient, sums, done, weight, bias, statistics, to_weight, to_bias,
            *plan.size, plan.share, **how, **plan.shares,
        )  # fmt: skip
        _back_apply[plan.many](
            x, out, gradient, to_x, to_x if to_shortcut is None else to_shortcut, weight, bias,
            statistics, to_weight, to_bias, *plan.size, **how, **plan.turns,
        )  # fmt: skip
        return to_x, to_shortcut, to_weight, to_bias, *[None] * 6
