"""HeteroFL: clients with networks of different widths, all of them parts of one network.

Inside a client the network is whole, with zeros outside the client's part: it computes what the
narrow network would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fedhelix.components.pruning import coordinate_mean
from fedhelix.components.subnetworks import Places, cut, filled, mask, places_of, window
from fedhelix.core.errors import UserError
from fedhelix.core.layers import Layers
from fedhelix.core.method import Batch, Capabilities, Client, Context, Local, LocalRound, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree, masked_mean, take
from fedhelix.methods.fedavg import FedAvg


@register("heterofl", paper="Diao et al., ICLR 2021, arXiv:2010.01264")
@dataclass(frozen=True)
class HeteroFL(FedAvg):
    """A client trains the first channels of every layer; each value is averaged over those who
    have it.
    """

    widths: str = option("1/0.5/0.25", "shares of the channels that the clients have, in turn")

    @property
    def capabilities(self) -> Capabilities:
        """What travels has other shapes than the model."""
        return replace(super().capabilities, packed_uploads=True, packed_downloads=True)

    def check(self, layers: Layers) -> None:
        """Refuse widths that are none, and networks that cannot be cut."""
        try:
            widths = [float(width) for width in self.widths.split("/")]
        except ValueError:
            widths = []
        if not widths or not all(0 < width <= 1 for width in widths):
            raise UserError(
                f"widths of {self.name} are numbers above 0 and up to 1, such as 1/0.5/0.25, not "
                f"'{self.widths}'."
            )
        places_of(layers, window(min(widths)))

    def server_init(
        self, client_inits: Mapping[int, Tree], ctx: Context
    ) -> tuple[Tree, dict[int, Tree]]:
        """Server: a model, and BatchNorm's statistics for each width, on which they depend."""
        server, replies = super().server_init(client_inits, ctx)
        statistics = take(server["model"], ctx.layers.buffers)
        return {**server, "statistics": dict.fromkeys(self._widths(), statistics)}, replies

    def _widths(self) -> list[str]:
        return self.widths.split("/")

    def _start(self, ctx: Context) -> int:
        """The first channel of this round's parts."""
        return 0

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: the client's part of the network, and which it is."""
        widths = self._widths()
        width = widths[client % len(widths)]
        part = {"width": float(width), "start": self._start(ctx)}
        model = {**server["model"], **server["statistics"][width]}
        return {"model": cut(model, places(ctx.layers, part)), "part": part}

    def start(self, payload: Tree, client_state: Tree, client: Client) -> dict[str, State]:
        """Client: its part, with zeros around it."""
        inside = places(client.layers, payload["part"])
        model = filled(payload["model"], inside, client.initial)
        model |= scaled(model, inside, client.layers, -1)
        return super().start({"model": model}, client_state, client)

    def loss_context(self, payload: Tree, client_state: Tree, client: Client) -> Tree:
        """Client: which of the parameters are its own."""
        inside, trained = places(client.layers, payload["part"]), set(client.layers.parameters)
        own = {name: axes for name, axes in inside.items() if name in trained}
        return {"mask": {name: mask(axes, client.initial[name]) for name, axes in own.items()}}

    def loss(self, params: Mapping[str, Tensor], batch: Batch, local: Local) -> Tensor:
        """Client: the base loss of its part; all else gets no gradient and stays zero."""
        part = {name: params[name] * own for name, own in local.context["mask"].items()}
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
        those of the same width.
        """
        statistics = dict(server["statistics"])
        for width in statistics:
            same = [float(part_of(upload)["width"] == float(width)) for upload in uploads]
            shares = [weight * mine for weight, mine in zip(weights, same, strict=True)]
            statistics[width] = mean_of_parts(statistics[width], uploads, shares, ctx.layers)
        model = mean_of_parts(server["model"], uploads, weights, ctx.layers)
        return {**server, "model": model, "statistics": statistics}

    def model(self, server: Tree, ctx: Context) -> State | None:
        """Server: the whole network, with the statistics of the greatest width."""
        return {**server["model"], **server["statistics"][max(self._widths(), key=float)]}


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
    return places_of(layers, window(float(part["width"]), int(part["start"])))


def scaled(model: State, inside: Places, layers: Layers, power: int) -> State:
    """Weights times a power of the share of their inputs that a part has."""
    shares = {
        name: len(axes[1]) / layers.shapes[name][1]
        for name, axes in inside.items()
        if len(axes) > 1
    }
    return {name: model[name] * share**power for name, share in shares.items() if share < 1}
