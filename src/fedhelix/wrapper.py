"""A method around a method: GenFed, clusters and the defences change a hook or two and pass on the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedhelix.errors import BadInput
from fedhelix.method import Batch, Client, Context, Local, LocalRound, Method, Phase, Upload
from fedhelix.tree import State, Tree
from fedhelix.units import Units


@dataclass(frozen=True)
class Wrapper(Method):
    """A method that holds a method and changes a hook or two of it; every other hook is the inner one's."""

    inner: Method

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.shared is not Wrapper.shared and cls.upload is Wrapper.upload:
            raise BadInput(
                f"{cls.__name__} overrides shared, but the method inside uploads what it shares itself; "
                "override upload as well, or leave shared out."
            )

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Method):
            raise BadInput(f"{self.name} works around a method such as FedAvg(), not around {self.inner!r}.")
        super().__post_init__()

    @property
    def label(self) -> str:
        """Its name and the inner one's; plain FedAvg goes without saying."""
        return self.name if self.inner.label == "fedavg" else f"{self.name}+{self.inner.label}"

    def options(self) -> dict[str, Any]:
        """Its own hyperparameters and the inner ones, on one level."""
        mine = {name: value for name, value in vars(self).items() if name != "inner"}
        return {**mine, **self.inner.options()}

    @property
    def greets(self) -> bool:
        """As the inner method, unless the wrapper has something to tell."""
        return self.inner.greets or type(self).hello is not Wrapper.hello

    @property
    def scores(self) -> bool:
        """Whether the inner method needs the server's validation set."""
        return self.inner.scores

    @property
    def whole(self) -> bool:
        """As the inner method, unless the wrapper changes what is uploaded."""
        return self.inner.whole and type(self).upload is Wrapper.upload

    @property
    def packed(self) -> bool:
        """As the inner method."""
        return self.inner.packed

    @property
    def central(self) -> bool:
        """As the inner method."""
        return self.inner.central

    @property
    def singles(self) -> bool:
        """As the inner method."""
        return self.inner.singles

    @property
    def objective(self) -> Method | None:
        """As the inner method, unless the wrapper changes the loss."""
        return self.inner.objective if type(self).loss is Wrapper.loss else self

    def check(self, units: Units) -> None:
        """As the inner method; a wrapper looks at the server's model, of which there must not be several."""
        if self.inner.apart and isinstance(self.inner, Wrapper):
            raise BadInput(f"{self.name} must stand inside of {self.inner.name}, as in {self.inner.name}+{self.name}.")
        if self.inner.apart:
            raise BadInput(f"{self.name} cannot be put around {self.inner.name}, which keeps a model for each cluster.")
        self.inner.check(units)

    def shared(self, units: Units) -> Sequence[str]:
        """As the inner method."""
        return self.inner.shared(units)

    def hello(self, client: Client) -> Tree:
        """As the inner method."""
        return self.inner.hello(client)

    def begin(self, hellos: Mapping[int, Tree], ctx: Context) -> tuple[Tree, dict[int, Tree]]:
        """As the inner method."""
        return self.inner.begin(hellos, ctx)

    def workers(self, server: Tree, cohort: Sequence[int], ctx: Context) -> Sequence[int]:
        """As the inner method."""
        return self.inner.workers(server, cohort, ctx)

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """As the inner method."""
        return self.inner.download(server, client, ctx)

    def start(self, payload: Tree, own: Tree, client: Client) -> dict[str, State]:
        """As the inner method."""
        return self.inner.start(payload, own, client)

    def anchor(self, payload: Tree, own: Tree, client: Client) -> Tree:
        """As the inner method."""
        return self.inner.anchor(payload, own, client)

    def phases(self, client: Client) -> Sequence[Phase]:
        """As the inner method."""
        return self.inner.phases(client)

    def loss(self, params: Mapping[str, Tensor], batch: Batch, local: Local) -> Tensor:
        """As the inner method."""
        return self.inner.loss(params, batch, local)

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """As the inner method."""
        return self.inner.upload(local)

    def weigh(self, server: Tree, uploads: Sequence[Upload], ctx: Context) -> list[float]:
        """As the inner method."""
        return self.inner.weigh(server, uploads, ctx)

    def merge(self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context) -> Tree:
        """As the inner method."""
        return self.inner.merge(server, uploads, weights, ctx)

    def model(self, server: Tree, ctx: Context) -> State | None:
        """As the inner method."""
        return self.inner.model(server, ctx)

    def personal(self, models: dict[str, State]) -> str:
        """As the inner method."""
        return self.inner.personal(models)

    def tune(self, client: Client) -> Sequence[Phase]:
        """As the inner method."""
        return self.inner.tune(client)

    def welcome(self, server: Tree, message: Tree, ctx: Context) -> tuple[Tree, Tree, bool]:
        """As the inner method; where that is a mere download, it is the wrapper's."""
        if usual(self, "welcome"):
            return Method.welcome(self, server, message, ctx)
        return self.inner.welcome(server, message, ctx)

    def reply(self, payload: Tree, client: Client) -> Tree:
        """As the inner method; where that is a mere hello, it is the wrapper's."""
        if usual(self, "reply"):
            return Method.reply(self, payload, client)
        return self.inner.reply(payload, client)

    def settle(self, payload: Tree, client: Client) -> Tree:
        """As the inner method."""
        return self.inner.settle(payload, client)


def usual(method: Method, hook: str) -> bool:
    """Whether neither a method nor one inside of it has overridden a hook."""
    if isinstance(method, Wrapper):
        return getattr(type(method), hook) is getattr(Wrapper, hook) and usual(method.inner, hook)
    return getattr(type(method), hook) is getattr(Method, hook)
