"""FFA-LoRA: A stays as it was drawn, and only B is trained and sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedhelix.core.layers import Layers
from fedhelix.core.method import Client, Context, LocalRound, Phase
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree
from fedhelix.methods.fedit import FedIT


@register("ffa-lora", paper="Sun et al., ICLR 2024, arXiv:2403.12313")
@dataclass(frozen=True)
class FFALoRA(FedIT):
    """LoRA with a fixed A: only B is trained and averaged.

    With the same A for all, the mean of the products B A is the product of the mean of B.
    """

    def shared_params(self, layers: Layers) -> Sequence[str]:
        """All but A, which everybody can make from the seed."""
        return layers.without(adapter.a for adapter in layers.adapters)

    def phases(self, client: Client) -> Sequence[Phase]:
        """Client: A does not train."""
        return (Phase(frozen=tuple(adapter.a for adapter in client.layers.adapters)),)

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: it keeps nothing."""
        return super().upload(local)[0], local.client_state

    def model(self, server: Tree, ctx: Context) -> State | None:
        """Server: what was trained, with the initial A."""
        return {**ctx.initial, **server["model"]}
