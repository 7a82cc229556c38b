"""The papers' small convolutional networks, each one line of numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from torch import nn

from fedhelix.core.errors import UserError


class Conv(NamedTuple):
    """One convolution of a plain CNN, followed by an activation and `pool` × `pool` max-pooling."""

    channels: int
    kernel: int
    padding: int = 0
    stride: int = 1
    pool: int = 2


def plain_cnn(
    shape: tuple[int, ...],
    outputs: int,
    convs: Sequence[Conv],
    hidden: Sequence[int],
    activation: type[nn.Module] = nn.ReLU,
    batch_norm: bool = False,
    share: float = 1.0,
) -> nn.Sequential:
    """Convolutions `conv1`, `conv2`, … (with `bn1`, … on request), then linear layers `fc1`, …

    All of them may have a share of their channels only.
    """
    channels, height, width = image(shape)
    convs = [conv._replace(channels=narrowed(conv.channels, share)) for conv in convs]
    hidden = [narrowed(size, share) for size in hidden]
    net = nn.Sequential()
    for place, conv in enumerate(convs, 1):
        # BatchNorm subtracts the mean, so a bias before it would do nothing.
        layer = nn.Conv2d(
            channels, conv.channels, conv.kernel, conv.stride, conv.padding, bias=not batch_norm
        )
        net.add_module(f"conv{place}", layer)
        if batch_norm:
            net.add_module(f"bn{place}", nn.BatchNorm2d(conv.channels))
        net.add_module(f"act{place}", activation())
        if conv.pool > 1:
            net.add_module(f"pool{place}", nn.MaxPool2d(conv.pool))
        channels, height, width = conv.channels, side_after(conv, height), side_after(conv, width)
        if min(height, width) < 1:
            raise UserError(f"nothing is left of such a small image after convolution {place}.")
    net.add_module("flatten", nn.Flatten())
    widths = [channels * height * width, *hidden, outputs]
    for place, (inner, outer) in enumerate(itertools.pairwise(widths), 1):
        net.add_module(f"fc{place}", nn.Linear(inner, outer))
        if place <= len(hidden):
            net.add_module(f"fc{place}_act", activation())
    return net


def image(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The shape as (channels, height, width), or an error for samples that are not images."""
    if len(shape) != 3:
        raise UserError("it needs images, that is samples of shape (channels, height, width).")
    return shape[0], shape[1], shape[2]


def narrowed(channels: int, width: float) -> int:
    """A share of the channels, rounded up."""
    if not 0 < width <= 1:
        raise UserError(f"the width of a network is a number above 0 and up to 1, not {width}.")
    return math.ceil(round(width * channels, 6))


def side_after(conv: Conv, side: int) -> int:
    """How many of `side` pixels a convolution and its pooling leave."""
    return ((side + 2 * conv.padding - conv.kernel) // conv.stride + 1) // conv.pool


def genfed_cnn(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """GenFed's network: two 3×3 convolutions of 32 channels, one hidden layer (colour: two)."""
    hidden = [128] if image(shape)[0] == 1 else [256, 64]
    return plain_cnn(shape, outputs, [Conv(32, 3, padding=1), Conv(32, 3, padding=1)], hidden)


def fedpac_cnn(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """FedPAC's and pFedGPA's network: 5×5 convolutions of 16 and 32 channels, leaky ReLU.

    Colour images get a third convolution of 64 channels.
    """
    convs = [Conv(16, 5), Conv(32, 5, padding=1)]
    if image(shape)[0] > 1:
        convs.append(Conv(64, 3, padding=1))
    return plain_cnn(shape, outputs, convs, [128], nn.LeakyReLU)


def small_cnn(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """pFedGPA's small network: 5×5 convolutions of 8 and 16 channels, 64 features, leaky ReLU."""
    return plain_cnn(shape, outputs, [Conv(8, 5), Conv(16, 5)], [64], nn.LeakyReLU)


def w1_cnn(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A small network for 28×28 images: 5×5 convolutions of 10 and 20 channels, 50 features."""
    return plain_cnn(shape, outputs, [Conv(10, 5), Conv(20, 5)], [50])


def lenet(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """LeNet-5 with ReLU and max-pooling: 5×5 convolutions, then 120 and 84 hidden features."""
    return plain_cnn(shape, outputs, [Conv(6, 5), Conv(16, 5)], [120, 84])


def lenet_sigmoid(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """iDLG's sigmoid LeNet for privacy audits: three smooth 5×5 convolutions of 12 channels."""
    halving, keeping = Conv(12, 5, padding=2, stride=2, pool=1), Conv(12, 5, padding=2, pool=1)
    net = plain_cnn(shape, outputs, [halving, halving, keeping], [], nn.Sigmoid)
    for parameter in net.parameters():
        # As in the reference code: with PyTorch's narrower default weights hardly any gradient
        # passes the sigmoids.
        nn.init.uniform_(parameter, -0.5, 0.5)
    return net


def bn_cnn(shape: tuple[int, ...], outputs: int, width: float = 1.0) -> nn.Module:
    """A small network with BatchNorm for 32×32 images: five 3×3 convolutions, 16–64 channels."""
    wide, same = partial(Conv, kernel=3, padding=1), partial(Conv, kernel=3, padding=1, pool=1)
    convs = [wide(16), same(32), wide(32), same(64), wide(64)]
    return plain_cnn(shape, outputs, convs, [], batch_norm=True, share=width)


DIGITS = (Conv(8, 3, padding=1), Conv(16, 3, padding=1))


def digits_cnn(shape: tuple[int, ...], outputs: int, width: float = 1.0) -> nn.Module:
    """A fast network for tiny images: 3×3 convolutions of 8 and 16 channels, 64 features."""
    return plain_cnn(shape, outputs, DIGITS, [64], share=width)


def digits_bn_cnn(shape: tuple[int, ...], outputs: int, width: float = 1.0) -> nn.Module:
    """`digits-cnn` with BatchNorm after each convolution, for methods such as FedBN."""
    return plain_cnn(shape, outputs, DIGITS, [64], batch_norm=True, share=width)
