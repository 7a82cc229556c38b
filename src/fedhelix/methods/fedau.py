"""FedAU: who takes part rarely counts more, by how long it was away before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from fedhelix.core.method import Context, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import Tree
from fedhelix.methods.fedavg import FedAvg


@register("fedau", paper="Wang and Ji, ICLR 2024, arXiv:2306.03401")
@dataclass(frozen=True)
class FedAU(FedAvg):
    """Weights clients by how rarely they take part.

    Weights updates by the mean interval between a client's participations, which estimates one over
    its rate.
    """

    cutoff: int | None = option(50, "intervals are cut at so many rounds (auto: never)", low=1)
    global_lr: float = option(
        1.0, "step of the server along the weighted sum of the updates", above=0
    )
    count: Literal["sampled", "selected"] = option(
        "sampled", "who took part: all that sent, or only the chosen"
    )

    def server_init(
        self, client_inits: Mapping[int, Tree], ctx: Context
    ) -> tuple[Tree, dict[int, Tree]]:
        """Server: nobody has completed an interval yet."""
        server, replies = super().server_init(client_inits, ctx)
        nothing = torch.zeros(ctx.clients, dtype=torch.int64)
        return {**server, "missed": nothing, "intervals": nothing, "total": nothing}, replies

    def onboard_server(self, server: Tree, message: Tree, ctx: Context) -> tuple[Tree, Tree, bool]:
        """Server: one more client to keep count of."""
        # A cluster counts only its own members, so more than one may be new to it.
        new = ctx.clients + 1 - len(server["missed"])
        counted = {key: F.pad(server[key], (0, new)) for key in ("missed", "intervals", "total")}
        return super().onboard_server({**server, **counted}, message, ctx)

    def weights(self, server: Tree, uploads: Sequence[Upload], ctx: Context) -> list[float]:
        """Server: the mean of a client's completed intervals (1 before the first), over how many
        could have come.
        """
        means = torch.where(
            server["intervals"] > 0, server["total"] / server["intervals"].clamp(min=1), 1.0
        )
        return [float(means[upload.client]) / len(ctx.present) for upload in uploads]

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: one step along the weighted sum, which need not be a mean; buffers are averaged
        plainly.
        """
        state = super().aggregate(server, uploads, weights, ctx)
        for name in ctx.layers.parameters:
            old = server["model"][name]
            moved = sum(
                w * (upload.tree["model"][name] - old)
                for w, upload in zip(weights, uploads, strict=True)
            )
            state["model"][name] = old + self.global_lr * moved
        kept = [self.count == "sampled" or weight > 0 for weight in weights]
        here = torch.zeros(len(server["missed"]), dtype=torch.bool)
        here[[upload.client for upload, keep in zip(uploads, kept, strict=True) if keep]] = True
        gap = server["missed"].cpu() + 1
        full = here if self.cutoff is None else here | (gap >= self.cutoff)
        return {
            **state,
            "missed": torch.where(full, 0, gap),
            "intervals": server["intervals"].cpu() + full,
            "total": server["total"].cpu() + torch.where(full, gap, 0),
        }
