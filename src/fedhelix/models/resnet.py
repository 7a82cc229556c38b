"""ResNets for 32×32 images: a 3×3 stem and no max-pooling before the first stage."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from fedhelix.models.cnn import image, narrowed
from fedhelix.models.norm import norm_alone, norm_relu


class Block(nn.Module):
    """Two 3×3 convolutions with a shortcut; a 1×1 convolution adapts it where shapes change."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output for a batch of feature maps."""
        out = norm_relu(self.bn1, self.conv1(x))
        return norm_relu(self.bn2, self.conv2(out), partial(self._adapted, x))

    def _adapted(self, x: Tensor) -> Tensor:
        """The block's input in the shape of its output."""
        if not len(self.shortcut):
            return x
        conv, norm = self.shortcut
        assert isinstance(norm, nn.BatchNorm2d)
        return norm_alone(norm, conv(x))


class ResNet(nn.Module):
    """Stages of ever wider and coarser blocks, global average pooling, and one linear layer."""

    def __init__(self, channels: int, outputs: int, widths: Sequence[int], blocks: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.stages = [f"layer{number}" for number in range(1, len(widths) + 1)]
        for name, inputs, width in zip(self.stages, (widths[0], *widths), widths, strict=False):
            first = Block(inputs, width, 1 if name == "layer1" else 2)
            self.add_module(
                name, nn.Sequential(first, *(Block(width, width, 1) for _ in range(blocks - 1)))
            )
        self.fc = nn.Linear(widths[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of a batch of images."""
        x = norm_relu(self.bn1, self.conv1(x))
        for name in self.stages:
            x = self.get_submodule(name)(x)
        return self.fc(x.mean((-2, -1)))


def resnet18(shape: tuple[int, ...], outputs: int, width: float = 1.0) -> nn.Module:
    """GENE-FL's network: ResNet-18 with BatchNorm and a 3×3 stem, 11.2 million parameters."""
    widths = [narrowed(channels, width) for channels in (64, 128, 256, 512)]
    return ResNet(image(shape)[0], outputs, widths, 2)


def resnet8(shape: tuple[int, ...], outputs: int, width: float = 1.0) -> nn.Module:
    """A small ResNet with BatchNorm: three stages of one block, 78 thousand parameters."""
    widths = [narrowed(channels, width) for channels in (16, 32, 64)]
    return ResNet(image(shape)[0], outputs, widths, 1)
