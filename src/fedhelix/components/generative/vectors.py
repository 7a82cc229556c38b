"""Slices of models as flat vectors, and the normalisation of their coordinates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedhelix.core.errors import UserError
from fedhelix.core.layers import Layers
from fedhelix.core.options import convert
from fedhelix.core.tree import State

LAST = "last:"

Normalise = Literal["residual", "tensor"]


def slice_of(layers: Layers, text: str) -> list[str]:
    """The trainable entries of a slice: `all`, `last:K` for the last K layers, or layer names."""
    if text == "all":
        return list(layers.parameters)
    if text.startswith(LAST):
        chosen = set(layers.tail(convert("slice", text.removeprefix(LAST), int)))
    else:
        names = [name.strip() for name in text.split(",")]
        known = [layer.name for layer in layers.all]
        if strange := [name for name in names if name not in known]:
            raise UserError(
                f"slice names no layer '{strange[0]}'; "
                f"the model has {', '.join(known)} (or use all, last:2)."
            )
        chosen = {entry for layer in layers.all if layer.name in names for entry in layer.entries}
    return [name for name in layers.parameters if name in chosen]


@dataclass(frozen=True)
class Layout:
    """The order, shapes and types of a slice's tensors in the vector, which is float32."""

    shapes: dict[str, torch.Size]
    types: dict[str, torch.dtype] = field(default_factory=dict)  # none: as the vector

    @classmethod
    def of(cls, state: Mapping[str, Tensor], names: Iterable[str]) -> Layout:
        """The named entries of a state, in the order given."""
        chosen = {name: state[name] for name in names}
        shapes = {name: value.shape for name, value in chosen.items()}
        return cls(shapes, {name: value.dtype for name, value in chosen.items()})

    @property
    def sizes(self) -> list[int]:
        """The number of values of each tensor."""
        return [shape.numel() for shape in self.shapes.values()]

    def accepts(self, state: Mapping[str, Tensor], whose: str) -> bool:
        """Whether a slice is finite; raises an error if it belongs to another model."""
        for name, shape in self.shapes.items():
            if name not in state or state[name].shape != shape:
                actual = tuple(state[name].shape) if name in state else "nothing"
                raise UserError(
                    f"{whose} has {actual} for '{name}' instead of {tuple(shape)}; "
                    "it must be of the same architecture."
                )
        return all(bool(state[name].isfinite().all()) for name in self.shapes)

    def flatten(self, states: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """One row for each state."""
        return torch.stack(
            [torch.cat([state[name].float().flatten() for name in self.shapes]) for state in states]
        )

    def unflatten(self, vector: Tensor) -> State:
        """The slice of a row."""
        parts = vector.split(self.sizes)
        return {
            name: part.view(shape).to(self.types.get(name, part.dtype))
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


class Normaliser(NamedTuple):
    """Scales coordinates to about unit size, and back.

    `residual` subtracts every coordinate's mean over the training vectors: what is left is how
    clients differ, which is all that a generator can learn. `tensor` subtracts one mean per tensor;
    then nearly all variance lies between coordinates, where all clients agree, and the autoencoder
    wastes its capacity on that.
    """

    centre: Tensor
    scale: Tensor

    @classmethod
    def fit(cls, vectors: Tensor, sizes: Sequence[int], kind: Normalise) -> Normaliser:
        """Centre and scale of training vectors whose tensors have these sizes."""
        parts = vectors.split(list(sizes), dim=1)
        means = [
            part.mean(0) if kind == "residual" else part.mean().expand(part.shape[1])
            for part in parts
        ]
        spreads = [
            (part - mean).square().mean().sqrt() for part, mean in zip(parts, means, strict=True)
        ]
        # A tensor that is the same everywhere has no spread to divide by.
        scales = [
            torch.where(spread > 0, spread, 1.0).expand(part.shape[1])
            for spread, part in zip(spreads, parts, strict=True)
        ]
        return cls(torch.cat(means), torch.cat(scales))

    def apply(self, vectors: Tensor) -> Tensor:
        """Normalised vectors."""
        return (vectors - self.centre) / self.scale

    def undo(self, vectors: Tensor) -> Tensor:
        """The inverse of `apply`."""
        return vectors * self.scale + self.centre
