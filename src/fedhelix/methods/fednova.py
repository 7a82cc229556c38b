"""FedNova: updates are normalised by how far their clients' steps went before they are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedhelix.core.method import Context, LocalRound, Upload
from fedhelix.core.registry import register
from fedhelix.core.tree import Tree, add, masked_mean, subtract, take
from fedhelix.methods.fedavg import FedAvg


@register("fednova", paper="Wang et al., NeurIPS 2020, arXiv:2007.07481")
@dataclass(frozen=True)
class FedNova(FedAvg):
    """FedAvg, corrected for clients that take more local steps.

    FedAvg of the updates per unit of local work, so that no client counts more for taking more
    steps.

    The local work is the sum of the coefficients with which a round's gradients enter the update.
    The server steps along the mean as far as the clients went on average.
    """

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: its model, and how far its steps went."""
        tree, client_state = super().upload(local)
        work = local.client.travel(max(local.steps, 1))
        return {**tree, "work": torch.tensor(work)}, client_state

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: a step along the mean update per work, as long as the mean work; buffers are
        averaged plainly.
        """
        state = super().aggregate(server, uploads, weights, ctx)
        counted = [(upload.tree, w) for upload, w in zip(uploads, weights, strict=True) if w > 0]
        if not counted:
            return state
        total = sum(w for _, w in counted)
        mean_work = sum(w * float(tree["work"]) for tree, w in counted) / total
        per_work = [w / float(tree["work"]) for tree, w in counted]
        old = take(server["model"], ctx.layers.parameters)
        moved = subtract(masked_mean([tree["model"] for tree, _ in counted], per_work, old), old)
        state["model"] |= add(old, moved, mean_work * sum(per_work) / total)
        return state
