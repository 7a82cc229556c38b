"""Codes: a vector of updates in few bits per value, and what such a code says.

All packed entries of a model lie one after the other in one vector, so that the number of kernels
does not depend on the number of layers. A *row* is what belongs to one output of a layer: a slice
along the first dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from fedhelix.core.errors import UserError
from fedhelix.core.flat import FlatLayout, layout_of
from fedhelix.core.layers import Layers
from fedhelix.core.tree import State

Bits = Literal[1, 2, 4, 8]
Parts = dict[str, Tensor]  # the tensors of a code, by name

TOP = {2: 1, 4: 7, 8: 127}  # the largest level; one bit has the levels -1 and 1 alone
THRESHOLD = 0.7  # of a row's mean magnitude: smaller values become zero with two bits
LARGEST_SCALE = 1e6  # no honest update moves a weight further


def packable(layers: Layers, initial: State) -> list[str]:
    """The entries that are worth packing: trainable floats of two or more dimensions."""
    return [
        name
        for name in layers.parameters
        if initial[name].dim() >= 2 and initial[name].is_floating_point() and initial[name].numel()
    ]


def present(model: State, packable: Sequence[str], initial: State) -> tuple[FlatLayout, Parts]:
    """The layout of the entries that a model has, and a mask of them unless it has all."""
    there = [name in model for name in packable]
    layout = layout_of([name for name in packable if name in model], initial)
    # On the CPU, where reading it waits for nothing.
    return layout, {} if all(there) else {"entries": torch.tensor(there, dtype=torch.uint8)}


def announced(
    packed: Any, packable: Sequence[str], initial: State
) -> tuple[FlatLayout, dict[str, Any]]:
    """The inverse of `present`: the layout of the entries that were packed, and their code."""
    if not isinstance(packed, Mapping):
        raise UserError("has no packed weights instead of some.")
    if "entries" not in packed:
        return layout_of(packable, initial), dict(packed)
    check_parts({"entries": packed["entries"]}, {"entries": (torch.uint8, len(packable))})
    mask = check_mask(packed["entries"], "entries")
    names = [name for name, yes in zip(packable, mask, strict=True) if yes]
    return layout_of(names, initial), {
        name: part for name, part in packed.items() if name != "entries"
    }


# Bits ---------------------------------------------------------------------------------------------


def pack(codes: Tensor, bits: int) -> Tensor:
    """Small numbers as bytes, 8 / bits in each, the first one lowest; zeros fill the last byte."""
    fill = -len(codes) % (8 // bits)
    together = torch.nn.functional.pad(codes, (0, fill)).view(-1, 8 // bits)
    return (together << _shifts(bits, codes.device)).sum(1, dtype=torch.uint8)


def unpack(values: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of `pack`."""
    apart = (values[:, None] >> _shifts(bits, values.device)) & (2**bits - 1)
    return apart.flatten()[:count]


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device)


def _by_row(values: Tensor, layout: FlatLayout, reduce: str) -> Tensor:
    """Sum, mean or maximum of every row; without a check, which would wait for a GPU."""
    lengths = layout.row_lengths(values.device)
    return torch.segment_reduce(values, reduce, lengths=lengths, unsafe=True)


def _spread(scales: Tensor, layout: FlatLayout) -> Tensor:
    """The scale of every value's row."""
    lengths = layout.row_lengths(scales.device)
    return scales.float().repeat_interleave(lengths, output_size=layout.count)


TINY = torch.finfo(torch.float32).tiny
STRETCH = 1.5  # times the mean size: the largest scale of a sign


def encode_bits(vector: Tensor, layout: FlatLayout, bits: int) -> Parts:
    """Levels and one scale per row: signs (1 bit), signs and zeros (2), or a uniform grid."""
    size = vector.abs()
    if bits == 1:
        # Signs times the mean size would be shorter than the vector. This scale keeps its length
        # along itself, but for a bound without which error feedback might grow.
        mean = _by_row(size, layout, "mean")
        even = _by_row(size.square(), layout, "mean") / mean.clamp_min(TINY)
        scales = torch.minimum(even, STRETCH * mean).bfloat16()
        return {"values": pack((vector >= 0).to(torch.uint8), 1), "scales": scales}
    top = TOP[bits]
    if bits == 2:
        large = size > THRESHOLD * _spread(_by_row(size, layout, "mean"), layout)
        left = _by_row(large.float(), layout, "sum").clamp_min(1)
        scales = (_by_row(size * large, layout, "sum") / left).bfloat16()
        levels = vector.sign() * large
    else:
        scales = (_by_row(size, layout, "max") / top).bfloat16()
        steps = _spread(scales, layout).clamp_min(TINY)
        levels = (vector / steps).round().clamp(-top, top)
    return {"values": pack((levels + top).to(torch.uint8), bits), "scales": scales}


def decode_bits(parts: Mapping[str, Tensor], layout: FlatLayout, bits: int) -> Tensor:
    """What the code says; the one level that no encoder writes counts as the largest."""
    codes = unpack(parts["values"], bits, layout.count).float()
    levels = 2 * codes - 1 if bits == 1 else (codes - TOP[bits]).clamp_max(TOP[bits])
    return levels * _spread(parts["scales"], layout)


def check_bits(parts: Mapping[str, Any], layout: FlatLayout, bits: int) -> None:
    """Raise UserError for what no encoder writes."""
    length = math.ceil(bits * layout.count / 8)
    check_parts(parts, {"values": (torch.uint8, length), "scales": (torch.bfloat16, layout.rows)})
    low, high = torch.stack(torch.aminmax(parts["scales"])).tolist()
    if not math.isfinite(low + high):
        raise UserError("holds values that are not finite.")
    if not 0 <= low <= high <= LARGEST_SCALE:
        raise UserError(
            f"has scales from {low:g} to {high:g} instead of some between 0 and {LARGEST_SCALE:g}."
        )


class Same(tuple[Tensor, ...]):
    """Tensors as a key: only the very same ones are equal."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(tuple(map(id, self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and list(map(id, self)) == list(map(id, other))


# All clients get the same model: it is packed once, and in a simulation also unpacked once, so that
# clients who use it can be evaluated together.


def packed_model(model: State, layout: FlatLayout, bits: int) -> Parts:
    """The weights of a model on a uniform grid."""
    return _packed_model(Same(model[name] for name in layout.names), layout, bits)


def unpacked_model(parts: Mapping[str, Tensor], layout: FlatLayout, bits: int) -> State:
    """The inverse of `packed_model`, but for rounding."""
    return _unpacked_model(Same((parts["values"], parts["scales"])), layout, bits)


@lru_cache(maxsize=4)
def _packed_model(values: Same, layout: FlatLayout, bits: int) -> Parts:
    return encode_bits(layout.flat(dict(zip(layout.names, values, strict=True))), layout, bits)


@lru_cache(maxsize=4)
def _unpacked_model(parts: Same, layout: FlatLayout, bits: int) -> State:
    values, scales = parts
    return layout.state(decode_bits({"values": values, "scales": scales}, layout, bits))


# The largest values alone -------------------------------------------------------------------------


def how_many(layout: FlatLayout, keep: float) -> int:
    """The number of values that are kept."""
    return max(1, math.ceil(keep * layout.count))


def encode_top(vector: Tensor, layout: FlatLayout, keep: float) -> Parts:
    """The values of largest magnitude, and their places in rising order."""
    places = vector.abs().topk(how_many(layout, keep), sorted=False).indices.sort().values
    return {"indices": places.int(), "values": vector[places].bfloat16()}


def decode_top(parts: Mapping[str, Tensor], layout: FlatLayout) -> Tensor:
    """What the code says: zero wherever nothing was sent."""
    values = parts["values"].float()
    return values.new_zeros(layout.count).scatter(0, parts["indices"].long(), values)


def check_top(parts: Mapping[str, Any], layout: FlatLayout, keep: float) -> None:
    """Raise UserError for what no encoder writes."""
    count = how_many(layout, keep)
    check_parts(parts, {"indices": (torch.int32, count), "values": (torch.bfloat16, count)})
    places = parts["indices"]
    falls = (places[1:] <= places[:-1]).sum().int()
    low, high, wrong = torch.stack([*torch.aminmax(places), falls]).tolist()
    if low < 0 or high >= layout.count:
        raise UserError(f"has indices from {low} to {high} instead of 0 to {layout.count - 1}.")
    if wrong:
        raise UserError("has indices out of order instead of each once, in rising order.")


# Whole layers -------------------------------------------------------------------------------------


def encode_units(vector: Tensor, origin: Tensor, layout: FlatLayout, keep: float) -> Parts:
    """The layers that moved furthest, relative to their length and per value, until they are the
    share `keep` of all values; which ones, and their values. Waits for a GPU, because the choice
    says how long the code is.
    """
    parts = vector.split(layout.sizes)
    norms = [
        torch.stack(torch._foreach_norm(list(v.split(layout.sizes)))) for v in (vector, origin)
    ]
    relative = (norms[0] / norms[1].clamp_min(torch.finfo(torch.float32).tiny)).tolist()
    scores = [score / size for score, size in zip(relative, layout.sizes, strict=True)]
    chosen, total = [], 0
    for place in sorted(range(len(parts)), key=lambda place: (-scores[place], place)):
        if total >= keep * layout.count:
            break
        chosen.append(place)
        total += layout.sizes[place]
    mask = torch.zeros(len(parts), dtype=torch.uint8)
    mask[chosen] = 1
    return {
        "layers": mask,
        "values": torch.cat([parts[place] for place in sorted(chosen)]).bfloat16(),
    }


def decode_units(parts: Mapping[str, Tensor], layout: FlatLayout) -> Tensor:
    """What the code says: zero in every layer that was not sent."""
    values, mask = parts["values"].float(), parts["layers"].tolist()
    sent = iter(values.split([n for n, yes in zip(layout.sizes, mask, strict=True) if yes]))
    return torch.cat(
        [
            next(sent) if yes else values.new_zeros(size)
            for size, yes in zip(layout.sizes, mask, strict=True)
        ]
    )


def check_units(parts: Mapping[str, Any], layout: FlatLayout) -> None:
    """Raise UserError for what no encoder writes."""
    known = {"layers": (torch.uint8, len(layout.sizes)), "values": (torch.bfloat16, None)}
    check_parts(parts, known)
    mask = check_mask(parts["layers"], "layers")
    length = sum(size for size, yes in zip(layout.sizes, mask, strict=True) if yes)
    if not length:
        raise UserError("has no layer instead of at least one.")
    check_parts(parts, {**known, "values": (torch.bfloat16, length)})


# Checks -------------------------------------------------------------------------------------------


def check_mask(mask: Tensor, name: str) -> list[int]:
    """The zeros and ones of a mask; anything else is a UserError."""
    values = mask.tolist()
    if other := sorted(set(values) - {0, 1}):
        raise UserError(f"has {other[0]} in '{name}' instead of 0 or 1.")
    return values


def check_parts(
    parts: Mapping[str, Any], known: Mapping[str, tuple[torch.dtype, int | None]]
) -> None:
    """Whether a code consists of vectors of these types and lengths, where these are known."""
    if parts.keys() != known.keys():
        there, right = (", ".join(sorted(names)) or "nothing" for names in (parts, known))
        raise UserError(f"has {there} packed instead of {right}.")
    for name, (dtype, length) in known.items():
        part = parts[name]
        if not isinstance(part, Tensor):
            raise UserError(f"has a {type(part).__name__} for '{name}' instead of a tensor.")
        if part.dtype != dtype:
            raise UserError(f"has {part.dtype} for '{name}' instead of {dtype}.")
        if part.dim() != 1 or length not in (None, len(part)):
            right = "one dimension" if length is None else f"({length},)"
            raise UserError(f"has shape {tuple(part.shape)} for '{name}' instead of {right}.")
