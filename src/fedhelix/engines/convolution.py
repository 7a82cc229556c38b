"""Convolutions of many clients at once, each with its own weights.

Stacked over clients a convolution becomes a grouped one, for which GPUs have only slow kernels. Here it is a few
primitives on whole stacks (pictures: clients x batch x channels x height x width), written as matrix products with
all patches, and on a GPU as Triton kernels that never lay the patches out in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

try:
    from fedhelix.engines import triton_convolution as fast
except ImportError:  # a machine without Triton
    fast = None  # type: ignore[assignment]

Pair = tuple[int, int]


def patches(x: Tensor, kernel: Pair, padding: Pair) -> Tensor:
    """All windows as columns: clients x (channels * kernel) x (batch * places)."""
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    windows = x.unfold(3, kernel[0], 1).unfold(4, kernel[1], 1)  # a view: clients, batch, channels, places, kernel
    columns = windows.permute(0, 2, 5, 6, 1, 3, 4)
    return columns.reshape(len(x), x.shape[2] * kernel[0] * kernel[1], -1)


def forward(x: Tensor, weight: Tensor, padding: Pair) -> Tensor:
    """The convolution of every client's batch with its own weights."""
    if fast is not None and x.is_cuda:
        return fast.forward(x, weight, padding)
    clients, outputs, _, *kernel = weight.shape
    height, width = (x.shape[3 + k] + 2 * padding[k] - kernel[k] + 1 for k in (0, 1))
    product = weight.reshape(clients, outputs, -1) @ patches(x, (kernel[0], kernel[1]), padding)
    return product.view(clients, outputs, x.shape[1], height, width).transpose(1, 2).contiguous()


def to_weight(x: Tensor, gradient: Tensor, kernel: Pair, padding: Pair) -> Tensor:
    """The gradient of the weights."""
    if fast is not None and x.is_cuda:
        return fast.to_weight(x, gradient, kernel, padding)
    clients, _, outputs = gradient.shape[:3]
    by_output = gradient.transpose(1, 2).reshape(clients, outputs, -1)
    product = by_output @ patches(x, kernel, padding).transpose(1, 2)
    return product.view(clients, outputs, x.shape[2], *kernel)


def to_input(gradient: Tensor, weight: Tensor, padding: Pair) -> Tensor:
    """The gradient of the pictures: a convolution with the flipped kernel."""
    flipped = weight.flip(3, 4).transpose(1, 2).contiguous()
    return forward(gradient, flipped, (weight.shape[3] - 1 - padding[0], weight.shape[4] - 1 - padding[1]))


def _whole(value: Tensor, axis: int | None, clients: int) -> Tensor:
    """With the axis of clients in front; what all clients have in common is repeated without a copy."""
    return value.expand(clients, *value.shape) if axis is None else value.movedim(axis, 0)


class Convolve(torch.autograd.Function):
    """A convolution of stride 1 for one client that knows how to be one for many under `vmap`."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, padding: Pair) -> Tensor:
        """One client."""
        return forward(x[None], weight[None], padding)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Pair], output: Tensor) -> None:
        """Keep what the gradients need."""
        x, weight, ctx.padding = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def vmap(info: Any, axes: tuple[int | None, ...], x: Tensor, weight: Tensor, padding: Pair) -> tuple[Tensor, int]:
        """Many clients."""
        clients = info.batch_size
        return forward(_whole(x, axes[0], clients), _whole(weight, axes[1], clients), padding), 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:
        """Both gradients are convolutions too."""
        x, weight = ctx.saved_tensors
        back = ConvolveToInput.apply(gradient, weight, ctx.padding) if ctx.needs_input_grad[0] else None
        kernel = (weight.shape[2], weight.shape[3])
        return back, ConvolveToWeight.apply(x, gradient, kernel, ctx.padding), None


class _GradientOnly(torch.autograd.Function):
    """A step of the backward pass; second derivatives are not needed here."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Nothing to keep."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Refuse second derivatives."""
        raise RuntimeError("stacked convolutions have no second derivative; use the serial engine")


class ConvolveToInput(_GradientOnly):
    """The gradient of the pictures."""

    @staticmethod
    def forward(gradient: Tensor, weight: Tensor, padding: Pair) -> Tensor:
        """One client."""
        return to_input(gradient[None], weight[None], padding)[0]

    @staticmethod
    def vmap(info: Any, axes: tuple[int | None, ...], gradient: Tensor, weight: Tensor, padding: Pair) -> Any:
        """Many clients."""
        clients = info.batch_size
        return to_input(_whole(gradient, axes[0], clients), _whole(weight, axes[1], clients), padding), 0


class ConvolveToWeight(_GradientOnly):
    """The gradient of the weights."""

    @staticmethod
    def forward(x: Tensor, gradient: Tensor, kernel: Pair, padding: Pair) -> Tensor:
        """One client."""
        return to_weight(x[None], gradient[None], kernel, padding)[0]

    @staticmethod
    def vmap(
        info: Any, axes: tuple[int | None, ...], x: Tensor, gradient: Tensor, kernel: Pair, padding: Pair
    ) -> tuple[Tensor, int]:
        """Many clients."""
        clients = info.batch_size
        return to_weight(_whole(x, axes[0], clients), _whole(gradient, axes[1], clients), kernel, padding), 0


class StackedConvolutions(TorchFunctionMode):
    """While this is in force, plain 2-d convolutions are computed as above; all others stay as they are."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        kinds: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Catch conv2d."""
        kwargs = kwargs or {}
        plain = plain_convolution(*args, **kwargs) if function is torch.conv2d else None
        if plain is None:
            return function(*args, **kwargs)
        x, weight, bias, padding = plain
        out = Convolve.apply(x, weight, padding)
        return out if bias is None else out + bias.view(1, -1, 1, 1)


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


def pair(value: Any) -> Pair:
    """A size that may be given once for both directions."""
    return (value, value) if isinstance(value, int) else (value[0], value[1] if len(value) > 1 else value[0])
