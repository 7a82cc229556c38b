"""Defences: robust rules around any method, which then aggregates the changed updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedhelix.core.errors import UserError
from fedhelix.core.layers import Layers
from fedhelix.core.method import Context, Method, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree, take
from fedhelix.core.wrapper import Wrapper
from fedhelix.methods.fedavg import FedAvg
from fedhelix.robust import rules


@dataclass(frozen=True)
class Defence(Wrapper):
    """Treats updates as rows of a matrix, whatever the clients' weights.

    An entry that a client did not upload is the median of those that did. Zeros would pull all
    rules towards no update, and the clients that sent least would be closest to each other.
    """

    inner: Method = option(FedAvg(), "the method that aggregates what the rule leaves")
    one_for_all: ClassVar[bool] = True  # whether the rule makes one row of all updates

    def check(self, layers: Layers) -> None:
        """Refuse a method without updates of a common model."""
        super().check(layers)
        inner = self.inner.capabilities
        if inner.packed_uploads or not inner.central_model or not self.inner.shared_params(layers):
            raise UserError(
                f"{self.name} sees no updates of a common model around {self.inner.label}."
            )
        if self.one_for_all and inner.single_uploads:
            raise UserError(
                f"{self.name} makes one of all uploads, "
                f"but {self.inner.label} needs every single one."
            )

    def rule(self, updates: Tensor) -> Tensor:
        """The changed updates: one row for all, or one row each."""
        raise NotImplementedError

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
        changed = list(uploads)
        for i, row in zip(kept, self.rule(updates).expand_as(updates), strict=True):
            parts = (start + row).split([value.numel() for value in origin.values()])
            model = {
                n: part.view_as(old) for (n, old), part in zip(origin.items(), parts, strict=True)
            }
            sent_model = uploads[i].tree["model"]  # entries that were not sent stay out
            changed[i] = uploads[i]._replace(
                tree={**uploads[i].tree, "model": {**sent_model, **take(model, sent_model)}}
            )
        return super().aggregate(server, changed, weights, ctx)


def filled(sent: Sequence[State], origin: State) -> list[State]:
    """Every upload with all entries; missing ones are the median of those sent, or unchanged."""
    usual = dict(origin)
    for name in origin:
        known = [state[name] for state in sent if name in state]
        if 0 < len(known) < len(sent):
            usual[name] = rules.median(torch.stack(known).flatten(1)).view_as(origin[name])
    return [{**usual, **state} for state in sent]


def _flat(state: State, names: State) -> Tensor:
    return torch.cat([state[name].flatten() for name in names])


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
    """The mean of every coordinate without its largest and smallest values."""

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
    """The mean of the updates that are closest to their neighbours, as many as should be benign."""

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
    """The mean of updates whose distance from a moving centre is clipped."""

    radius: float | None = option(
        None, "longest distance from the centre (auto: the median of the round)", above=0
    )
    iterations: int = option(3, "how often the centre moves", low=1)

    def rule(self, updates: Tensor) -> Tensor:
        """One row for all."""
        return rules.centred_clipping(updates, self.radius, self.iterations)


@register("norm-bound", paper="Sun et al., 2019, arXiv:1911.07963")
@dataclass(frozen=True)
class NormBound(Defence):
    """No update is longer than a bound; weights and aggregation are those of the inner method."""

    one_for_all: ClassVar[bool] = False
    bound: float | None = option(None, "longest update (auto: the median of the round)", above=0)

    def rule(self, updates: Tensor) -> Tensor:
        """One row each."""
        return rules.clipped(updates, self.bound)
