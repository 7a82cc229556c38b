"""pFedGPA: the server learns what clients' parameters look like, and generates each client's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedhelix.errors import BadInput
from fedhelix.generative import FEWEST, Buffer, Layout, Recipe, findings, slice_of
from fedhelix.method import Context, Upload
from fedhelix.methods.fedavg_ft import FedAvgFT
from fedhelix.options import option
from fedhelix.registry import register
from fedhelix.seeds import key
from fedhelix.tree import Tree
from fedhelix.units import Units


@register("pfedgpa", paper="Lai et al., AAAI 2025, arXiv:2409.05701")
@dataclass(frozen=True)
class PFedGPA(Recipe, FedAvgFT):
    """FedAvg carries it. In the end a diffusion model learns the last uploads; each client's own is sent through it."""

    mode: Literal["experiment", "online"] = option("experiment", "generate once, in the last round, or in every round")
    slice: str = option("all", "what is generated: all, last:K for the last K layers, or names of layers")
    buffer_rounds: int = option(20, "rounds whose uploads the generator learns from", low=1)
    warmup: int = option(5, "rounds of plain FedAvg before the online mode generates", low=0)
    online_steps: int = option(300, "training steps of each network in a round of the online mode", low=1)

    def check(self, units: Units) -> None:
        """Something must be left to generate."""
        super().check(units)
        slice_of(units, self.slice)

    def begin(self, hellos: Mapping[int, Tree], ctx: Context) -> tuple[Tree, dict[int, Tree]]:
        """Server: FedAvg's, if there will be enough uploads to learn from."""
        rounds = range(max(0, ctx.rounds - self.buffer_rounds), ctx.rounds)
        expected = sum(len(ctx.cohort(t)) for t in rounds)
        if self.learns and expected < FEWEST:
            raise BadInput(
                f"pfedgpa would fit its generator to {expected} uploads, but it needs at least {FEWEST}; "
                "use more rounds, a larger cohort or a larger buffer_rounds."
            )
        return super().begin(hellos, ctx)

    def layout(self, ctx: Context) -> Layout:
        """Server: the slice as a vector."""
        return Layout.of(ctx.initial, slice_of(ctx.units, self.slice))

    def workers(self, cohort: Sequence[int], ctx: Context) -> Sequence[int]:
        """Server: in the last round also those who were not sampled while uploads were kept."""
        if ctx.round < ctx.rounds - 1:
            return cohort
        seen = {client for t in range(max(0, ctx.rounds - self.buffer_rounds), ctx.rounds) for client in ctx.cohort(t)}
        return sorted({*cohort, *(set(range(ctx.clients)) - seen)})

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: the average, and over it what was generated for this client."""
        return {"model": {**server["model"], **server.get("personal", {}).get(str(client), {})}}

    def merge(self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context) -> Tree:
        """Server: average, keep the uploads, and generate when it is time."""
        merged, layout = super().merge(server, uploads, weights, ctx), self.layout(ctx)
        buffer = Buffer.of(server.get("buffer"), sum(layout.sizes), ctx.device).add(
            layout.flatten([upload.tree["model"] for upload in uploads]),
            [upload.client for upload in uploads],
            layout.flatten([server["model"]])[0],
            ctx.round,
            self.buffer_rounds,
        )
        last = ctx.round == ctx.rounds - 1
        if last or (self.mode == "online" and ctx.round >= self.warmup):
            merged |= self.generated(buffer, layout, ctx, None if last else self.online_steps)
        return {**merged, "buffer": buffer._asdict()}

    def generated(self, buffer: Buffer, layout: Layout, ctx: Context, steps: int | None) -> Tree:
        """Server: a generator that has learnt the uploads, and what it makes of each client's own."""
        seed, (known, base) = key(ctx.seed, "pfedgpa", ctx.round), self.material(buffer)
        generator = self.fit(known, layout.sizes, seed, steps)
        made = self.vectors(known, generator, seed)
        ctx.notes.update(findings(known, made, generator))
        rows = zip(buffer.owners, base + made, strict=True)
        personal = {str(owner): layout.unflatten(row) for owner, row in rows}
        return {"personal": personal, **({"generator": generator.tree()} if generator else {})}
