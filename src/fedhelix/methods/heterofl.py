"""HeteroFL: clients with networks of different widths and depths, all of them parts of one network.

Inside a client the network is whole, with zeros outside the client's part: it computes what the
small network would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedhelix.components.pruning import coordinate_mean
from fedhelix.components.subnetworks import Places, cut, filled, left_out, mask, places_of, window
from fedhelix.core.errors import UserError
from fedhelix.core.layers import Layers
from fedhelix.core.method import Batch, Capabilities, Client, Context, Local, LocalRound, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.shift import SHIFT
from fedhelix.core.tree import State, Tree, masked_mean, take
from fedhelix.methods.fedavg import FedAvg


@register("heterofl", paper="Diao et al., ICLR 2021, arXiv:2010.01264")
@dataclass(frozen=True)
class HeteroFL(FedAvg):
    """Small clients train a part of every layer of the model.

    A client trains the first channels of every layer and the first blocks of every stage; each
    value is averaged over those who have it.
    """

    without_classes = "masked_loss = false"

    widths: str = option("1/0.5/0.25", "shares of the channels that the clients have, in turn")
    depths: str = option(
        "1", "shares of the residual blocks of every stage that the clients have, in turn"
    )
    masked_loss: bool = option(
        False, "leave classes that a client has no samples of out of its loss"
    )

    @property
    def capabilities(self) -> Capabilities:
        """What travels has other shapes than the model; only classes can be left out."""
        return replace(
            super().capabilities,
            packed_uploads=True,
            packed_downloads=True,
            classification=self.masked_loss,
        )

    def check(self, layers: Layers) -> None:
        """Refuse shares that are none, and networks that cannot be cut."""
        places_of(layers, window(min(self._shares("widths"))))
        depth = min(self._shares("depths"))
        if depth < 1 and not left_out(layers, depth):
            raise UserError(
                f"depths of {self.name} leave residual blocks out, of which this network has none "
                "to spare; use depths = 1, or a network such as resnet18."
            )

    def _shares(self, name: Literal["widths", "depths"]) -> list[float]:
        """The numbers of an option."""
        text = getattr(self, name)
        try:
            shares = [float(share) for share in text.split("/")]
        except ValueError:
            shares = []
        if not shares or not all(0 < share <= 1 for share in shares):
            raise UserError(
                f"{name} of {self.name} are numbers above 0 and up to 1, such as 1/0.5/0.25, not "
                f"'{text}'."
            )
        return shares

    def _parts(self) -> list[tuple[float, float]]:
        """Widths and depths of the clients, in turn."""
        widths, depths = self._shares("widths"), self._shares("depths")
        turns = math.lcm(len(widths), len(depths))
        return [(widths[i % len(widths)], depths[i % len(depths)]) for i in range(turns)]

    def server_init(
        self, client_inits: Mapping[int, Tree], ctx: Context
    ) -> tuple[Tree, dict[int, Tree]]:
        """Server: a model, and BatchNorm's statistics for each size, on which they depend."""
        server, replies = super().server_init(client_inits, ctx)
        statistics = take(server["model"], ctx.layers.buffers)
        sizes = [size_name(*part) for part in self._parts()]
        return {**server, "statistics": dict.fromkeys(sizes, statistics)}, replies

    def _start(self, ctx: Context) -> int:
        """The first channel of this round's parts."""
        return 0

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: the client's part of the network, and which it is."""
        parts = self._parts()
        width, depth = parts[client % len(parts)]
        part = {"width": width, "depth": depth, "start": self._start(ctx)}
        model = {**server["model"], **server["statistics"][size_name(width, depth)]}
        return {"model": cut(model, places(ctx.layers, part)), "part": part}

    def start(self, payload: Tree, client_state: Tree, client: Client) -> dict[str, State]:
        """Client: its part, with zeros around it."""
        inside = places(client.layers, payload["part"])
        model = filled(payload["model"], inside, client.initial)
        model |= scaled(model, inside, client.layers, -1)
        return super().start({"model": model}, client_state, client)

    def loss_context(self, payload: Tree, client_state: Tree, client: Client) -> Tree:
        """Client: which of the parameters are its own, how much faster they learn, and what is
        added to the outputs.
        """
        inside, trained = places(client.layers, payload["part"]), set(client.layers.parameters)
        own = {name: axes for name, axes in inside.items() if name in trained}
        shares, like = input_shares(own, client.layers), client.initial
        return {
            "mask": {name: mask(axes, like[name]) for name, axes in own.items()},
            "speed": {name: like[name].new_tensor(1 / shares.get(name, 1)) for name in own},
            **({"absent": absent_classes(client)} if self.masked_loss else {}),
        }

    def loss(self, params: Mapping[str, Tensor], batch: Batch, local: Local) -> Tensor:
        """Client: the base loss of its part; all else gets no gradient and stays zero.

        A gradient is divided by the share of the inputs: outputs move as in the whole network.
        """
        part = {}
        if self.masked_loss:
            part[SHIFT] = params.get(SHIFT, 0) + local.context["absent"]
        for name, own in local.context["mask"].items():
            value, speed = params[name], local.context["speed"][name]
            part[name] = own * (value.detach() + speed * (value - value.detach()))
        return local.base_loss({**params, **part}, batch)

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: its part."""
        sent, kept = super().upload(local)
        inside = places(local.layers, local.payload["part"])
        model = sent["model"] | scaled(sent["model"], inside, local.layers, 1)
        return {"model": cut(model, inside)}, kept

    def decode(self, upload: Tree, payload: Tree, ctx: Context) -> Tree:
        """Server: the part, with zeros around it."""
        inside = places(ctx.layers, payload["part"])
        return {**upload, "model": filled(upload["model"], inside, ctx.initial)}

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: a mean of every value over the clients whose part has it; of statistics over
        those of the same size.
        """
        statistics = dict(server["statistics"])
        parts = [part_of(upload) for upload in uploads]
        sizes = [size_name(part["width"], part["depth"]) for part in parts]
        for size, old in statistics.items():
            shares = [weight * (mine == size) for weight, mine in zip(weights, sizes, strict=True)]
            statistics[size] = mean_of_parts(old, uploads, shares, ctx.layers)
        model = mean_of_parts(server["model"], uploads, weights, ctx.layers)
        return {**server, "model": model, "statistics": statistics}

    def model(self, server: Tree, ctx: Context) -> State | None:
        """Server: the whole network, with the statistics of the greatest size."""
        return {**server["model"], **server["statistics"][size_name(*max(self._parts()))]}


def size_name(width: float, depth: float) -> str:
    """What the server calls the clients of one size."""
    return f"{width:g}" if depth == 1 else f"{width:g}x{depth:g}"


def absent_classes(client: Client) -> Tensor:
    """Zero for the classes of a client's samples, and so little for the others that they play no
    part.
    """
    counts = torch.bincount(client.targets(), minlength=client.classes or 0)
    return torch.where(counts > 0, 0.0, -1e4)


def part_of(upload: Upload) -> Tree:
    """Which part of the network a client had."""
    part: Tree = (upload.payload or {})["part"]
    return part


def mean_of_parts(
    old: State, uploads: Sequence[Upload], weights: Sequence[float], layers: Layers
) -> State:
    """The entries of an old state as means of every value over the clients that have it."""
    models = [upload.tree["model"] for upload in uploads]
    mean = masked_mean(models, weights, old)
    inside = [places(layers, part_of(upload)) for upload in uploads]
    for name in mean.keys() & inside[0].keys():
        masks = [mask(axes[name], old[name]) for axes in inside]
        mean[name] = coordinate_mean([model[name] for model in models], masks, weights, old[name])
    return mean


def places(layers: Layers, part: Mapping[str, Any]) -> Places:
    """Where a part lies in the network."""
    channels = window(float(part["width"]), int(part["start"]))
    return {**places_of(layers, channels), **left_out(layers, float(part["depth"]))}


def input_shares(inside: Places, layers: Layers) -> dict[str, float]:
    """Which share of a weight's inputs a part has, where it lacks some."""
    shares = {
        name: len(axes[1]) / layers.shapes[name][1]
        for name, axes in inside.items()
        if len(axes) > 1
    }
    return {name: share for name, share in shares.items() if share < 1}


def scaled(model: State, inside: Places, layers: Layers, power: int) -> State:
    """Weights times a power of the share of their inputs that a part has."""
    shares = input_shares(inside, layers)
    return {name: model[name] * share**power for name, share in shares.items()}
