"""pFedGPA: the server learns what clients' parameters look like, and generates
each client's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedhelix.components.generative import Buffer, Layout, Recipe, receive_newcomer, slice_of
from fedhelix.core.layers import Layers
from fedhelix.core.method import Capabilities, Client, Context, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.seeds import key
from fedhelix.core.tree import Tree, drop, take
from fedhelix.methods.fedavg_ft import FedAvgFT
from fedhelix.store.progress import below


@register("pfedgpa", paper="Lai et al., AAAI 2025, arXiv:2409.05701")
@dataclass(frozen=True)
class PFedGPA(Recipe, FedAvgFT):
    """A diffusion model generates each client's parameters.

    FedAvg carries it. In the end a diffusion model learns the last uploads; each client's own is
    sent through it.
    """

    slice: str = option(
        "all", "what is generated: all, last:K for the last K layers, or names of layers"
    )
    buffer_rounds: int = option(
        20, "rounds whose uploads the generator learns from", low=1, high=1_000_000
    )

    @property
    def capabilities(self) -> Capabilities:
        """Each client's own upload is what its model is made from."""
        return replace(super().capabilities, single_uploads=True, final_work=True)

    def check(self, layers: Layers) -> None:
        """Something must be left to generate."""
        super().check(layers)
        slice_of(layers, self.slice)

    def server_init(
        self, client_inits: Mapping[int, Tree], ctx: Context
    ) -> tuple[Tree, dict[int, Tree]]:
        """Server: FedAvg's, if there will be enough uploads to learn from."""
        self.check_enough(sum(len(ctx.cohort(t)) for t in self._window(ctx)))
        return super().server_init(client_inits, ctx)

    def _window(self, ctx: Context) -> range:
        """Server: the rounds whose uploads are there in the end."""
        return range(max(0, ctx.rounds - self.buffer_rounds), ctx.rounds)

    def _layout(self, ctx: Context) -> Layout:
        """Server: the slice as a vector."""
        return Layout.of(ctx.initial, slice_of(ctx.layers, self.slice))

    def select_clients(self, server: Tree, cohort: Sequence[int], ctx: Context) -> Sequence[int]:
        """Server: in the last round also those of whom no upload is kept, and
        somebody in any case.
        """
        if ctx.round < ctx.rounds - 1:
            return cohort
        seen = (
            Buffer(**server["buffer"]).since(self._window(ctx).start).owners
            if "buffer" in server
            else []
        )
        return sorted({*cohort, *(set(ctx.present) - set(seen))}) or list(ctx.present)[:1]

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: the average, and over it what was generated for this client."""
        return {"model": {**server["model"], **server.get("personal", {}).get(str(client), {})}}

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: average, keep the uploads, and generate when it is time."""
        state, layout = super().aggregate(server, uploads, weights, ctx), self._layout(ctx)
        senders = [upload.client for upload in uploads]
        vectors = layout.flatten([server["model"], *(upload.tree["model"] for upload in uploads)])
        buffer = Buffer.of(server.get("buffer"), vectors.shape[1], ctx.device)
        buffer = buffer.add(
            vectors[1:], senders, weights, vectors[0], ctx.round, self.buffer_rounds
        )
        state |= {
            "buffer": buffer._asdict(),
            "personal": drop(server.get("personal", {}), map(str, senders)),
        }
        last = ctx.round == ctx.rounds - 1
        if last or (self.mode == "online" and ctx.round >= self.warmup):
            seed, steps = key(ctx.seed, "pfedgpa", ctx.round), None if last else self.online_steps
            made, statistics = self.serve(buffer, layout, seed, steps, below)
            ctx.metadata.update(statistics)
            state |= {**made, "personal": state["personal"] | made["personal"]}
        return state

    def onboard_client(self, payload: Tree, client: Client) -> Tree:
        """Newcomer: nothing at first, then what local training makes of the model that it got."""
        if not payload:
            return {}
        trained = client.train({**client.initial, **payload["model"]}, payload["turn"])
        return {"model": take(trained, slice_of(client.layers, self.slice))}

    def onboard_server(self, server: Tree, message: Tree, ctx: Context) -> tuple[Tree, Tree, bool]:
        """Server: guided generation in a few turns, or something simpler."""
        seed = key(ctx.seed, "newcomer", ctx.round, ctx.clients)
        return receive_newcomer(
            self, server, message, self._layout(ctx), ctx.initial, ctx.clients, seed, below
        )
