"""Samples that lie at their sites: the server knows how many there are, and nothing more."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from fedhelix.core.errors import UserError
from fedhelix.core.seeds import numpy_draw
from fedhelix.data import Dataset, Partition, Split, from_arrays, from_npz

OWN = "own"  # in place of a data set's name: every site has its own samples


class RemotePartition(Partition):
    """One client per site, as the server sees it: only the lengths of the parts mean anything."""

    here: ClassVar[bool] = False

    def __init__(self, counts: Sequence[tuple[int, int]], valid: float):
        super().__init__(clients=len(counts), valid=valid)
        object.__setattr__(self, "counts", list(counts))

    def split(self, data: Dataset, seed: int, exclude: np.ndarray | None = None) -> list[Split]:
        """Every client's parts."""
        counts: list[tuple[int, int]] = vars(self)["counts"]
        return [
            own_split(train, test, self.valid, seed, i) for i, (train, test) in enumerate(counts)
        ]

    def divided(self, *_: object) -> list[Partition]:
        """Newcomers have the last numbers and bring their own samples."""
        return [self]


def own_split(train: int, test: int, valid: float, seed: int, client: int) -> Split:
    """A site's own samples, of which a share is kept for validation."""
    order = numpy_draw(seed, "partition-valid", client).permutation(train)
    kept = 0 if train < 2 or not valid else int(np.clip(round(valid * train), 1, train - 1))
    return Split(order[kept:], order[:kept], np.arange(test))


def read_own(path: str | Path) -> Dataset:
    """A site's data: FILE.npz, or a folder with x.npy and y.npy and, if there are any, x_test.npy
    and y_test.npy.
    """
    place = Path(path)
    if not place.is_dir():
        return dataclasses.replace(from_npz(place), name=OWN)
    arrays: dict[str, Any] = {}
    try:
        for name in ("x", "y", "x_test", "y_test"):
            if (place / f"{name}.npy").exists():
                arrays[name] = np.load(place / f"{name}.npy", allow_pickle=False)
    except (OSError, ValueError) as problem:
        raise UserError(f"'{place / name}.npy' cannot be read: {problem}.") from None
    if not {"x", "y"} <= arrays.keys():
        raise UserError(
            f"the folder '{place}' must hold x.npy and y.npy; put the site's samples there."
        )
    return from_arrays(**arrays, name=OWN)


def kind_of(data: Dataset) -> dict[str, Any]:
    """What a site tells of its data: counts and the kind of a sample, never a sample."""
    return {
        "data": data.name,
        "train": len(data.x),
        "test": len(data.x_test),
        "shape": list(data.shape),
        "target": list(data.y.shape[1:]),
        "dtype": str(data.x.dtype),
        "classes": data.classes,
    }


def common_kind(cards: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The kind of sample that all sites have; one whose samples differ is named."""
    names = list(cards)
    for name in names:
        if "shape" not in cards[name]:
            raise UserError(
                f"site '{name}' has no samples of its own, but a part of '{cards[name].get('data')}'; "
                f"the run must be about these data, and not about '{OWN}'."
            )
    first = cards[names[0]]
    for name in names[1:]:
        for key in ("shape", "target", "dtype"):
            if cards[name][key] != first[key]:
                raise UserError(
                    f"site '{name}' has samples with {key} {cards[name][key]}, but '{names[0]}' has {first[key]}."
                )
        if (cards[name]["classes"] is None) != (first["classes"] is None):
            raise UserError(
                f"one of the sites '{name}' and '{names[0]}' has a regression, the other a classification."
            )
    classes = [card["classes"] for card in cards.values()]
    return {**first, "classes": None if None in classes else max(classes)}


def stand_in(kind: Mapping[str, Any]) -> Dataset:
    """Data of a server that has none: one sample of zeros, which tells the network its input."""
    x = torch.zeros(
        1, *kind["shape"], dtype=getattr(torch, str(kind["dtype"]).removeprefix("torch."))
    )
    y = torch.zeros(1, *kind["target"], dtype=torch.int64 if kind["classes"] else torch.float32)
    return Dataset(OWN, x, y, x, y, kind["classes"])
