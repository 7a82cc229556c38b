"""What clients uploaded in the last rounds, as vectors, and what can be had from it without learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedhelix.tree import Tree


class Buffer(NamedTuple):
    """One row per upload, the oldest first, and one for the model that each of their rounds began with."""

    vectors: Tensor
    clients: Tensor
    rounds: Tensor
    starts: Tensor

    @classmethod
    def of(cls, tree: Tree | None, values: int, device: torch.device) -> Buffer:
        """The buffer in a server's tree, or an empty one."""
        if tree is not None:
            return cls(**tree)
        nothing, empty = torch.zeros(0, dtype=torch.int64), torch.zeros(0, values, device=device)
        return cls(empty, nothing, nothing, empty)

    def add(self, vectors: Tensor, clients: Sequence[int], start: Tensor, round: int, keep: int) -> Buffer:
        """With the uploads of a round, and without those that are `keep` rounds old."""
        rounds = torch.cat([self.rounds.cpu(), torch.full((len(clients),), round)])
        everybody = torch.cat([self.clients.cpu(), torch.tensor(list(clients), dtype=torch.int64)])
        starts = torch.cat([self.starts, start.unsqueeze(0)])
        fresh, young = rounds > round - keep, rounds.unique() > round - keep
        uploads = torch.cat([self.vectors, vectors])
        return Buffer(
            uploads[fresh.to(uploads.device)], everybody[fresh], rounds[fresh], starts[young.to(starts.device)]
        )

    def updates(self) -> Buffer:
        """What clients changed in the models that they received, instead of what came of it."""
        places = self.rounds.unique(return_inverse=True)[1].to(self.vectors.device)
        return self._replace(vectors=self.vectors - self.starts[places])

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


def distances(left: Tensor, right: Tensor) -> Tensor:
    """Between all rows, without the shortcut that cancels digits of near ones."""
    return torch.cdist(left, right, compute_mode="donot_use_mm_for_euclid_dist")


def neighbourhoods(vectors: Tensor, count: int) -> Tensor:
    """For every row the mean of the `count` nearest ones, itself among them."""
    nearest = distances(vectors, vectors).topk(min(count, len(vectors)), largest=False).indices
    return vectors[nearest].mean(1)


def shaken(vectors: Tensor, amount: float, seed: int) -> Tensor:
    """Every row with noise, whose size is a share of the distance to the mean of all rows."""
    noise = torch.randn(vectors.shape, generator=torch.Generator().manual_seed(seed)).to(vectors)
    size = (vectors - vectors.mean(0)).norm(dim=1, keepdim=True)
    return vectors + amount * size * noise / noise.norm(dim=1, keepdim=True)
