"""Error feedback: an update in few bits, and what the code lost, which goes into the next one.

A client's code takes some thirty small steps. A GPU does those of small networks as one recorded
program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from torch import Tensor

from fedhelix.components.codes import (
    LARGEST_SCALE,
    Parts,
    Same,
    decode_bits,
    encode_bits,
)
from fedhelix.core.cuda import LARGE, Recorded
from fedhelix.core.flat import FlatLayout
from fedhelix.core.tree import State

Program = Callable[..., tuple[Tensor, ...]]


def bounded(lost: Tensor) -> Tensor:
    """What a code lost, but zero where that is absurd: after a round that diverged, which the
    server refuses, the next code must be an honest one again.
    """
    return lost.where(lost.abs() < LARGEST_SCALE / 10, 0)


def encode(update: Tensor, layout: FlatLayout, bits: int) -> tuple[Parts, Tensor]:
    """The code of an update, and what it lost."""
    values, scales, lost = _encoder(layout, bits)(update)
    return {"values": values, "scales": scales}, lost


def decode(parts: Mapping[str, Tensor], origin: Tensor, layout: FlatLayout, bits: int) -> Tensor:
    """The origin plus what the code says."""
    return _decoder(layout, bits)(parts["values"], parts["scales"], origin)[0]


def flat_model(model: Mapping[str, Tensor], layout: FlatLayout) -> Tensor:
    """A model as one vector, made once for all clients that have received the same one."""
    return _flat_model(Same(model[name] for name in layout.names), layout)


@lru_cache(maxsize=4)
def _flat_model(values: Same, layout: FlatLayout) -> Tensor:
    state: State = dict(zip(layout.names, values, strict=True))
    return layout.flat(state)


@lru_cache(maxsize=16)
def _encoder(layout: FlatLayout, bits: int) -> Program:
    def program(update: Tensor) -> tuple[Tensor, ...]:
        parts = encode_bits(update, layout, bits)
        return parts["values"], parts["scales"], bounded(update - decode_bits(parts, layout, bits))

    return Recorded(program) if layout.count < LARGE else program


@lru_cache(maxsize=16)
def _decoder(layout: FlatLayout, bits: int) -> Program:
    def program(values: Tensor, scales: Tensor, origin: Tensor) -> tuple[Tensor, ...]:
        return (origin + decode_bits({"values": values, "scales": scales}, layout, bits),)

    return Recorded(program) if layout.count < LARGE else program
