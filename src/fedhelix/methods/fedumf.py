"""FedUmf: clients that wait train too, and bring what they learnt when their turn comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedhelix.core.method import Client, Context, LocalRound
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree, add, subtract, take
from fedhelix.methods.fedavg import FedAvg


@register("fedumf", paper="FedUmf, Mathematics 10(20), 3751, 2022")
@dataclass(frozen=True)
class FedUmf(FedAvg):
    """Idle clients pre-train and start from what they learnt.

    An unsampled client trains and stores its update; sampled next, it starts from the new model
    plus that update.

    Only those who will be sampled next are simulated: what the others store is never used. What the
    model weighs that they would get all the same is counted.
    """

    mu: float = option(1.0, "factor on the stored update", low=0)

    def select_clients(self, server: Tree, cohort: Sequence[int], ctx: Context) -> Sequence[int]:
        """Server: the cohort, and the next one, which trains in advance."""
        soon = ctx.cohort(ctx.round + 1) if ctx.round + 1 < ctx.rounds else ()
        workers = {*cohort, *(set(soon) & set(ctx.present))}
        unseen = 4 * sum(ctx.layers.sizes.values()) * (len(ctx.present) - len(workers))
        ctx.metadata["other_bytes"] = (
            ctx.metadata.get("other_bytes", 0) + unseen
        )  # in clusters: of all of them
        return sorted(workers)

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: the model, and whether an upload is wanted."""
        wanted = client in ctx.cohort(ctx.round)
        return {
            **super().download(server, client, ctx),
            "role": {"sampled": torch.tensor(float(wanted))},
        }

    def start(self, payload: Tree, client_state: Tree, client: Client) -> dict[str, State]:
        """Client: the received model, plus the update that it stored in the last round, if it is
        sampled now.
        """
        received = super().start(payload, {}, client)["model"]
        if not bool(payload["role"]["sampled"]) or client_state.get("round") != client.round - 1:
            return {"model": received, "received": received}
        ahead = add(take(received, client_state["update"]), client_state["update"], self.mu)
        return {"model": {**received, **ahead}, "received": received}

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: the model if it is sampled, otherwise nothing, and then it keeps its update."""
        if bool(local.payload["role"]["sampled"]):
            return super().upload(local)[0], {}
        names = local.layers.parameters
        update = subtract(take(local.models["model"], names), local.models["received"])
        return {}, {"update": update, "round": local.client.round}

    def personal(self, models: dict[str, State]) -> str:
        """Client: the global model."""
        return "received"
