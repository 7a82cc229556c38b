"""What a method is: a frozen value whose hooks are FedAvg's until it says otherwise.

A method has no loop, no device, no logger and no state. Its fields are its hyperparameters. State passes through
the hooks as trees of named tensors: `server` is what the server keeps, `own` is what one client keeps. A hook sees
only what its side would see on real machines: client hooks get a `Client`, server hooks a `Context`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedhelix import seeds
from fedhelix.errors import BadInput
from fedhelix.options import Checked
from fedhelix.tree import State, Tree, drop, masked_mean, take
from fedhelix.units import Units

PARTS = ("all", "head", "body")


@dataclass(frozen=True)
class Phase:
    """Train one part of one of the client's models for some epochs, with a fresh optimiser."""

    part: str = "all"  # or head, or body
    epochs: int | None = None  # None: as many as the federation says
    model: str = "model"  # which of the models that `start` returned
    rate: float = 1.0  # factor on the learning rate

    def __post_init__(self) -> None:
        if self.part not in PARTS:
            raise BadInput(f"a phase trains one of the parts {', '.join(PARTS)}, not '{self.part}'.")


Scorer = Callable[[Sequence[State]], list[tuple[float, float]]]  # metric and loss of models


class Batch(NamedTuple):
    """Samples of one training step; `mask` is 0 for samples that only fill the batch up."""

    x: Tensor
    y: Tensor
    mask: Tensor | None = None


class Upload(NamedTuple):
    """What the server received from one client."""

    client: int
    samples: int
    tree: Tree


@dataclass(frozen=True, eq=False)
class Client:
    """What a client knows of itself in one round."""

    id: int
    samples: int  # how many it trains on
    round: int  # 0 in the first round
    lr: float  # this round's learning rate
    momentum: float
    epochs: int  # local epochs of one round
    units: Units
    initial: State  # the initial model, which everybody can make from the seed
    seed: int
    inputs: Callable[[], Tensor]  # its training samples, prepared as the model gets them
    targets: Callable[[], Tensor]
    features: Callable[[], Tensor]  # its training samples as they are, pixels between 0 and 1
    sample_loss: Callable[[State, Tensor, Tensor], Tensor]  # of one prepared sample, evaluation mode; may be vmapped
    valid: Callable[[State], float]  # the metric of a model on its validation samples; not-a-number without any
    gradients: Callable[[State], Iterator[State]]  # the gradient of the loss on each of its batches, at a model
    train: Callable[[State, int], State]  # a model after a round's plain local training; turns see other batches

    def travel(self, steps: int) -> float:
        """How far that many steps of SGD go along a constant gradient of one: steps * lr, and more with momentum."""
        lag = self.momentum * (1 - self.momentum**steps) / (1 - self.momentum)
        return self.lr * (steps - lag) / (1 - self.momentum)

    def draw(self, purpose: str, every_round: bool = True) -> torch.Generator:
        """Random numbers of this client, new in each round or the same all along."""
        return seeds.draw(self.seed, purpose, self.round if every_round else -1, self.id)


@dataclass(frozen=True, eq=False)
class Local:
    """What a client's loss may look at. Engines run many clients at once, so nothing here names a single client."""

    anchor: Tree
    phase: Phase
    units: Units
    risk: Callable[[Mapping[str, Tensor], Batch], Tensor]  # mean loss of a model's state on a batch
    outputs: Callable[[Mapping[str, Tensor], Tensor], Tensor]  # what a model's state says to samples


@dataclass(frozen=True, eq=False)
class LocalRound(Local):
    """A client's round, from what it received to what it trained; `upload` may look at all of it."""

    client: Client
    payload: Tree
    own: Tree
    models: dict[str, State]
    steps: int  # optimiser steps of the round


@dataclass(frozen=True, eq=False)
class Context:
    """What the server knows in one round, besides its own state."""

    round: int
    rounds: int
    clients: int  # how many the server knows; an unseen one gets this number as its id
    units: Units
    initial: State
    device: torch.device
    seed: int
    cohort: Callable[[int], list[int]]  # who is sampled in a given round
    present: Sequence[int]  # who could be sampled in this one
    # Metric and loss on the server's validation data, to which entries that a model lacks are fitted first.
    score: Scorer | None = None
    notes: dict[str, Any] = field(default_factory=dict)  # what the method wants recorded of this round

    def draw(self, purpose: str) -> torch.Generator:
        """Random numbers of the server, new in each round."""
        return seeds.draw(self.seed, purpose, self.round, -1)


@dataclass(frozen=True)
class Method(Checked):
    """Federated averaging, hook by hook, in the order in which a round calls them."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    apart: ClassVar[bool] = False
    """Whether the server keeps several models; a wrapper that looks at the model must then stand inside."""

    @property
    def label(self) -> str:
        """What run folders, tables and progress call it."""
        return self.name

    def options(self) -> dict[str, Any]:
        """Its hyperparameters by name, as they are written down."""
        return dict(vars(self))

    @property
    def greets(self) -> bool:
        """Whether clients have something to tell before round 0."""
        return type(self).hello is not Method.hello

    @property
    def scores(self) -> bool:
        """Whether it needs the server's validation set."""
        return False

    @property
    def whole(self) -> bool:
        """Whether every upload holds all shared entries, so that one that lacks some is refused."""
        return type(self).upload is Method.upload

    @property
    def packed(self) -> bool:
        """Whether uploads hold weights in a form of the method's own, which nobody else can judge or change."""
        return False

    @property
    def central(self) -> bool:
        """Whether the server has a model of which uploads are updates."""
        return True

    @property
    def singles(self) -> bool:
        """Whether it makes something of every single upload, besides their mean."""
        return False

    @property
    def late(self) -> frozenset[str]:
        """Options that change nothing before the end of the last round: runs that differ only in them can fork there.

        Models may be used differently too, for until then nobody uses any.
        """
        return frozenset()

    @property
    def objective(self) -> Method | None:
        """What clients of several runs must have in common to be trained as one program; None: the plain loss."""
        return None if type(self).loss is Method.loss else self

    # Both sides ------------------------------------------------------------------------------------------------

    def check(self, units: Units) -> None:
        """Raise BadInput when the method cannot work with this network."""

    def shared(self, units: Units) -> Sequence[str]:
        """The entries that travel; the others never leave their client."""
        return units.names

    # Before the first round ------------------------------------------------------------------------------------

    def hello(self, client: Client) -> Tree:
        """Client: what it tells the server once, before round 0."""
        return {}

    def begin(self, hellos: Mapping[int, Tree], ctx: Context) -> tuple[Tree, dict[int, Tree]]:
        """Server: its first state, and a reply to each hello (which becomes the client's first `own`)."""
        return {"model": take(ctx.initial, self.shared(ctx.units))}, {}

    # Each round ------------------------------------------------------------------------------------------------

    def workers(self, server: Tree, cohort: Sequence[int], ctx: Context) -> Sequence[int]:
        """Server: who works in this round."""
        return cohort

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: what one client receives."""
        return {"model": server["model"]}

    def start(self, payload: Tree, own: Tree, client: Client) -> dict[str, State]:
        """Client: its models at the start of the round; what was received replaces what was kept."""
        return {"model": {**client.initial, **own.get("model", {}), **payload.get("model", {})}}

    def anchor(self, payload: Tree, own: Tree, client: Client) -> Tree:
        """Client: tensors that the loss looks at and that stay fixed during the round."""
        return {}

    def phases(self, client: Client) -> Sequence[Phase]:
        """Client: which parts train, in which order and for how long."""
        return (Phase(),)

    def loss(self, params: Mapping[str, Tensor], batch: Batch, local: Local) -> Tensor:
        """Client: the objective on one batch. It must be a pure function, since engines run many clients at once."""
        return local.risk(params, batch)

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: what leaves it, and what it keeps for its next round."""
        shared, model = self.shared(local.units), local.models["model"]
        personal = drop(model, shared)
        return {"model": take(model, shared)}, {**local.own, "model": personal} if personal else local.own

    def weigh(self, server: Tree, uploads: Sequence[Upload], ctx: Context) -> list[float]:
        """Server: the weight of each upload; zero leaves it out."""
        total = sum(upload.samples for upload in uploads)
        return [upload.samples / total for upload in uploads]

    def merge(self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context) -> Tree:
        """Server: its next state."""
        models = [upload.tree.get("model", {}) for upload in uploads]
        return {**server, "model": masked_mean(models, weights, server["model"])}

    # When models are used --------------------------------------------------------------------------------------

    def model(self, server: Tree, ctx: Context) -> State | None:
        """Server: the one global model, if there is one."""
        return server["model"] if len(server["model"]) == len(ctx.units.names) else None

    def personal(self, models: dict[str, State]) -> str:
        """Client: which of its models it uses."""
        return "model"

    def tune(self, client: Client) -> Sequence[Phase]:
        """Client: training before the personal model is used; its result is never uploaded nor kept."""
        return ()

    # When an unseen client arrives -----------------------------------------------------------------------------

    def welcome(self, server: Tree, message: Tree, ctx: Context) -> tuple[Tree, Tree, bool]:
        """Server: one turn of a dialogue with an unseen client: next state, what it receives, whether that was all."""
        return server, self.download(server, ctx.clients, ctx), True

    def reply(self, payload: Tree, client: Client) -> Tree:
        """Client: its turn in that dialogue: a hello before it has received anything, then an answer."""
        return {} if payload else self.hello(client)

    def settle(self, payload: Tree, client: Client) -> Tree:
        """Client: what it keeps of the last payload as its first `own`; what each round brings anew need not be."""
        return {}
