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
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from fedhelix.core.cuda import with_triton
from fedhelix.engines.kernels.arguments import Pair, is_plain_pooling, plain_convolution


def kernels() -> Any:
    """The primitives in Triton; None without it."""
    return with_triton("fedhelix.engines.batched.triton")


def has_kernels(x: Tensor) -> bool:
    """Whether Triton's kernels can compute it."""
    return x.is_cuda and kernels() is not None


def patches(x: Tensor, kernel: Pair, padding: Pair) -> Tensor:
    """All windows as columns: clients x (channels * kernel) x (batch * places)."""
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    # A view: clients, batch, channels, places, kernel.
    windows = x.unfold(3, kernel[0], 1).unfold(4, kernel[1], 1)
    columns = windows.permute(0, 2, 5, 6, 1, 3, 4)
    return columns.reshape(len(x), x.shape[2] * kernel[0] * kernel[1], -1)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Pair) -> Tensor:
    """The convolution of every client's batch with its own weights."""
    if has_kernels(x):
        return kernels().forward(x, weight, bias, padding)
    clients, outputs, _, *kernel = weight.shape
    height, width = (x.shape[3 + k] + 2 * padding[k] - kernel[k] + 1 for k in (0, 1))
    product = weight.reshape(clients, outputs, -1) @ patches(x, (kernel[0], kernel[1]), padding)
    out = product.view(clients, outputs, x.shape[1], height, width).transpose(1, 2)
    return out.contiguous() if bias is None else out + bias[:, None, :, None, None]


def to_weight(x: Tensor, gradient: Tensor, kernel: Pair, padding: Pair) -> Tensor:
    """The gradient of the weights."""
    if has_kernels(x):
        return kernels().to_weight(x, gradient, kernel, padding)
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
    """A convolution of stride 1 for one client; under `vmap`, for many.

    Gradients are taken outside of `vmap`, of the stacked operation below.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Pair) -> Tensor:
        """One client."""
        return forward(x[None], weight[None], None if bias is None else bias[None], padding)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save nothing."""

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
        stacks = (_whole(x, axes[0], clients), _whole(weight, axes[1], clients), biases)
        return ConvolveStacks.apply(*stacks, padding), 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Refuse: here, a gradient is one of many clients."""
        raise RuntimeError("stacked convolutions have no gradient inside of vmap")


class ConvolveStacks(torch.autograd.Function):
    """The convolution of every client's batch with its own weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: Pair) -> Tensor:
        """Many clients."""
        ctx.save_for_backward(x, weight)
        ctx.padding = padding
        return forward(x, weight, bias, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of images and weights, which are convolutions too, and of the bias."""
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        kernel = (weight.shape[3], weight.shape[4])
        return (
            to_input(gradient, weight, ctx.padding) if needs_x else None,
            to_weight(x, gradient, kernel, ctx.padding) if needs_weight else None,
            gradient.sum((1, 3, 4)) if needs_bias else None,
            None,
        )


class MaxPool(torch.autograd.Function):
    """The maximum of each 2x2 square for one client, on a GPU; under `vmap`, for many."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """One client."""
        return kernels().pool(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save nothing."""

    @staticmethod
    def vmap(info: Any, axes: tuple[int | None, ...], x: Tensor) -> tuple[Tensor, int]:
        """Many clients are just more images."""
        return MaxPoolStacks.apply(_whole(x, axes[0], info.batch_size)), 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Refuse: here, a gradient is one of many clients."""
        raise RuntimeError("stacked poolings have no gradient inside of vmap")


class MaxPoolStacks(torch.autograd.Function):
    """The same of any number of images."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Save the images: computing the maximum again is cheaper than storing its place."""
        ctx.save_for_backward(x)
        return kernels().pool(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """The gradient goes to the maximum of each square."""
        (x,) = ctx.saved_tensors
        return kernels().pool_to_input(x, gradient)


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
            function is F.max_pool2d and has_kernels(args[0]) and is_plain_pooling(*args, **kwargs)
        ):
            return MaxPool.apply(args[0])
        return function(*args, **kwargs)
