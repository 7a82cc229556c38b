"""GenFed: a round is a generation, and only the fittest models have descendants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedhelix.components.selection import (
    Schedule,
    diverse,
    effective,
    fitness_of,
    fittest,
    not_diverged,
    parents,
    whole,
    without_copies,
)
from fedhelix.core.errors import UserError
from fedhelix.core.layers import Layers
from fedhelix.core.method import Capabilities, Context, Method, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree, copies_of, cosine_distances, take, updates_of, zeros
from fedhelix.core.wrapper import Wrapper
from fedhelix.methods.fedavg import FedAvg


@register("genfed", paper="GenFed, Expert Systems with Applications 281, 127636, 2025")
@dataclass(frozen=True)
class GenFed(Wrapper):
    """Averages only the models that score best on the server.

    Scores every returned model on the server's validation set; only the best are aggregated.
    """

    inner: Method = option(FedAvg(), "the method that aggregates the chosen models")
    schedule: Schedule = option("linear", "how the number of chosen models changes over the rounds")
    rho_max: int = option(5, "the largest number of chosen models", low=1)
    b: float | None = option(
        None, "base of the power schedule (auto: it reaches rho_max at c)", above=0, below=1
    )
    c: float | None = option(
        None, "round at which schedules reach their end (auto: half of all rounds)", above=0
    )
    diversity: float = option(
        0.0, "reward for an update that points elsewhere than the chosen ones", low=0
    )
    twins: bool = option(False, "let copies of one model be chosen together, as in the paper")

    @property
    def capabilities(self) -> Capabilities:
        """It cannot do without the server's validation set."""
        return replace(super().capabilities, server_validation=True)

    def check_inner(self, layers: Layers | None = None) -> None:
        """What stays at home is fitted to the validation set; but for that there must be a body,
        and a linear head.
        """
        super().check_inner(layers)
        if self.inner.capabilities.packed_uploads:
            raise UserError(
                f"genfed cannot score what {self.inner.label} uploads, which is packed in its "
                "own way."
            )
        if layers is None:
            return
        shared = set(self.inner.shared_params(layers))
        if not shared & set(layers.body or layers.names):
            raise UserError(
                f"genfed cannot score the models of {self.inner.label}, which uploads no body."
            )
        if not shared >= set(layers.head) and layers.weighted[-1].kind != "linear":
            raise UserError(
                f"genfed around {self.inner.label} needs a network whose last layer is linear."
            )

    def weights(self, server: Tree, uploads: Sequence[Upload], ctx: Context) -> list[float]:
        """Server: the inner method's weights, but zero for the unfit; then they are scaled to a sum
        of one.
        """
        assert ctx.score is not None
        models: list[State] = [{**server["model"], **upload.tree["model"]} for upload in uploads]
        fitness = [
            fitness_of(*scored, upload.client)
            for scored, upload in zip(ctx.score(models), uploads, strict=True)
        ]
        # In clusters this is called for each of them, with the notes of one round.
        ctx.metadata.setdefault("fitness", {}).update(
            {str(-client): metric for metric, _, client in fitness}
        )
        moving = take(models[0], ctx.layers.parameters)
        origin = {**zeros(moving), **take(server["model"], moving)}
        known = (
            list(range(len(uploads)))
            if self.twins
            else without_copies(fitness, copies_of(updates_of(models, origin), origin))
        )
        known = not_diverged(fitness, known)
        fitness = [fitness[i] for i in known]
        timed = parents(self.schedule, ctx.round, ctx.rounds, self.rho_max, self.b, self.c)
        wanted = (
            effective([metric for metric, *_ in fitness]) if self.schedule == "adaptive" else timed
        )
        rho = whole(wanted, min(self.rho_max, len(known)))
        if self.diversity:
            best = diverse(
                fitness, cosine_distances([models[i] for i in known], origin), rho, self.diversity
            )
        else:
            best = fittest(fitness, rho)
        chosen = [known[i] for i in best]
        ctx.metadata["rho"] = ctx.metadata.get("rho", 0) + rho
        ctx.metadata.setdefault("selected", []).extend(uploads[i].client for i in chosen)
        weights = self.inner.weights(server, uploads, ctx)
        total = sum(weights[i] for i in chosen)
        if len(chosen) == len(uploads) and math.isclose(total, 1):
            return weights  # to the bit
        return [weight / total if i in chosen else 0.0 for i, weight in enumerate(weights)]
