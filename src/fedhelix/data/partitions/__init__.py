"""Partitions: which client holds which samples.

Most kinds only decide *how many* samples of each class every client gets. Drawing the samples,
cutting off validation samples and finding test samples with the same class proportions is the same
for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import numpy as np

from fedhelix.core.errors import UserError, unknown
from fedhelix.core.options import F, build, checks_arguments
from fedhelix.data.datasets import Dataset
from fedhelix.data.owners import read_owners
from fedhelix.data.partitions.base import Partition, Split, class_split
from fedhelix.data.partitions.dominant import Dominant, FedPACDominant
from fedhelix.data.partitions.kinds import Dirichlet, Iid, Natural, Quantity, Shard

__all__ = [
    "Partition",
    "Split",
    "as_text",
    "class_split",
    "dirichlet",
    "dominant",
    "fedpac",
    "iid",
    "natural",
    "parse",
    "quantity",
    "shard",
    "usual",
]

KINDS: dict[str, tuple[type[Partition], tuple[str, ...], int]] = {
    "iid": (Iid, (), 0),
    "shard": (Shard, ("classes_per_client",), 1),
    "dirichlet": (Dirichlet, ("alpha",), 1),
    "quantity": (Quantity, ("alpha",), 1),
    "dominant": (Dominant, ("share", "samples"), 1),
    "fedpac": (FedPACDominant, ("share", "samples"), 1),
    "natural": (Natural, ("min_samples",), 0),
}
"""Each partition with the fields that the numbers in its text mean, and how many it needs."""


def _checks_arguments(function: F) -> F:
    return checks_arguments(function, more=[field.name for field in fields(Partition)])


@_checks_arguments
def iid(clients: int, **common: Any) -> Partition:
    """Every client gets an equal random part of all samples."""
    return build(Iid, {"clients": clients, **common}, "the iid partition")


@_checks_arguments
def shard(clients: int, classes_per_client: int, **common: Any) -> Partition:
    """Every client holds `classes_per_client` distinct classes, one shard of each.

    There are clients × classes_per_client shards of about equal size.
    """
    values = {"clients": clients, "classes_per_client": classes_per_client, **common}
    return build(Shard, values, "the shard partition")


@_checks_arguments
def dirichlet(clients: int, alpha: float, **common: Any) -> Partition:
    """Each class is spread over the clients by proportions ~ Dir(alpha).

    Every client gets at least `min_samples` samples (by default 10, where there are enough).
    """
    values = {"clients": clients, "alpha": alpha, **common}
    return build(Dirichlet, values, "the dirichlet partition")


@_checks_arguments
def quantity(clients: int, alpha: float, **common: Any) -> Partition:
    """The sizes of the clients are proportions ~ Dir(alpha) of all samples, whatever their classes.

    Every client gets at least `min_samples` samples (by default 10, where there are enough).
    """
    values = {"clients": clients, "alpha": alpha, **common}
    return build(Quantity, values, "the quantity partition")


@_checks_arguments
def dominant(
    clients: int,
    share: float = 0.2,
    samples: int = 600,
    groups: Iterable[Iterable[int]] | None = None,
    **common: Any,
) -> Partition:
    """Every client gets `samples` samples, most of them of its group's dominant classes.

    Where a class has too few samples for one client, all clients of its group get fewer.
    `share` of them (0.2, or 20 for per cent) is spread evenly over all classes.
    """
    values = {"clients": clients, "share": share, "samples": samples, "groups": groups, **common}
    return build(Dominant, values, "the dominant partition")


@_checks_arguments
def fedpac(clients: int, share: float = 0.2, samples: int = 1000, **common: Any) -> Partition:
    """The dominant partition as FedPAC's code has it: remainders go to the last class of a part."""
    values = {"clients": clients, "share": share, "samples": samples, **common}
    return build(FedPACDominant, values, "the fedpac partition")


@_checks_arguments
def natural(ids: Any = None, **common: Any) -> Partition:
    """Every owner is a client; `ids` says who owns each training sample where the data do not.

    Of a table, `ids` may be the name of the column with the owners. Where nobody owns the test
    samples, each client is tested on some with the class proportions of its training samples.
    `min_samples` leaves out owners with fewer training samples; a warning says how many.
    """
    if ids is not None:
        ids = np.asarray(ids) if np.ndim(ids) == 0 else read_owners(ids, "ids")
    values = {"ids": ids, **common}
    return build(Natural, values, "the natural partition")


def usual(data: Dataset) -> str:
    """The default partition: natural for data that come with owners, otherwise Dirichlet."""
    return "dirichlet:0.3" if data.owners is None else "natural"


def parse(text: str, clients: int, **common: Any) -> Partition:
    """A partition from text: iid, shard:4, dirichlet:0.1, quantity:0.5, dominant:20 or, with
    300 samples for each client, dominant:20:300, fedpac likewise, natural, or natural:5 without
    owners of fewer than 5 samples.

    `natural` ignores `clients`.
    """
    name, *numbers = text.strip().split(":")
    before, equals, _ = name.partition("=")
    if equals and before in KINDS:
        raise UserError(f"unknown partition '{name}'; did you mean '{name.replace('=', ':')}'?")
    if name not in KINDS:
        raise unknown("partition", name, KINDS)
    kind, settings, needed = KINDS[name]
    values = dict(common) if kind is Natural else {"clients": clients, **common}
    if numbers and not settings:
        raise UserError(
            f"the partition {name} takes no number; '{name}' alone is right, not '{text}'."
        )
    if len(numbers) > len(settings):
        right = ":".join([name, *map(str.upper, settings)])
        raise UserError(f"the partition '{text}' has too many numbers; '{right}' is right.")
    numbers += [""] * (needed - len(numbers))
    for place, (setting, number) in enumerate(zip(settings, numbers, strict=False)):
        if not number:
            before = ":".join([name, *numbers[:place]])
            raise UserError(
                f"the partition '{text}' lacks its {setting}; '{before}:' and a number is right."
            )
        values[setting] = number
    return build(kind, values, f"the {name} partition")


def as_text(partition: Partition) -> str:
    """What `parse` reads as this partition; one that needs more is its class with its arguments.

    Clients and validation samples have settings of their own.
    """
    kept = [
        one for one in fields(partition) if one.compare and one.name not in ("clients", "valid")
    ]
    given = {one.name: repr(getattr(partition, one.name)) for one in kept}
    changed = [one.name for one in kept if given[one.name] != repr(one.default)]
    for name, (kind, settings, needed) in KINDS.items():
        if type(partition) is kind and set(changed) <= set(settings):
            written = [
                one for place, one in enumerate(settings) if place < needed or one in changed
            ]
            return ":".join([name, *(f"{getattr(partition, one):.12g}" for one in written)])
    words = " ".join(", ".join(f"{one}={given[one]}" for one in changed).split())
    return f"{type(partition).__name__}({words})"
