"""SCAFFOLD: control variates correct each client's drift away from the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedhelix.method import Batch, Client, Context, Local, LocalRound, Upload
from fedhelix.methods.fedavg import FedAvg
from fedhelix.options import option
from fedhelix.registry import register
from fedhelix.tree import Tree, add, masked_mean, subtract, take, zeros


@register("scaffold", paper="Karimireddy et al., ICML 2020, arXiv:1910.06378")
@dataclass(frozen=True)
class Scaffold(FedAvg):
    """Each local gradient is shifted by (server control - own control), the control being a client's mean gradient.

    Read off the round's steps (option II of the paper) it costs nothing, but with large steps the clients drive each
    other away: on digits it diverged at a learning rate of 0.1. At the received model (option I) it costs one more
    pass over the data and did not. Either way it does best with smaller steps than FedAvg's.
    """

    control: Literal["gradient", "steps"] = option("gradient", "the gradient at the received model, or over the steps")
    server_lr: float = option(1.0, "step of the server along the mean update", above=0)

    def begin(self, hellos: Mapping[int, Tree], ctx: Context) -> tuple[Tree, dict[int, Tree]]:
        """Server: its control starts at zero."""
        server, replies = super().begin(hellos, ctx)
        return {**server, "control": zeros(take(ctx.initial, ctx.units.parameters))}, replies

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: model and control, twice FedAvg's bytes."""
        return {"model": server["model"], "control": server["control"]}

    def anchor(self, payload: Tree, own: Tree, client: Client) -> Tree:
        """Client: the correction of its gradients."""
        control = payload["control"]
        return subtract(control, own.get("control") or zeros(control))

    def loss(self, params: Mapping[str, Tensor], batch: Batch, local: Local) -> Tensor:
        """Client: a linear term has the correction as its gradient."""
        return local.risk(params, batch) + sum((params[name] * value).sum() for name, value in local.anchor.items())

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: the model, and how its control changed: to its mean gradient, at the received model or on its way."""
        tree, own = super().upload(local)
        received, old = local.payload["model"], own.get("control") or zeros(local.payload["control"])
        if self.control == "gradient":
            found = list(local.client.gradients({**local.models["model"], **received}))
            control = {name: torch.stack([gradient[name] for gradient in found]).mean(0) for name in old}
        else:
            moved = subtract(take(received, old), local.models["model"])
            mean = add(zeros(moved), moved, 1 / local.client.travel(max(local.steps, 1)))
            control = add(old, subtract(mean, local.payload["control"]))
        return {**tree, "control": subtract(control, old)}, {**own, "control": control}

    def weigh(self, server: Tree, uploads: Sequence[Upload], ctx: Context) -> list[float]:
        """Server: every client counts alike."""
        return [1 / len(uploads)] * len(uploads)

    def merge(self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context) -> Tree:
        """Server: step along the mean model update, and move the control by the share of clients that took part."""
        merged = super().merge(server, uploads, weights, ctx)
        old, names = server["model"], ctx.units.parameters
        step = subtract(take(merged["model"], names), old)
        merged["model"] |= add(take(old, names), step, self.server_lr)
        # Whatever a client's model weighs, it has moved its own control, and the server's is the mean of them all.
        alike = [1 / len(uploads)] * len(uploads)
        change = masked_mean([upload.tree["control"] for upload in uploads], alike, server["control"])
        return {**merged, "control": add(server["control"], change, len(uploads) / len(ctx.present))}
