"""SCAFFOLD: control variates correct each client's drift away from the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedhelix.core.method import (
    Batch,
    Capabilities,
    Client,
    Context,
    Local,
    LocalRound,
    Upload,
)
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import Tree, add, masked_mean, subtract, take, zeros
from fedhelix.methods.fedavg import FedAvg

ADVICE = (
    "SCAFFOLD needs small steps where clients have few classes: take control = steps, momentum = 0 "
    "and an lr of 0.05 or less"
)


@register("scaffold", paper="Karimireddy et al., ICML 2020, arXiv:1910.06378")
@dataclass(frozen=True)
class Scaffold(FedAvg):
    """Corrects client drift with control variates.

    Each local gradient is shifted by (server control - own control), the control being a client's
    mean gradient.

    At the received model (option I of the paper) the control costs one more pass over the data;
    read off the round's steps (option II) it costs nothing. A client that has fitted its own
    samples has no gradient left and follows the correction alone. So the learning rate must shrink
    with the number of local steps, as the paper's theorem demands, and with the number of classes
    that a client has.
    """

    control: Literal["gradient", "steps"] = option(
        "gradient", "the gradient at the received model, or over the steps"
    )
    server_lr: float = option(1.0, "step of the server along the mean update", above=0)

    @property
    def capabilities(self) -> Capabilities:
        """As FedAvg, with advice for clients of few classes."""
        return replace(super().capabilities, if_loss_rises=ADVICE)

    def server_init(
        self, client_inits: Mapping[int, Tree], ctx: Context
    ) -> tuple[Tree, dict[int, Tree]]:
        """Server: its control starts at zero."""
        server, replies = super().server_init(client_inits, ctx)
        return {**server, "control": zeros(take(ctx.initial, ctx.layers.parameters))}, replies

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: model and control, twice FedAvg's bytes."""
        return {"model": server["model"], "control": server["control"]}

    def loss_context(self, payload: Tree, client_state: Tree, client: Client) -> Tree:
        """Client: the correction of its gradients."""
        control = payload["control"]
        return subtract(control, client_state.get("control") or zeros(control))

    def loss(self, params: Mapping[str, Tensor], batch: Batch, local: Local) -> Tensor:
        """Client: the loss on its samples; a term of value zero has the correction as its
        gradient.
        """
        return local.base_loss(params, batch) + sum(
            ((params[name] - params[name].detach()) * value).sum()
            for name, value in local.context.items()
        )

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: the model, and how its control changed: to its mean gradient, at the received
        model or on its way.
        """
        tree, client_state = super().upload(local)
        received, old = (
            local.payload["model"],
            client_state.get("control") or zeros(local.payload["control"]),
        )
        if self.control == "gradient":
            gradients = list(local.client.gradients({**local.models["model"], **received}))
            control = {
                name: torch.stack([gradient[name] for gradient in gradients]).mean(0)
                for name in old
            }
        else:
            moved = subtract(take(received, old), local.models["model"])
            mean = add(zeros(moved), moved, 1 / local.client.travel(max(local.steps, 1)))
            control = add(old, subtract(mean, local.payload["control"]))
        return {**tree, "control": subtract(control, old)}, {**client_state, "control": control}

    def weights(self, server: Tree, uploads: Sequence[Upload], ctx: Context) -> list[float]:
        """Server: every client counts alike."""
        return [1 / len(uploads)] * len(uploads)

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: step along the mean model update, and move the control by the share of clients
        that took part.
        """
        state = super().aggregate(server, uploads, weights, ctx)
        old, names = server["model"], ctx.layers.parameters
        step = subtract(take(state["model"], names), old)
        state["model"] |= add(take(old, names), step, self.server_lr)
        # Whatever a client's model weighs, it has moved its own control, and the server's is the
        # mean of them all.
        alike = [1 / len(uploads)] * len(uploads)
        change = masked_mean(
            [upload.tree["control"] for upload in uploads], alike, server["control"]
        )
        return {
            **state,
            "control": add(server["control"], change, len(uploads) / len(ctx.present)),
        }
