"""Warm start: the server trains the first model on its own samples, before any client does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fedhelix.core.errors import UserError
from fedhelix.core.layers import Layers
from fedhelix.core.method import Capabilities, Context, Method
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import Tree
from fedhelix.core.wrapper import Wrapper, shares
from fedhelix.methods.fedavg import FedAvg


@register("warm-start", paper="fedhelix")
@dataclass(frozen=True)
class WarmStart(Wrapper):
    """Starts from a model that the server trained.

    Before the first round, the server trains the model on its own samples.
    """

    inner: Method = option(FedAvg(), "the method that goes on from there")
    warm_epochs: int = option(10, "epochs on the server's samples before the first round", low=1)
    required: bool = option(True, "refuse to run where the server has no samples")

    @property
    def capabilities(self) -> Capabilities:
        """As the inner method, but the server must have samples if they are required."""
        inner = super().capabilities
        return replace(inner, server_validation=self.required or inner.server_validation)

    def check_inner(self, layers: Layers | None = None) -> None:
        """There must be one model that the server can train."""
        super().check_inner(layers)
        if not self.inner.capabilities.central_model or not shares(self.inner, layers):
            raise UserError(
                f"warm-start needs a method with a model at the server, which {self.inner.label} "
                "does not have."
            )

    def server_init(
        self, client_inits: Mapping[int, Tree], ctx: Context
    ) -> tuple[Tree, dict[int, Tree]]:
        """Server: as the inner method, from the trained model if there are samples."""
        if ctx.train is not None:
            ctx = replace(ctx, initial=ctx.train(ctx.initial, self.warm_epochs))
        return super().server_init(client_inits, ctx)
