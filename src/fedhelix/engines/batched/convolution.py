"""Convolution and pooling of many clients at once, each with its own weights.

Stacked over clients, a convolution becomes a grouped one, for which GPUs have only slow kernels.
Here it is a few primitives on whole stacks (images: clients x batch x channels x height x width):
matrix products with all patches, or, on a GPU, Triton kernels that never store the patches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedhelix.engines.kernels.arguments import Pair, is_plain_pooling, plain_convolution

try:
    from fedhelix.engines.batched import triton as fast
except ImportError:  # a machine without Triton
    fast = None  # type: ignore[assignment]


def patches(x: Tensor, kernel: Pair, padding: Pair) -> Tensor:
    """All windows as columns: clients x (channels * kernel) x (batch * places)."""
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    # A view: clients, batch, channels, places, kernel.
    windows = x.unfold(3, kernel[0], 1).unfold(4, kernel[1], 1)
    columns = windows.permute(0, 2, 5, 6, 1, 3, 4)
    return columns.reshape(len(x), x.shape[2] * kernel[0] * kernel[1], -1)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Pair) -> Tensor:
    """The convolution of every client's batch with its own weights."""
    if fast is not None and x.is_cuda:
        return fast.forward(x, weight, bias, padding)
    clients, outputs, _, *kernel = weight.shape
    height, width = (x.shape[3 + k] + 2 * padding[k] - kernel[k] + 1 for k in (0, 1))
    product = weight.reshape(clients, outputs, -1) @ patches(x, (kernel[0], kernel[1]), padding)
    out = product.view(clients, outputs, x.shape[1], height, width).transpose(1, 2)
    return out.contiguous() if bias is None else out + bias[:, None, :, None, None]


def to_weight(x: Tensor, gradient: Tensor, kernel: Pair, padding: Pair) -> Tensor:
    """The gradient of the weights."""
    if fast is not None and x.is_cuda:
        return fast.to_weight(x, gradient, kernel, padding)
    clients, _, outputs = gradient.shape[:3]
    by_output = gradient.transpose(1, 2).reshape(clients, outputs, -1)
    product = by_output @ patches(x, kernel, padding).transpose(1, 2)
    return product.view(clients, outputs, x.shape[2], *kernel)


def to_input(gradient: Tensor, weight: Tensor, padding: Pair) -> Tensor:
    """The gradient of the images: a convolution with the flipped kernel."""
    flipped = weight.flip(3, 4).transpose(1, 2).contiguous()
    around = (weight.shape[3] - 1 - padding[0], weight.shape[4] - 1 - padding[1])
    return forward(gradient, flipped, None, around)


def _whole(value: Tensor, axis: int | None, clients: int) -> Tensor:
    """A value with a leading axis of clients; one that is common to all is expanded, not copied."""
    return value.expand(clients, *value.shape) if axis is None else value.movedim(axis, 0)


class Convolve(torch.autograd.Function):
    """A convolution of stride 1 for one client; under `vmap`, for many."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Pair) -> Tensor:
        """One client."""
        return forward(x[None], weight[None], None if bias is None else bias[None], padding)[0]

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, Pair], output: Tensor
    ) -> None:
        """Save the inputs for the gradients."""
        x, weight, _, ctx.padding = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def vmap(
        info: Any,
        axes: tuple[int | None, ...],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        padding: Pair,
    ) -> tuple[Tensor, int]:
        """Many clients."""
        clients = info.batch_size
        biases = None if bias is None else _whole(bias, axes[2], clients)
        return forward(
            _whole(x, axes[0], clients), _whole(weight, axes[1], clients), biases, padding
        ), 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        """The gradients of images and weights, which are convolutions too, and of the bias."""
        x, weight = ctx.saved_tensors
        back = (
            ConvolveToInput.apply(gradient, weight, ctx.padding)
            if ctx.needs_input_grad[0]
            else None
        )
        kernel = (weight.shape[2], weight.shape[3])
        to_bias = gradient.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None
        return back, ConvolveToWeight.apply(x, gradient, kernel, ctx.padding), to_bias, None


class _GradientOnly(torch.autograd.Function):
    """A step of the backward pass, without a derivative of its own."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Refuse second derivatives."""
        raise RuntimeError("stacked convolutions have no second derivative; use the serial engine")


class ConvolveToInput(_GradientOnly):
    """The gradient of the images."""

    @staticmethod
    def forward(gradient: Tensor, weight: Tensor, padding: Pair) -> Tensor:
        """One client."""
        return to_input(gradient[None], weight[None], padding)[0]

    @staticmethod
    def vmap(
        info: Any, axes: tuple[int | None, ...], gradient: Tensor, weight: Tensor, padding: Pair
    ) -> Any:
        """Many clients."""
        clients = info.batch_size
        return to_input(
            _whole(gradient, axes[0], clients), _whole(weight, axes[1], clients), padding
        ), 0


class ConvolveToWeight(_GradientOnly):
    """The gradient of the weights."""

    @staticmethod
    def forward(x: Tensor, gradient: Tensor, kernel: Pair, padding: Pair) -> Tensor:
        """One client."""
        return to_weight(x[None], gradient[None], kernel, padding)[0]

    @staticmethod
    def vmap(
        info: Any,
        axes: tuple[int | None, ...],
        x: Tensor,
        gradient: Tensor,
        kernel: Pair,
        padding: Pair,
    ) -> tuple[Tensor, int]:
        """Many clients."""
        clients = info.batch_size
        return to_weight(
            _whole(x, axes[0], clients), _whole(gradient, axes[1], clients), kernel, padding
        ), 0


class MaxPool(torch.autograd.Function):
    """The maximum of each 2x2 square, on a GPU; many clients are just more images."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """One client."""
        return fast.pool(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save the images: computing the maximum again is cheaper than storing its place."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def vmap(info: Any, axes: tuple[int | None, ...], x: Tensor) -> tuple[Tensor, int]:
        """Many clients."""
        return fast.pool(_whole(x, axes[0], info.batch_size)), 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """The gradient goes to the maximum of each square."""
        return PoolToInput.apply(*ctx.saved_tensors, gradient)


class PoolToInput(_GradientOnly):
    """The gradient of the pooled images."""

    @staticmethod
    def forward(x: Tensor, gradient: Tensor) -> Tensor:
        """One client."""
        return fast.pool_to_input(x, gradient)

    @staticmethod
    def vmap(
        info: Any, axes: tuple[int | None, ...], x: Tensor, gradient: Tensor
    ) -> tuple[Tensor, int]:
        """Many clients."""
        clients = info.batch_size
        return fast.pool_to_input(
            _whole(x, axes[0], clients), _whole(gradient, axes[1], clients)
        ), 0


class StackedConvolutions(TorchFunctionMode):
    """A mode in which plain 2-D convolutions and poolings use the functions of this module."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        kinds: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Intercept conv2d and max_pool2d."""
        kwargs = kwargs or {}
        if function is torch.conv2d:
            plain = plain_convolution(*args, **kwargs)
            if plain is not None:
                return Convolve.apply(*plain)
        elif (
            function is F.max_pool2d
            and fast is not None
            and args[0].is_cuda
            and is_plain_pooling(*args, **kwargs)
        ):
            return MaxPool.apply(args[0])
        return function(*args, **kwargs)
