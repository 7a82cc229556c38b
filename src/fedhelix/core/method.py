"""What a method is: a frozen value whose hooks are FedAvg's until it says otherwise.

A method has no loop, no device, no logger and no state. Its fields are its hyperparameters. State
passes through the hooks as trees of named tensors: `server` is what the server keeps,
`client_state` is what one client keeps. A hook sees only what its side would see on real machines:
client hooks get a `Client`, server hooks a `Context`.

The decorator `hook` is the one place that knows a hook: wrappers delegate, returned values are
checked and misspelt hooks are refused by what it records.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from torch import Tensor

from fedhelix.core import returns
from fedhelix.core.docs import summary
from fedhelix.core.layers import Layers
from fedhelix.core.options import Checked
from fedhelix.core.parts import Inputs
from fedhelix.core.returns import Check, Phase
from fedhelix.core.tree import State, Tree, drop, masked_mean, take
from fedhelix.core.views import Batch, Client, Context, Local, LocalRound, Scorer, Upload

__all__ = [
    "HOOKS",
    "Batch",
    "Capabilities",
    "Client",
    "Context",
    "Hook",
    "Local",
    "LocalRound",
    "Method",
    "Phase",
    "Scorer",
    "Upload",
    "hook",
]

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Capabilities:
    """What a method needs and does, as far as wrappers, engines and the loop have to know."""

    client_init: bool = False  # clients send something before round 0
    server_validation: bool = False  # it needs the server's validation set
    complete_uploads: bool = True  # an upload without some shared entry is refused
    classification: bool = False  # it needs classes
    sample_features: bool = False  # it needs one vector of features per sample, not one per token
    packed_uploads: bool = False  # weights travel in a form that nobody else can score or change
    packed_downloads: bool = False  # so does the model that a client receives
    central_model: bool = True  # the server has a model of which uploads are updates
    single_uploads: bool = False  # it makes something of every single upload, besides their mean
    compares_uploads: bool = False  # it looks at them side by side, to change or choose some
    buffer: int | None = None  # it is asynchronous: a round ends with so many uploads
    several_models: bool = False  # the server keeps several models; wrappers must stand inside
    outermost: bool = False  # it protects single uploads; nothing outside may look at them
    final_work: bool = False  # the last round takes longer than the others
    server_extra: tuple[str, str] | None = None  # a module for its server, and the extra with it
    if_loss_rises: str = ""  # advice of its own, given where models get no better
    sample_gradients: bool = False  # its loss differentiates sample by sample
    # Uploads are words to be summed under masks: share of clients that must stay, and neighbours.
    masks: tuple[float, int | None] | None = None
    # What clients of several runs must have in common to train as one program; None: plain loss.
    loss_key: Hashable | None = None


@dataclass(frozen=True)
class Hook:
    """What is known of a hook: who calls it, what it must return, and how many arguments it has."""

    name: str
    side: Literal["both", "client", "server"]
    check: Check
    arguments: int
    summary: str


def hook(
    side: Literal["both", "client", "server"], returns: Check
) -> Callable[[Function], Function]:
    """Make a function of `Method` a hook."""

    def mark(function: Function) -> Function:
        arguments = len(inspect.signature(function).parameters) - 1
        known = Hook(function.__name__, side, returns, arguments, summary(function))
        function.__hook__ = known  # type: ignore[attr-defined]
        return function

    return mark


@dataclass(frozen=True)
class Method(Checked):
    """Federated averaging, hook by hook, in the order in which a round calls them."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    # Methods like it and their options, for the options of wrappers that do not suit it.
    instead: ClassVar[tuple[tuple[str, dict[str, str]], ...]] = ()
    # Options with which a sum of its uploads is enough for its server.
    if_summed: ClassVar[tuple[tuple[str, bool | str], ...]] = ()
    # The option with which it needs no classes, if one makes it need them.
    without_classes: ClassVar[str] = ""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "name" not in vars(cls):  # unless it is registered, it must not pass for its parent
            cls.name = cls.__name__

    @property
    def label(self) -> str:
        """What run folders, tables and progress call it."""
        return self.name

    def options(self) -> dict[str, Any]:
        """Its hyperparameters by name, as they are written down."""
        return dict(vars(self))

    def overrides(self, hook: str) -> bool:
        """Whether a hook is not FedAvg's."""
        return getattr(type(self), hook) is not getattr(Method, hook)

    @property
    def capabilities(self) -> Capabilities:
        """What others have to know about it; override it with
        `replace(super().capabilities, ...)`.
        """
        return Capabilities(
            client_init=self.overrides("client_init"),
            complete_uploads=not self.overrides("upload"),
            loss_key=self if self.overrides("loss") else None,
        )

    # Both sides ---------------------------------------------------------------------------------

    @hook("both", returns.nothing)
    def check(self, layers: Layers) -> None:
        """Raise UserError when the method cannot work with this network."""

    @hook("both", returns.entries)
    def shared_params(self, layers: Layers) -> Sequence[str]:
        """The entries that travel; the others never leave their client."""
        return layers.names

    # Before the first round ---------------------------------------------------------------------

    @hook("client", returns.tree)
    def client_init(self, client: Client) -> Tree:
        """What it sends to the server once, before round 0."""
        return {}

    @hook("server", returns.server_start)
    def server_init(
        self, client_inits: Mapping[int, Tree], ctx: Context
    ) -> tuple[Tree, dict[int, Tree]]:
        """Its first state, and a reply for some clients (which becomes their first state)."""
        return {"model": take(ctx.initial, self.shared_params(ctx.layers))}, {}

    # Each round ---------------------------------------------------------------------------------

    @hook("server", returns.clients)
    def candidates(self, server: Tree, ctx: Context) -> Sequence[int]:
        """Who can be drawn for this round."""
        return ctx.present

    @hook("server", returns.clients)
    def select_clients(self, server: Tree, cohort: Sequence[int], ctx: Context) -> Sequence[int]:
        """Who works in this round."""
        return cohort

    @hook("server", returns.tree)
    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """What one client receives."""
        return {"model": server["model"]}

    @hook("client", returns.models)
    def start(self, payload: Tree, client_state: Tree, client: Client) -> dict[str, State]:
        """Its models at the start of the round; what was received replaces what was kept."""
        kept, received = client_state.get("model", {}), payload.get("model", {})
        return {"model": {**client.initial, **kept, **received}}

    @hook("client", returns.tensors)
    def loss_context(self, payload: Tree, client_state: Tree, client: Client) -> Tree:
        """Tensors that the loss looks at and that stay fixed during the round."""
        return {}

    @hook("client", returns.phases)
    def phases(self, client: Client) -> Sequence[Phase]:
        """Which parts train, in which order and for how long."""
        return (Phase(),)

    @hook("client", returns.one_number)
    def loss(self, params: Mapping[str, Tensor], batch: Batch, local: Local) -> Tensor:
        """The objective on one batch: a pure function, since engines run many clients at once."""
        return local.base_loss(params, batch)

    @hook("client", returns.upload)
    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """What leaves it, and what it keeps for its next round."""
        shared, model = self.shared_params(local.layers), local.models["model"]
        personal = drop(model, shared)
        kept = {**local.client_state, "model": personal} if personal else local.client_state
        return {"model": take(model, shared)}, kept

    @hook("server", returns.tree)
    def decode(self, upload: Tree, payload: Tree, ctx: Context) -> Tree:
        """What an upload says once it is unpacked; UserError refuses it."""
        return upload

    @hook("server", returns.tree)
    def encode(self, upload: Tree, payload: Tree, ctx: Context) -> Tree:
        """An unpacked upload as it would travel: forged ones have to pass `decode`, too."""
        return upload

    @hook("server", returns.weights)
    def weights(self, server: Tree, uploads: Sequence[Upload], ctx: Context) -> list[float]:
        """The weight of each upload; zero leaves it out."""
        total = sum(upload.samples for upload in uploads)
        return [upload.samples / total for upload in uploads]

    @hook("server", returns.next_state)
    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Its next state."""
        models = [upload.tree.get("model", {}) for upload in uploads]
        return {**server, "model": masked_mean(models, weights, server["model"])}

    # When models are used -----------------------------------------------------------------------

    @hook("server", returns.model_or_none)
    def model(self, server: Tree, ctx: Context) -> State | None:
        """The one global model, if there is one."""
        return server["model"] if len(server["model"]) == len(ctx.layers.names) else None

    @hook("server", returns.tree)
    def deliver(self, server: Tree, client: int, ctx: Context) -> Tree:
        """What one client receives to use, not to train; a newcomer starts from it, too."""
        return self.download(server, client, ctx)

    @hook("client", returns.model_name)
    def personal(self, models: dict[str, State]) -> str:
        """Which of its models it uses."""
        return "model"

    @hook("client", returns.outputs)
    def predict(self, params: Mapping[str, Tensor], x: Inputs, local: Local) -> Tensor:
        """The outputs of its model for samples, where `start` added entries to it: a pure function
        that may look at these and at the network's features.
        """
        return local.outputs(params, x)

    @hook("client", returns.phases)
    def personalize(self, client: Client) -> Sequence[Phase]:
        """Training before the personal model is used; its result is neither uploaded nor kept."""
        return ()

    @hook("client", returns.model_name)
    def choose(self, models: dict[str, State], client: Client) -> str:
        """Which of its models it uses once `personalize` has trained them."""
        return self.personal(models)

    # When an unseen client arrives --------------------------------------------------------------

    @hook("server", returns.onboarding)
    def onboard_server(self, server: Tree, message: Tree, ctx: Context) -> tuple[Tree, Tree, bool]:
        """One turn of a dialogue with a newcomer: next state, what it receives, whether that was
        all.
        """
        return server, self.deliver(server, ctx.clients, ctx), True

    @hook("client", returns.tree)
    def onboard_client(self, payload: Tree, client: Client) -> Tree:
        """The newcomer's turn: `client_init` before it has received anything, then an answer."""
        return {} if payload else self.client_init(client)

    @hook("client", returns.tree)
    def onboard_state(self, payload: Tree, client: Client) -> Tree:
        """What a newcomer keeps of the last payload as its first state, besides
        what rounds bring.
        """
        return {}


HOOKS: dict[str, Hook] = {
    name: function.__hook__
    for name, function in vars(Method).items()
    if hasattr(function, "__hook__")
}
