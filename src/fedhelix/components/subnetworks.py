"""Sub-networks: which places of every entry a narrower or shallower network has, and how it is cut
out.

It computes what the whole one does with zeros outside its places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fedhelix.core.errors import UserError
from fedhelix.core.layers import Layer, Layers
from fedhelix.core.tree import State

# For each entry that is cut, the places that stay along its first axes.
Places = Mapping[str, tuple[Tensor, ...]]
# The places that stay of so many channels; equal numbers must give equal places, since layers that
# are added up have equal numbers.
Pick = Callable[[int], Tensor]


def window(width: float, start: int = 0) -> Pick:
    """A share of the channels, rounded up, from a place on; behind the last comes the first."""
    return lambda size: (torch.arange(math.ceil(round(width * size, 6))) + start) % size


def places_of(layers: Layers, pick: Pick) -> dict[str, tuple[Tensor, ...]]:
    """The places of a narrower network: every hidden channel is picked or not, in all layers that
    give or take it; the network's inputs and outputs stay.
    """
    if layers.frozen:
        raise UserError("a network with frozen parameters cannot be cut; let all of it train.")
    places: dict[str, tuple[Tensor, ...]] = {}
    before: list[int] = []  # channels that earlier layers give
    head = layers.weighted[-1] if layers.weighted else None
    for layer in layers.all:
        if not layer.reached or layer.kind == "other":
            raise _refusal(layer)
        for name in layer.entries:
            places |= _entry_places(name, layer, layers.shapes[name], before, pick, layer is head)
        if layer is head:  # what follows works on the outputs
            return places
        if layer.kind != "norm":
            before.append(layer.outputs)
    return places


def left_out(layers: Layers, depth: float) -> dict[str, tuple[Tensor, ...]]:
    """No places in the residual blocks that a shallower network lacks: of every stage it has the
    first blocks, a share that is rounded up.
    """
    return {
        name: (torch.arange(0),)
        for block in layers.blocks
        if block.place >= math.ceil(round(depth * block.stage, 6))
        for name in block.entries
        if layers.shapes[name]
    }


def _entry_places(
    name: str, layer: Layer, shape: Sequence[int], before: Sequence[int], pick: Pick, head: bool
) -> dict[str, tuple[Tensor, ...]]:
    """The places of one entry, if it has axes to cut."""
    if not shape:
        return {}
    if shape[0] != layer.outputs:  # neither outputs x inputs nor one value per output
        raise _refusal(layer)
    if layer.kind == "norm":
        return {name: (_inputs(shape[0], before, pick, layer),)}
    outputs = torch.arange(shape[0]) if head else pick(shape[0])
    if len(shape) == 1 or shape[1] == 1:
        return {name: (outputs,)}
    return {name: (outputs, _inputs(shape[1], before, pick, layer))}


def _inputs(size: int, before: Sequence[int], pick: Pick, layer: Layer) -> Tensor:
    """The places of a layer's inputs: the channels of an earlier layer, of which flattening makes
    several inputs each, or the samples themselves.
    """
    if not before:
        return torch.arange(size)
    nearest = before[::-1]
    channels = size if size in nearest else next((n for n in nearest if size % n == 0), 0)
    if not channels:
        raise UserError(
            f"the {size} inputs of '{layer.name}' are not the outputs of a layer before it, so "
            "the network cannot be cut."
        )
    each = size // channels
    return (pick(channels)[:, None] * each + torch.arange(each)).flatten()


def _refusal(layer: Layer) -> UserError:
    return UserError(
        "only convolutions, linear layers and BatchNorm can be cut to a width, and "
        f"'{layer.name}' is none of these."
    )


def cut(state: State, places: Places) -> State:
    """The values at the places."""
    smaller = dict(state)
    for name, axes in places.items():
        for axis, kept in enumerate(axes):
            smaller[name] = smaller[name].index_select(axis, kept.to(smaller[name].device))
    return smaller


def filled(state: State, places: Places, like: State) -> State:
    """The inverse of `cut`, with zeros where nothing is; UserError for values that do not fit."""
    whole = dict(state)
    for name in places.keys() & state.keys():
        value, axes = state[name], places[name]
        shape = (*map(len, axes), *like[name].shape[len(axes) :])
        if value.shape != shape:
            raise UserError(f"'{name}' has shape {tuple(value.shape)} instead of {shape}.")
        whole[name] = torch.zeros_like(like[name], device=value.device, dtype=value.dtype)
        whole[name][_grid(axes, value)] = value
    return whole


def mask(axes: Sequence[Tensor], like: Tensor) -> Tensor:
    """One at the places of an entry, zero elsewhere."""
    whole = torch.zeros_like(like)
    whole[_grid(axes, like)] = 1
    return whole


def resized(state: State, layers: Layers, target: Layers) -> State:
    """Entries of a network for one of another width: of its channels the strongest, which also
    stand for those that are gone, or, for a wider one, all of them several times, which together
    say what one said before. Residual blocks that a shallower one lacks are left out.
    """
    spare = {name for block in layers.blocks for name in block.entries} - target.shapes.keys()
    state = {name: value for name, value in state.items() if name not in spare}
    sizes = _new_sizes(state, layers, target)
    strengths = _strengths(state)

    def pick(size: int) -> Tensor:
        new = sizes.get(size, size)
        if new > size:
            return torch.arange(new) % size
        strongest = strengths.get(size, -torch.arange(size).float()).topk(new).indices
        return strongest.sort().values

    places = {name: axes for name, axes in places_of(layers, pick).items() if name in state}
    other = cut(state, places)
    for name, value in other.items():
        if tuple(value.shape) != target.shapes[name]:
            raise UserError(
                f"the network to inherit has shape {target.shapes[name]} for '{name}'; from "
                f"{layers.shapes[name]}, with all layers changed alike, comes {tuple(value.shape)}."
            )
    norm = set(layers.norm)
    for name, axes in places.items():
        if len(axes) > 1 and name not in norm:
            inputs = axes[1].to(state[name].device)
            copies = inputs.bincount()[inputs].view(1, -1, *[1] * (other[name].dim() - 2))
            gone = max(1.0, layers.shapes[name][1] / len(inputs))
            other[name] = other[name] * gone / copies
    return other


def _new_sizes(state: State, layers: Layers, target: Layers) -> dict[int, int]:
    """How many channels the other network has where this one has so many."""
    sizes: dict[int, int] = {}
    for name in state:
        if name not in target.shapes or len(target.shapes[name]) != len(layers.shapes[name]):
            raise UserError(
                f"only the widths of networks may differ, but the one to inherit has no '{name}' "
                "of as many axes."
            )
        if target.shapes[name]:
            size, new = layers.shapes[name][0], target.shapes[name][0]
            if sizes.setdefault(size, new) != new:
                raise UserError(
                    f"layers of {size} channels become {sizes[size]} wide in one place and {new} "
                    f"in '{name}'; change all layers alike."
                )
    return sizes


def _strengths(state: State) -> dict[int, Tensor]:
    """How strong each of so many channels is, by the weights that make it, in all layers together;
    every layer counts alike.
    """
    strengths: dict[int, Tensor] = {}
    for value in state.values():
        if value.dim() > 1:
            each = value.detach().abs().flatten(1).sum(1).float()
            each = each / each.mean().clamp_min(1e-12)
            strengths[len(each)] = strengths[len(each)] + each if len(each) in strengths else each
    return strengths


def _grid(axes: Sequence[Tensor], like: Tensor) -> tuple[Tensor, ...]:
    """Indices of all combinations of places."""
    return tuple(
        kept.to(like.device).view(-1, *[1] * (len(axes) - 1 - axis))
        for axis, kept in enumerate(axes)
    )
