"""pFedMe: clients train personal models near the global one, which moves towards them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedhelix.core.method import Client, Context, LocalRound, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree, add, subtract, take
from fedhelix.methods.fedprox import FedProx


@register("pfedme", paper="T. Dinh et al., NeurIPS 2020, arXiv:2006.08848")
@dataclass(frozen=True)
class PFedMe(FedProx):
    """Personal models near the global one, by Moreau envelopes.

    Moreau envelopes: at a client the loss of the global model w is that of the best personal model
    theta near it, F(theta) + mu/2 |theta - w|².

    Its gradient is mu (w - theta), so a client sends w moved towards its theta, which stays. The
    paper's R is 1 here, and a round's local training is the search for theta.
    """

    mu: float = option(0.1, "lambda: pull of the personal model towards the global one", above=0)
    step: float = option(
        1.0, "how far a client moves the global model towards its own", above=0, high=1
    )
    beta: float = option(1.0, "step of the server towards the mean of the uploads", above=0)

    def start(self, payload: Tree, client_state: Tree, client: Client) -> dict[str, State]:
        """Client: its last personal model; at first, the received one."""
        received = super().start(payload, {}, client)["model"]
        return {"model": client_state.get("trained", received)}

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: the received model after a step towards the personal one, which stays."""
        model, received = local.models["model"], local.context
        moved = add(received, subtract(take(model, received), received), self.step)
        return {"model": {**model, **moved}}, {"trained": model}

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: a step towards the mean."""
        state = super().aggregate(server, uploads, weights, ctx)
        old = take(server["model"], ctx.layers.parameters)
        moved = subtract(take(state["model"], old), old)
        return {**state, "model": {**state["model"], **add(old, moved, self.beta)}}
