"""FedOpt: the server treats the mean update as a gradient for Adam, Yogi or Adagrad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from fedhelix.core.method import Context, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import Tree, subtract, take, zeros
from fedhelix.methods.fedavg import FedAvg


@register("fedopt", paper="Reddi et al., ICLR 2021, arXiv:2003.00295")
@dataclass(frozen=True)
class FedOpt(FedAvg):
    """An adaptive optimiser on the server: Adam, Yogi or Adagrad.

    FedAdam, FedYogi or FedAdagrad: an adaptive optimiser on the server, plain SGD on the clients.
    """

    server_optimizer: Literal["adam", "yogi", "adagrad"] = option(
        "adam", "the server's rule for the second moment"
    )
    server_lr: float = option(0.03, "the server's learning rate", above=0)
    beta1: float = option(0.9, "memory of the first moment", low=0, below=1)
    beta2: float = option(0.99, "memory of the second moment (not for adagrad)", low=0, below=1)
    tau: float = option(1e-3, "adaptivity: small values trust the second moment more", above=0)
    bias_correction: bool = option(
        False, "larger first steps, since the moments start at zero (not for adagrad)"
    )

    def server_init(
        self, client_inits: Mapping[int, Tree], ctx: Context
    ) -> tuple[Tree, dict[int, Tree]]:
        """Server: both moments start at zero."""
        server, replies = super().server_init(client_inits, ctx)
        params = take(ctx.initial, ctx.layers.parameters)
        return {**server, "first": zeros(params), "second": zeros(params)}, replies

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: one adaptive step along the mean update; BatchNorm statistics are plainly
        averaged.
        """
        state = super().aggregate(server, uploads, weights, ctx)
        update = subtract(take(state["model"], ctx.layers.parameters), server["model"])
        lr, t = self.server_lr, ctx.round + 1
        if self.bias_correction and self.server_optimizer != "adagrad":
            lr *= (1 - self.beta2**t) ** 0.5 / (1 - self.beta1**t)
        first, second = {}, {}
        for name, delta in update.items():
            square, old = delta.square(), server["second"][name]
            first[name] = self.beta1 * server["first"][name] + (1 - self.beta1) * delta
            second[name] = {
                "adam": self.beta2 * old + (1 - self.beta2) * square,
                "yogi": old - (1 - self.beta2) * square * torch.sign(old - square),
                "adagrad": old + square,
            }[self.server_optimizer]
            step = first[name] / (second[name].sqrt() + self.tau)
            state["model"][name] = server["model"][name] + lr * step
        return {**state, "first": first, "second": second}
