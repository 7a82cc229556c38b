"""Ancestors: the model that is used is a moving mean of the server's last models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedhelix.core.method import Context, Method, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree, masked_mean
from fedhelix.core.wrapper import Wrapper
from fedhelix.methods.fedavg import FedAvg

# Polynomial-decay averaging: weights grow with the (EARLY - 1)-th power of the round.
EARLY = 9


@register("ancestors", paper="after Polyak and Juditsky, 1992")
@dataclass(frozen=True)
class Ancestors(Wrapper):
    """Clients use a moving mean of the server's models.

    Clients train the server's last model, but use a mean of it and its ancestors.
    """

    inner: Method = option(FedAvg(), "the method whose models are averaged over rounds")
    kept: float = option(0.8, "how much of the mean stays after a round", low=0, below=1)

    def server_init(
        self, client_inits: Mapping[int, Tree], ctx: Context
    ) -> tuple[Tree, dict[int, Tree]]:
        """Server: the first model is its own mean."""
        server, replies = super().server_init(client_inits, ctx)
        return {**server, "ancestors": server["model"]}, replies

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: the new model joins the mean, which grows longer from round to round.

        When newcomers take over, a new mean begins: earlier models do not know what they have.
        """
        state = super().aggregate(server, uploads, weights, ctx)
        age = ctx.round - ctx.since
        kept = min(self.kept, age / (age + EARLY))
        models = [server["ancestors"], state["model"]]
        return {**state, "ancestors": masked_mean(models, [kept, 1 - kept], state["model"])}

    def model(self, server: Tree, ctx: Context) -> State | None:
        """Server: the mean."""
        return super().model({**server, "model": server["ancestors"]}, ctx)

    def deliver(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: the mean, where the inner method would give its model."""
        return super().deliver({**server, "model": server["ancestors"]}, client, ctx)
