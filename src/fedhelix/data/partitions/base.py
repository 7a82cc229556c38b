"""What all partitions share: drawing samples, cutting off validation parts, building test parts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from fedhelix.core.errors import UserError
from fedhelix.core.options import Checked, checks_arguments, option
from fedhelix.core.seeds import numpy_draw
from fedhelix.data.datasets import Dataset
from fedhelix.data.owners import Names
from fedhelix.data.sampling import ClassPool, affordable, apportion, segments


@dataclass(frozen=True, eq=False)
class Split:
    """One client's samples: train and valid index `Dataset.x`, test indexes `Dataset.x_test`."""

    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray


@dataclass(frozen=True)
class Partition(Checked):
    """The base of all partitions; a subclass decides how many samples of each class a client gets.

    Make one with `iid`, `shard`, `dirichlet`, `dominant` or `natural`.
    """

    clients: int = option(10, "how many clients", low=1)
    valid: float = option(
        0.1, "share of a client's samples that is kept for validation", low=0, high=0.9
    )
    test_samples: int | None = option(
        None, "test samples of a client (auto: 100, or its share of all)", low=1
    )
    min_samples: int | None = option(
        None, "samples that every client gets at least (auto: 10, where there are enough)", low=1
    )
    classes: tuple[int, ...] | None = option(None, "use only samples of these classes")

    by_class: ClassVar[bool] = True
    """Whether the rule looks at labels, and therefore needs a classification."""

    here: ClassVar[bool] = True
    """Whether the clients' samples are in this data set rather than at remote sites."""

    def __post_init__(self) -> None:
        if self.classes is not None:
            object.__setattr__(self, "classes", class_list("classes", self.classes))
        super().__post_init__()

    def names(self, data: Dataset) -> Names | None:
        """What the clients are called, if the data say more than their numbers."""
        return None

    @property
    def name(self) -> str:
        """The name that `parse` knows."""
        return type(self).__name__.lower()

    def split(self, data: Dataset, seed: int, exclude: np.ndarray | None = None) -> list[Split]:
        """Every client's samples, without the training samples in `exclude`.

        The same seed gives the same split. No client holds a sample twice. A client's test part
        has the class proportions of its training part and may share samples with other clients'
        test parts.
        """
        if self.by_class and data.classes is None:
            raise UserError(
                f"a {self.name} partition needs classes, but '{data.name}' has none; "
                "use iid, quantity or natural."
            )
        usable = self.usable(data, data.y)
        if exclude is not None:
            usable = np.setdiff1d(usable, training_indices(exclude, len(data.y)))
        if len(usable) == 0:
            raise UserError(f"no training samples of '{data.name}' are left for the clients.")
        members, sizes = self.members(data, usable, numpy_draw(seed, "partition"))
        tests = self.tests(data, members, sizes, numpy_draw(seed, "partition-test"))

        client = np.repeat(np.arange(len(sizes)), sizes)
        # Client number plus a fraction in [0, 1): one sort shuffles within every client at once.
        shuffled = members[
            np.argsort(client + numpy_draw(seed, "partition-valid").random(len(members)))
        ]
        valid = np.clip(np.rint(self.valid * sizes).astype(np.int64), 1, np.maximum(sizes - 1, 1))
        valid[(sizes < 2) | (self.valid == 0)] = 0
        return [
            Split(train=samples[count:], valid=samples[:count], test=test)
            for samples, count, test in zip(
                segments(shuffled, sizes), valid.tolist(), tests, strict=True
            )
        ]

    def divided(self, data: Dataset, newcomers: int, unseen: float, seed: int) -> list[Partition]:
        """This partition with newcomers added.

        With `unseen` classes there are two: one for the known clients, and one for the newcomers,
        who alone hold that share of the classes.
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
                f"there is no class {max(self.classes)} in '{data.name}'; "
                f"its classes are 0 to {data.classes - 1}."
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
        self.check_sizes(counts.sum(1))
        return pool.take(counts, np.cumsum(counts, axis=0) - counts), counts.sum(1)

    def counts(
        self, present: np.ndarray, supply: np.ndarray, draw: np.random.Generator
    ) -> np.ndarray:
        """The rule: how many samples of each present class each client gets (clients × classes)."""
        raise UserError(
            f"the partition {self.name} has no rule; write its counts(present, supply, draw)."
        )

    def checked(self, counts: Any, supply: np.ndarray) -> np.ndarray:
        """A rule's counts, if they are possible: no more than the supply, and no empty client."""
        table, shape = np.asarray(counts), (self.clients, len(supply))
        if table.shape != shape or table.dtype.kind not in "iu":
            raise UserError(
                f"counts of the partition {self.name} must be whole numbers of the shape {shape}, "
                f"clients × classes, not {table.dtype} of the shape {table.shape}."
            )
        if table.min() < 0 or (table > supply).any():
            client, place = np.argwhere((table < 0) | (table > supply))[0]
            fewer = "; give fewer samples" if hasattr(self, "samples") else ""
            raise UserError(
                f"the partition {self.name} gives client {client} {table[client, place]} samples "
                f"of a class that has {supply[place]}{fewer}."
            )
        if not table.sum(1).all():
            raise UserError(
                f"the partition {self.name} gives client {int(np.argmin(table.sum(1)))} no samples."
            )
        return table

    def check_sizes(self, sizes: np.ndarray) -> None:
        """Refuse clients with fewer samples than the user asked for."""
        if self.min_samples is not None and sizes.min() < self.min_samples:
            raise UserError(
                f"the partition {self.name} gives client {int(np.argmin(sizes))} {sizes.min()} "
                f"training samples, fewer than min_samples = {self.min_samples}; lower min_samples"
                + ("." if hasattr(self, "samples") else " or clients.")
            )

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
        untestable = np.flatnonzero(held.sum(1) == 0)
        if len(untestable):
            raise UserError(
                f"the test pool of '{data.name}' has no sample of any class "
                f"that client {untestable[0]} holds."
            )
        totals = affordable(
            self.test_samples or self.usual_test(data, clients, len(usable)), held, pool.sizes
        )
        starts = draw.integers(0, np.maximum(pool.sizes, 1), size=held.shape)
        return segments(pool.take(apportion(totals, held), starts), totals)

    def usual_test(self, data: Dataset, clients: int, available: int) -> int:
        """The size of a test part when the user gives none."""
        return max(100, available // clients)


@checks_arguments
def class_split(
    data: Dataset, fraction: float = 0.5, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Known and unseen classes: two disjoint random parts, for the `classes` of partitions."""
    if data.classes is None:
        raise UserError(f"'{data.name}' has no classes that could be split.")
    known = round(fraction * data.classes)
    if not 0 < known < data.classes:
        raise UserError(
            f"a fraction of {fraction} leaves one side of the {data.classes} classes empty."
        )
    order = numpy_draw(seed, "class-split").permutation(data.classes)
    return np.sort(order[:known]), np.sort(order[known:])


def class_list(name: str, values: Any) -> tuple[int, ...]:
    """Classes that the user listed, as a tuple."""
    array = np.asarray(values)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu" or array.min() < 0:
        raise UserError(f"{name} must be a list of classes such as [0, 1, 2], not {values!r}.")
    return tuple(array.tolist())


def training_indices(indices: Any, samples: int) -> np.ndarray:
    """Indices that the user gave, if they are indices of training samples."""
    array = np.asarray(indices)
    if array.size and (array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= samples):
        raise UserError(
            f"exclude must hold indices of training samples, whole numbers from 0 to {samples - 1}."
        )
    return array
