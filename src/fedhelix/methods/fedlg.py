"""FedLG: the original learnGene in a federation: a few stable layers are shared and inherited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from fedhelix.core.layers import Layers
from fedhelix.core.method import Context, LocalRound, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import Tree, masked_mean, take
from fedhelix.methods.fedavg import FedAvg

FLAT = 5e-10  # a gradient entry below this counts as no gradient


@register("fedlg", paper="Wang et al., AAAI 2022, with the fixed set of GENE-FL, arXiv:2504.14628")
@dataclass(frozen=True)
class FedLG(FedAvg):
    """Shares three convolutions, chosen by place or by gradient.

    Shares the first convolution of the second stage and the last two, or the three with the
    stillest gradients.
    """

    select: Literal["fixed", "gradient"] = option(
        "fixed", "a fixed set, or the layers whose gradients are stillest"
    )
    layers: int = option(3, "how many layers the gradient rule keeps", low=1)

    def shared_params(self, layers: Layers) -> Sequence[str]:
        """The fixed set (in ResNet-18: layer2.0.conv1, layer4.1.conv1, layer4.1.conv2), or whatever
        may be chosen.
        """
        if self.select == "gradient":
            return [name for layer in layers.convs for name in layer.entries]
        second = layers.stages[:2][-1:]
        chosen = {
            layer.name: layer for layer in (*(stage[0] for stage in second), *layers.convs[-2:])
        }
        return [name for layer in chosen.values() for name in layer.entries]

    def server_init(
        self, client_inits: Mapping[int, Tree], ctx: Context
    ) -> tuple[Tree, dict[int, Tree]]:
        """Server: before the first gradients are known, the last layers are chosen."""
        server, replies = super().server_init(client_inits, ctx)
        if self.select == "gradient":
            server["moving"] = torch.arange(len(ctx.layers.convs), 0, -1, dtype=torch.float32)
        return server, replies

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: the chosen layers."""
        if self.select == "fixed":
            return super().download(server, client, ctx)
        stillest = server["moving"].argsort(stable=True)[: self.layers].tolist()
        return {
            "model": take(
                server["model"], [name for at in stillest for name in ctx.layers.convs[at].entries]
            )
        }

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: the layers that it received, and how much of each convolution's
        gradient moves.
        """
        if self.select == "fixed":
            return super().upload(local)
        model, received = local.models["model"], local.payload["model"]
        shares = [
            torch.stack(
                [
                    (grad[layer.entries[0]].abs() > FLAT).float().mean()
                    for layer in local.layers.convs
                ]
            )
            for grad in local.client.gradients(model)
        ]
        moving = {"moving": torch.stack(shares).mean(0).cpu()} if shares else {}
        # The next round may bring other layers, so all of them are kept.
        return {"model": take(model, received), **moving}, {**local.client_state, "model": model}

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: average the layers, and with the gradient rule the shares as well."""
        state = super().aggregate(server, uploads, weights, ctx)
        if self.select == "gradient":
            state |= masked_mean(
                [upload.tree for upload in uploads], weights, take(server, ["moving"])
            )
        return state
