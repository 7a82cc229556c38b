"""Convolutions as matrix products.

Stacked over clients a convolution becomes a grouped one, for which GPUs have slow kernels. Written as one product of
the weights with all patches it becomes a batched matrix product, which they are best at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


def patches(x: Tensor, kernel: Sequence[int]) -> Tensor:
    """All windows of a batch of pictures as columns: (channels * kernel) x (pictures * places)."""
    windows = x.unfold(2, kernel[0], 1).unfold(3, kernel[1], 1)  # a view: pictures, channels, places, kernel
    return windows.permute(1, 4, 5, 0, 2, 3).reshape(x.shape[1] * kernel[0] * kernel[1], -1)


class Product(torch.autograd.Function):
    """A convolution of stride 1 without padding; its gradients are matrix products too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        """Weights times patches."""
        outputs, kernel = weight.shape[0], weight.shape[2:]
        height, width = x.shape[2] - kernel[0] + 1, x.shape[3] - kernel[1] + 1
        columns = patches(x, kernel)
        return (weight.reshape(outputs, -1) @ columns).view(outputs, len(x), height, width).transpose(0, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Patches are cheaper to make again than to keep."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """For the weights: gradient times patches; for the input: a convolution with the flipped kernel."""
        x, weight = ctx.saved_tensors
        kernel = weight.shape[2:]
        by_output = gradient.transpose(0, 1).reshape(weight.shape[0], -1)
        to_weight = (by_output @ patches(x, kernel).T).view_as(weight)
        if not ctx.needs_input_grad[0]:
            return None, to_weight
        around = F.pad(gradient, (kernel[1] - 1, kernel[1] - 1, kernel[0] - 1, kernel[0] - 1))
        return Product.forward(around, weight.flip(2, 3).transpose(0, 1)), to_weight


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]) -> Tensor:
    """A convolution of stride 1."""
    if any(padding):
        x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    out = Product.apply(x, weight)
    return out if bias is None else out + bias.view(1, -1, 1, 1)


class AsProducts(TorchFunctionMode):
    """While this is in force, plain 2-d convolutions are computed as products; others stay as they are."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        kinds: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Catch conv2d."""
        kwargs = dict(kwargs or {})
        if function is F.conv2d or function is torch.conv2d:
            plain = _plain(*args, **kwargs)
            if plain is not None:
                return convolve(*plain)
        return function(*args, **kwargs)


def _plain(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, tuple[int, int]] | None:
    """The arguments of `convolve`, if the convolution is one that it can do."""
    if _pair(stride) != (1, 1) or _pair(dilation) != (1, 1) or groups != 1 or isinstance(padding, str):
        return None
    return (input, weight, bias, _pair(padding)) if input.dim() == 4 else None


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1] if len(value) > 1 else value[0])
