"""Which calls of PyTorch's convolutions and poolings are the plain ones that engines have faster
ways for.
"""

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
    """The arguments of a 2-d convolution of stride 1 without groups or dilation; None for any
    other.
    """
    if (
        pair(stride) != (1, 1)
        or pair(dilation) != (1, 1)
        or groups != 1
        or isinstance(padding, str)
    ):
        return None
    around = pair(padding)
    if input.dim() != 4 or any(
        pad >= size for pad, size in zip(around, weight.shape[2:], strict=True)
    ):
        return None
    return input, weight, bias, around


def is_plain_pooling(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> bool:
    """Whether a pooling takes 2x2 squares side by side."""
    squares = pair(kernel_size) == pair(stride if stride is not None else kernel_size) == (2, 2)
    plain = (
        pair(padding) == (0, 0)
        and pair(dilation) == (1, 1)
        and not ceil_mode
        and not return_indices
    )
    return squares and plain and input.dim() == 4


def pair(value: Any) -> Pair:
    """A size that may be given once for both directions."""
    return (
        (value, value)
        if isinstance(value, int)
        else (value[0], value[1] if len(value) > 1 else value[0])
    )
