"""Layers and their roles (head, body, norm, convolutions), read from a module's structure and not
from its names.

Methods choose by them what travels: `layers.body`, `layers.norm`, `layers.convs[-4:]`,
`layers.split("module")`. An *entry* is one tensor of the module's state dict, named as there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from torch import Tensor, nn

from fedhelix.core.errors import UserError
from fedhelix.core.fit import probe
from fedhelix.core.parts import Inputs
from fedhelix.core.residual import Block, residual_blocks
from fedhelix.core.tree import wide

Kind = Literal["conv", "linear", "norm", "other"]
Granularity = Literal["conv", "module", "tensor"]

Shapes = Mapping[str, Sequence[int]]  # of entries, by their names
FEW = 3  # names in a sentence

WHOLE = "(model)"  # the name of a layer that is the module itself or its own bare parameters


@dataclass(frozen=True)
class Layer:
    """A module that holds state of its own."""

    name: str
    kind: Kind
    entries: tuple[str, ...]  # parameters, then buffers
    outputs: int  # channels or features; 0 where that means nothing
    pointwise: bool  # a 1×1 convolution, such as a shortcut
    weighted: bool  # maps features to features: it has a weight of two or more dimensions
    reached: bool  # the forward pass calls it


class Adapter(NamedTuple):
    """A pair of low-rank matrices: A maps inputs to `rank` values, B those to outputs."""

    a: str
    b: str
    rank: int


@dataclass(frozen=True)
class Layers:
    """What a network consists of; make one with `Layers.of(module, example)`."""

    # All entries of a model's state, in the order of the state dict; of tied tensors only the first
    # name.
    names: tuple[str, ...]
    parameters: tuple[str, ...]  # the trainable ones
    buffers: tuple[str, ...]  # the others, such as running statistics
    sizes: dict[str, int]  # elements of each entry
    all: tuple[Layer, ...]  # in the order in which the forward pass reaches them
    tied: bool = False  # whether tensors have several names
    # The first name of a tensor by those that it has in other modules.
    aliases: Mapping[str, str] = field(default_factory=dict)
    # Parameters that do not require gradients: part of the network and of no state, so that they
    # neither travel nor cost memory per client.
    frozen: tuple[str, ...] = ()
    half: tuple[str, ...] = ()  # entries in half precision
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of each entry
    blocks: tuple[Block, ...] = ()  # those that can be left out

    @classmethod
    def of(cls, module: nn.Module, example: Inputs | None = None) -> Layers:
        """Read a module; a batch as example settles the order of its layers, otherwise that of
        registration holds.
        """
        state = {
            name: value
            for name, value in module.state_dict(keep_vars=True).items()
            if isinstance(value, Tensor)
        }
        names_of: dict[int, list[str]] = {}
        for name, value in state.items():
            names_of.setdefault(id(value), []).append(name)
        first_name = {key: names[0] for key, names in names_of.items()}
        own = {name: value for name, value in state.items() if first_name[id(value)] == name}
        tied = len(own) < len(state)
        frozen = tuple(name for name, value in own.items() if is_frozen(value))
        own = {name: value for name, value in own.items() if not is_frozen(value)}
        return cls(
            names=tuple(own),
            parameters=tuple(name for name, value in own.items() if value.requires_grad),
            buffers=tuple(name for name, value in own.items() if not value.requires_grad),
            sizes={name: value.numel() for name, value in own.items()},
            all=read_layers(module, own, names_of, example),
            tied=tied,
            aliases={
                name: first
                for name, value in places(module)
                if (first := first_name.get(id(value))) in own and first != name
            },
            frozen=frozen,
            half=tuple(name for name, value in own.items() if wide(value) is not value),
            shapes={name: tuple(value.shape) for name, value in own.items()},
            blocks=() if example is None else residual_blocks(module, own, example),
        )

    @cached_property
    def weighted(self) -> tuple[Layer, ...]:
        """The layers that map features to features: convolutions, linear layers and their like; no
        norms.
        """
        return tuple(layer for layer in self.all if layer.weighted and layer.reached)

    @cached_property
    def head(self) -> tuple[str, ...]:
        """Entries of the last weighted layer: in a classifier, its last linear layer."""
        return self.weighted[-1].entries if self.weighted else ()

    def check_linear_head(self, who: str, plain: bool = True) -> None:
        """Refuse a network without a linear last layer on the features of a layer below it, for
        `who` needs one. A `plain` one holds its weight itself, not in parts as with weight norm.
        """
        linear = len(self.weighted) > 1 and self.weighted[-1].kind == "linear"
        if not linear or (plain and self.head[0].rpartition(".")[2] != "weight"):
            raise UserError(f"{who} needs a model with a linear head and a layer below it.")

    @cached_property
    def body(self) -> tuple[str, ...]:
        """Everything but the head."""
        return self.without(self.head)

    @cached_property
    def norm(self) -> tuple[str, ...]:
        """Entries of all BatchNorm modules, running statistics included."""
        return tuple(entry for layer in self.all if layer.kind == "norm" for entry in layer.entries)

    @cached_property
    def convs(self) -> tuple[Layer, ...]:
        """What a paper on CNNs calls the conv layers: not the 1×1 shortcuts, unless there are no
        others.

        In a network without convolutions its hidden linear layers stand for them.
        """
        convs = tuple(layer for layer in self.all if layer.kind == "conv" and layer.reached)
        hidden = tuple(layer for layer in self.weighted[:-1] if layer.kind == "linear")
        return tuple(layer for layer in convs if not layer.pointwise) or convs or hidden

    @cached_property
    def stages(self) -> tuple[tuple[Layer, ...], ...]:
        """The `convs`, cut where their width changes (ResNet-18: stem and layer1, layer2, layer3,
        layer4).
        """
        return tuple(
            tuple(stage) for _, stage in itertools.groupby(self.convs, lambda layer: layer.outputs)
        )

    @cached_property
    def adapters(self) -> tuple[Adapter, ...]:
        """The pairs that LoRA's layers, and peft's, call lora_A and lora_B."""
        pairs = [
            (name, name.replace("lora_A", "lora_B"), self.shapes[name][0])
            for name in self.parameters
            if "lora_A" in name.split(".")
        ]
        return tuple(Adapter(*pair) for pair in pairs if pair[1] in self.parameters)

    def without(self, entries: Iterable[str]) -> tuple[str, ...]:
        """All entries but these."""
        unwanted = set(entries)
        return tuple(name for name in self.names if name not in unwanted)

    def tail(self, count: int) -> tuple[str, ...]:
        """Entries of the last `count` weighted layers."""
        if not 1 <= count <= len(self.weighted):
            raise UserError(
                f"the model has {len(self.weighted)} weighted layers, so its last {count} cannot "
                "be taken."
            )
        return tuple(entry for layer in self.weighted[-count:] for entry in layer.entries)

    def split(self, granularity: Granularity) -> dict[str, tuple[str, ...]]:
        """Parts by name, each with its entries.

        `conv`: each convolution and each linear layer, nothing else; `module`: each convolution
        with the BatchNorm that follows it, and every other layer; `tensor`: every entry alone. The
        last two cover the whole state.
        """
        if granularity == "tensor":
            return {name: (name,) for name in self.names}
        if granularity == "conv":
            return {
                layer.name: layer.entries for layer in self.all if layer.kind in ("conv", "linear")
            }
        if granularity != "module":
            raise UserError(f"granularity must be conv, module or tensor, not '{granularity}'.")
        layers: dict[str, tuple[str, ...]] = {}
        previous: Layer | None = None
        for layer in self.all:
            if (
                previous
                and previous.kind == "conv"
                and layer.kind == "norm"
                and previous.outputs == layer.outputs
            ):
                layers[previous.name] += layer.entries
            else:
                layers[layer.name] = layer.entries
            previous = layer
        return layers


def places(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by the first name of each place; a tensor may be in several."""
    for path, part in module.named_modules():
        for name, value in (*part._parameters.items(), *part._buffers.items()):
            if value is not None:
                yield f"{path}.{name}" if path else name, value


def difference(now: Shapes, then: Shapes) -> str:
    """How a network's entries differ from those that it had; empty where they are the same."""
    new = [name for name in now if name not in then]
    lost = [name for name in then if name not in now]
    if new and lost:
        return f"it has {_several(new)} instead of {_several(lost)}"
    if new or lost:
        return f"it also has {_several(new)}" if new else f"it lacks {_several(lost)}"
    for name, shape in now.items():
        if tuple(shape) != (old := tuple(then[name])):
            return f"{name} has the shape {tuple(shape)} instead of {old}"
    return ""


def _several(names: Sequence[str]) -> str:
    rest = len(names) - FEW
    return ", ".join(names[:FEW]) + (f" and {rest} more" if rest > 0 else "")


def is_frozen(value: Tensor) -> bool:
    """Whether an entry is a parameter that nobody trains."""
    return isinstance(value, nn.Parameter) and not value.requires_grad


def read_layers(
    module: nn.Module,
    state: dict[str, Tensor],
    names_of: Mapping[int, list[str]],
    example: Inputs | None,
) -> tuple[Layer, ...]:
    """The modules that hold state, those first that the forward pass reaches first; the unreached
    come last.

    A tensor that several modules share belongs to the last of them, as an embedding that is also
    the head.
    """
    holders = {
        entry: [find_owner(module, name) for name in names_of[id(value)]]
        for entry, value in state.items()
    }
    holding = {owner for found in holders.values() for _, owner in found}
    parts = [part for part in module.modules() if part in holding]
    calls = parts if example is None else call_order(module, parts, example)
    turn = {owner: place for place, owner in enumerate(calls)}
    owners: dict[nn.Module, tuple[str, list[str]]] = {}
    for entry, found in holders.items():
        name, owner = max(found, key=lambda one: turn.get(one[1], -1))
        owners.setdefault(owner, (name, []))[1].append(
            entry
        )  # one module under two names stays one layer
    unreached = [owner for owner in owners if owner not in turn]
    return tuple(
        read_layer(owner, *owners[owner], state, owner in turn)
        for owner in [*(owner for owner in calls if owner in owners), *unreached]
    )


def find_owner(module: nn.Module, entry: str) -> tuple[str, nn.Module]:
    """The layer to which an entry belongs.

    That is the module that holds it, but a convolution, linear layer or norm owns what lies below
    it as well: a parametrised layer (weight norm, for example) keeps its weights in children.
    """
    path = entry.split(".")[:-1]
    owner = module
    for depth, child in enumerate(path):
        if kind_of(owner) != "other":
            return ".".join(path[:depth]) or WHOLE, owner
        owner = getattr(owner, child)
    return ".".join(path) or WHOLE, owner


def call_order(module: nn.Module, parts: Iterable[nn.Module], example: Inputs) -> list[nn.Module]:
    """The parts in the order of their first call."""
    order: dict[nn.Module, None] = {}
    hooks = [
        part.register_forward_pre_hook(lambda called, _: order.setdefault(called)) for part in parts
    ]
    try:
        probe(module, example)
    finally:
        for hook in hooks:
            hook.remove()
    return list(order)


def read_layer(
    module: nn.Module, name: str, entries: list[str], state: dict[str, Tensor], reached: bool
) -> Layer:
    """Describe one layer."""
    kind = kind_of(module)
    is_parameter = {entry: isinstance(state[entry], nn.Parameter) for entry in entries}
    widest = max((state[entry].dim() for entry in entries if is_parameter[entry]), default=0)
    return Layer(
        name=name,
        kind=kind,
        entries=tuple(sorted(entries, key=lambda entry: not is_parameter[entry])),
        outputs=width_of(module),
        pointwise=isinstance(module, nn.modules.conv._ConvNd) and set(module.kernel_size) == {1},
        weighted=kind in ("conv", "linear") or (kind == "other" and widest >= 2),
        reached=reached,
    )


def kind_of(module: nn.Module) -> Kind:
    """What a module is to the methods; only BatchNorm counts as norm, for it alone keeps statistics
    of the data.
    """
    if isinstance(module, nn.modules.conv._ConvNd):
        return "conv"
    if isinstance(module, nn.Linear):
        return "linear"
    return "norm" if isinstance(module, nn.modules.batchnorm._BatchNorm) else "other"


def width_of(module: nn.Module) -> int:
    """Channels or features that a layer gives."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return module.out_channels
    if isinstance(module, nn.Linear):
        return module.out_features
    return module.num_features if isinstance(module, nn.modules.batchnorm._BatchNorm) else 0
