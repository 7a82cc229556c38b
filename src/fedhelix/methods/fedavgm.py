"""FedAvgM: the server goes on a little in the direction of its last steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedhelix.core.method import Context, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import Tree, add, subtract, take, zeros
from fedhelix.methods.fedavg import FedAvg


@register("fedavgm", paper="Hsu et al., 2019, arXiv:1909.06335")
@dataclass(frozen=True)
class FedAvgM(FedAvg):
    """FedAvg with momentum on the server: what clients have in common adds up, what sets them apart
    averages out.
    """

    server_momentum: float = option(
        0.5, "how much of its last step the server goes on with", low=0, below=1
    )
    for_absent: bool = option(
        False, "times the share of clients that are absent: none if all of them take part"
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
        absent = 1 - len(uploads) / len(ctx.present) if self.for_absent else 1.0
        step = add(update, server["step"], absent * self.server_momentum)
        return {
            **state,
            "model": {**state["model"], **add(take(server["model"], step), step)},
            "step": step,
        }
