"""Networks of linear layers alone: they take samples of any shape."""

from __future__ import annotations

import math

from torch import nn


def mlp(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Two hidden linear layers of 128 and 64 features, for tables and anything else."""
    net = nn.Sequential()
    net.add_module("flatten", nn.Flatten())
    net.add_module("fc1", nn.Linear(math.prod(shape), 128))
    net.add_module("act1", nn.ReLU())
    net.add_module("fc2", nn.Linear(128, 64))
    net.add_module("act2", nn.ReLU())
    net.add_module("fc3", nn.Linear(64, outputs))
    return net


def linear(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """One linear layer: logistic or linear regression."""
    net = nn.Sequential()
    net.add_module("flatten", nn.Flatten())
    net.add_module("fc", nn.Linear(math.prod(shape), outputs))
    return net
