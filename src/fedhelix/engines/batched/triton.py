"""The primitives of `convolution` as Triton kernels.

Convolutions are matrix products whose patches exist only in registers; pooling reads every value
once.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

Pair = tuple[int, int]

ROWS = 128  # places (image, row, column) that one program handles at a time
PROGRAMS = 528  # enough to fill a large GPU

# A kernel can take only numbers and pointers, so every size and stride is an argument of its own:
# hence the long lists of arguments. B, C, H, W: batch, channels, height and width of the images;
# F, Y, X: channels, height and width of the outputs; KH, KW: kernel; PH, PW: padding; M, N, K: the
# block of the matrix product.


@triton.jit
def _patches(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    x, place, column, places, columns, C, H, W, X, Y, KH: tl.constexpr, KW: tl.constexpr, PH, PW
):
    """A block of patches: each place (row) has the value under each cell of the kernel (column)."""
    image, inside = place // (Y * X), place % (Y * X)
    channel, offset = column // (KH * KW), column % (KH * KW)
    row = (inside // X)[:, None] + (offset // KW)[None, :] - PH
    col = (inside % X)[:, None] + (offset % KW)[None, :] - PW
    valid = (
        (place < places)[:, None]
        & (column < columns)[None, :]
        & (row >= 0)
        & (row < H)
        & (col >= 0)
        & (col < W)
    )
    at = image[:, None] * (C * H * W) + channel[None, :] * (H * W) + row * W + col
    return tl.load(x + at, mask=valid, other=0.0)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    x, weight, bias, out, B, C, H, W, F, Y, X, x_stride, weight_stride, bias_stride, PH, PW,
    BIAS: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    place, output = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(2) * N + tl.arange(0, N)
    places, columns = B * Y * X, C * KH * KW
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, columns, K):
        column = start + tl.arange(0, K)
        block = _patches(
            x + client * x_stride, place, column, places, columns, C, H, W, X, Y, KH, KW, PH, PW
        )
        kernel = tl.load(
            weight + client * weight_stride + output[None, :] * columns + column[:, None],
            mask=(output < F)[None, :] & (column < columns)[:, None],
            other=0.0,
        )
        total += tl.dot(block, kernel, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + client * bias_stride + output, mask=output < F, other=0.0)[None, :]
    at = (
        (place // (Y * X))[:, None] * (F * Y * X)
        + output[None, :] * (Y * X)
        + (place % (Y * X))[:, None]
    )
    tl.store(
        out + client * (B * F * Y * X) + at,
        total,
        mask=(place < places)[:, None] & (output < F)[None, :],
    )


@triton.jit
def _to_weight(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917
    x, gradient, out, B, C, H, W, F, Y, X, x_stride, gradient_stride, PH, PW, share,
    KH: tl.constexpr, KW: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    client, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    places, columns = B * Y * X, C * KH * KW
    blocks = tl.cdiv(columns, K)
    column = (tl.program_id(0) % blocks) * K + tl.arange(0, K)
    output = (tl.program_id(0) // blocks) * N + tl.arange(0, N)
    total = tl.zeros((N, K), dtype=tl.float32)
    for start in range(part * share, (part + 1) * share, M):
        place = start + tl.arange(0, M)
        block = _patches(
            x + client * x_stride, place, column, places, columns, C, H, W, X, Y, KH, KW, PH, PW
        )
        at = (
            (place // (Y * X))[None, :] * (F * Y * X)
            + output[:, None] * (Y * X)
            + (place % (Y * X))[None, :]
        )
        inside = (place < places)[None, :] & (output < F)[:, None]
        back = tl.load(gradient + client * gradient_stride + at, mask=inside, other=0.0)
        total += tl.dot(back, block, input_precision=PRECISION)
    clients = tl.num_programs(1)
    at = (part * clients + client) * (F * columns) + output[:, None] * columns + column[None, :]
    tl.store(out + at, total, mask=(output < F)[:, None] & (column < columns)[None, :])


def _precision() -> str:
    """That of PyTorch's own convolutions: TF32 unless the user has switched it off, in PyTorch or
    for all of NVIDIA's libraries.
    """
    allowed = torch.backends.cudnn.allow_tf32 and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"
    return "tf32" if allowed else "ieee"


def _dense(value: Tensor) -> Tensor:
    """Contiguous within each client; a stack that repeats one client is not copied."""
    return value if value[0].is_contiguous() else value.contiguous()


def _block(size: int, most: int) -> int:
    return max(16, min(most, triton.next_power_of_2(size)))


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Pair) -> Tensor:
    """The convolution of every client's batch with its own weights."""
    x, weight, bias = _dense(x), _dense(weight), None if bias is None else _dense(bias)
    clients, batch, channels, height, width = x.shape
    outputs, kernel = weight.shape[1], weight.shape[3:]
    rows, columns = height + 2 * padding[0] - kernel[0] + 1, width + 2 * padding[1] - kernel[1] + 1
    out = torch.empty(clients, batch, outputs, rows, columns, device=x.device, dtype=x.dtype)
    n, k = _block(outputs, 64), _block(channels * kernel[0] * kernel[1], 64)
    m = ROWS if k < 64 else 2 * ROWS  # measured: wide patches need large blocks, no pipelining
    grid = (triton.cdiv(batch * rows * columns, m), clients, triton.cdiv(outputs, n))
    _forward[grid](
        x, weight, bias, out, batch, channels, height, width, outputs, rows, columns,
        x.stride(0), weight.stride(0), 0 if bias is None else bias.stride(0), *padding,
        BIAS=bias is not None, KH=kernel[0], KW=kernel[1], M=m, N=n, K=k,
        PRECISION=_precision(), num_stages=3 if k < 64 else 1,
    )  # fmt: skip
    return out


def to_weight(x: Tensor, gradient: Tensor, kernel: Pair, padding: Pair) -> Tensor:
    """The gradient of the weights, summed in a fixed order so that two runs are identical."""
    x, gradient = _dense(x), _dense(gradient)
    clients, batch, channels, height, width = x.shape
    outputs, rows, columns = gradient.shape[2:]
    n, k = _block(outputs, 64), _block(channels * kernel[0] * kernel[1], 64)
    blocks = triton.cdiv(outputs, n) * triton.cdiv(channels * kernel[0] * kernel[1], k)
    places = batch * rows * columns
    parts = max(1, min(PROGRAMS // (blocks * clients), triton.cdiv(places, 2 * ROWS)))
    share = triton.cdiv(triton.cdiv(places, parts), ROWS) * ROWS
    out = torch.empty(parts, clients, outputs, channels, *kernel, device=x.device, dtype=x.dtype)
    _to_weight[(blocks, clients, parts)](
        x, gradient, out, batch, channels, height, width, outputs, rows, columns,
        x.stride(0), gradient.stride(0), *padding, share,
        KH=kernel[0], KW=kernel[1], M=ROWS, N=n, K=k, PRECISION=_precision(),
    )  # fmt: skip
    return out.sum(0) if parts > 1 else out[0]


@triton.jit
def _squares(x, at, inside, H, W, Y, X):  # type: ignore[no-untyped-def]
    """The corners of the 2x2 squares, and their four values."""
    place = at % (Y * X)
    corner = at // (Y * X) * (H * W) + place // X * (2 * W) + place % X * 2
    a, b = tl.load(x + corner, mask=inside), tl.load(x + corner + 1, mask=inside)
    c, d = tl.load(x + corner + W, mask=inside), tl.load(x + corner + W + 1, mask=inside)
    return corner, a, b, c, d


@triton.jit
def _largest(a, b, c, d):  # type: ignore[no-untyped-def]
    every: tl.constexpr = tl.PropagateNan.ALL  # a diverged client must stay visible
    return tl.maximum(
        tl.maximum(a, b, propagate_nan=every),
        tl.maximum(c, d, propagate_nan=every),
        propagate_nan=every,
    )


@triton.jit
def _pool(x, out, total, H, W, Y, X, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < total
    _, a, b, c, d = _squares(x, at, inside, H, W, Y, X)
    tl.store(out + at, _largest(a, b, c, d), mask=inside)


@triton.jit
def _pool_to_input(x, gradient, out, total, H, W, Y, X, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < total
    corner, a, b, c, d = _squares(x, at, inside, H, W, Y, X)
    back, best = tl.load(gradient + at, mask=inside), _largest(a, b, c, d)
    # The first of equal values gets the whole gradient, as in PyTorch.
    to_a, to_b, to_c = a == best, b == best, c == best
    tl.store(out + corner, tl.where(to_a, back, 0.0), mask=inside)
    tl.store(out + corner + 1, tl.where(to_b & ~to_a, back, 0.0), mask=inside)
    tl.store(out + corner + W, tl.where(to_c & ~to_a & ~to_b, back, 0.0), mask=inside)
    tl.store(out + corner + W + 1, tl.where(to_a | to_b | to_c, 0.0, back), mask=inside)


SQUARES = 512  # handled by one program


def pool(x: Tensor) -> Tensor:
    """The maximum of each 2x2 square of any number of images."""
    x, (height, width) = x.contiguous(), x.shape[-2:]
    out = torch.empty(*x.shape[:-2], height // 2, width // 2, device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(out.numel(), SQUARES),)
    _pool[grid](x, out, out.numel(), height, width, height // 2, width // 2, SIZE=SQUARES)
    return out


def pool_to_input(x: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of the images."""
    x, gradient, (height, width) = x.contiguous(), gradient.contiguous(), x.shape[-2:]
    uncovered = height % 2 or width % 2  # a last row or column that no square covers
    out = torch.zeros_like(x) if uncovered else torch.empty_like(x)
    grid = (triton.cdiv(gradient.numel(), SQUARES),)
    _pool_to_input[grid](
        x, gradient, out, gradient.numel(), height, width, height // 2, width // 2, SIZE=SQUARES
    )
    return out
