"""Named tensors: the one shape in which models, uploads and state travel, rest and are averaged.

A *state* is a flat map from a name to a tensor, such as a model's state dict. A *tree* nests such
maps and may hold numbers too; it is what servers and clients keep, and it goes to disk or over the
wire without a special case.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import compress
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from fedhelix.core.errors import UserError
from fedhelix.core.files import write_atomically

State = dict[str, Tensor]
Tree = dict[str, Any]

SEPARATOR = "/"
# What safetensors and JSON raise for bytes that are not what they should be.
UNREADABLE = (
    safetensors.SafetensorError, ValueError, LookupError, TypeError, AttributeError,
    RecursionError, OverflowError,
)  # fmt: skip
JOINED = 2**28  # values of all uploads that a mean copies at a time: 1 GiB
COPY_WITHIN = 1e-4  # of an update's length; honest clients are never that near to each other


def copy_all(targets: Iterable[Tensor], sources: Iterable[Tensor]) -> None:
    """Copies in as few operations as there are types."""
    kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        into, out_of = kinds.setdefault(target.dtype, ([], []))
        into.append(target)
        out_of.append(source)
    for into, out_of in kinds.values():
        torch._foreach_copy_(into, out_of)


def take(state: Mapping[str, Tensor], names: Iterable[str]) -> State:
    """The named entries, in the order of the state."""
    wanted = set(names)
    return {name: value for name, value in state.items() if name in wanted}


def drop(state: Mapping[str, Tensor], names: Iterable[str]) -> State:
    """Everything but the named entries."""
    unwanted = set(names)
    return {name: value for name, value in state.items() if name not in unwanted}


def clone(state: Mapping[str, Tensor]) -> State:
    """A copy that shares no memory with the original."""
    return {name: value.detach().clone() for name, value in state.items()}


def zeros(state: Mapping[str, Tensor]) -> State:
    """Zeros of the same names and shapes."""
    return {name: torch.zeros_like(value) for name, value in state.items()}


def add(
    left: Mapping[str, Tensor], right: Mapping[str, Tensor], scale: float | Tensor = 1.0
) -> State:
    """`left + scale * right`, entry by entry; on a GPU all of them at once."""
    if not left:
        return {}
    others = [right[name] for name in left]
    if isinstance(scale, Tensor) or scale != 1:
        others = list(torch._foreach_mul(others, scale))
    return dict(zip(left, torch._foreach_add(list(left.values()), others), strict=True))


def subtract(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> State:
    """`left - right`, entry by entry; on a GPU all of them at once."""
    if not left:
        return {}
    others = [right[name] for name in left]
    return dict(zip(left, torch._foreach_sub(list(left.values()), others), strict=True))


def wide(value: Tensor) -> Tensor:
    """Half precision in float32, in which to compute; any other type as it is."""
    return value.float() if value.is_floating_point() and value.element_size() < 4 else value


def widened(state: Mapping[str, Tensor]) -> State:
    """A state with all half precision in float32."""
    return {name: wide(value) for name, value in state.items()}


def updates_of(models: Sequence[State], origin: State) -> Tensor:
    """How far each model has moved from an origin that says which entries count, one model in a
    row.
    """
    return (flat_rows(models, origin) - flat_rows([origin], origin)).float()


def flat_rows(models: Sequence[State], names: Iterable[str]) -> Tensor:
    """The named entries one after the other, one model in a row."""
    chosen = list(names)
    return torch.stack([torch.cat([model[name].flatten() for name in chosen]) for model in models])


def cosine_distances(models: Sequence[State], origin: State) -> list[list[float]]:
    """One minus the cosine between every two models, as seen from an origin that says which entries
    count.
    """
    layers = torch.nn.functional.normalize(updates_of(models, origin))
    return (1 - layers @ layers.T).tolist()


def copies_of(moved: Tensor, origin: State) -> list[int]:
    """For each model the position of the first one that it is a copy of, which may be itself; by
    what `updates_of` says.

    Who copies an update adds it to the origin anew, so that the last digits of the weights may
    differ.
    """
    updates = moved.double()  # squares of finite floats stay finite
    rounding = (
        2
        * torch.finfo(torch.float32).eps
        * torch.cat([old.flatten().float() for old in origin.values()]).norm()
    )
    near = COPY_WITHIN * updates.norm(dim=1) + rounding
    # One product tells who is far from whom; only the others are compared number by number.
    products = updates @ updates.T
    both = products.diag()[:, None] + products.diag()
    close = (both - 2 * products <= 0.01 * both + 4 * rounding**2).nonzero().tolist()
    originals = list(range(len(updates)))
    for copy, original in close:
        if original < originals[copy] and (updates[copy] - updates[original]).norm() <= near[copy]:
            originals[copy] = original
    return originals


def masked_mean(
    uploads: Sequence[Mapping[str, Tensor]], weights: Sequence[float], previous: State
) -> State:
    """For each entry the weighted mean over the clients that uploaded it; nobody did: the previous
    value.

    Weights need not sum to one; a weight of zero leaves the client out. Integer entries
    (BatchNorm's counters) take the maximum, because a mean of counts means nothing.
    """
    names = previous.keys()  # uploads may hold more than these, also other things
    if all(state[name].is_cuda for state in (*uploads, previous) for name in names & state.keys()):
        return _mean_of_joined(uploads, weights, previous)
    return _mean_by_entry(uploads, weights, previous)


def _mean_of_joined(
    uploads: Sequence[Mapping[str, Tensor]], weights: Sequence[float], previous: State
) -> State:
    """The same, with entries of one type that came from the same clients as one, as far as memory
    allows: a GPU is done with an entry sooner than Python is.
    """
    groups: dict[Any, list[list[str]]] = {}
    for name, old in previous.items():
        sent = (upload[name].dtype if name in upload else None for upload in uploads)
        parts = groups.setdefault((old.dtype, *sent), [[]])
        values = sum(previous[other].numel() for other in parts[-1]) + old.numel()
        if parts[-1] and values * len(uploads) > JOINED:
            parts.append([])
        parts[-1].append(name)
    means: State = {}
    for names in (names for parts in groups.values() for names in parts):

        def joined(state: Mapping[str, Tensor], names: Sequence[str] = names) -> State:
            there = names[0] in state
            return {"": torch.cat([state[name].flatten() for name in names])} if there else {}

        mean = _mean_by_entry([joined(upload) for upload in uploads], weights, joined(previous))
        pieces = mean[""].split([previous[name].numel() for name in names])
        for name, piece in zip(names, pieces, strict=True):
            means[name] = piece.view(previous[name].shape)
    return {name: means[name] for name in previous}


def _mean_by_entry(
    uploads: Sequence[Mapping[str, Tensor]], weights: Sequence[float], previous: State
) -> State:
    merged: State = {}
    pairs = list(zip(uploads, map(float, weights), strict=True))
    shares = cache(_shares)  # the same for all entries that the same clients have uploaded
    for name, old in previous.items():
        there = [weight > 0 and name in upload for upload, weight in pairs]
        if not any(there):
            merged[name] = old
            continue
        chosen = list(compress(pairs, there))
        values = torch.stack([upload[name] for upload, _ in chosen])
        if not values.is_floating_point():
            merged[name] = values.amax(0)
            continue
        exact = wide(values)
        share = shares(tuple(weight for _, weight in chosen), exact.dtype, exact.device)
        # In place: for many clients the memory of a second copy costs more than the sum.
        merged[name] = exact.mul_(share.view(-1, *[1] * old.dim())).sum(0).to(values.dtype)
    return merged


def _shares(weights: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Weights as shares of their sum."""
    share = torch.tensor(weights, dtype=torch.float64)
    return (share / share.sum()).to(dtype).to(device)


def copied_levels(tree: Mapping[str, Any]) -> Tree:
    """A tree of the same tensors; who changes a level of it changes no other tree."""
    return {
        name: copied_levels(value) if isinstance(value, dict) else value
        for name, value in tree.items()
    }


def tensors(tree: Mapping[str, Any]) -> list[Tensor]:
    """All tensors of a tree."""
    collected: list[Tensor] = []
    for value in tree.values():
        if isinstance(value, Tensor):
            collected.append(value)
        elif isinstance(value, Mapping):
            collected.extend(tensors(value))
    return collected


def payload_bytes(tree: Mapping[str, Any]) -> int:
    """What a tree weighs on the wire: every value in its own type, buffers and counters
    included.
    """
    return sum([tensor.nbytes for tensor in tensors(tree)])


def paper_bytes(tree: Mapping[str, Any]) -> int:
    """What papers count: 4 bytes for every value, whatever its type."""
    return 4 * sum([tensor.numel() for tensor in tensors(tree)])


def to_device(tree: Mapping[str, Any], device: torch.device | str) -> Tree:
    """The same tree with its tensors on a device (tensors that are there already
    are not copied).
    """
    moved: Tree = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            moved[name] = to_device(value, device)
        else:
            moved[name] = value.to(device) if isinstance(value, Tensor) else value
    return moved


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """One flat map with names such as `model/fc.weight`."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if SEPARATOR in name:
            raise UserError(
                f"the name '{name}' holds a '{SEPARATOR}', which separates the levels of a tree."
            )
        if not isinstance(value, Tensor) and isinstance(value, Mapping):
            below = f"{prefix}{name}{SEPARATOR}"
            flat.update(
                flatten(value, below) or {below: None}
            )  # an empty level leaves its bare name behind
        else:
            flat[prefix + name] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> Tree:
    """The inverse of `flatten`."""
    tree: Tree = {}
    for path, value in flat.items():
        *parents, name = path.split(SEPARATOR)
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise UserError(f"'{parent}' is a level and a value of the tree at once.")
        if name in place:
            raise UserError(f"the tree has '{name}' twice in one place.")
        if name:
            place[name] = value
    return tree


def encode(tree: Mapping[str, Any]) -> bytes:
    """A tree as safetensors: tensors as tensors, numbers and flags in the header."""
    flat = flatten(tree)
    # A tensor may be a view or shared between entries; safetensors wants each one whole and alone.
    arrays = {
        name: value.detach().cpu().clone()
        for name, value in flat.items()
        if isinstance(value, Tensor)
    }
    # One header entry with all names in order: safetensors sorts tensors, and writes several header
    # entries in any
    # order, but a reloaded tree must be summed in the same order, and equal trees must have equal
    # bytes.
    entries = {name: None if name in arrays else value for name, value in flat.items()}
    return to_bytes(
        {name: value.contiguous() for name, value in arrays.items()},
        {"entries": json.dumps(entries)},
    )


def decode(content: bytes) -> Tree:
    """The inverse of `encode`; bytes from a stranger do no harm."""
    try:
        arrays = from_bytes(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        entries = json.loads(header.get("__metadata__", {}).get("entries", "{}"))
        return unflatten(
            {name: arrays.get(name, value) for name, value in (entries or arrays).items()}
        )
    except UNREADABLE as problem:
        raise UserError(f"these bytes are no tree: {type(problem).__name__}: {problem}.") from None


def save(tree: Mapping[str, Any], path: Path) -> None:
    """Write a tree to a safetensors file, atomically."""
    write_atomically(path, encode(tree))


def load(path: Path, device: torch.device | str = "cpu") -> Tree:
    """Read a tree back."""
    try:
        with safetensors.safe_open(str(path), framework="pt", device=str(device)) as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            entries = json.loads((file.metadata() or {}).get("entries", "{}"))
        return unflatten(
            {name: arrays.get(name, value) for name, value in (entries or arrays).items()}
        )
    except FileNotFoundError:
        raise UserError(f"'{path}' is missing.") from None
    except (OSError, *UNREADABLE) as problem:
        raise UserError(f"'{path}' is damaged: {problem}.") from None
