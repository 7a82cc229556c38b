"""The uploads of the last rounds as vectors, and simple statistics of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedhelix.core.tree import Tree


class Buffer(NamedTuple):
    """One row per upload, the oldest first, and one for the model that each round began with."""

    vectors: Tensor
    clients: Tensor
    weights: Tensor
    rounds: Tensor
    starts: Tensor

    @classmethod
    def of(cls, tree: Tree | None, values: int, device: torch.device) -> Buffer:
        """The buffer in a server's tree, or an empty one."""
        if tree is not None:
            return cls(**tree)
        nothing, empty = torch.zeros(0, dtype=torch.int64), torch.zeros(0, values, device=device)
        return cls(empty, nothing, torch.zeros(0), nothing, empty)

    def add(
        self,
        vectors: Tensor,
        clients: Sequence[int],
        weights: Sequence[float],
        start: Tensor,
        round: int,
        keep: int,
    ) -> Buffer:
        """The buffer with the uploads of a round, without those that are `keep` rounds old."""
        return Buffer(
            torch.cat([self.vectors, vectors]),
            torch.cat([self.clients.cpu(), torch.tensor(list(clients), dtype=torch.int64)]),
            torch.cat([self.weights.cpu(), torch.tensor(list(weights), dtype=torch.float32)]),
            torch.cat([self.rounds.cpu(), torch.full((len(clients),), round)]),
            torch.cat([self.starts, start.unsqueeze(0)]),
        ).since(round - keep + 1)

    def since(self, first: int) -> Buffer:
        """Only the uploads of that round and later ones."""
        fresh, young = self.rounds.cpu() >= first, self.rounds.cpu().unique() >= first
        return Buffer(
            self.vectors[fresh.to(self.vectors.device)],
            self.clients.cpu()[fresh],
            self.weights.cpu()[fresh],
            self.rounds.cpu()[fresh],
            self.starts[young.to(self.starts.device)],
        )

    def trusted(self) -> Tensor:
        """The vectors of uploads with a positive weight: a selection has rejected the others."""
        return self.vectors[(self.weights > 0).to(self.vectors.device)]

    def updates(self) -> Buffer:
        """The differences of the uploads from the average that their round began with."""
        places = self.rounds.unique(return_inverse=True)[1].to(self.vectors.device)
        return self._replace(vectors=self.vectors - self.starts[places])

    @property
    def owners(self) -> list[int]:
        """The clients with an upload in the buffer."""
        return sorted(set(self.clients.tolist()))

    def latest(self) -> Tensor:
        """The last upload of every owner."""
        last = {client: row for row, client in enumerate(self.clients.tolist())}
        return self.vectors[[last[client] for client in self.owners]]

    def means(self) -> Tensor:
        """The mean of every owner's uploads."""
        clients = self.clients.to(self.vectors.device)
        return torch.stack([self.vectors[clients == owner].mean(0) for owner in self.owners])


def distances(left: Tensor, right: Tensor) -> Tensor:
    """Distances between all rows, without the fast formula, which loses digits of close rows."""
    return torch.cdist(left, right, compute_mode="donot_use_mm_for_euclid_dist")


def neighbourhoods(vectors: Tensor, count: int) -> Tensor:
    """For every row, the mean of the `count` nearest rows, itself included."""
    nearest = distances(vectors, vectors).topk(min(count, len(vectors)), largest=False).indices
    return vectors[nearest].mean(1)


def shaken(vectors: Tensor, amount: float, seed: int) -> Tensor:
    """Every row with noise proportional to its distance from the mean of all rows."""
    noise = torch.randn(vectors.shape, generator=torch.Generator().manual_seed(seed)).to(vectors)
    size = (vectors - vectors.mean(0)).norm(dim=1, keepdim=True)
    return vectors + amount * size * noise / noise.norm(dim=1, keepdim=True)
