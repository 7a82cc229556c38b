"""Defences: robust rules around any method, which then aggregates the changed updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedhelix.core.errors import UserError
from fedhelix.core.layers import Layers
from fedhelix.core.method import Capabilities, Context, Method, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree, take, wide
from fedhelix.core.wrapper import Wrapper, shares
from fedhelix.methods.fedavg import FedAvg
from fedhelix.robust import rules


@dataclass(frozen=True)
class Defence(Wrapper):
    """Treats updates as rows of a matrix, whatever the clients' weights.

    An entry that a client did not upload is the median of those that did. Zeros would pull all
    rules towards no update, and the clients that sent least would be closest to each other.
    Rules compute in float32 at least, and every entry keeps its type.
    """

    inner: Method = option(FedAvg(), "the method that aggregates what the rule leaves")
    # What it does to single updates; empty if every client's update stays its own.
    mixing: ClassVar[str] = "makes one of all uploads"

    @property
    def capabilities(self) -> Capabilities:
        """It needs uploads that differ."""
        return replace(super().capabilities, compares_uploads=True)

    def check_inner(self, layers: Layers | None = None) -> None:
        """Refuse a method without updates of a common model."""
        super().check_inner(layers)
        inner = self.inner.capabilities
        if inner.packed_uploads or not inner.central_model or not shares(self.inner, layers):
            raise UserError(
                f"{self.name} sees no updates of a common model around {self.inner.label}."
            )
        if self.mixing and inner.single_uploads:
            raise UserError(
                f"{self.name} {self.mixing}, but {self.inner.label} needs every single one."
            )

    def rule(self, updates: Tensor) -> Tensor:
        """The changed updates: one row for all, or one row each."""
        raise NotImplementedError

    def change(
        self, updates: Tensor, weights: list[float], server: Tree, ctx: Context
    ) -> tuple[Tensor, list[float], Tree]:
        """The changed updates, their weights, and what the server keeps for its next round."""
        return self.rule(updates), weights, {}

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: aggregate as the inner method, after the rule has changed the uploads.

        Uploads of weight zero take no part.
        """
        origin = {
            name: value for name, value in server["model"].items() if value.is_floating_point()
        }
        kept = [i for i, weight in enumerate(weights) if weight > 0]
        if not kept:
            return super().aggregate(server, uploads, weights, ctx)
        sent = [uploads[i].tree["model"] for i in kept]
        start = _flat(origin, origin)
        updates = torch.stack([_flat(whole, origin) - start for whole in filled(sent, origin)])
        rows, shares, memory = self.change(updates, [weights[i] for i in kept], server, ctx)
        changed, weighted = list(uploads), list(weights)
        for i, row, share in zip(kept, rows.expand_as(updates), shares, strict=True):
            parts = (start + row).split([value.numel() for value in origin.values()])
            model = {
                name: part.view_as(old).to(old.dtype)
                for (name, old), part in zip(origin.items(), parts, strict=True)
            }
            sent_model = uploads[i].tree["model"]  # entries that were not sent stay out
            changed[i] = uploads[i]._replace(
                tree={**uploads[i].tree, "model": {**sent_model, **take(model, sent_model)}}
            )
            weighted[i] = share
        return {**super().aggregate(server, changed, weighted, ctx), **memory}


def filled(sent: Sequence[State], origin: State) -> list[State]:
    """Every upload with all entries; missing ones are the median of those sent, or unchanged."""
    usual = dict(origin)
    for name in origin:
        known = [state[name] for state in sent if name in state]
        if 0 < len(known) < len(sent):
            rows = wide(torch.stack(known)).reshape(len(known), -1)
            usual[name] = rules.median(rows).view_as(origin[name])
    return [{**usual, **state} for state in sent]


def _flat(state: State, names: State) -> Tensor:
    return torch.cat([wide(state[name]).flatten() for name in names])


@register("median", paper="Yin et al., ICML 2018, arXiv:1803.01498")
@dataclass(frozen=True)
class Median(Defence):
    """The median of every coordinate."""

    def rule(self, updates: Tensor) -> Tensor:
        """One row for all."""
        return rules.median(updates)


@register("trimmed-mean", paper="Yin et al., ICML 2018, arXiv:1803.01498")
@dataclass(frozen=True)
class TrimmedMean(Defence):
    """The mean of every coordinate without its extreme values."""

    withstand: float = option(
        0.2, "share of malicious uploads that it is made for", low=0, below=0.5
    )

    def rule(self, updates: Tensor) -> Tensor:
        """One row for all."""
        return rules.trimmed_mean(updates, round(self.withstand * len(updates)))


@register("krum", paper="Blanchard et al., NeurIPS 2017, arXiv:1703.02757")
@dataclass(frozen=True)
class Krum(Defence):
    """The one update that is closest to its neighbours."""

    withstand: float = option(
        0.2, "share of malicious uploads that it is made for", low=0, below=0.5
    )

    def rule(self, updates: Tensor) -> Tensor:
        """One row for all."""
        return rules.multi_krum(updates, round(self.withstand * len(updates)), 1)


@register("multi-krum", paper="Blanchard et al., NeurIPS 2017, arXiv:1703.02757")
@dataclass(frozen=True)
class MultiKrum(Defence):
    """The mean of the updates closest to their neighbours.

    The mean of the updates that are closest to their neighbours, as many as should be benign.
    """

    withstand: float = option(
        0.2, "share of malicious uploads that it is made for", low=0, below=0.5
    )

    def rule(self, updates: Tensor) -> Tensor:
        """One row for all."""
        attackers = round(self.withstand * len(updates))
        return rules.multi_krum(updates, attackers, len(updates) - attackers)


@register("geometric-median", paper="Pillutla et al., IEEE TSP 2022, arXiv:1912.13445")
@dataclass(frozen=True)
class GeometricMedian(Defence):
    """The point with the smallest sum of distances to the updates."""

    def rule(self, updates: Tensor) -> Tensor:
        """One row for all."""
        return rules.geometric_median(updates)


@register("centred-clipping", paper="Karimireddy et al., ICML 2021, arXiv:2012.10333")
@dataclass(frozen=True)
class CentredClipping(Defence):
    """Clips updates around a moving centre, then averages them.

    The mean of updates whose distance from a moving centre is clipped.
    """

    radius: float | None = option(
        None, "longest distance from the centre (auto: the median of the round)", above=0
    )
    iterations: int = option(3, "how often the centre moves", low=1)
    carry: bool = option(
        True, "start at the last round's centre, as in the paper, and not at no update"
    )

    def change(
        self, updates: Tensor, weights: list[float], server: Tree, ctx: Context
    ) -> tuple[Tensor, list[float], Tree]:
        """One row for all, which the server keeps as the next round's centre."""
        start = server.get("centre") if self.carry else None
        centre = rules.centred_clipping(updates, self.radius, self.iterations, start)
        return centre, weights, {"centre": centre} if self.carry else {}


@register("norm-bound", paper="Sun et al., 2019, arXiv:1911.07963")
@dataclass(frozen=True)
class NormBound(Defence):
    """Limits the length of every update.

    No update is longer than a bound; weights and aggregation are those of the inner method.
    """

    mixing: ClassVar[str] = ""
    bound: float | None = option(
        None, "longest update (auto: the median of the round, times `times`)", above=0
    )
    times: float = option(1.0, "auto: how many times as long as the median", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bound is not None and self.times != 1:
            raise UserError("norm-bound: give either bound or times, which scales the median.")

    def rule(self, updates: Tensor) -> Tensor:
        """One row each."""
        return rules.clipped(updates, self.bound, self.times)


@register("nnm", paper="Allouah et al., AISTATS 2023, arXiv:2302.01772")
@dataclass(frozen=True)
class NearestNeighbourMixing(Defence):
    """Replaces every update by the mean of its nearest neighbours.

    Every update becomes the mean of those nearest to it; another defence goes inside.
    """

    mixing: ClassVar[str] = "mixes uploads"
    leave_out: float | None = option(
        None,
        "share of the updates, the farthest, that are left out of each mean (auto: what the "
        "defence inside withstands, or 0.2)",
        low=0,
        below=0.5,
    )

    def rule(self, updates: Tensor) -> Tensor:
        """One row each."""
        share = self.leave_out
        if share is None:
            share = self.inner.options().get("withstand", 0.2)
        return rules.nearest_mixed(updates, round(share * len(updates)))


@register("bucketing", paper="Karimireddy et al., ICLR 2022, arXiv:2006.09365")
@dataclass(frozen=True)
class Bucketing(Defence):
    """Averages random groups of updates before another defence.

    Random buckets of updates are averaged; another defence, inside, then sees the means.

    A bucket with a single malicious update counts as malicious, so what is inside has to withstand
    up to `bucket_size` times as large a share.
    """

    mixing: ClassVar[str] = "mixes uploads"
    bucket_size: int = option(2, "how many updates are averaged", low=1)

    def change(
        self, updates: Tensor, weights: list[float], server: Tree, ctx: Context
    ) -> tuple[Tensor, list[float], Tree]:
        """The first upload of each bucket stands for all of it, with their weights; the others get
        none. Entries that it did not send stay out.
        """
        order = torch.randperm(len(updates), generator=ctx.draw("buckets"))
        means = rules.bucket_means(updates, order.to(updates.device), self.bucket_size)
        rows, shares = updates.clone(), [0.0] * len(weights)
        for bucket, mean in zip(order.split(self.bucket_size), means, strict=True):
            rows[bucket[0]] = mean
            shares[int(bucket[0])] = sum(weights[i] for i in bucket.tolist())
        return rows, shares, {}
