"""FedAvgM: the server goes on a little in the direction of its last steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhelix.core.method import Context, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree, add, subtract, take, wide, zeros
from fedhelix.methods.fedavg import FedAvg

SLOW = 9  # rounds after which newcomers may have a momentum of one half


@register("fedavgm", paper="Hsu et al., 2019, arXiv:1909.06335")
@dataclass(frozen=True)
class FedAvgM(FedAvg):
    """FedAvg with momentum on the server.

    FedAvg with momentum on the server: what clients have in common adds up, what sets them apart
    averages out.
    """

    server_momentum: float = option(
        0.5, "how much of its last step the server goes on with", low=0, below=1
    )
    adaptive: bool = option(
        False, "times the share of absent clients, or how well steps agree if that is more"
    )

    def server_init(
        self, client_inits: Mapping[int, Tree], ctx: Context
    ) -> tuple[Tree, dict[int, Tree]]:
        """Server: it stands still."""
        server, replies = super().server_init(client_inits, ctx)
        return {**server, "step": zeros(take(server["model"], ctx.layers.parameters))}, replies

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: the mean update and a share of the last step; BatchNorm statistics are plainly
        averaged.
        """
        state = super().aggregate(server, uploads, weights, ctx)
        update = subtract(take(state["model"], server["step"]), server["model"])
        step = add(update, server["step"], self._momentum(update, server, uploads, ctx))
        return {
            **state,
            "model": {**state["model"], **add(take(server["model"], step), step)},
            "step": step,
            **({"update": update} if self.adaptive else {}),
        }

    def _momentum(
        self, update: State, server: Tree, uploads: Sequence[Upload], ctx: Context
    ) -> float | Tensor:
        """Server: its momentum in this round.

        The last steps stand in for clients that are absent. Where all take part, they are worth
        following only as far as new updates point the same way: the square of the cosine is the
        share of their length that does. Two updates are taken together, because what a code of few
        bits loses in one round comes in the next. So it is where uploads come late: old updates
        repeat the last steps by themselves.

        Newcomers' first updates go far and in new directions, so their momentum grows slowly.
        """
        if not self.adaptive:
            return self.server_momentum
        late = any(upload.staleness for upload in uploads)
        absent = 0.0 if late else 1 - len(uploads) / max(len(uploads), len(ctx.present))
        two = add(update, server["update"]) if "update" in server else update
        new, last = (
            torch.cat([wide(tree[name]).flatten() for name in update])
            for tree in (two, server["step"])
        )
        cosine = F.cosine_similarity(new, last, dim=0).clamp(0.0, 1.0)
        age = ctx.round - ctx.since
        most = min(self.server_momentum, age / (age + SLOW)) if ctx.since else self.server_momentum
        return most * cosine.square().clamp(min=absent)
