"""Ditto: beside the global model every client trains a personal one that stays near it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fedhelix.core.method import Batch, Client, Local, LocalRound, Phase
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree
from fedhelix.methods.fedprox import FedProx


@register("ditto", paper="Li et al., ICML 2021, arXiv:2012.04221")
@dataclass(frozen=True)
class Ditto(FedProx):
    """A personal model beside the global one, held near it.

    FedAvg for the global model; a personal model that minimises the local risk plus mu/2 times its
    distance.
    """

    mu: float = option(
        0.1, "strength of the pull of the personal model towards the global one", low=0
    )
    personal_epochs: int | None = option(
        None, "epochs of the personal model; auto: as many as in a round", low=0
    )

    def start(self, payload: Tree, client_state: Tree, client: Client) -> dict[str, State]:
        """Client: two models."""
        model = super().start(payload, {}, client)["model"]
        return {"model": model, "personal": client_state.get("personal", model)}

    def phases(self, client: Client) -> Sequence[Phase]:
        """Client: first the global model, then the personal one."""
        return Phase(), Phase(epochs=self.personal_epochs, model="personal")

    def loss(self, params: Mapping[str, Tensor], batch: Batch, local: Local) -> Tensor:
        """Client: only the personal model is pulled towards the global one."""
        if local.phase.model == "personal":
            return super().loss(params, batch, local)
        return local.base_loss(params, batch)

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: the global model leaves, the personal one stays."""
        return super().upload(local)[0], {"personal": local.models["personal"]}

    def personal(self, models: dict[str, State]) -> str:
        """Client: its own."""
        return "personal"
