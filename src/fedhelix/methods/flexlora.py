"""FlexLoRA: clients with adapters of different ranks; the server averages the products B A.

A client of rank r has zeros in all further rows of A and columns of B. These get no gradient, since
each of them is a factor of the other's, so its adapter keeps its rank; they are not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedhelix.components.subnetworks import Places, cut, filled
from fedhelix.core.errors import UserError
from fedhelix.core.layers import Adapter, Layers
from fedhelix.core.method import Capabilities, Client, Context, LocalRound, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree
from fedhelix.methods.fedit import FedIT


@register("flexlora", paper="Bai et al., NeurIPS 2024, arXiv:2402.11505")
@dataclass(frozen=True)
class FlexLoRA(FedIT):
    """LoRA with a rank of its own for each client.

    The mean of B A, cut by a singular value decomposition to the rank of each client.
    """

    ranks: str | None = option(
        None, "ranks of the clients in turn, such as 1/2/4; auto: the network's"
    )

    @property
    def capabilities(self) -> Capabilities:
        """With ranks, what travels has other shapes than the model."""
        cut = self.ranks is not None
        return replace(super().capabilities, packed_uploads=cut, packed_downloads=cut)

    def check(self, layers: Layers) -> None:
        """Refuse ranks that are none, or that the network does not have."""
        super().check(layers)
        most = min(adapter.rank for adapter in layers.adapters)
        for rank in [] if self.ranks is None else self.ranks.split("/"):
            if not rank.isdigit() or not 1 <= int(rank) <= most:
                raise UserError(
                    f"ranks of flexlora are whole numbers from 1 to {most}, the rank of the "
                    f"model's adapters, such as 1/{most}, not '{self.ranks}'."
                )

    def _places(self, layers: Layers, client: int) -> Places:
        """The places of a client's adapters."""
        if self.ranks is None:
            return {}
        ranks = self.ranks.split("/")
        return ranked(layers, lambda _: int(ranks[client % len(ranks)]))

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: as much of every adapter as the client can hold."""
        return {"model": cut(server["model"], self._places(ctx.layers, client))}

    def start(self, payload: Tree, client_state: Tree, client: Client) -> dict[str, State]:
        """Client: zeros fill what was cut off."""
        model = filled(payload["model"], received(client.layers, payload), client.initial)
        return super().start({**payload, "model": model}, client_state, client)

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: as much as it received."""
        sent, kept = super().upload(local)
        return {"model": cut(sent["model"], received(local.layers, local.payload))}, kept

    def decode(self, upload: Tree, payload: Tree, ctx: Context) -> Tree:
        """Server: zeros fill what was cut off."""
        inside = received(ctx.layers, payload)
        return {**upload, "model": filled(upload["model"], inside, ctx.initial)}

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: the best adapters of the network's rank for the mean of the products."""
        after = super().aggregate(server, uploads, weights, ctx)
        merged, total = dict(after["model"]), sum(weights)
        for adapter in ctx.layers.adapters:
            models = [upload.tree["model"] for upload in uploads]
            left = [
                model[adapter.b] * (weight / total)
                for model, weight in zip(models, weights, strict=True)
            ]
            right = [model[adapter.a] for model in models]
            merged[adapter.a], merged[adapter.b] = factors(
                torch.cat(left, 1), torch.cat(right), adapter.rank
            )
        return {**after, "model": merged}


def factors(left: Tensor, right: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A (rank x inputs, orthonormal rows) and B with the product nearest to left @ right."""
    rows, inner = torch.linalg.qr(left.float())
    columns, outer = torch.linalg.qr(right.float().T)
    u, s, v = torch.linalg.svd(inner @ outer.T, full_matrices=False)
    a, b = (columns @ v.T).T[:rank], (rows @ (u * s))[:, :rank]
    # A decomposition is unique up to signs: the largest value of every row of A is positive.
    sign = a.gather(1, a.abs().argmax(1, keepdim=True)).sign()
    return (a * sign).to(right.dtype), (b * sign.T).to(left.dtype)


def ranked(layers: Layers, rank: Callable[[Adapter], int]) -> Places:
    """The places of adapters with other ranks."""
    places: dict[str, tuple[Tensor, ...]] = {}
    for adapter in layers.adapters:
        outputs, inner = torch.arange(layers.shapes[adapter.b][0]), torch.arange(rank(adapter))
        places |= {adapter.a: (inner,), adapter.b: (outputs, inner)}
    return places


def received(layers: Layers, payload: Tree) -> Places:
    """The places of the adapters that a client received."""
    return ranked(layers, lambda adapter: len(payload["model"][adapter.a]))
