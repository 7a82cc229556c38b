"""The uploads of many clients as few tensors, which takes fewer steps than one tensor after the
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhelix.core.tree import flatten, tensors, unflatten
from fedhelix.engines.local import ClientResult
from fedhelix.engines.parallel.shared import ALIGNMENT, is_plain


class Group(NamedTuple):
    """Uploads of the same entries and shapes."""

    places: list[int]  # of their results
    names: list[str]
    shapes: list[tuple[int, ...]]
    stacks: list[Tensor]  # of each entry, with a row for each upload


class Stacked(NamedTuple):
    """Results, whose uploads are empty where they are in a group."""

    results: list[Any]
    groups: list[Group]

    def tensors(self) -> list[Tensor]:
        """All stacks."""
        return [stack for group in self.groups for stack in group.stacks]


def stack_uploads(results: Sequence[Any]) -> Stacked:
    """Uploads that are alike go together; one that shares a tensor with what its client keeps stays
    where it is.
    """
    alike: dict[Any, dict[int, list[Tensor]]] = {}
    for place, result in enumerate(results):
        if not isinstance(result, ClientResult) or not result.upload:
            continue
        flat = flatten(result.upload)
        kept = {id(tensor) for tensor in tensors(result.client_state)}
        if all(isinstance(x, Tensor) and is_plain(x) and id(x) not in kept for x in flat.values()):
            kind = tuple((name, tuple(x.shape), x.dtype) for name, x in flat.items())
            alike.setdefault(kind, {})[place] = list(flat.values())
    groups = []
    for kind, uploads in alike.items():
        names, shapes, _ = zip(*kind, strict=True)
        columns = zip(*uploads.values(), strict=True)
        stacks = [_aligned(torch.stack(column)) for column in columns]
        groups.append(Group(list(uploads), list(names), list(shapes), stacks))
    grouped = {place for group in groups for place in group.places}
    left = [
        result._replace(upload={}) if place in grouped else result
        for place, result in enumerate(results)
    ]
    return Stacked(left, groups)


def unstack_uploads(stacked: Stacked) -> list[Any]:
    """The results with their uploads, which are views of the stacks."""
    results = list(stacked.results)
    for places, names, shapes, stacks in stacked.groups:
        columns = [
            stack[:, : torch.Size(shape).numel()].view(len(places), *shape).unbind()
            for stack, shape in zip(stacks, shapes, strict=True)
        ]
        for place, *upload in zip(places, *columns, strict=True):
            tree = unflatten(dict(zip(names, upload, strict=True)))
            results[place] = results[place]._replace(upload=tree)
    return results


def _aligned(stack: Tensor) -> Tensor:
    """One row for each model, filled up so that all begin where PyTorch's allocator would begin."""
    rows = stack.view(len(stack), stack[0].numel())
    missing = -rows.shape[1] % (ALIGNMENT // stack.element_size())
    return F.pad(rows, (0, missing)) if missing else rows
