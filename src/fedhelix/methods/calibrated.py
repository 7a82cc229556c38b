"""Calibrated training: a client tells its model how common each class is, so that the model does
not have to learn it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedhelix.core.method import Capabilities, Client, LocalRound, Method
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.shift import SHIFT
from fedhelix.core.tree import State, Tree, drop
from fedhelix.core.wrapper import Wrapper
from fedhelix.methods.fedavg import FedAvg

Prior = Literal["uniform", "initial"]
USED = "shifted"  # the model that carries the shares where no other does


def log_shares(targets: Tensor, classes: int, smooth: float) -> Tensor:
    """The logarithms of the class shares, with `smooth` added to the count of every class."""
    ones = torch.ones(len(targets), device=targets.device)
    counts = torch.zeros(classes, device=targets.device).index_add(0, targets, ones)
    return smoothed_log(counts, smooth)


def smoothed_log(counts: Tensor, smooth: float) -> Tensor:
    """The logarithms of the shares of some counts, with `smooth` added to each."""
    return ((counts + smooth) / (counts.sum() + smooth * len(counts))).log()


@register("calibrated", paper="fedhelix; after balanced softmax, Ren et al., NeurIPS 2020")
@dataclass(frozen=True)
class Calibrated(Wrapper):
    """Corrects training for each client's mix of classes.

    Clients train on outputs plus the logarithms of their class shares, which never leave them.

    What is shared then answers for balanced classes. A client's personal model has its own shares
    added to the outputs again: Bayes' rule for its own mix of classes.
    """

    inner: Method = option(FedAvg(), "the method whose clients are calibrated")
    tau: float = option(1.0, "how strongly the shares count; 0: not at all", low=0)
    smooth: float = option(1.0, "added to the count of every class", above=0)
    trained: bool = option(
        True, "train with the shares too; otherwise a model gets them when it is used"
    )
    sharpen: float = option(
        1.0,
        "how much more the shares count when a model is used than in training, if the metric is "
        "accuracy",
        above=0,
    )
    prior: Prior = option(
        "uniform",
        "shares that the initial network knows already: none, or (pretrained) those it predicts",
    )

    @property
    def capabilities(self) -> Capabilities:
        """Shares are those of classes."""
        return replace(super().capabilities, classification=True)

    @property
    def spares_samples(self) -> bool:
        """Shares that models train with show in what they learn."""
        return not self.trained

    def overrides(self, hook: str) -> bool:
        """Whether the wrapper, or a method inside of it, has a hook that is not FedAvg's."""
        if hook == "choose" and self.sharpen == 1:
            return self.inner.overrides(hook)
        return super().overrides(hook)

    def start(self, payload: Tree, client_state: Tree, client: Client) -> dict[str, State]:
        """Client: every model carries the client's shares, to train with and to use; or one more
        does, which is only used.
        """
        assert client.classes is not None
        shift = log_shares(client.targets(), client.classes, self.smooth)
        if self.prior == "initial":
            predicted = client.outputs(client.initial).softmax(1).sum(0)
            shift = shift - smoothed_log(predicted, self.smooth)
        shift = shift if self.tau == 1 else self.tau * shift
        models = super().start(payload, client_state, client)
        if not self.trained:
            used = models[self.inner.personal(models)]
            return {**models, USED: {**used, SHIFT: used.get(SHIFT, 0) + shift}}
        return {
            name: {**model, SHIFT: model[SHIFT] + shift if SHIFT in model else shift}
            for name, model in models.items()
        }

    def personal(self, models: dict[str, State]) -> str:
        """Client: the model that carries the shares."""
        return self.inner.personal(models) if self.trained else USED

    def choose(self, models: dict[str, State], client: Client) -> str:
        """Client: as the inner method, with sharper shares: trained on few samples, a model is too
        sure of classes that the client lacks. That makes better decisions, but probabilities that
        are too extreme, so it is done for the accuracy alone.
        """
        name = self.inner.choose(models, client) if self.trained else USED
        if client.metric == "accuracy":
            models[name] = {**models[name], SHIFT: self.sharpen * models[name][SHIFT]}
        return name

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: the shares are removed before anything leaves or is kept."""
        models = {
            name: drop(model, [SHIFT]) for name, model in local.models.items() if name != USED
        }
        return super().upload(replace(local, models=models))
