"""FedDyn: a dynamic regulariser makes the local optima agree with the global one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fedhelix.core.method import Batch, Client, Context, Local, LocalRound, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import Tree, add, masked_mean, subtract, take, zeros
from fedhelix.methods.fedavg import FedAvg


@register("feddyn", paper="Acar et al., ICLR 2021, arXiv:2111.04263")
@dataclass(frozen=True)
class FedDyn(FedAvg):
    """FedAvg with a dynamic penalty against client drift.

    Each client minimises F(w) - <dual, w> + alpha/2 |w - received|², where the dual is the gradient
    of F at the model that it trained last.

    The server keeps the mean of all duals as `h` and corrects the mean of the models by it. Nothing
    but models travels.
    """

    alpha: float = option(0.03, "strength of the dynamic regulariser", above=0)

    def server_init(
        self, client_inits: Mapping[int, Tree], ctx: Context
    ) -> tuple[Tree, dict[int, Tree]]:
        """Server: h starts at zero."""
        server, replies = super().server_init(client_inits, ctx)
        return {**server, "h": zeros(take(ctx.initial, ctx.layers.parameters))}, replies

    def loss_context(self, payload: Tree, client_state: Tree, client: Client) -> Tree:
        """Client: the received parameters, and its dual, which starts at zero."""
        received = take(payload["model"], client.layers.parameters)
        return {"received": received, "dual": client_state.get("dual") or zeros(received)}

    def loss(self, params: Mapping[str, Tensor], batch: Batch, local: Local) -> Tensor:
        """Client: a linear term, which takes the last gradient off, and a quadratic one."""
        loss, dual = local.base_loss(params, batch), local.context["dual"]
        for name, received in local.context["received"].items():
            quadratic = (params[name] - received).square().sum()
            loss = loss - (dual[name] * params[name]).sum() + self.alpha / 2 * quadratic
        return loss

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: the model leaves; the dual becomes the gradient at it, by the condition of an
        optimum.
        """
        tree, client_state = super().upload(local)
        received, dual = local.context["received"], local.context["dual"]
        moved = subtract(take(local.models["model"], received), received)
        return tree, {**client_state, "dual": add(dual, moved, -self.alpha)}

    def weights(self, server: Tree, uploads: Sequence[Upload], ctx: Context) -> list[float]:
        """Server: every client counts the same."""
        return [1 / len(uploads)] * len(uploads)

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: h moves by the share of clients that took part, the mean model by -h / alpha."""
        mean = super().aggregate(server, uploads, weights, ctx)["model"]
        old = take(server["model"], ctx.layers.parameters)
        # Whatever the weight of its model, a client has changed its dual, and h is the mean of all.
        models, equal = [upload.tree["model"] for upload in uploads], [1.0] * len(uploads)
        moved = subtract(masked_mean(models, equal, old), old)
        h = add(server["h"], moved, -self.alpha * len(uploads) / len(ctx.present))
        return {**server, "model": {**mean, **add(take(mean, old), h, -1 / self.alpha)}, "h": h}
