"""The partitions themselves: each one a rule that says how many samples of each class go where."""

from __future__ import annotations

import heapq
import warnings
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from fedhelix.core.errors import UserError
from fedhelix.core.options import option
from fedhelix.data.datasets import Dataset
from fedhelix.data.owners import Names
from fedhelix.data.partitions.base import Partition
from fedhelix.data.sampling import (
    enough_for,
    even,
    segments,
    top_up,
)

USUAL_LEAST = 10  # samples of a client, where there are enough


@dataclass(frozen=True)
class Iid(Partition):
    """Every client gets an equal random part of all samples."""

    by_class: ClassVar[bool] = False

    def counts(
        self, present: np.ndarray, supply: np.ndarray, draw: np.random.Generator
    ) -> np.ndarray:
        """One class that stands for all, cut evenly."""
        enough_for(self.clients, supply)
        return even(int(supply.sum()), self.clients)[:, None]


@dataclass(frozen=True)
class Shard(Partition):
    """Every client holds the same number of distinct classes, one shard of each.

    All shards are about equally large.
    """

    classes_per_client: int = option(2, "distinct classes of each client", low=1)

    def counts(
        self, present: np.ndarray, supply: np.ndarray, draw: np.random.Generator
    ) -> np.ndarray:
        """Cut each class into shards, and deal them out so that no client gets two of one class."""
        if self.classes_per_client > len(present):
            raise UserError(
                f"every client should hold {self.classes_per_client} distinct classes, "
                f"but there are only {len(present)}; lower classes_per_client."
            )
        shards = self.shards_of(supply)
        holds = self.deal(shards, draw)
        rank = np.cumsum(holds, axis=0) - 1
        size, rest = np.divmod(supply, np.maximum(shards, 1))
        return np.where(holds, size + (rank < rest), 0)

    def shards_of(self, supply: np.ndarray) -> np.ndarray:
        """How many shards each class is cut into; the class with the largest shards is cut next."""
        wanted = self.clients * self.classes_per_client
        # A shard needs a sample, and a client holds at most one shard of a class.
        limits = np.minimum(supply, self.clients)
        if limits.sum() < wanted:
            raise UserError(
                f"{self.clients} clients with {self.classes_per_client} classes each need {wanted} "
                f"shards, but the {supply.sum()} samples give only {limits.sum()}; "
                "lower clients or classes_per_client."
            )
        shards = np.zeros(len(supply), dtype=np.int64)
        queue = [(-np.inf, label) for label in range(len(supply))]
        for _ in range(wanted):
            _, label = heapq.heappop(queue)
            shards[label] += 1
            if shards[label] < limits[label]:
                heapq.heappush(queue, (-supply[label] / shards[label], label))
        return shards

    def deal(self, shards: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        """Who holds which class (clients × classes), drawn with the remaining shards as weights.

        Once a class has as many shards left as there are clients left, every remaining client must
        take one. There are never more than `classes_per_client` such classes, so the dealing
        always comes out even.
        """
        holds = np.zeros((self.clients, len(shards)), dtype=bool)
        left = shards.copy()
        for client in range(self.clients):
            # The smallest of exponential draws divided by weights: a weighted draw without repeats.
            with np.errstate(divide="ignore"):
                order = draw.standard_exponential(len(left)) / left
            order[left == self.clients - client] = -1
            chosen = np.argsort(order)[: self.classes_per_client]
            holds[client, chosen] = True
            left[chosen] -= 1
        return holds


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Each class is spread over the clients by proportions from a Dirichlet distribution.

    The smaller alpha, the more unequal the clients.
    """

    alpha: float = option(0.1, "concentration of the Dirichlet distribution", above=0, high=1e6)

    def counts(
        self, present: np.ndarray, supply: np.ndarray, draw: np.random.Generator
    ) -> np.ndarray:
        """Proportions per class, then a top-up for clients that got too few samples."""
        enough_for(self.clients, supply)
        proportions = draw.dirichlet(np.full(self.clients, self.alpha), size=len(supply))
        cuts = np.rint(np.cumsum(proportions, axis=1) * supply[:, None]).astype(np.int64)
        cuts[:, -1] = supply
        counts = np.diff(cuts, axis=1, prepend=0).T.copy()
        # Topping up, because redrawing until every client has enough would hardly ever end.
        least = USUAL_LEAST if self.min_samples is None else self.min_samples
        top_up(counts, min(least, int(supply.sum()) // self.clients), draw)
        return counts


@dataclass(frozen=True)
class Quantity(Dirichlet):
    """Random samples of all classes, in numbers from a Dirichlet distribution.

    The smaller alpha, the more of the samples belong to a few clients.
    """

    by_class: ClassVar[bool] = False


@dataclass(frozen=True)
class Natural(Partition):
    """Every owner of samples is a client.

    Owners come with the data or as `ids`, one for each training sample. Where the data say who owns
    the test samples too, clients are tested on their own. Owners with fewer than `min_samples`
    training samples are left out, with their test samples; those that the server keeps count.
    """

    clients: int = option(0, "always as many as there are owners", low=0, high=0)
    ids: np.ndarray | None = field(
        default=None, compare=False, metadata={"meaning": "owner of each training sample"}
    )

    by_class: ClassVar[bool] = False

    def divided(self, data: Dataset, newcomers: int, unseen: float, seed: int) -> list[Partition]:
        """The last owners are the newcomers."""
        if newcomers and unseen:
            raise UserError(
                "owners keep their classes; "
                "set newcomers_classes to 0, and the last owners come later."
            )
        return [self]

    def members(
        self, data: Dataset, usable: np.ndarray, draw: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """The owners' samples, in the order of the owners' names."""
        names, owner, left_out = self.kept(data)
        if len(left_out):
            warnings.warn(
                f"{len(left_out)} of the {len(left_out) + len(names)} owners of '{data.name}' have "
                f"fewer than {self.min_samples} training samples and are left out.",
                stacklevel=2,
            )
        usable = usable[owner[usable] >= 0]
        sizes = np.bincount(owner[usable], minlength=len(names))
        if not sizes.all():
            raise UserError(
                f"client '{names[np.argmin(sizes)]}' of '{data.name}' has no training samples left."
            )
        return usable[np.argsort(owner[usable], kind="stable")], sizes

    def tests(
        self, data: Dataset, members: np.ndarray, sizes: np.ndarray, draw: np.random.Generator
    ) -> list[np.ndarray]:
        """Each owner's test samples; owners without any are not evaluated."""
        if self.ids is not None or data.owners_test is None:
            return super().tests(data, members, sizes, draw)
        strangers = ~np.isin(data.owners_test, self.owners(data)[0])
        if strangers.any():
            raise UserError(
                f"owner '{data.owners_test[strangers][0]}' of '{data.name}' "
                "has test samples but no training samples; remove them, or leave out who owns the "
                "test samples, and all clients share them."
            )
        names = self.kept(data)[0]
        usable = draw.permutation(self.usable(data, data.y_test))
        usable = usable[np.isin(data.owners_test[usable], names)]
        owner = np.searchsorted(names, data.owners_test[usable])
        usable = usable[np.argsort(owner, kind="stable")]
        parts = segments(usable, np.bincount(owner, minlength=len(names)))
        if lacking := sum(not len(part) for part in parts):
            warnings.warn(
                f"{lacking} of the {len(parts)} clients of '{data.name}' have no test samples of "
                "their own; they train, but are not evaluated.",
                stacklevel=2,
            )
        return [part[: self.test_samples] for part in parts]

    def names(self, data: Dataset) -> Names | None:
        """The owners' names, unless they are the clients' numbers."""
        names = self.kept(data)[0].tolist()
        return None if names == list(range(len(names))) else tuple(names)

    def kept(self, data: Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The names of the owners with enough samples; for each training sample its owner's index
        among them, or -1; and the names of the others.
        """
        names, owner = self.owners(data)
        if self.min_samples is None:
            return names, owner, names[:0]
        sizes = np.bincount(owner[self.usable(data, data.y)], minlength=len(names))
        enough = sizes >= self.min_samples
        if not enough.any():
            raise UserError(
                f"no owner of '{data.name}' has {self.min_samples} training samples; the most are "
                f"{sizes.max()}, so lower min_samples."
            )
        return names[enough], np.where(enough, np.cumsum(enough) - 1, -1)[owner], names[~enough]

    def owners(self, data: Dataset) -> tuple[np.ndarray, np.ndarray]:
        """The owners' sorted names, and for each training sample its owner's index among them."""
        ids = data.owners if self.ids is None else np.asarray(self.ids)
        if ids is None:
            raise UserError(
                f"'{data.name}' does not say who owns which sample; give an npz file the array "
                "'owners', or partition.natural(ids) an owner of each training sample, or use "
                "another partition, such as dirichlet:0.3."
            )
        if ids.shape != (len(data.y),):
            raise UserError(
                f"'{data.name}' has {len(data.y)} training samples, "
                f"but ids has the shape {ids.shape}; from_arrays(..., owners=ids) takes one for "
                "every sample, before some are held out for testing."
            )
        return np.unique(ids, return_inverse=True)
