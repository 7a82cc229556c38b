"""Recognises the plain convolutions and poolings for which engines have faster kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

Pair = tuple[int, int]


def plain_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, Pair] | None:
    """The arguments of a 2-D convolution of stride 1 without groups or dilation; otherwise None."""
    strides = pair(stride) == pair(dilation) == (1, 1)
    if not strides or groups != 1 or isinstance(padding, str):
        return None
    around = pair(padding)
    narrow = all(pad < size for pad, size in zip(around, weight.shape[2:], strict=True))
    return (input, weight, bias, around) if input.dim() == 4 and narrow else None


def is_plain_pooling(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> bool:
    """Whether a pooling covers the image with 2x2 squares side by side."""
    squares = pair(kernel_size) == pair(stride if stride is not None else kernel_size) == (2, 2)
    plain = pair(padding) == (0, 0) and pair(dilation) == (1, 1)
    return squares and plain and not ceil_mode and not return_indices and input.dim() == 4


def pair(value: Any) -> Pair:
    """A size for both directions; PyTorch accepts one number, or one or two in a sequence."""
    if isinstance(value, int):
        return value, value
    return value[0], value[1] if len(value) > 1 else value[0]
