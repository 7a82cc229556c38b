"""FedBuff: clients train all the time, and the server steps whenever its buffer is full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedhelix.components.staleness import discount
from fedhelix.core.errors import UserError
from fedhelix.core.layers import Layers
from fedhelix.core.method import Capabilities, Context, Method, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree, add, subtract, take
from fedhelix.core.wrapper import Wrapper, shares
from fedhelix.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Asynchronous(Wrapper):
    """A method whose rounds end with some uploads, whoever else is still at work."""

    def check_inner(self, layers: Layers | None = None) -> None:
        """The server must have a model, and see what uploads make of it."""
        super().check_inner(layers)
        inner = self.inner.capabilities
        if inner.buffer is not None:
            raise UserError(f"{self.name} cannot be put around {self.inner.name}: both buffer.")
        if inner.packed_uploads or not inner.central_model or not shares(self.inner, layers):
            raise UserError(
                f"{self.name} sees no updates of a common model around {self.inner.label}."
            )

    def stepped(self, server: Tree, state: Tree, step: float, ctx: Context) -> Tree:
        """The next server state with only a part of the way to its model; BatchNorm statistics are
        taken as they are.
        """
        if step == 1:
            return state
        model: State = state["model"]
        old = take(server["model"], ctx.layers.parameters)
        way = subtract(take(model, old), old)
        return {**state, "model": {**model, **add(old, way, step)}}


@register("fedbuff", paper="Nguyen et al., AISTATS 2022, arXiv:2106.06639")
@dataclass(frozen=True)
class FedBuff(Asynchronous):
    """Asynchronous: the server waits for a few uploads only.

    The server aggregates as soon as some uploads have arrived; late updates count less.
    """

    inner: Method = option(FedAvg(), "the method whose clients need not wait for each other")
    buffer: int = option(5, "uploads that make a new model", low=1)
    exponent: float = option(
        0.5, "an update that is s models old counts (1 + s) to the power of minus this", low=0
    )
    step: float = option(1.0, "factor on the mean update: the server's learning rate", above=0)

    @property
    def capabilities(self) -> Capabilities:
        """It is asynchronous."""
        return replace(super().capabilities, buffer=self.buffer)

    def weights(self, server: Tree, uploads: Sequence[Upload], ctx: Context) -> list[float]:
        """Server: the inner method's, for the updates as they count now."""
        return self.inner.weights(server, self._current(server, uploads, ctx), ctx)

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: a step along the mean of the updates, each with its discount."""
        current = self._current(server, uploads, ctx)
        state = self.inner.aggregate(server, current, weights, ctx)
        return self.stepped(server, state, self.step, ctx)

    def _current(self, server: Tree, uploads: Sequence[Upload], ctx: Context) -> list[Upload]:
        """Server: the uploads as if their updates had begun at its present model."""
        return [
            self._moved(server, upload, ctx) if upload.staleness else upload for upload in uploads
        ]

    def _moved(self, server: Tree, upload: Upload, ctx: Context) -> Upload:
        """Server: what the client would receive now plus its discounted update."""
        now: State = self.inner.download(server, upload.client, ctx)["model"]
        model: State = upload.tree.get("model", {})
        begun: State = (upload.payload or {}).get("model", {})
        names = [name for name in ctx.layers.parameters if name in model and name in begun]
        factor = discount(upload.staleness, "polynomial", self.exponent)
        update = subtract(take(model, names), begun)
        moved = {name: now[name] + factor * update[name] for name in names}
        return upload._replace(tree={**upload.tree, "model": {**model, **moved}})
