"""What hooks are given: a client's view of its round, and the server's view of a round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedhelix.core import seeds
from fedhelix.core.errors import UserError
from fedhelix.core.layers import Layers
from fedhelix.core.parts import Inputs
from fedhelix.core.renamed import HasRenamed
from fedhelix.core.returns import Phase
from fedhelix.core.tree import State, Tree

Scorer = Callable[[Sequence[State]], list[tuple[float, float]]]  # metric and loss of models


class Batch(NamedTuple):
    """Samples of one training step; `mask` is 0 for samples that only fill the batch up."""

    x: Inputs
    y: Tensor
    mask: Tensor | None = None

    def mean(self, values: Tensor) -> Tensor:
        """The mean of one value or row per sample; samples that only fill the batch up do not
        count.
        """
        mask = torch.ones_like(values) if self.mask is None else self.mask
        if values.dim() > mask.dim():
            mask = mask[:, None]
        return (values * mask).sum(0) / mask.sum(0).clamp_min(1)


class Upload(NamedTuple):
    """What the server received from one client."""

    client: int
    samples: int
    tree: Tree
    payload: Tree | None = None  # what the client had received before
    staleness: int = 0  # how many rounds have ended since


class Sampling(NamedTuple):
    """How the cohort of a round is drawn, as far as an accountant of privacy has to know."""

    scheme: Literal["fixed", "poisson", "other"]  # so many of all; each by its rate; by a clock ...
    size: float  # of a cohort, on average
    rates: Mapping[int, float]  # how likely each client takes part


@dataclass(frozen=True, eq=False)
class Client(HasRenamed):
    """What a client knows of itself in one round."""

    id: int
    samples: int  # how many it trains on
    round: int  # 0 in the first round
    final: bool  # the rounds are over: what it makes of its model now, it keeps
    classes: int | None  # None: not a classification
    metric: str  # accuracy, or score where the metric is another one
    lr: float  # this round's learning rate
    momentum: float
    optimizer: str
    epochs: int  # local epochs of one round
    layers: Layers
    initial: State  # the initial model, which everybody can make from the seed
    seed: int
    inputs: Callable[[], Inputs]  # its training samples, prepared as the model gets them
    targets: Callable[[], Tensor]
    raw_inputs: Callable[[], Tensor]  # its training samples as they are, pixels between 0 and 1
    # The loss of one prepared sample in evaluation mode; may be vmapped.
    sample_loss: Callable[[State, Inputs, Tensor], Tensor]
    # The mean over some prepared samples of the squared gradients of some entries, in evaluation
    # mode; None where the network has layers that only `sample_loss` can differentiate.
    squared_gradients: Callable[[State, Sequence[str], Inputs, Tensor], State | None]
    # The metric of a model on its validation samples; not-a-number without any.
    valid: Callable[[State], float]
    # The loss of a model on each of its validation samples, of which there may be none.
    valid_losses: Callable[[State], Tensor]
    # The gradient of the loss on each of its batches, at a model, which may change in between; as a
    # second argument the entries that it is for, or else all that can be trained.
    gradients: Callable[..., Iterator[State]]
    # A model's outputs for its training samples, in evaluation mode.
    outputs: Callable[[State], Tensor]
    # What its training samples are below the head of a model, in evaluation mode.
    features: Callable[[State], Tensor]
    # A model after a round's plain local training; turns see other batches.
    train: Callable[[State, int], State]
    deployed: bool = False  # it is a real site, whose noise nobody else may know

    renamed: ClassVar = {"units": "layers", "own": "client_state"}

    def travel(self, steps: int) -> float:
        """How far that many steps of SGD go along a constant gradient of one."""
        if self.optimizer != "sgd":
            raise UserError(f"this method needs optimizer = sgd, not {self.optimizer}.")
        # steps * lr without momentum; with momentum the velocity builds up to 1 / (1 - momentum).
        lag = self.momentum * (1 - self.momentum**steps) / (1 - self.momentum)
        return self.lr * (steps - lag) / (1 - self.momentum)

    def draw(self, purpose: str, every_round: bool = True) -> torch.Generator:
        """Random numbers of this client, new in each round or the same all along."""
        return seeds.draw(self.seed, purpose, self.round if every_round else -1, self.id)

    def normal(self, purpose: str, count: int) -> Tensor:
        """Standard normal numbers that protect it: in a deployment, nobody can repeat them."""
        if self.deployed:
            return seeds.secret_normal(count)
        return torch.randn(count, generator=self.draw(purpose))


@dataclass(frozen=True, eq=False)
class Local(HasRenamed):
    """What a client's loss may look at.

    Engines run many clients at once, so nothing here names a single client.
    """

    context: Tree  # what `loss_context` returned
    phase: Phase
    layers: Layers
    # The mean loss of a model's state on a batch.
    base_loss: Callable[[Mapping[str, Tensor], Batch], Tensor]
    # The outputs of a model's state for samples.
    outputs: Callable[[Mapping[str, Tensor], Inputs], Tensor]
    # What the head of the model gets for samples, one row each.
    features: Callable[[Mapping[str, Tensor], Inputs], Tensor]

    renamed: ClassVar = {"units": "layers", "anchor": "context", "risk": "base_loss"}


@dataclass(frozen=True, eq=False)
class LocalRound(Local):
    """A client's round, from what it received to what it trained; `upload` may
    look at all of it.
    """

    client: Client
    payload: Tree
    client_state: Tree
    models: dict[str, State]
    steps: int  # optimiser steps of the round

    renamed: ClassVar = {**Local.renamed, "own": "client_state"}


@dataclass(frozen=True, eq=False)
class Context(HasRenamed):
    """What the server knows in one round, besides its own state."""

    round: int
    rounds: int
    clients: int  # how many the server knows; an unseen one gets this number as its id
    layers: Layers
    initial: State
    device: torch.device
    seed: int
    cohort: Callable[[int], list[int]]  # who is sampled in a given round
    present: Sequence[int]  # who could be sampled in this one
    sampling: Sampling  # how they are sampled
    counts: Callable[[int], int]  # what a client counts in a mean: its samples, or one
    epochs: int  # local epochs of one round
    since: int = 0  # the first round of those who are present: later than 0 if they are newcomers
    # Metric and loss of models on the server's validation data; None without any. Entries that a
    # model lacks are fitted to these data first.
    score: Scorer | None = None
    # The same on about so many of these samples.
    score_on: Callable[[Sequence[State], int], list[tuple[float, float]]] | None = None
    # A model after so many epochs on the server's own samples; None without any.
    train: Callable[[State, int], State] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)  # what the method wants recorded
    deployed: bool = False  # the clients are real sites, whom noise protects
    # Rounds with noise that clients have answered by their own count, which a crash or a backup may
    # have put ahead of the server's.
    counted: Mapping[int, int] = field(default_factory=dict)

    renamed: ClassVar = {"units": "layers", "notes": "metadata"}

    def draw(self, purpose: str) -> torch.Generator:
        """Random numbers of the server, new in each round."""
        return seeds.draw(self.seed, purpose, self.round, -1)

    def normal(self, purpose: str, count: int) -> Tensor:
        """Standard normal numbers that protect clients: in a deployment, nobody can repeat them."""
        if self.deployed:
            return seeds.secret_normal(count)
        return torch.randn(count, generator=self.draw(purpose))
