"""What clients uploaded in the last rounds, as vectors, and what can be had from it without learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedhelix.tree import Tree


class Buffer(NamedTuple):
    """One row per upload, the oldest first."""

    vectors: Tensor
    clients: Tensor
    rounds: Tensor

    @classmethod
    def of(cls, tree: Tree | None, values: int, device: torch.device) -> Buffer:
        """The buffer in a server's tree, or an empty one."""
        if tree is not None:
            return cls(**tree)
        nothing = torch.zeros(0, dtype=torch.int64)
        return cls(torch.zeros(0, values, device=device), nothing, nothing)

    def add(self, vectors: Tensor, clients: Sequence[int], round: int, keep: int) -> Buffer:
        """With the uploads of a round, and without those that are `keep` rounds old."""
        rounds = torch.cat([self.rounds.cpu(), torch.full((len(clients),), round)])
        fresh = rounds > round - keep
        everybody = torch.cat([self.clients.cpu(), torch.tensor(list(clients), dtype=torch.int64)])
        return Buffer(torch.cat([self.vectors, vectors])[fresh.to(vectors.device)], everybody[fresh], rounds[fresh])

    @property
    def owners(self) -> list[int]:
        """Who has an upload in it."""
        return sorted(set(self.clients.tolist()))

    def latest(self) -> Tensor:
        """The last upload of every owner."""
        last = {client: row for row, client in enumerate(self.clients.tolist())}
        return self.vectors[[last[client] for client in self.owners]]

    def means(self) -> Tensor:
        """The mean of every owner's uploads."""
        clients = self.clients.to(self.vectors.device)
        return torch.stack([self.vectors[clients == owner].mean(0) for owner in self.owners])


def neighbourhoods(vectors: Tensor, count: int) -> Tensor:
    """For every row the mean of the `count` nearest ones, itself among them."""
    nearest = torch.cdist(vectors, vectors).topk(min(count, len(vectors)), largest=False).indices
    return vectors[nearest].mean(1)


def shaken(vectors: Tensor, amount: float, seed: int) -> Tensor:
    """Every row with noise, whose size is a share of the distance to the mean of all rows."""
    noise = torch.randn(vectors.shape, generator=torch.Generator().manual_seed(seed)).to(vectors)
    size = (vectors - vectors.mean(0)).norm(dim=1, keepdim=True)
    return vectors + amount * size * noise / noise.norm(dim=1, keepdim=True)
