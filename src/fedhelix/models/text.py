"""A network for sequences of symbols."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedhelix.core.errors import UserError

WIDTH = 32


class Attention(nn.Module):
    """One head of self-attention from the last symbol to all others."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """What the last symbol finds, added to it."""
        query = self.query(x[:, -1:])
        scores = torch.matmul(query, self.key(x).transpose(1, 2)) / math.sqrt(WIDTH)
        return (x[:, -1:] + torch.matmul(scores.softmax(2), self.value(x))).squeeze(1)


class Transformer(nn.Module):
    """Embedded symbols and places, attention, and two linear layers."""

    def __init__(self, length: int, symbols: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, WIDTH)
        self.places = nn.Parameter(torch.randn(length, WIDTH) * 0.02)
        self.attention = Attention()
        self.hidden = nn.Linear(WIDTH, 2 * WIDTH)
        self.head = nn.Linear(2 * WIDTH, symbols)

    def forward(self, x: Tensor) -> Tensor:
        """The scores of all symbols as the next one."""
        found = self.attention(self.embedding(x) + self.places)
        return self.head(torch.relu(self.hidden(found)))


def transformer(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A small transformer that predicts the next of some symbols; the outputs are the alphabet."""
    if len(shape) != 1:
        raise UserError("it takes sequences of symbols.")
    return Transformer(shape[0], outputs)
