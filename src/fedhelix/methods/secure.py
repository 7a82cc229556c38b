"""Secure: secure aggregation. The server learns the sum of all updates and no single one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from fedhelix.components.clipping import flat_update, moved
from fedhelix.components.secure_sum import (
    WORDS,
    Bits,
    from_words,
    protocol_bytes,
    sum_words,
    to_words,
    units,
)
from fedhelix.core.errors import UserError
from fedhelix.core.layers import Layers
from fedhelix.core.method import Capabilities, Context, LocalRound, Method, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree, take
from fedhelix.core.wrapper import Wrapper, beyond_a_sum, how_to_sum, refuse_more, rounded
from fedhelix.methods.compact import Compact
from fedhelix.methods.dp_sgd import DPSGD
from fedhelix.methods.fedavg import FedAvg
from fedhelix.methods.helix import Helix
from fedhelix.methods.private import Private

UNPACKED = (Compact, DPSGD, Helix)  # whose own uploads are means of what they hold


@register("secure", paper="Bell et al., CCS 2020, arXiv:2006.07304")
@dataclass(frozen=True)
class Secure(Wrapper):
    """Secure aggregation: the server sees only the sum of updates.

    Sums updates under masks that cancel; a simulation leaves the masks out.
    """

    inner: Method = option(FedAvg(), "the method that aggregates the mean")
    word_bits: Bits = option(32, "bits of a value in an upload")
    bound: float | None = option(
        None, "largest change of a value; larger ones are cut (auto: 64, or 1 in short words)",
        above=0, high=1e6,
    )  # fmt: skip
    threshold: float = option(
        2 / 3, "share of a client's neighbours that must stay for its masks to come off",
        above=0.5, high=1,
    )  # fmt: skip
    degree: int | None = option(
        None, "with how many neighbours a client has masks, an even number (auto: all)", low=4
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.degree is not None and self.degree % 2:
            raise UserError(f"degree must be even, half on either side, not {self.degree}.")

    @property
    def capabilities(self) -> Capabilities:
        """Nobody can look at single uploads, or change them."""
        return replace(
            super().capabilities,
            complete_uploads=False,
            packed_uploads=True,
            outermost=True,
            masks=(self.threshold, self.degree),
        )

    @property
    def _bound(self) -> float:
        return self.bound or (64.0 if self.word_bits == 32 else 1.0)

    def check_inner(self, layers: Layers | None = None) -> None:
        """Refuse methods whose server needs more than a sum."""
        summed: Method = self.inner
        while isinstance(summed, UNPACKED):
            summed = summed.inner
        private = isinstance(self.inner, Private)  # which checks the same, and weighs all alike
        why = rounded(layers) if private else beyond_a_sum(summed, layers)
        if self.inner.capabilities.packed_downloads:
            why = "its downloads are packed"  # clients and server would start from other models
        if private and self.word_bits < 32:
            why = f"words of {self.word_bits} bits would make its clipped updates longer"
        if why is not None:
            whose, how = self.inner.label, how_to_sum(self.inner)
            raise UserError(f"secure cannot aggregate the uploads of {whose}: {why}{how}.")

    def server_init(
        self, client_inits: Mapping[int, Tree], ctx: Context
    ) -> tuple[Tree, dict[int, Tree]]:
        """Server: as the inner method; cohorts must be large enough to hide a client."""
        check_cohort(self, ctx.sampling.size, len(ctx.present))
        return self.inner.server_init(client_inits, ctx)

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: as the inner method, with what the whole cohort counts, the same for all:
        clients who took their shares from the server could not tell a sum from a single upload.
        """
        counts = [self._count(i, ctx) for i in ctx.cohort(ctx.round)]
        ctx.metadata["other_bytes"] = protocol_bytes(len(counts), self.degree, 0)
        total = torch.tensor(max(sum(counts), 1), dtype=torch.float64)
        rule = {"total": total, "alike": torch.tensor(set(counts) <= {1})}
        return {**self.inner.download(server, client, ctx), "secure": rule}

    def deliver(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: as the inner method."""
        return self.inner.deliver(server, client, ctx)

    def _count(self, client: int, ctx: Context) -> int:
        return 1 if isinstance(self.inner, Private) else ctx.counts(client)

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: its share of the update in whole numbers; where that is not finite, one NaN,
        which the server refuses.
        """
        tree, kept = self.inner.upload(local)
        if not tree:
            return tree, kept
        if "packed" in tree:  # sums need values; a client has all that the server would decode by
            tree = self.inner.decode(tree, local.payload, cast(Context, local.client))
        origin = _floats({**local.client.initial, **local.payload.get("model", {})})
        origin = take(origin, self.shared_params(local.layers))
        refuse_more(self, tree, {"model", "privacy"}, "sum")
        if lacking := origin.keys() - tree["model"].keys():
            raise UserError(
                f"secure cannot sum parts of models: {self.inner.label} left '{min(lacking)}' out."
            )
        row = torch.cat([flat_update(take(tree["model"], origin), origin), *_further(tree)])
        if not bool(row.isfinite().all()):
            return {"words": torch.tensor([math.nan])}, kept
        rule = local.payload["secure"]
        share = (1 if bool(rule["alike"]) else local.client.samples) / float(rule["total"])
        draw = local.client.draw("rounding")
        return {"words": to_words(row, share, self._bound, self.word_bits, draw)}, kept

    def decode(self, upload: Tree, payload: Tree, ctx: Context) -> Tree:
        """Server: words are as they are; clients have unpacked what is in them."""
        return upload

    def weights(self, server: Tree, uploads: Sequence[Upload], ctx: Context) -> list[float]:
        """Server: as the shares that clients took."""
        total = sum(self._share(upload, ctx) for upload in uploads)
        return [self._share(upload, ctx) / total for upload in uploads]

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: the inner method gets the mean in place of every upload; one alone changes
        nothing.
        """
        asked = len(ctx.cohort(ctx.round))
        ctx.metadata["other_bytes"] = protocol_bytes(asked, self.degree, len(uploads))
        if len(uploads) < 2:
            return server
        origin = _floats(server["model"])
        total = sum_words([self._words(upload, origin) for upload in uploads])
        share = sum(self._share(upload, ctx) for upload in uploads)
        mean = from_words(total, share, self._bound).to(ctx.device)
        size = sum(value.numel() for value in origin.values())
        tree: Tree = {"model": moved(origin, mean[:size])}
        tree |= {"privacy": {"short": mean[size]}} if len(mean) > size else {}
        alike = [upload._replace(tree=tree) for upload in uploads]
        return self.inner.aggregate(server, alike, weights, ctx)

    def _share(self, upload: Upload, ctx: Context) -> float:
        return self._count(upload.client, ctx) / float((upload.payload or {})["secure"]["total"])

    def _words(self, upload: Upload, origin: State) -> Tensor:
        words: Tensor = upload.tree["words"]
        size, form = sum(value.numel() for value in origin.values()), WORDS[self.word_bits]
        if words.dtype != form or words.dim() != 1 or len(words) - size not in (0, 1):
            raise UserError(f"the upload of client {upload.client} is no row of {size} words.")
        return words


def check_cohort(method: Secure, cohort: float, clients: int) -> None:
    """Refuse cohorts that hide nobody, or whose sums are too large."""
    if min(cohort, clients) < 2:
        raise UserError("secure hides a client among others; cohorts need two clients at least.")
    if method.degree is not None and method.degree >= clients:
        raise UserError(f"degree = {method.degree} needs more than {clients} clients; lower it.")
    if cohort >= (most := units(method.word_bits)):
        raise UserError(f"words of {method.word_bits} bits hold sums over {most - 1} clients.")


def _floats(state: State) -> State:
    """Counters of BatchNorm have no mean, and stay as they are."""
    return {name: value for name, value in state.items() if value.is_floating_point()}


def _further(tree: Tree) -> list[Tensor]:
    """What an adaptive clip needs to know."""
    return [value.view(1) for value in tree.get("privacy", {}).values()]
