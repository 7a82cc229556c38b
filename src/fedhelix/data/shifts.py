"""Shifts: groups of clients whose labels or inputs differ, whatever classes they hold.

Group 0 always has the data as they are. The data are kept once for each group, never for each
client: a client's split points into the copy of its group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedhelix.core.errors import UserError, unknown
from fedhelix.core.options import Checked, option
from fedhelix.core.seeds import numpy_draw
from fedhelix.data.checks import describe
from fedhelix.data.datasets import Dataset
from fedhelix.data.partitions import Split
from fedhelix.data.sampling import apportion
from fedhelix.data.transforms import blurred, faded, permuted, recoloured, rotated, swapped

UNSHIFTED = "none"
PIECE = 4096  # images that are transformed at once
PARTS = 1_000_000  # whole-number shares keep the apportionment exact


@dataclass(frozen=True)
class ShiftKind:
    """How a group differs: by the labels of its classes, or by its inputs."""

    needs: Literal["classes", "images", "colour images", "numbers"]
    name: Callable[[int, int], str]  # of a group among so many
    most: Callable[[int], int] = lambda classes: 100  # groups
    labels: Callable[[np.ndarray, int], np.ndarray] | None = None
    inputs: Callable[[Tensor, int, int], Tensor] | None = None

    def check(self, data: Dataset, text: str, groups: int) -> None:
        """Refuse data that cannot be shifted in this way."""
        images = data.x.dim() == 4 and data.x.dtype != torch.int64
        fits = {
            "classes": data.classes is not None,
            "images": images,
            "colour images": images and data.x.shape[1] == 3,
            "numbers": data.x.dtype != torch.int64 and data.fields is None,
        }
        if not fits[self.needs]:
            has = "no classes" if self.needs == "classes" else f"samples of {describe(data.x)}"
            raise UserError(f"shift = {text} needs {self.needs}, and '{data.name}' has {has}.")
        if groups > (most := self.most(data.classes or 0)):
            raise UserError(
                f"shift = {text} has {groups} groups, but '{data.name}' allows {most} at most."
            )


KINDS = {
    "concept": ShiftKind(
        "classes", lambda g, n: f"labels {g}", most=lambda classes: classes, labels=permuted
    ),
    "swap": ShiftKind(
        "classes", lambda g, n: f"swap {g}", most=lambda classes: classes // 2 + 1, labels=swapped
    ),
    "rotation": ShiftKind(
        "images",
        lambda g, n: f"rotation {360 * g / n:g}°",
        inputs=lambda x, g, n: rotated(x, g / n),
    ),
    "blur": ShiftKind(
        "images",
        lambda g, n: f"blur {g}",
        inputs=lambda x, g, n: blurred(x, g * x.shape[-2] / 16),
    ),
    "contrast": ShiftKind(
        "images",
        lambda g, n: f"contrast 1/{g + 1}",
        inputs=lambda x, g, n: faded(x, g + 1),
    ),
    "colour": ShiftKind(
        "colour images",
        lambda g, n: f"hue {360 * g / n:g}°",
        inputs=lambda x, g, n: recoloured(x, g / n),
    ),
    "scale": ShiftKind(
        "numbers", lambda g, n: f"scale 1/{g + 1}", inputs=lambda x, g, n: x / (g + 1)
    ),
}


class ShiftPart(NamedTuple):
    """One kind of shift, and the share of the clients in each of its groups."""

    name: str
    shares: tuple[float, ...]
    text: str

    @property
    def kind(self) -> ShiftKind:
        """What it does."""
        return KINDS[self.name]


@dataclass(frozen=True)
class Shift(Checked):
    """Groups of clients that differ in more than their classes."""

    shift: str = option(
        UNSHIFTED,
        "how groups of clients differ: concept:G, swap:G, rotation:G, blur:G, contrast:G, colour:G "
        "or scale:G, with shares such as 0.7/0.3 in place of G, several joined by +",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "shift", self.shift.strip())
        parse(self.shift)

    @property
    def relabels(self) -> bool:
        """Whether groups differ in their labels."""
        return any(part.kind.labels for part in parse(self.shift))


def parse(text: str) -> tuple[ShiftPart, ...]:
    """The parts of a setting such as `concept:3` or `swap:0.7/0.3+rotation:4`."""
    if text == UNSHIFTED:
        return ()
    parts = tuple(_part(piece.strip(), text) for piece in text.split("+"))
    if len({part.name for part in parts}) < len(parts):
        raise UserError(f"shift = {text} names a kind twice; each one counts once.")
    return parts


def _part(piece: str, text: str) -> ShiftPart:
    name, _, number = piece.partition(":")
    if name not in KINDS:
        raise unknown("shift", name, (UNSHIFTED, *KINDS))
    try:
        shares = tuple(float(share) for share in number.split("/"))
    except ValueError:
        shares = ()
    if len(shares) == 1 and shares[0] >= 2 and shares[0].is_integer():
        return ShiftPart(name, (1 / shares[0],) * int(min(shares[0], PARTS)), piece)
    if len(shares) < 2:
        raise UserError(
            f"shift = {text} must say how many groups there are, 2 or more, as in {name}:3, or "
            f"the shares of the clients in them, as in {name}:0.7/0.3."
        )
    if min(shares) <= 0 or not abs(sum(shares) - 1) < 1e-6:
        raise UserError(f"the shares of shift = {text} must be above 0 and sum to 1.")
    return ShiftPart(name, shares, piece)


class ShiftedData(NamedTuple):
    """Data with a copy for every group, the clients' splits, and what each client's shift is."""

    data: Dataset
    splits: list[Split]
    names: list[str]


def shifted(
    data: Dataset, splits: Sequence[Split], text: str, seed: int, newcomers: int = 0
) -> ShiftedData:
    """The data as every group has them, and each client's split in the copy of its group.

    The last clients are the newcomers; each kind's groups are dealt out among them and among the
    others by the same shares, at random.
    """
    parts = parse(text)
    if not parts:
        return ShiftedData(data, list(splits), [UNSHIFTED] * len(splits))
    for part in parts:
        part.kind.check(data, part.text, len(part.shares))
    known = len(splits) - newcomers
    groups = [_dealt(part, known, newcomers, seed) for part in parts]
    sizes = [len(part.shares) for part in parts]
    places = np.ravel_multi_index(tuple(groups), tuple(sizes)).tolist()
    seeded = seed if any(part.kind.labels for part in parts) else 0
    train, test = len(data.y), len(data.y_test)
    moved = [
        Split(split.train + place * train, split.valid + place * train, split.test + place * test)
        for split, place in zip(splits, places, strict=True)
    ]
    names = [_name(parts, combination) for combination in zip(*groups, strict=True)]
    pool = data.cached(("shift", text, seeded), lambda: _copies(data, parts, seed))
    return ShiftedData(pool, moved, names)


def _dealt(part: ShiftPart, known: int, newcomers: int, seed: int) -> np.ndarray:
    """The group of every client."""
    if known < len(part.shares):
        raise UserError(
            f"shift = {part.text} has {len(part.shares)} groups for {known} clients; lower it."
        )
    weights = np.rint(np.array([part.shares]) * PARTS).astype(np.int64)
    if not apportion(np.array([known]), weights).all():
        raise UserError(f"a share in shift = {part.text} is too small for one of {known} clients.")
    dealt = []
    for when, clients in enumerate((known, newcomers)):
        among = clients if clients >= len(part.shares) else known
        groups = np.repeat(np.arange(len(part.shares)), apportion(np.array([among]), weights)[0])
        dealt.append(numpy_draw(seed, f"shift-{part.name}", when).permutation(groups)[:clients])
    return np.concatenate(dealt)


def _name(parts: Sequence[ShiftPart], groups: Sequence[int]) -> str:
    named = [
        part.kind.name(group, len(part.shares))
        for part, group in zip(parts, map(int, groups), strict=True)
        if group
    ]
    return ", ".join(named) or UNSHIFTED


def _copies(data: Dataset, parts: Sequence[ShiftPart], seed: int) -> Dataset:
    """Both pools once for every combination of groups, one after the other."""
    combinations = list(product(*(range(len(part.shares)) for part in parts)))
    copies = {
        suffix: [
            _variant(data, suffix, list(zip(parts, groups, strict=True)), seed)
            for groups in combinations
        ]
        for suffix in ("", "_test")
    }
    pools: dict[str, Any] = {
        name + suffix: torch.cat([copy[place] for copy in copies[suffix]])
        for suffix in copies
        for place, name in enumerate("xy")
    }
    owners, owners_test = (
        None if names is None else np.tile(names, len(combinations))
        for names in (data.owners, data.owners_test)
    )
    return dataclasses.replace(data, **pools, owners=owners, owners_test=owners_test)


def _variant(
    data: Dataset, suffix: str, groups: Sequence[tuple[ShiftPart, int]], seed: int
) -> tuple[Tensor, Tensor]:
    """One pool as one group has it."""
    x, y = getattr(data, "x" + suffix), getattr(data, "y" + suffix)
    for part, group in groups:
        if part.kind.labels is not None:
            order = numpy_draw(seed, f"{part.name}-classes").permutation(data.classes or 0)
            y = torch.from_numpy(part.kind.labels(order, group)).to(y.device)[y]
        if part.kind.inputs is not None and group:
            x = _transformed(x, part.kind.inputs, group, len(part.shares))
    return x, y


def _transformed(
    x: Tensor, inputs: Callable[[Tensor, int, int], Tensor], group: int, groups: int
) -> Tensor:
    """Samples after a transformation, in their own type: pixels are rounded and stay pixels."""
    pieces = (inputs(piece.float(), group, groups) for piece in x.split(PIECE))
    if x.dtype == torch.uint8:
        pieces = (piece.round().clamp(0, 255).to(torch.uint8) for piece in pieces)
    return torch.cat(list(pieces))
