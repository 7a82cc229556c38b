"""Faster layers for the three places where PyTorch's native kernels lose most of their time.

These are the gradient of a convolution's weights, convolutions of few channels, and pooling. The
layers here store images with the batch last, so that all samples of a pixel are neighbours in
memory: patches are then copied in long rows, and pooling is vectorised.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pair = tuple[int, int]


def layers_for(module: nn.Module) -> dict[nn.Module, type[nn.Module]]:
    """The layers with a faster replacement; only PyTorch's own types are replaced."""
    layers = list(module.modules())
    convolutions = dict.fromkeys(filter(is_plain_convolution, layers), Convolution)
    return {**convolutions, **dict.fromkeys(filter(is_plain_pooling, layers), Pooling)}


def is_plain_convolution(layer: nn.Module) -> bool:
    """Whether this is a 2-D convolution of stride 1 without groups or dilation.

    Its padding must be smaller than its kernel.
    """
    if type(layer) is not nn.Conv2d or isinstance(layer.padding, str):
        return False
    if layer.padding_mode != "zeros":
        return False
    narrow = all(pad < size for pad, size in zip(layer.padding, layer.kernel_size, strict=True))
    return narrow and layer.stride == layer.dilation == (1, 1) and layer.groups == 1


def is_plain_pooling(layer: nn.Module) -> bool:
    """Whether this takes the maxima of windows, and nothing else."""
    return type(layer) is nn.MaxPool2d and not layer.return_indices


class Convolution(nn.Conv2d):
    """A convolution of stride 1."""

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Conv2d` does it."""
        if not are_images(x):
            return super().forward(x)
        return Convolve.apply(x, self.weight, self.bias, self.padding)


class Pooling(nn.MaxPool2d):
    """Pooling with the batch last.

    With samples in the place of channels this is channels-last, where PyTorch has a fast kernel.
    """

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.MaxPool2d` does it."""
        if not are_images(x):
            return super().forward(x)
        swapped = x.transpose(0, 1).contiguous(memory_format=torch.channels_last)
        return super().forward(swapped).transpose(0, 1)


def are_images(x: Tensor) -> bool:
    """Whether this is a batch of images outside of `torch.func`'s transforms."""
    return x.dim() == 4 and not torch._C._are_functorch_transforms_active()


class Convolve(torch.autograd.Function):
    """A convolution as one product of weights and patches, and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: Pair) -> Tensor:
        """All maps of all samples."""
        ctx.save_for_backward(x, weight)
        ctx.padding = padding
        taps = windows(x, weight, padding)
        start = weight.new_zeros(()) if bias is None else bias[:, None]
        maps = torch.addmm(start, weight.flatten(1), taps.reshape(weight[0].numel(), -1))
        return maps.view(len(weight), *taps.shape[3:]).permute(3, 0, 1, 2)

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """For images, a convolution with the flipped kernel; for weights, a product with the
        patches.
        """
        x, weight = ctx.saved_tensors
        (rows, columns), (down, right) = weight.shape[2:], ctx.padding
        to_x = to_weight = to_bias = None
        lying = batch_last(gradient).flatten(1)
        if ctx.needs_input_grad[0]:
            flipped = weight.flip(2, 3).transpose(0, 1).contiguous()
            to_x = torch.conv2d(gradient, flipped, padding=(rows - 1 - down, columns - 1 - right))
        if ctx.needs_input_grad[1]:
            patches = windows(x, weight, ctx.padding).reshape(weight[0].numel(), -1)
            # The transposed product is faster than `lying @ patches.t()`.
            to_weight = (patches @ lying.t()).t().contiguous().view_as(weight)
        if ctx.needs_input_grad[2]:
            to_bias = lying.sum(1)
        return to_x, to_weight, to_bias, None


def batch_last(x: Tensor) -> Tensor:
    """Images as channel x row x column x sample, contiguous."""
    return x.permute(1, 2, 3, 0).contiguous()


def windows(x: Tensor, weight: Tensor, padding: Pair) -> Tensor:
    """A view: channel x cell of the kernel (row, column) x place (row, column) x sample."""
    (rows, columns), (down, right) = weight.shape[2:], padding
    lying = batch_last(F.pad(x, (right, right, down, down)) if down or right else x)
    return lying.unfold(1, rows, 1).unfold(2, columns, 1).permute(0, 4, 5, 1, 2, 3)
