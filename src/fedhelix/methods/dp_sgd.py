"""DP-SGD: differential privacy of single samples, by noise on the clipped gradients of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedhelix.components.accounting import Accounting
from fedhelix.components.sample_gradients import clipped_mean, surrogate, with_noise
from fedhelix.core.bounds import rounded_up
from fedhelix.core.errors import BudgetSpent, UserError
from fedhelix.core.layers import Layers
from fedhelix.core.method import (
    Batch,
    Capabilities,
    Client,
    Context,
    Local,
    LocalRound,
    Method,
    Upload,
)
from fedhelix.core.options import option
from fedhelix.core.parts import Inputs, each
from fedhelix.core.registry import register
from fedhelix.core.tree import Tree, drop, take
from fedhelix.core.wrapper import CHOICES, CLIENT_HOOKS
from fedhelix.methods.budget import NOISE_ADVICE, Budgeted
from fedhelix.methods.fedavg import FedAvg

UNPROTECTED = (*CLIENT_HOOKS, *CHOICES)


@register("dp-sgd", paper="Abadi et al., CCS 2016, arXiv:1607.00133")
@dataclass(frozen=True)
class DPSGD(Budgeted):
    """Differential privacy of samples: clipped, noisy gradients.

    Clips the gradient of every sample and adds Gaussian noise to their sum in every step.
    """

    books = "samples"
    level = "sample"

    inner: Method = option(FedAvg(), "the method whose clients train so")
    epsilon: float = option(8.0, "privacy budget of every sample", above=0, high=1e6)
    sample_clip: float = option(1.0, "longest gradient of a sample", above=0)

    @property
    def capabilities(self) -> Capabilities:
        """What uploads hold is protected already, whoever looks at them."""
        helps = NOISE_ADVICE.format("a smaller sample_clip or lr")
        return replace(
            super().capabilities,
            sample_gradients=True,
            complete_uploads=True,
            if_loss_rises=helps,
        )

    def check_inner(self, layers: Layers | None = None) -> None:
        """Refuse networks and methods that mix samples, or use them in other ways."""
        if layers is not None and layers.norm:
            raise UserError(
                "dp-sgd needs the gradient of each sample alone, and BatchNorm mixes samples; "
                "choose a network without it."
            )
        if used := [hook for hook in UNPROTECTED if self.inner.overrides(hook)]:
            raise UserError(
                f"dp-sgd cannot protect samples of {self.inner.label}, whose {used[0]} may use "
                "them without noise."
            )
        super().check_inner(layers)

    # What the server does -----------------------------------------------------------------------

    def server_init(
        self, client_inits: Mapping[int, Tree], ctx: Context
    ) -> tuple[Tree, dict[int, Tree]]:
        """Server: as the inner method; the noise is found, and every client's ledger is empty."""
        server, replies = self.inner.server_init(client_inits, ctx)
        return {**server, "samples": self._opened_books(ctx)}, replies

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: as the inner method, with the noise to use."""
        noise = torch.tensor(server["samples"]["noise"], device=ctx.device)
        return {**self.inner.download(server, client, ctx), "samples": {"noise": noise}}

    def deliver(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: as the inner method; what a client trains for itself needs no noise."""
        return self.inner.deliver(server, client, ctx)

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: as the inner method, and the ledger."""
        state = self.inner.aggregate(server, uploads, weights, ctx)
        clients = [upload.client for upload in uploads]
        return {**state, "samples": self._charged_books(server, clients, ctx)}

    # What a client does -------------------------------------------------------------------------

    def loss_context(self, payload: Tree, client_state: Tree, client: Client) -> Tree:
        """Client: the noise, which must last for its budget, whatever the server says.

        Training for its own use gets none: what `deliver` sends has no noise, and `upload` refuses
        what was trained without.
        """
        if "samples" not in payload:
            return {}
        noise, steps = self._exposure(payload, client_state, client)
        spent = self._epsilon(noise, steps)
        if spent > self.epsilon:
            raise BudgetSpent(
                f"the budget epsilon = {self.epsilon:g} is spent: with a noise of {noise:g} "
                f"round {client.round + 1} would make it {rounded_up(spent)}."
            )
        # In a deployment noise comes from the operating system; the name alone says so.
        return {"secret_noise" if client.deployed else "noise": payload["samples"]["noise"]}

    def loss(self, params: Mapping[str, Tensor], batch: Batch, local: Local) -> Tensor:
        """The mean loss; its gradient is the noisy mean of the samples' clipped ones."""

        def alone(state: Mapping[str, Tensor], x: Inputs, y: Tensor) -> Tensor:
            one = Batch(each(lambda part: part[None], x), y[None])
            return self.inner.loss({**fixed, **state}, one, local)

        if not {"noise", "secret_noise"} & local.context.keys():
            return self.inner.loss(params, batch, local)
        fixed = take(params, local.layers.buffers)  # which have no gradient
        frozen = {name: value.detach() for name, value in drop(params, fixed).items()}
        secret = "secret_noise" in local.context
        noise = local.context["secret_noise" if secret else "noise"]
        clip = torch.full_like(noise, self.sample_clip)
        mean, value, count = clipped_mean(alone, frozen, batch.x, batch.y, batch.mask, clip)
        return surrogate(params, with_noise(mean, noise * clip / count, secret), value)

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: as the inner method; it counts its epochs itself, too, all at the least noise."""
        if "samples" not in local.payload:
            raise UserError("dp-sgd uploads nothing that was trained without noise.")
        tree, kept = self.inner.upload(local)
        noise, steps = self._exposure(local.payload, local.client_state, local.client)
        return tree, {**kept, "samples": {"noise": noise, "steps": steps}}

    def spent(self, payload: Tree, client_state: Tree) -> float:
        """Client: its epsilon after a round, as it counts itself."""
        counted = client_state["samples"]
        return self._epsilon(float(counted["noise"]), int(counted["steps"]))

    def is_last(self, payload: Tree, client_state: Tree, epochs: int) -> bool:
        """Client: as it counts itself."""
        counted = client_state["samples"]
        return self._epsilon(float(counted["noise"]), int(counted["steps"]) + epochs) > self.epsilon

    # What it costs ------------------------------------------------------------------------------

    def _sums(self, ctx: Context) -> int:
        return ctx.epochs  # a sample is in one batch of every epoch

    def _exposure(self, payload: Tree, client_state: Tree, client: Client) -> tuple[float, int]:
        """The least noise of a client's rounds up to this one, and its epochs in them."""
        before = client_state.get("samples", {"noise": math.inf, "steps": 0})
        asked = float(payload["samples"]["noise"])
        if not 0 < asked < math.inf:
            raise UserError(f"dp-sgd needs noise, a finite number above 0, not {asked:g}.")
        noise = min(float(before["noise"]), asked)
        return noise, int(before["steps"]) + client.epochs

    def _epsilon(self, noise: float, steps: int) -> float:
        counted = Accounting(self.accountant, "public", self.delta)
        return counted.epsilon(noise, {1.0: steps}) if steps else 0.0
