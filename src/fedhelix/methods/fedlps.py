"""FedLPS: a shared encoder that is soon frozen, and a predictor whose channels every client prunes
for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedhelix.components.pruning import (
    channels,
    coordinate_mean,
    encoder,
    mask_of,
    prunable,
    unpacked,
)
from fedhelix.core.errors import UserError
from fedhelix.core.layers import Layers
from fedhelix.core.method import Batch, Capabilities, Client, Context, Local, LocalRound, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree, drop, take
from fedhelix.methods.fedavg import FedAvg


@register("fedlps", paper="Jia et al., AAAI 2024, with the pruning of GENE-FL, arXiv:2504.14628")
@dataclass(frozen=True)
class FedLPS(FedAvg):
    """Clients prune their predictor and send what is left.

    After its first round a client keeps the strongest channels of its predictor, and sends only
    these.
    """

    prune_ratio: float = option(
        0.8, "share of channels that is pruned; 0.38 gives the paper's bytes", low=0, below=1
    )

    @property
    def capabilities(self) -> Capabilities:
        """Of pruned layers only the surviving weights travel."""
        return replace(super().capabilities, packed_uploads=True)

    def check(self, layers: Layers) -> None:
        """There must be something to prune behind the encoder."""
        if not prunable(layers):
            raise UserError(
                "fedlps prunes hidden layers behind the first stage, and this model has none."
            )

    def start(self, payload: Tree, client_state: Tree, client: Client) -> dict[str, State]:
        """Client: the received model without the pruned channels, and the model that it trained
        last.
        """
        model = super().start(payload, {}, client)["model"]
        model |= {
            name: model[name] * mask_of(kept, model[name])
            for name, kept in client_state.get("channels", {}).items()
        }
        return {"model": model, "trained": client_state.get("trained", model)}

    def loss_context(self, payload: Tree, client_state: Tree, client: Client) -> Tree:
        """Client: what stays of each weight, and whether the encoder learns, as it does in the
        client's first round only.
        """
        model, kept = (
            client.initial,
            client_state.get("channels") or channels(client.initial, prunable(client.layers), 0.0),
        )
        first = float("channels" not in client_state)
        learns = torch.tensor(first, device=next(iter(model.values())).device)
        return {
            "mask": {name: mask_of(stay, model[name]) for name, stay in kept.items()},
            "learns": learns,
        }

    def loss(self, params: Mapping[str, Tensor], batch: Batch, local: Local) -> Tensor:
        """Client: the risk of the pruned model; a frozen encoder gets no gradient."""
        learns, trained = (
            local.context["learns"],
            set(encoder(local.layers)) & set(local.layers.parameters),
        )
        fixed = {
            name: learns * params[name] + (1 - learns) * params[name].detach() for name in trained
        }
        pruned = {name: params[name] * mask for name, mask in local.context["mask"].items()}
        return local.base_loss({**params, **fixed, **pruned}, batch)

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: the surviving coordinates and which they are, the rest of the predictor, and once
        the encoder.
        """
        model, names, first = local.models["model"], prunable(local.layers), encoder(local.layers)
        frozen = "channels" in local.client_state
        if frozen:  # not even weight decay moves it
            model = {
                **model,
                **take(local.payload["model"], set(first) & set(local.layers.parameters)),
            }
        kept = local.client_state.get("channels") or channels(model, names, self.prune_ratio)
        masks = {name: mask_of(kept[name], model[name]) for name in names}
        model = {**model, **{name: model[name] * masks[name] for name in names}}
        silent = [*names, *(first if frozen else ())]
        values = {name: model[name][masks[name] > 0] for name in names}
        return {"model": drop(model, silent), "values": values, "channels": kept}, {
            "channels": kept,
            "trained": model,
        }

    def personal(self, models: dict[str, State]) -> str:
        """Client: its pruned model."""
        return "trained"

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: a mean of every coordinate over those who kept it; who sends no encoder votes for
        the one that is there.
        """
        sent = {name for upload in uploads for name in upload.tree["model"]}
        there = take(server["model"], sent & set(encoder(ctx.layers)))
        whole = [
            upload._replace(tree={**upload.tree, "model": {**there, **upload.tree["model"]}})
            for upload in uploads
        ]
        model = super().aggregate(server, whole, weights, ctx)["model"]
        for name in prunable(ctx.layers):
            masks = [mask_of(upload.tree["channels"][name], model[name]) for upload in uploads]
            values = [
                unpacked(upload.tree["values"][name], mask)
                for upload, mask in zip(uploads, masks, strict=True)
            ]
            model[name] = coordinate_mean(values, masks, weights, server["model"][name])
        return {**server, "model": model}
