"""Kernels for the CPU: oneDNN's, PyTorch's native ones, or native ones helped out where they are slow.

On some processors oneDNN takes twice as long as the native kernels for small convolutions. And the native ones lose
most of their time in two places: the backward pass of a convolution, and pooling. `tuned` replaces just these by
faster PyTorch operations. All three compute the same function; their results differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Kernels = Literal["onednn", "native", "tuned"]
Pair = tuple[int, int]


@contextmanager
def applied(kernels: Kernels) -> Iterator[None]:
    """Compute with these kernels, in one thread.

    More threads gain next to nothing on small networks, and would make results depend on their number.
    """
    before, threads = torch.backends.mkldnn.enabled, torch.get_num_threads()
    torch.backends.mkldnn.enabled = kernels == "onednn"  # type: ignore[assignment]
    torch.set_num_threads(1)
    try:
        with Tuned() if kernels == "tuned" else nullcontext():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.mkldnn.enabled = before


class Convolve(torch.autograd.Function):
    """A convolution of stride 1 whose gradients are a forward convolution and a product with all patches."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Pair) -> Tensor:
        """The native forward pass is fast already."""
        return torch.conv2d(x, weight, bias, padding=padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, Pair], output: Tensor) -> None:
        """Keep what the gradients need."""
        x, weight, _, ctx.padding = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """To the pictures: convolve with the flipped kernel; to the weights: multiply with the patches."""
        x, weight = ctx.saved_tensors
        (rows, columns), (down, right) = weight.shape[2:], ctx.padding
        to_x = to_weight = to_bias = None
        if ctx.needs_input_grad[0]:
            flipped = weight.flip(2, 3).transpose(0, 1).contiguous()
            to_x = torch.conv2d(gradient, flipped, padding=(rows - 1 - down, columns - 1 - right))
        if ctx.needs_input_grad[1]:
            windows = F.pad(x, (right, right, down, down)) if down or right else x
            windows = windows.unfold(2, rows, 1).unfold(3, columns, 1)  # a view; the reshape below copies it once
            patches = windows.permute(0, 1, 4, 5, 2, 3).reshape(len(x), weight[0].numel(), -1)
            to_weight = torch.bmm(gradient.flatten(2), patches.transpose(1, 2)).sum(0).view_as(weight)
        if ctx.needs_input_grad[2]:
            to_bias = gradient.sum((0, 2, 3))
        return to_x, to_weight, to_bias, None


class Pool(torch.autograd.Function):
    """Maximum of each 2x2 square: looked for where the channels of a pixel lie together, which is much faster."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        """The maxima and where they are."""
        found, places = F.max_pool2d(x.contiguous(memory_format=torch.channels_last), 2, return_indices=True)
        return found.contiguous(), places.contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        """Keep the places."""
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Tensor:
        """Back to the places; the native kernel for that is fast."""
        x, places = ctx.saved_tensors
        back = torch.ops.aten.max_pool2d_with_indices_backward
        return back(gradient.contiguous(), x, [2, 2], [2, 2], [0, 0], [1, 1], False, places)


def pool(x: Tensor) -> Tensor:
    """Maximum of each 2x2 square; a row or column left over is dropped."""
    if torch.is_grad_enabled() and x.requires_grad:
        return Pool.apply(x)[0]
    height, width = x.shape[-2] // 2 * 2, x.shape[-1] // 2 * 2
    rows = torch.maximum(x[..., 0:height:2, :], x[..., 1:height:2, :])
    return torch.maximum(rows[..., 0:width:2], rows[..., 1:width:2])


class Tuned(TorchFunctionMode):
    """While this is in force, plain convolutions and poolings of pictures take the faster ways."""

    def __torch_function__(
        self, function: Callable[..., Any], kinds: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Catch conv2d and max_pool2d."""
        kwargs = kwargs or {}
        if function is torch.conv2d:
            plain = plain_convolution(*args, **kwargs)
            if plain is not None and torch.is_grad_enabled():
                return Convolve.apply(*plain)
        elif function is F.max_pool2d and is_plain_pooling(*args, **kwargs):
            return pool(args[0])
        return function(*args, **kwargs)


def plain_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, Pair] | None:
    """The arguments of a 2-d convolution of stride 1 without groups or dilation; None for any other."""
    if pair(stride) != (1, 1) or pair(dilation) != (1, 1) or groups != 1 or isinstance(padding, str):
        return None
    around = pair(padding)
    if input.dim() != 4 or any(pad >= size for pad, size in zip(around, weight.shape[2:], strict=True)):
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
    plain = pair(padding) == (0, 0) and pair(dilation) == (1, 1) and not ceil_mode and not return_indices
    return squares and plain and input.dim() == 4


def pair(value: Any) -> Pair:
    """A size that may be given once for both directions."""
    return (value, value) if isinstance(value, int) else (value[0], value[1] if len(value) > 1 else value[0])
