"""Samples that the server reserves: a validation set, and supplements for small clients."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from fedhelix.core.errors import UserError
from fedhelix.core.options import Checked, option
from fedhelix.core.seeds import numpy_draw
from fedhelix.data.datasets import Dataset
from fedhelix.data.partitions import Partition, Split
from fedhelix.data.sampling import ClassPool, stratified

# Of the training data, where a method needs a validation set and the user sets no size.
USUAL_SIZE = 0.1
POOL_SHARE = 0.2  # of the validation set, for supplements


@dataclass(frozen=True)
class ServerData(Checked):
    """Samples of the server, taken from the training data before the clients get theirs."""

    validation_size: float | None = option(
        None,
        "the server's validation samples; below 1: share of the training data "
        "(auto: 0.1 if needed)",
        low=0,
    )
    validation_shared: bool = option(
        False,
        "score on the samples of supplements too, instead of on other ones",
        needs="supplement_size",
    )
    supplement_size: float = option(
        0.0,
        "samples that the server gives to a small client; up to 1: times the mean client",
        low=0,
        idle_with={"server_only": (True,)},
    )
    supplement_below: float = option(
        0.2,
        "clients with fewer samples ask for a supplement; up to 1: times the mean client",
        low=0,
        needs="supplement_size",
    )
    server_only: bool = option(
        False, "train on the server's samples alone: what they are worth without any client"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("validation_size", "supplement_size", "supplement_below"):
            value = getattr(self, name) or 0.0
            if value > 1 and not float(value).is_integer():
                raise UserError(
                    f"{name} = {value:g} is neither a share nor a whole number of samples."
                )

    def resolved(self, needed: bool) -> Self:
        """With a size for `auto`: the usual one if needed or if supplements are given, else 0."""
        if self.validation_size is not None:
            return self
        needed = needed or bool(self.supplement_size) or self.server_only
        return dataclasses.replace(self, validation_size=USUAL_SIZE if needed else 0.0)


@dataclass(frozen=True, eq=False)
class Reserve:
    """Indices into `Dataset.x` of the samples for scoring models, and of those for supplements."""

    scoring: np.ndarray
    pool: np.ndarray

    @property
    def all(self) -> np.ndarray:
        """Every sample that is kept from the partition."""
        return np.union1d(self.scoring, self.pool)

    @classmethod
    def of(cls, data: Dataset, partition: Partition, requested: ServerData, seed: int) -> Reserve:
        """As many samples of every class, where there are enough; a fifth is for supplements."""
        usable = partition.usable(data, data.y)
        size = requested.validation_size or 0.0
        count = round(size * len(usable)) if size < 1 else int(size)
        if size and not 0 < count < len(usable):
            raise UserError(
                f"validation_size = {size:g} leaves the server or the clients without samples."
            )
        if requested.supplement_size and not count:
            raise UserError(
                "supplements come from the validation set; set validation_size above 0."
            )
        held = even_sample(data, usable, count, numpy_draw(seed, "validation"))
        scoring, pool = held, held if requested.supplement_size else held[:0]
        if requested.supplement_size and not requested.validation_shared:
            kinds = np.unique(data.codes(data.y)[held], return_inverse=True)[1]
            given = stratified(
                kinds, round(POOL_SHARE * count), numpy_draw(seed, "supplement-pool")
            )
            scoring, pool = np.delete(held, given), held[given]
        if requested.supplement_size and not len(pool):
            raise UserError(f"validation_size = {size:g} leaves nothing for supplements; raise it.")
        if count and data.classes is not None:
            _warn_of_missing(data, partition, scoring)
        return cls(np.sort(scoring), np.sort(pool))

    def replacing(self, splits: Sequence[Split]) -> list[Split]:
        """The splits with these samples alone to train on: what they are worth by themselves."""
        if not len(self.all):
            raise UserError(
                "server_only trains on the server's own samples; set validation_size above 0."
            )
        return [dataclasses.replace(split, train=self.all) for split in splits]

    def supplement(
        self, data: Dataset, splits: Sequence[Split], requested: ServerData, seed: int
    ) -> tuple[list[Split], dict[int, int]]:
        """The splits with supplements for small clients, and how many samples each one gets.

        Every client's supplement is an independent draw.
        """
        mean = float(np.mean([len(split.train) for split in splits]))
        size, below = (
            mean * value if value <= 1 else value
            for value in (requested.supplement_size, requested.supplement_below)
        )
        supplied, given = list(splits), dict[int, int]()
        if not requested.supplement_size or requested.server_only:
            return supplied, given
        if round(size) < 1:
            warnings.warn(
                f"supplement_size = {requested.supplement_size:g} is less than one sample, "
                "so that nobody gets any.",
                stacklevel=3,
            )
            return supplied, given
        labels = np.unique(data.codes(data.y)[self.pool], return_inverse=True)[1]
        for client, split in enumerate(splits):
            if len(split.train) >= below:
                continue
            draw = numpy_draw(seed, "supplement", 0, client)
            pool = ClassPool.of(self.pool, labels, int(labels.max()) + 1, draw)
            extra = pool.take(balanced(round(size), pool.sizes, draw)[None], 0)
            supplied[client] = dataclasses.replace(
                split, train=np.concatenate([split.train, extra])
            )
            given[client] = len(extra)
        if len(given) > 1 and round(size) >= len(self.pool):
            warnings.warn(
                f"the server has {len(self.pool)} samples for supplements of {round(size)}, "
                "so that every small client gets the same ones; "
                "raise validation_size or lower supplement_size.",
                stacklevel=3,
            )
        return supplied, given


def even_sample(
    data: Dataset, among: np.ndarray, count: int, draw: np.random.Generator
) -> np.ndarray:
    """`count` of the samples in `among`, as many of every class, where there are enough."""
    kinds, labels = np.unique(data.codes(data.y)[among], return_inverse=True)
    pool = ClassPool.of(among, labels, len(kinds), draw)
    return pool.take(balanced(count, pool.sizes)[None], 0)


def balanced(total: int, supply: np.ndarray, draw: np.random.Generator | None = None) -> np.ndarray:
    """How many of each class: as equal as the supply allows.

    With `draw`, a remainder goes to random classes instead of the first ones.
    """
    counts = np.zeros(len(supply), dtype=np.int64)
    while (left := min(total, int(supply.sum())) - int(counts.sum())) > 0:
        waiting = np.flatnonzero(supply > counts)
        if left < len(waiting):
            counts[
                waiting[:left] if draw is None else draw.choice(waiting, left, replace=False)
            ] += 1
            break
        counts[waiting] += np.minimum(left // len(waiting), (supply - counts)[waiting])
    return counts


def _warn_of_missing(data: Dataset, partition: Partition, held: np.ndarray) -> None:
    wanted = range(data.classes or 0) if partition.classes is None else partition.classes
    missing = sorted(set(wanted) - set(data.codes(data.y)[held].tolist()))
    if missing:
        names = ", ".join(map(str, missing))
        warnings.warn(f"the server's validation set has no sample of class {names}.", stacklevel=3)
