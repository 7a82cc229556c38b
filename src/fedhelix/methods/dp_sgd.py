"""DP-SGD: differential privacy of single samples, by noise on the clipped gradients of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedhelix.components.accounting import Accounting, Ledger
from fedhelix.components.sample_gradients import clipped_mean, surrogate, with_noise
from fedhelix.core.errors import UserError
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
from fedhelix.core.tree import Tree
from fedhelix.core.wrapper import Wrapper
from fedhelix.methods.fedavg import FedAvg

UNPROTECTED = ("client_init", "start", "loss_context", "phases", "upload", "select_clients")


@register("dp-sgd", paper="Abadi et al., CCS 2016, arXiv:1607.00133")
@dataclass(frozen=True)
class DPSGD(Wrapper):
    """Clips the gradient of every sample and adds Gaussian noise to their sum in every step."""

    inner: Method = option(FedAvg(), "the method whose clients train so")
    epsilon: float = option(8.0, "privacy budget of every sample", above=0, high=1e6)
    delta: float = option(1e-5, "probability with which epsilon may not hold", above=0, below=1)
    noise: float | None = option(
        None, "its standard deviation on the sum, in clips (auto: by epsilon and rounds)", above=0
    )
    sample_clip: float = option(1.0, "longest gradient of a sample", above=0)
    accountant: Literal["rdp", "pld"] = option(
        "rdp", "Rényi divergences, or the tighter but slower privacy loss distributions"
    )

    @property
    def capabilities(self) -> Capabilities:
        """What uploads hold is protected already, whoever looks at them."""
        return replace(super().capabilities, sample_gradients=True, complete_uploads=True)

    def check(self, layers: Layers) -> None:
        """Refuse networks and methods that mix samples, or use them in other ways."""
        if layers.norm:
            raise UserError(
                "dp-sgd needs the gradient of each sample alone, and BatchNorm mixes samples; "
                "choose a network without it."
            )
        if used := [hook for hook in UNPROTECTED if self.inner.overrides(hook)]:
            raise UserError(
                f"dp-sgd cannot protect samples of {self.inner.label}, whose {used[0]} may use "
                "them without noise."
            )
        super().check(layers)

    # What the server does -----------------------------------------------------------------------

    def server_init(
        self, client_inits: Mapping[int, Tree], ctx: Context
    ) -> tuple[Tree, dict[int, Tree]]:
        """Server: as the inner method; the noise is found, and every client's ledger is empty."""
        server, replies = self.inner.server_init(client_inits, ctx)
        noise = self.noise
        if noise is None:
            noise = self._accounting.noise(self.epsilon, {1.0: ctx.rounds * max(ctx.epochs, 1)})
        return {**server, "samples": {"noise": noise, "ledger": {}}}, replies

    def select_clients(self, server: Tree, cohort: Sequence[int], ctx: Context) -> Sequence[int]:
        """Server: whoever has enough left of its budget for one more round."""
        able = [client for client in ctx.present if self._left(server["samples"], client, ctx)]
        if not able:
            raise UserError(
                f"the budget epsilon = {self.epsilon:g} is spent: no client can take part in round "
                f"{ctx.round + 1}; run fewer rounds, or raise noise or epsilon."
            )
        return [client for client in cohort if client in able]

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: as the inner method, with the noise to use."""
        noise = torch.tensor(server["samples"]["noise"], device=ctx.device)
        return {**self.inner.download(server, client, ctx), "samples": {"noise": noise}}

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: as the inner method, and the ledger."""
        state = self.inner.aggregate(server, uploads, weights, ctx)
        spent = server["samples"]
        for _ in range(ctx.epochs):  # a sample is in one batch of every epoch
            ledger = self._ledger(spent).charged({upload.client: 1.0 for upload in uploads})
            spent = {**spent, "ledger": ledger}
        ctx.metadata["epsilon"] = self._ledger(spent).epsilons()
        ctx.metadata["noise"] = spent["noise"]
        return {**state, "samples": spent}

    # What a client does -------------------------------------------------------------------------

    def loss_context(self, payload: Tree, client_state: Tree, client: Client) -> Tree:
        """Client: the noise, which must last for its budget, whatever the server says."""
        noise = payload["samples"]["noise"]
        steps = int(client_state.get("sample_steps", 0)) + client.epochs
        spent = self._accounting.epsilon(float(noise), {1.0: steps}) if steps else 0.0
        if spent > self.epsilon:
            raise UserError(
                f"the budget epsilon = {self.epsilon:g} is spent: with a noise of {float(noise):g} "
                f"round {client.round + 1} would make it {spent:.3g}."
            )
        # In a deployment noise comes from the operating system; the name alone says so.
        return {"secret_noise" if client.deployed else "noise": noise}

    def loss(self, params: Mapping[str, Tensor], batch: Batch, local: Local) -> Tensor:
        """The mean loss; its gradient is the noisy mean of the samples' clipped ones."""

        def alone(state: Mapping[str, Tensor], x: Inputs, y: Tensor) -> Tensor:
            sample = each(lambda part: part[None], x)
            return self.inner.loss(state, Batch(sample, y[None]), local)

        frozen = {name: value.detach() for name, value in params.items()}
        secret = "secret_noise" in local.context
        noise = local.context["secret_noise" if secret else "noise"]
        clip = torch.full_like(noise, self.sample_clip)
        mean, value, count = clipped_mean(alone, frozen, batch.x, batch.y, batch.mask, clip)
        return surrogate(params, with_noise(mean, noise * clip / count, secret), value)

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: as the inner method; it counts its epochs itself, too."""
        tree, kept = self.inner.upload(local)
        steps = int(local.client_state.get("sample_steps", 0)) + local.client.epochs
        return tree, {**kept, "sample_steps": steps}

    # What it costs ------------------------------------------------------------------------------

    @property
    def _accounting(self) -> Accounting:
        return Accounting(self.accountant, "public", self.delta)

    def _ledger(self, samples: Tree) -> Ledger:
        return Ledger(self._accounting, samples["noise"], self.epsilon, samples["ledger"])

    def _left(self, samples: Tree, client: int, ctx: Context) -> bool:
        rounds = sum(samples["ledger"].get(str(client), {}).values()) + ctx.epochs
        return self._accounting.epsilon(samples["noise"], {1.0: rounds}) <= self.epsilon
