"""A personal finish: when the rounds are over, each client makes the most of what it received."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedhelix.core.method import Client, LocalRound, Method, Phase
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree, take
from fedhelix.core.wrapper import Wrapper
from fedhelix.methods.fedavg import FedAvg

USUAL, RIVALS = "tuned", ("received", "archive", "archive-tuned")


@register("finish", paper="fedhelix")
@dataclass(frozen=True)
class Finish(Wrapper):
    """Each client fine-tunes in the end, where validation agrees.

    Each client fine-tunes in small steps, unless its validation samples prefer something else.

    It may prefer the received model, or that model plus a mean of its own updates, its archive,
    with or without fine-tuning.
    """

    inner: Method = option(FedAvg(), "the method whose model clients receive")
    ft_rate: float = option(0.1, "factor on the learning rate while fine-tuning", above=0)
    ft_epochs: int | None = option(
        None, "epochs of fine-tuning; auto: as many as in a round", low=0
    )
    archive: float = option(
        0.0,
        "how much of a client's archive of updates a round keeps; 0: no archive",
        low=0,
        below=1,
    )

    @property
    def spares_samples(self) -> bool:
        """What a client makes of its model in the end stays with it."""
        return True

    def start(self, payload: Tree, client_state: Tree, client: Client) -> dict[str, State]:
        """Client: in the end, the candidates."""
        models = super().start(payload, client_state, client)
        if not client.final:
            return models
        received = models[super().personal(models)]
        candidates = {"received": received, "tuned": received}
        if self.archive:
            updates = client_state.get("archive", {})
            own = {**received, **{n: received[n] + update for n, update in updates.items()}}
            candidates |= {"archive": own, "archive-tuned": own}
        return {**models, **candidates}

    def personalize(self, client: Client) -> Sequence[Phase]:
        """Client: fine-tune what was received, and that plus the archive."""
        before = super().personalize(client)
        if not client.final:
            return before
        names = ("tuned", "archive-tuned") if self.archive else ("tuned",)
        tuned = (Phase(epochs=self.ft_epochs, model=name, rate=self.ft_rate) for name in names)
        return (*before, *tuned)

    def choose(self, models: dict[str, State], client: Client) -> str:
        """Client: the fine-tuned model, unless another has clearly lower losses on validation."""
        if not client.final:
            return super().choose(models, client)
        usual = client.valid_losses(models[USUAL])
        if len(usual) < 2:
            return USUAL
        gains = {
            name: _gain(usual, client.valid_losses(models[name]))
            for name in RIVALS
            if name in models
        }
        best = max(gains, key=lambda name: gains[name])
        return best if gains[best] > 0 else USUAL

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: the round's update goes into the archive."""
        sent, kept = super().upload(local)
        if not self.archive:
            return sent, kept
        names = [name for name in local.layers.parameters if name in local.payload.get("model", {})]
        model, received = local.models["model"], local.payload["model"]
        before = local.client_state.get("archive", {})
        share = 1 - self.archive if before else 1.0
        update = {name: model[name] - received[name] for name in names}
        mean = {
            name: torch.lerp(before.get(name, value), value, share)
            for name, value in take(update, names).items()
        }
        return sent, {**kept, "archive": mean}


def _gain(usual: Tensor, losses: Tensor) -> float:
    """By how much some losses are lower for certain: the mean difference less its error."""
    if not losses.isfinite().all():
        return -math.inf
    if not usual.isfinite().all():
        return math.inf
    gain = usual - losses
    return float(gain.mean() - gain.std() / len(gain) ** 0.5)
