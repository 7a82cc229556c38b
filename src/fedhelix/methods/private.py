"""Private: differential privacy of clients. Updates are clipped, and their sum gets noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedhelix.components.accounting import Accounting
from fedhelix.components.clipping import clipped, flat_update, moved, next_clip
from fedhelix.core.errors import UserError
from fedhelix.core.layers import Layers
from fedhelix.core.method import Capabilities, Context, LocalRound, Method, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree, take
from fedhelix.core.wrapper import beyond_a_sum, refuse_more, rounded, without_noise
from fedhelix.methods.budget import NOISE_ADVICE, Budgeted
from fedhelix.methods.fedavg import FedAvg

COUNT_NOISE = 10.0  # on the count of short updates, in that on their sum


@register("private", paper="McMahan et al., ICLR 2018, arXiv:1710.06963")
@dataclass(frozen=True)
class Private(Budgeted):
    """Differential privacy of clients: clips updates, adds noise.

    Clips every update and adds Gaussian noise to their sum, within a privacy budget.
    """

    books = "privacy"
    level = "client"

    inner: Method = option(FedAvg(), "the method that aggregates the noisy mean")
    epsilon: float = option(8.0, "privacy budget of every client", above=0, high=1e6)
    clip: float = option(1.0, "longest update of a client; with quantile, at first", above=0)
    quantile: float | None = option(
        None, "adaptive clipping: share of updates shorter than the clip", above=0, below=1
    )
    noise_by: Literal["server", "clients"] = option(
        "server", "who adds noise: the server, or every client its share"
    )
    cohorts: Literal["public", "secret"] = option(
        "public", "whether who took part is known; secret cohorts need less noise"
    )

    @property
    def capabilities(self) -> Capabilities:
        """Nobody outside may look at single uploads."""
        whole = self.inner.capabilities.complete_uploads
        helps = NOISE_ADVICE.format("a smaller clip")
        return replace(
            super().capabilities, complete_uploads=whole, outermost=True, if_loss_rises=helps
        )

    def check_inner(self, layers: Layers | None = None) -> None:
        """Refuse methods that would tell more of a client than the noisy sum of updates."""
        why = beyond_a_sum(self.inner, layers) or without_noise(self.inner, layers)
        if self.noise_by == "clients":
            why = why or rounded(layers)
        if why is not None:
            raise UserError(f"private cannot protect clients of {self.inner.label}: {why}.")
        super().check_inner(layers)

    # What the server does before training -------------------------------------------------------

    def server_init(
        self, client_inits: Mapping[int, Tree], ctx: Context
    ) -> tuple[Tree, dict[int, Tree]]:
        """Server: as the inner method; the noise is found, and every client's ledger is empty."""
        server, replies = self.inner.server_init(client_inits, ctx)
        clip = torch.tensor(self.clip, device=ctx.device)
        return {**server, "privacy": {**self._opened_books(ctx), "clip": clip}}, replies

    def candidates(self, server: Tree, ctx: Context) -> Sequence[int]:
        """Server: whoever has enough left of its budget; secret cohorts are drawn from all, since
        fewer to draw from would raise the rates that are accounted for.
        """
        return ctx.present if self.cohorts == "secret" else super().candidates(server, ctx)

    def select_clients(self, server: Tree, cohort: Sequence[int], ctx: Context) -> Sequence[int]:
        """Server: whoever has enough left of its budget; the record has the clip."""
        ctx.metadata["clip"] = server["privacy"]["clip"]
        return super().select_clients(server, cohort, ctx)

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: as the inner method, with the clip and a client's share of the noise."""
        privacy = server["privacy"]
        ledger, rate = self._ledger(privacy, ctx), self._rate(client, ctx)
        spent = {
            name: torch.tensor(ledger.epsilon_after(client, rate, rounds), device=ctx.device)
            for name, rounds in (("epsilon", 1), ("next", 2))
        }
        spent["rounds"] = torch.tensor(sum(ledger.after(client, rate).values()), device=ctx.device)
        payload = self.inner.download(server, client, ctx)
        return {**payload, "privacy": self._rule(privacy, ctx), "spent": spent}

    def deliver(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: as the inner method, with clip and noise: a site that does not train with them
        sends no scores either.
        """
        payload = self.inner.deliver(server, client, ctx)
        return {**payload, "privacy": self._rule(server["privacy"], ctx)}

    def _rule(self, privacy: Tree, ctx: Context) -> Tree:
        share = privacy["noise"] / ctx.sampling.size**0.5
        return {"share": torch.tensor(share, device=ctx.device), "clip": privacy["clip"]}

    # What a client does -------------------------------------------------------------------------

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: its clipped update, perhaps with noise; the inner method may send nothing
        else.
        """
        tree, kept = self.inner.upload(local)
        refuse_more(self, tree, {"model"}, "protect")
        if not tree:
            return tree, kept
        clip, share = (local.payload["privacy"][name] for name in ("clip", "share"))
        origin = {**local.client.initial, **local.payload.get("model", {})}
        origin = take(origin, self.shared_params(local.layers))  # those left out get noise, too
        update = flat_update(tree["model"], origin)
        short = (update.norm() <= clip).float() - 0.5
        update = clipped(update, clip)
        if self.noise_by == "clients":
            if not 0 < share < math.inf:
                raise UserError(f"private uploads nothing with a noise of {float(share):g}.")
            noise = share * local.client.normal("privacy", len(update) + 1).to(clip.device)
            update, short = update + clip * noise[:-1], short + COUNT_NOISE * noise[-1] / 2
        count = {} if self.quantile is None else {"privacy": {"short": short}}
        return {"model": moved(origin, update), **count}, kept

    def counted(self, payload: Tree) -> int:
        """Client: as the server counts them, with this one."""
        return int(payload["spent"]["rounds"])

    def spent(self, payload: Tree, client_state: Tree) -> float:
        """Client: its epsilon after a round, as the server counts it."""
        return float(payload["spent"]["epsilon"])

    def is_last(self, payload: Tree, client_state: Tree, epochs: int) -> bool:
        """Client: as the server counts it."""
        return float(payload["spent"]["next"]) > self.epsilon

    # What the server makes of it ----------------------------------------------------------------

    def weights(self, server: Tree, uploads: Sequence[Upload], ctx: Context) -> list[float]:
        """Server: all alike, since numbers of samples are private too."""
        return [1 / len(uploads)] * len(uploads)

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: the inner method gets the noisy mean in place of every upload."""
        privacy, model = server["privacy"], server["model"]
        clip, size, missing = privacy["clip"], ctx.sampling.size, 1.0
        updates = torch.stack([_update(upload, model) for upload in uploads])
        if self.noise_by == "server":
            updates = clipped(updates, clip)
        else:  # the server adds the shares of those who did not answer
            missing = max(0.0, 1 - len(uploads) / size) ** 0.5
        draws = ctx.normal("privacy", updates.shape[1] + 1).to(clip.device)
        noise = privacy["noise"] * missing * draws
        mean = (updates.sum(0) + clip * noise[:-1]) / size
        noisy = [Upload(upload.client, 1, {"model": moved(model, mean)}) for upload in uploads]
        state = self.inner.aggregate(server, noisy, weights, ctx)
        if self.quantile is not None:
            short = torch.stack([upload.tree["privacy"]["short"] for upload in uploads])
            short = short.clamp(-0.5, 0.5) if self.noise_by == "server" else short
            share = (short.sum() + COUNT_NOISE * noise[-1] / 2) / size + 0.5
            clip = next_clip(clip, share, self.quantile)
        public = self.cohorts == "public"
        charged = [upload.client for upload in uploads] if public else self._able(server, ctx)
        books = self._charged_books(server, charged, ctx)
        return {**state, "privacy": {**books, "clip": clip}}

    # What it costs ------------------------------------------------------------------------------

    def _rate(self, client: int, ctx: Context) -> float:
        return 1.0 if self.cohorts == "public" else ctx.sampling.rates[client]

    def _counted(self, ctx: Context) -> Mapping[int, int]:
        if self.cohorts == "public" or not ctx.counted:
            return ctx.counted
        return dict.fromkeys(ctx.present, max(ctx.counted.values()))  # each counts for everybody

    def _accounting(self, ctx: Context) -> Accounting:
        queries = (1.0,) if self.quantile is None else (1.0, COUNT_NOISE)
        scheme = ctx.sampling.scheme
        if self.cohorts == "public":
            return Accounting(self.accountant, "public", self.delta, queries)
        if scheme == "other" or self.noise_by == "clients":
            raise UserError(
                "cohorts = secret needs a server that adds the noise (noise_by = server) and draws "
                "cohorts by chance alone: participation = uniform or bernoulli, and no devices."
            )
        return Accounting(self.accountant, scheme, self.delta, queries)


def _update(upload: Upload, model: State) -> Tensor:
    """How far a client has moved from what it received."""
    received = take((upload.payload or {}).get("model", {}), model)
    return flat_update(upload.tree["model"], {**model, **received})
