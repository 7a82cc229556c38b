"""Partitions: which client holds which samples.

Most of them only decide *how many* samples of each class every client gets; drawing them, cutting
off validation samples and finding a test part with the same class proportions is the same for all.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from fedhelix.core.errors import UserError, unknown
from fedhelix.core.options import Checked, build, option
from fedhelix.core.seeds import numpy_draw
from fedhelix.data.datasets import Dataset
from fedhelix.data.sampling import (
    ClassPool,
    affordable,
    apportion,
    enough_for,
    even,
    segments,
    top_up,
)


@dataclass(frozen=True, eq=False)
class Split:
    """One client's samples: train and valid are indices into `Dataset.x`, test into
    `Dataset.x_test`.
    """

    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray


@dataclass(frozen=True)
class Partition(Checked):
    """What all partitions have in common; make one with `iid`, `shard`, `dirichlet`, `dominant` or
    `natural`.
    """

    clients: int = option(10, "how many clients", low=1)
    valid: float = option(
        0.1, "share of a client's samples that is kept for validation", low=0, high=0.9
    )
    test_samples: int | None = option(
        None, "test samples of a client (auto: 100, or its share of all)", low=1
    )
    min_samples: int = option(10, "samples that every client gets, where there are enough", low=1)
    classes: tuple[int, ...] | None = option(None, "use only samples of these classes")

    by_class: ClassVar[bool] = True
    """Whether the rule looks at labels, and therefore needs a classification."""

    here: ClassVar[bool] = True
    """Whether the clients' samples are those of the data set, and not at their owners."""

    def __post_init__(self) -> None:
        if self.classes is not None:
            object.__setattr__(self, "classes", whole_numbers("classes", self.classes))
        super().__post_init__()

    @property
    def name(self) -> str:
        """The name that `parse` knows."""
        return type(self).__name__.lower()

    def split(self, data: Dataset, seed: int, exclude: np.ndarray | None = None) -> list[Split]:
        """Every client's samples, without the training samples in `exclude`; the same for the same
        seed.

        No client holds a sample twice. A client's test part has the class proportions of its
        training part and may share samples with other clients' test parts.
        """
        if self.by_class and data.classes is None:
            raise UserError(
                f"a {self.name} partition needs classes, but '{data.name}' has none; use iid or natural."
            )
        usable = self.usable(data, data.y)
        if exclude is not None:
            usable = np.setdiff1d(usable, training_indices(exclude, len(data.y)))
        if len(usable) == 0:
            raise UserError(f"no training samples of '{data.name}' are left for the clients.")
        members, sizes = self.members(data, usable, numpy_draw(seed, "partition"))
        tests = self.tests(data, members, sizes, numpy_draw(seed, "partition-test"))

        client = np.repeat(np.arange(len(sizes)), sizes)
        shuffled = members[
            np.argsort(client + numpy_draw(seed, "partition-valid").random(len(members)))
        ]
        valid = np.clip(np.rint(self.valid * sizes).astype(np.int64), 1, np.maximum(sizes - 1, 1))
        valid[(sizes < 2) | (self.valid == 0)] = 0
        return [
            Split(train=own[count:], valid=own[:count], test=test)
            for own, count, test in zip(
                segments(shuffled, sizes), valid.tolist(), tests, strict=True
            )
        ]

    def divided(self, data: Dataset, newcomers: int, unseen: float, seed: int) -> list[Partition]:
        """This partition, or one of the known clients and one of newcomers, who alone hold a share
        of the classes.
        """
        if not newcomers:
            return [self]
        if not unseen:
            return [replace(self, clients=self.clients + newcomers)]
        if self.classes is not None:
            raise UserError(
                "newcomers_classes chooses classes, and so does the partition; set it to 0."
            )
        known, new = class_split(data, 1 - unseen, seed)
        return [
            replace(self, classes=tuple(known)),
            replace(self, clients=newcomers, classes=tuple(new)),
        ]

    def usable(self, data: Dataset, targets: Tensor) -> np.ndarray:
        """Indices of the samples of the wanted classes."""
        if self.classes is None:
            return np.arange(len(targets))
        if data.classes is None:
            raise UserError(
                f"classes are given, but '{data.name}' is not a classification; leave them out."
            )
        if max(self.classes) >= data.classes:
            raise UserError(
                f"there is no class {max(self.classes)} in '{data.name}'; its classes are 0 to {data.classes - 1}."
            )
        return np.flatnonzero(np.isin(data.codes(targets), self.classes))

    def members(
        self, data: Dataset, usable: np.ndarray, draw: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """The samples of all clients, one client after the other, and how many each one has."""
        labels = (
            data.codes(data.y)[usable] if self.by_class else np.zeros(len(usable), dtype=np.int64)
        )
        present, compact = np.unique(labels, return_inverse=True)
        pool = ClassPool.of(usable, compact, len(present), draw)
        counts = self.checked(self.counts(present, pool.sizes, draw), pool.sizes)
        return pool.take(counts, np.cumsum(counts, axis=0) - counts), counts.sum(1)

    def counts(
        self, present: np.ndarray, supply: np.ndarray, draw: np.random.Generator
    ) -> np.ndarray:
        """The rule: how many samples of each class that is present each client gets (clients ×
        classes).
        """
        raise UserError(
            f"the partition {self.name} has no rule; write its counts(present, supply, draw)."
        )

    def checked(self, counts: Any, supply: np.ndarray) -> np.ndarray:
        """What a rule says, if clients can have it: any of them all samples of a class, none of
        them nothing.
        """
        found, wanted = np.asarray(counts), (self.clients, len(supply))
        if found.shape != wanted or found.dtype.kind not in "iu":
            raise UserError(
                f"counts of the partition {self.name} must be whole numbers of the shape {wanted}, clients × classes, "
                f"not {found.dtype} of the shape {found.shape}."
            )
        if found.min() < 0 or (found > supply).any():
            client, place = np.argwhere((found < 0) | (found > supply))[0]
            raise UserError(
                f"the partition {self.name} gives client {client} {found[client, place]} samples of a class that has "
                f"{supply[place]}."
            )
        if not found.sum(1).all():
            raise UserError(
                f"the partition {self.name} gives client {int(np.argmin(found.sum(1)))} no samples."
            )
        return found

    def tests(
        self, data: Dataset, members: np.ndarray, sizes: np.ndarray, draw: np.random.Generator
    ) -> list[np.ndarray]:
        """For each client test samples with the class proportions of its training samples."""
        clients, classes = len(sizes), data.classes or 1
        usable = self.usable(data, data.y_test)
        pool = ClassPool.of(usable, data.codes(data.y_test)[usable], classes, draw)
        cells = np.repeat(np.arange(clients) * classes, sizes) + data.codes(data.y)[members]
        held = np.bincount(cells, minlength=clients * classes).reshape(clients, classes)
        held[:, pool.sizes == 0] = 0
        lost = np.flatnonzero(held.sum(1) == 0)
        if len(lost):
            raise UserError(
                f"the test pool of '{data.name}' has no sample of any class that client {lost[0]} holds."
            )
        totals = affordable(
            self.test_samples or self.usual_test(data, clients, len(usable)), held, pool.sizes
        )
        starts = draw.integers(0, np.maximum(pool.sizes, 1), size=held.shape)
        return segments(pool.take(apportion(totals, held), starts), totals)

    def usual_test(self, data: Dataset, clients: int, available: int) -> int:
        """The size of a test part when the user gives none."""
        return max(100, available // clients)


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
    """Every client holds the same number of distinct classes, one shard of each; all shards are
    about equal.
    """

    classes_per_client: int = option(2, "distinct classes of each client", low=1)

    def counts(
        self, present: np.ndarray, supply: np.ndarray, draw: np.random.Generator
    ) -> np.ndarray:
        """Cut each class into shards, and deal them out so that no client gets two of one class."""
        if self.classes_per_client > len(present):
            raise UserError(
                f"every client should hold {self.classes_per_client} distinct classes, but there are only "
                f"{len(present)}; lower classes_per_client."
            )
        shards = self.shards_of(supply)
        holds = self.deal(shards, draw)
        rank = np.cumsum(holds, axis=0) - 1
        size, rest = np.divmod(supply, np.maximum(shards, 1))
        return np.where(holds, size + (rank < rest), 0)

    def shards_of(self, supply: np.ndarray) -> np.ndarray:
        """Into how many shards each class is cut: the next cut always goes to the class with the
        largest shards.
        """
        wanted = self.clients * self.classes_per_client
        limits = np.minimum(
            supply, self.clients
        )  # a shard has a sample, and a client only one shard of a class
        if limits.sum() < wanted:
            raise UserError(
                f"{self.clients} clients with {self.classes_per_client} classes each need {wanted} shards, but the "
                f"{supply.sum()} samples give only {limits.sum()}; lower clients or classes_per_client."
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
        """Who holds which class (clients × classes), drawn with the shards that are left as
        weights.

        A class with as many shards left as there are clients left must be taken by everybody from
        then on; there are never more than `classes_per_client` of these, so the dealing always
        comes out even.
        """
        holds = np.zeros((self.clients, len(shards)), dtype=bool)
        left = shards.copy()
        for client in range(self.clients):
            with np.errstate(divide="ignore"):
                turn = draw.standard_exponential(len(left)) / left
            turn[left == self.clients - client] = -1
            chosen = np.argsort(turn)[: self.classes_per_client]
            holds[client, chosen] = True
            left[chosen] -= 1
        return holds


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Each class is spread over the clients by proportions from a Dirichlet distribution; small
    alpha: very unequal.
    """

    alpha: float = option(0.1, "concentration of the Dirichlet distribution", above=0, high=1e6)

    def counts(
        self, present: np.ndarray, supply: np.ndarray, draw: np.random.Generator
    ) -> np.ndarray:
        """Proportions per class, then a top-up for clients that got too few (redrawing would hardly
        ever end).
        """
        enough_for(self.clients, supply)
        proportions = draw.dirichlet(np.full(self.clients, self.alpha), size=len(supply))
        cuts = np.rint(np.cumsum(proportions, axis=1) * supply[:, None]).astype(np.int64)
        cuts[:, -1] = supply
        counts = np.diff(cuts, axis=1, prepend=0).T.copy()
        top_up(counts, min(self.min_samples, int(supply.sum()) // self.clients), draw)
        return counts


@dataclass(frozen=True)
class Dominant(Partition):
    """Clients of equal size: a share of the samples spread evenly over all classes, the rest over
    dominant classes.

    Client i belongs to group i modulo the number of groups. Clients get different samples while the
    supply lasts and share them afterwards; where a class has not enough samples for one client, all
    clients of its group get fewer.
    """

    share: float = option(
        0.2,
        "share that is spread over all classes; above 1 it is read as per cent",
        low=0,
        high=100,
    )
    samples: int = option(600, "samples of each client", low=1)
    groups: tuple[tuple[int, ...], ...] | None = option(None, "the dominant classes of each group")

    def __post_init__(self) -> None:
        if self.groups is not None:
            groups = tuple(whole_numbers("each of groups", group) for group in self.groups)
            object.__setattr__(self, "groups", groups or None)
        super().__post_init__()
        if self.share > 1:
            object.__setattr__(self, "share", self.share / 100)

    def counts(
        self, present: np.ndarray, supply: np.ndarray, draw: np.random.Generator
    ) -> np.ndarray:
        """The law of the groups, in whole numbers."""
        parts = 1_000_000  # whole-number weights keep the apportionment exact
        even_parts = round(self.share * parts)
        groups = self.groups or usual_groups(present)
        weights = np.empty((len(groups), len(present)), dtype=np.int64)
        for row, group in enumerate(groups):
            dominant = np.isin(present, group)
            if dominant.sum() != len(set(group)):
                raise UserError(
                    f"group {row} is {list(group)}, but the data have samples of {present.tolist()} only."
                )
            weights[row] = (
                even_parts * dominant.sum() + (parts - even_parts) * len(present) * dominant
            )
        counts = apportion(affordable(self.samples, weights, supply), weights)
        return counts[np.arange(self.clients) % len(groups)]

    def usual_test(self, data: Dataset, clients: int, available: int) -> int:
        """As in the experiments that this partition comes from."""
        return 300 if data.shape == (3, 32, 32) else 600


@dataclass(frozen=True)
class Natural(Partition):
    """Every owner of samples is a client; owners come with the data or as `ids`, one for each
    training sample.

    Where the data say who owns the test samples too, clients are tested on their own.
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
                "owners keep their classes; set newcomers_classes to 0, and the last owners come later."
            )
        return [self]

    def members(
        self, data: Dataset, usable: np.ndarray, draw: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """The owners' samples, in the order of the owners' names."""
        names, owner = self.owners(data)
        sizes = np.bincount(owner[usable], minlength=len(names))
        if not sizes.all():
            raise UserError(
                f"client '{names[np.argmin(sizes)]}' of '{data.name}' has no training samples left."
            )
        return usable[np.argsort(owner[usable], kind="stable")], sizes

    def tests(
        self, data: Dataset, members: np.ndarray, sizes: np.ndarray, draw: np.random.Generator
    ) -> list[np.ndarray]:
        """Each owner's test samples; owners without any are tested like the clients of other
        partitions.
        """
        if self.ids is not None or data.owners_test is None:
            return super().tests(data, members, sizes, draw)
        names, _ = self.owners(data)
        strangers = ~np.isin(data.owners_test, names)
        if strangers.any():
            raise UserError(
                f"owner '{data.owners_test[strangers][0]}' of '{data.name}' has test samples but no training samples."
            )
        usable = draw.permutation(self.usable(data, data.y_test))
        owner = np.searchsorted(names, data.owners_test[usable])
        usable = usable[np.argsort(owner, kind="stable")]
        own = segments(usable, np.bincount(owner, minlength=len(names)))
        if not all(len(part) for part in own):
            others = super().tests(data, members, sizes, draw)
            own = [part if len(part) else other for part, other in zip(own, others, strict=True)]
        return [part[: self.test_samples] for part in own]

    def owners(self, data: Dataset) -> tuple[np.ndarray, np.ndarray]:
        """The owners' names, sorted, and for each training sample its owner's position among them."""
        ids = data.owners if self.ids is None else np.asarray(self.ids)
        if ids is None:
            raise UserError(
                f"'{data.name}' does not say who owns which sample; give ids, one for each training sample."
            )
        if ids.shape != (len(data.y),):
            raise UserError(
                f"'{data.name}' has {len(data.y)} training samples, but ids has the shape {ids.shape}."
            )
        return np.unique(ids, return_inverse=True)


def iid(clients: int, **common: Any) -> Partition:
    """Every client gets an equal random part of all samples."""
    return build(Iid, {"clients": clients, **common}, "the iid partition")


def shard(clients: int, classes_per_client: int, **common: Any) -> Partition:
    """Every client holds `classes_per_client` distinct classes: clients × classes_per_client equal
    shards.
    """
    values = {"clients": clients, "classes_per_client": classes_per_client, **common}
    return build(Shard, values, "the shard partition")


def dirichlet(clients: int, alpha: float, **common: Any) -> Partition:
    """Each class is spread over the clients by proportions ~ Dir(alpha); nobody gets fewer than
    `min_samples`.
    """
    return build(
        Dirichlet, {"clients": clients, "alpha": alpha, **common}, "the dirichlet partition"
    )


def dominant(
    clients: int,
    share: float = 0.2,
    samples: int = 600,
    groups: Iterable[Iterable[int]] | None = None,
    **common: Any,
) -> Partition:
    """`samples` each: `share` (0.2, or 20 for per cent) evenly over all classes, the rest over the
    group's classes.
    """
    values = {"clients": clients, "share": share, "samples": samples, "groups": groups, **common}
    return build(Dominant, values, "the dominant partition")


def natural(ids: Any = None, **common: Any) -> Partition:
    """Every owner is a client; `ids` says who owns each training sample where the data do not."""
    return build(
        Natural,
        {"ids": None if ids is None else np.asarray(ids), **common},
        "the natural partition",
    )


KINDS: dict[str, tuple[type[Partition], str | None]] = {
    "iid": (Iid, None),
    "shard": (Shard, "classes_per_client"),
    "dirichlet": (Dirichlet, "alpha"),
    "dominant": (Dominant, "share"),
    "natural": (Natural, None),
}
"""Each partition with the field that the number in its text means."""


def usual(data: Dataset) -> str:
    """The partition of data for which nobody named one: where they say who owns what, it stays so."""
    return "dirichlet:0.3" if data.owners is None else "natural"


def parse(text: str, clients: int, **common: Any) -> Partition:
    """A partition from text: iid, shard:4, dirichlet:0.1, dominant:20 or natural (which ignores
    `clients`).
    """
    name, colon, number = text.strip().partition(":")
    if name not in KINDS:
        raise unknown("partition", name, KINDS)
    kind, setting = KINDS[name]
    values = dict(common) if kind is Natural else {"clients": clients, **common}
    if setting is None and colon:
        raise UserError(
            f"the partition {name} takes no number; '{name}' alone is right, not '{text}'."
        )
    if setting is not None:
        if not number:
            raise UserError(
                f"the partition '{text}' lacks its {setting}; '{name}:' and a number is right."
            )
        values[setting] = number
    return build(kind, values, f"the {name} partition")


def class_split(
    data: Dataset, fraction: float = 0.5, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Known and unseen classes: two disjoint random parts, to be given to partitions as `classes`."""
    if data.classes is None:
        raise UserError(f"'{data.name}' has no classes that could be split.")
    known = round(fraction * data.classes)
    if not 0 < known < data.classes:
        raise UserError(
            f"a fraction of {fraction} leaves one side of the {data.classes} classes empty."
        )
    order = numpy_draw(seed, "class-split").permutation(data.classes)
    return np.sort(order[:known]), np.sort(order[known:])


def whole_numbers(name: str, values: Any) -> tuple[int, ...]:
    """Classes that the user listed, as a tuple."""
    array = np.asarray(values)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu" or array.min() < 0:
        raise UserError(f"{name} must be a list of classes such as [0, 1, 2], not {values!r}.")
    return tuple(array.tolist())


def training_indices(indices: Any, samples: int) -> np.ndarray:
    """Indices that the user gave, if they are such of training samples."""
    array = np.asarray(indices)
    if array.size and (array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= samples):
        raise UserError(
            f"exclude must hold indices of training samples, whole numbers from 0 to {samples - 1}."
        )
    return array


def usual_groups(present: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Five groups that overlap in a ring, {0,1,2}, {2,3,4} .. {8,9,0} for ten classes; EMNIST:
    digits, upper, lower.
    """
    classes = len(present)
    if classes == 62:
        spans = [(0, 10), (10, 26), (36, 26)]
    else:
        spans = [(group * classes // 5, max(1, round(0.3 * classes))) for group in range(5)]
    return tuple(
        tuple(present[(start + np.arange(width)) % classes].tolist()) for start, width in spans
    )
