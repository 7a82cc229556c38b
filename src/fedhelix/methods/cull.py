"""Cull: start from all returned models, and drop those whose removal improves their mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fedhelix.components.culling import CHECKED_ON, agreeing, culled, uncopied
from fedhelix.core.errors import UserError
from fedhelix.core.layers import Layers
from fedhelix.core.means import Means, means_by_group
from fedhelix.core.method import Context, Method, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree, take, updates_of
from fedhelix.core.wrapper import Wrapper
from fedhelix.methods.fedavg import FedAvg

# Metric and loss of some models on about so many validation samples.
Score = Callable[[Sequence[State], int], list[tuple[float, float]]]


def _loss(score: Score, model: State) -> float:
    """The loss of one model on as many validation samples as the best candidates see."""
    return score([model], CHECKED_ON)[0][1]


def losses_of(
    score: Score,
    means: Callable[[Sequence[Sequence[int]]], Means],
    groups: Sequence[Sequence[int]],
    count: int,
) -> list[float]:
    """The losses of the means of some groups of models on about so many validation samples."""
    scores = score(means(groups), count)
    return [loss if math.isfinite(loss) else math.inf for _, loss in scores]


@register("cull", paper="fedhelix")
@dataclass(frozen=True)
class Cull(Wrapper):
    """Drops models that raise the server's validation loss.

    Drops models whose removal lowers the loss of the mean on the server's validation set.

    Without such a set it goes by agreement alone.
    """

    inner: Method = option(FedAvg(), "the method that aggregates the remaining models")
    margin: float = option(
        0.02, "dropping must lower the loss by more than this share of it", low=0, below=1
    )
    rho_min: int = option(1, "models that stay in any case", low=1)

    def check_inner(self, layers: Layers | None = None) -> None:
        """Whole models are compared: the server must have one, and uploads must show it."""
        super().check_inner(layers)
        inner = self.inner.capabilities
        whole = layers is None or set(self.inner.shared_params(layers)) >= set(layers.parameters)
        if inner.packed_uploads or not inner.central_model or not whole:
            raise UserError(f"cull needs whole models, which {self.inner.label} does not upload.")

    def weights(self, server: Tree, uploads: Sequence[Upload], ctx: Context) -> list[float]:
        """Server: the inner method's weights, but zero for the dropped, scaled to a sum of one."""
        weights = self.inner.weights(server, uploads, ctx)
        origin = take(server["model"], ctx.layers.parameters)
        models = [{**server["model"], **upload.tree["model"]} for upload in uploads]
        updates = updates_of(models, origin)
        kept = uncopied(updates, origin)
        least = min(self.rho_min, len(kept))
        if ctx.score_on is None:
            kept = agreeing(updates, kept, least)
        else:
            losses = partial(losses_of, ctx.score_on, means_by_group(models, weights))
            before = partial(_loss, ctx.score_on, server["model"])
            kept = culled(kept, updates, losses, before, self.margin, least)
        dropped = [uploads[i].client for i in range(len(uploads)) if i not in kept]
        ctx.metadata.setdefault("dropped", []).extend(dropped)
        total = sum(weights[i] for i in kept)
        if not dropped or not total:
            return weights
        return [weight / total if i in kept else 0.0 for i, weight in enumerate(weights)]
