"""pFedHN: a hypernetwork on the server makes every client's model out of an embedding of that
client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedhelix.components.generative import Hyper, Layout
from fedhelix.core.method import Capabilities, Client, Context, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree, take
from fedhelix.methods.fedavg import FedAvg

HYPER = ("weights", "velocity")  # what the server keeps of the hypernetwork


@register("pfedhn", paper="Shamsian et al., ICML 2021, arXiv:2103.04628")
@dataclass(frozen=True)
class PFedHN(Hyper, FedAvg):
    """A hypernetwork generates each client's model.

    What local training changes in a client's model is the gradient of hypernetwork and embedding.
    """

    newcomer_turns: int = option(
        20, "steps in which a newcomer's embedding is learnt, nothing else changing", low=0
    )

    @property
    def capabilities(self) -> Capabilities:
        """The server has a hypernetwork instead of a model."""
        return replace(super().capabilities, central_model=False)

    def server_init(
        self, client_inits: Mapping[int, Tree], ctx: Context
    ) -> tuple[Tree, dict[int, Tree]]:
        """Server: a random hypernetwork; buffers, which it does not make, are averaged."""
        hyper = self.first(ctx.clients, self._layout(ctx), ctx.seed, ctx.device)
        return {"model": take(ctx.initial, ctx.layers.buffers), **hyper}, {}

    def _layout(self, ctx: Context) -> Layout:
        """Server: the trainable entries as one vector."""
        return Layout.of(ctx.initial, ctx.layers.parameters)

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: this client's model; the hypernetwork never leaves."""
        layout = self._layout(ctx)
        made = layout.unflatten(self.model_of(server["weights"], client, layout))
        return {"model": {name: (made | server["model"])[name] for name in ctx.layers.names}}

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: one step for each client that counts, in their order, against what it had been
        sent.
        """
        state, layout = super().aggregate(server, uploads, weights, ctx), self._layout(ctx)
        hyper = take(server, HYPER)
        chosen = [upload for upload, weight in zip(uploads, weights, strict=True) if weight > 0]
        for upload in chosen:
            sent = self.model_of(server["weights"], upload.client, layout)
            moved = sent - layout.flatten([upload.tree["model"]])[0]
            hyper = self.step(hyper, upload.client, moved, layout, share=1 / len(chosen))
        return {**state, **hyper}

    def model(self, server: Tree, ctx: Context) -> State | None:
        """Server: there is no model for all."""
        return None

    def onboard_client(self, payload: Tree, client: Client) -> Tree:
        """Newcomer: nothing at first, then what local training makes of the model that it got."""
        if not payload:
            return {}
        return {"model": client.train({**client.initial, **payload["model"]}, payload["turn"])}

    def onboard_server(self, server: Tree, message: Tree, ctx: Context) -> tuple[Tree, Tree, bool]:
        """Server: a new embedding, which alone learns from the newcomer's training."""
        layout, turn = self._layout(ctx), server.get("turn", 0)
        if not turn:
            server = {**server, **self.join(take(server, HYPER), ctx.clients + 1)}
        if "model" in message and layout.accepts(message["model"], "the newcomer's model"):
            moved = (
                self.model_of(server["weights"], ctx.clients, layout)
                - layout.flatten([message["model"]])[0]
            )
            server = {
                **server,
                **self.step(take(server, HYPER), ctx.clients, moved, layout, frozen=True),
            }
        done = turn == self.newcomer_turns
        payload = {**self.download(server, ctx.clients, ctx), "turn": turn + 1}
        return {**server, "turn": 0 if done else turn + 1}, payload, done
