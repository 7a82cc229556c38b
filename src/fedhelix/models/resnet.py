"""ResNet-18 as it is used for 32×32 pictures: a 3×3 stem and no max-pooling before the first stage."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fedhelix.models.cnn import picture


class Block(nn.Module):
    """Two 3×3 convolutions around which the input is led; where shapes change, a 1×1 convolution adapts it."""

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
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class ResNet18(nn.Module):
    """Four stages of two blocks each, 64 to 512 channels wide, then the mean over all pixels and one linear layer."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = nn.Sequential(Block(64, 64, 1), Block(64, 64, 1))
        self.layer2 = nn.Sequential(Block(64, 128, 2), Block(128, 128, 1))
        self.layer3 = nn.Sequential(Block(128, 256, 2), Block(256, 256, 1))
        self.layer4 = nn.Sequential(Block(256, 512, 2), Block(512, 512, 1))
        self.fc = nn.Linear(512, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes for a batch of pictures."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((-2, -1)))


def resnet18(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """GENE-FL's network: ResNet-18 with BatchNorm and a 3×3 stem, 11.2 million parameters."""
    return ResNet18(picture(shape)[0], outputs)
