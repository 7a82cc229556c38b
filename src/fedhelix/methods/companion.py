"""What methods share that train a small network on the features, beside the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fedhelix.core.layers import Layers
from fedhelix.core.method import (
    Batch,
    Capabilities,
    Client,
    Context,
    Local,
    LocalRound,
    Phase,
    Upload,
)
from fedhelix.core.shift import SHIFT, without_shift
from fedhelix.core.tree import State, Tree, clone, masked_mean, take
from fedhelix.methods.fedavg import FedAvg

COMPANION = "companion"


def head_outputs(params: Mapping[str, Tensor], layers: Layers, features: Tensor) -> Tensor:
    """What the linear head of a model makes of features, in their type."""
    weight, *bias = (params[name].to(features.dtype) for name in layers.head)
    return F.linear(features, weight, *bias)


def linear_entries(name: str, inputs: int, outputs: int, draw: torch.Generator) -> State:
    """A random linear layer with a normalisation behind it, by the names of its entries."""
    reach = inputs**-0.5
    return {
        f"({name} weight)": (2 * torch.rand(outputs, inputs, generator=draw) - 1) * reach,
        f"({name} bias)": (2 * torch.rand(outputs, generator=draw) - 1) * reach,
        f"({name} norm weight)": torch.ones(outputs),
        f"({name} norm bias)": torch.zeros(outputs),
    }


@dataclass(frozen=True)
class Companion(FedAvg):
    """FedAvg of the model and of further entries, which a method's `predict` looks at."""

    @property
    def capabilities(self) -> Capabilities:
        """The companion sees the features of a sample."""
        return replace(super().capabilities, sample_features=True)

    def _companion(self, features: int, classes: int, draw: torch.Generator) -> State:
        """Server: the first values of these entries, whose names are in parentheses."""
        raise NotImplementedError

    def check(self, layers: Layers) -> None:
        """The companion is between the head and the layers below."""
        super().check(layers)
        layers.check_linear_head(self.name)

    def server_init(
        self, client_inits: Mapping[int, Tree], ctx: Context
    ) -> tuple[Tree, dict[int, Tree]]:
        """Server: the model and the companion."""
        server, replies = super().server_init(client_inits, ctx)
        outputs, features = ctx.initial[ctx.layers.head[0]].shape
        first = self._companion(features, outputs, ctx.draw(self.name))
        moved = {name: value.to(ctx.device) for name, value in first.items()}
        return {**server, COMPANION: moved}, replies

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: the model and the companion."""
        return take(server, ("model", COMPANION))

    def start(self, payload: Tree, client_state: Tree, client: Client) -> dict[str, State]:
        """Client: the model with the companion's entries."""
        model = super().start(payload, client_state, client)["model"]
        return {"model": {**model, **payload[COMPANION]}}

    def phases(self, client: Client) -> Sequence[Phase]:
        """Client: the companion trains with the model."""
        draw = client.draw(self.name)
        return (Phase(extra=tuple(self._companion(1, 1, draw))),)

    def _used_loss(self, params: Mapping[str, Tensor], batch: Batch, local: Local) -> Tensor:
        """Client: the base loss of what `predict` returns.

        That is the network's outputs after a shift of every sample.
        """
        still = self._frozen(params, local)
        plain = head_outputs(params, local.layers, local.features(still, batch.x))
        shift = self.predict(still, batch.x, local) - plain + params.get(SHIFT, 0)
        return local.base_loss({**params, SHIFT: shift}, batch)

    def _frozen(self, params: Mapping[str, Tensor], local: Local) -> State:
        """Client: a model whose BatchNorm statistics are its own, so that one batch does not update
        them twice; without a shift.
        """
        still = {**params, **clone(take(params, local.layers.buffers))}
        return {name: value for name, value in still.items() if name != SHIFT}

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: the shared part of the model, and the companion."""
        model = local.models["model"]
        names = local.payload[COMPANION]
        plain = replace(local, models={"model": without_shift(model)})
        sent, kept = super().upload(plain)
        return {**sent, COMPANION: take(model, names)}, kept

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: the means of both."""
        state = super().aggregate(server, uploads, weights, ctx)
        sent = [upload.tree[COMPANION] for upload in uploads]
        return {**state, COMPANION: masked_mean(sent, weights, server[COMPANION])}
