"""Denoising diffusion (DDPM), and pFedGPA's inversion of a vector through it.

Equation numbers are those of pFedGPA, arXiv:2409.05701. A noise predictor `eps(x, t)` takes a batch
of vectors and one step t in 1..T. Everything here is exact maths on tensors; the networks and their
training are in `networks` and `training`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from fedhelix.components.generative.training import Watch, unwatched

Predictor = Callable[[Tensor, int], Tensor]
Network = Callable[[Tensor, Tensor], Tensor]  # one step for each row
Draw = Callable[[Tensor], Tensor]  # noise of the shape of a tensor
Inversion = Literal["eq15", "fresh", "dpm_encoder"]


@dataclass(frozen=True)
class Diffusion:
    """The linear noise schedule and what follows from it; t runs from 0 (no noise) to T."""

    steps: int = 1000
    first: float = 1e-4
    last: float = 0.02

    @cached_property
    def beta(self) -> Tensor:
        """The variance that step t adds; step 0 adds none."""
        steps = torch.linspace(self.first, self.last, self.steps, dtype=torch.float64)
        return torch.cat([torch.zeros(1, dtype=torch.float64), steps])

    @cached_property
    def alpha_bar(self) -> Tensor:
        """The share of a vector's variance that remains after t steps."""
        return (1 - self.beta).cumprod(0)

    @cached_property
    def sigma(self) -> Tensor:
        """The standard deviation of the reverse step from t to t - 1; that from 1 to 0 is zero."""
        before = torch.cat([torch.ones(1, dtype=torch.float64), self.alpha_bar[:-1]])
        variance = self.beta * (1 - before) / (1 - self.alpha_bar).clamp(min=1e-30)
        return variance.sqrt()

    def noised(self, x0: Tensor, bar: Tensor, noise: Tensor) -> Tensor:
        """x0 after some steps: Eq. 3. `bar` is the alpha_bar of each row's step."""
        bar = bar.view(-1, *[1] * (x0.dim() - 1))
        return bar.sqrt() * x0 + (1 - bar).sqrt() * noise

    def loss(self, eps: Network, x0: Tensor, t: Tensor, bar: Tensor, noise: Tensor) -> Tensor:
        """The error of a network's noise prediction at each row's step t: Eq. 5."""
        return (eps(self.noised(x0, bar, noise), t) - noise).square().mean()

    def mean(self, x: Tensor, t: int, noise: Tensor) -> Tensor:
        """The mean of x_{t-1}, if that is the noise in x_t: Eq. 16 (Eq. 6 misprints the root)."""
        beta, bar = float(self.beta[t]), float(self.alpha_bar[t])
        return (x - beta / (1 - bar) ** 0.5 * noise) / (1 - beta) ** 0.5

    def sample(
        self, eps: Predictor, x: Tensor, start: int, draw: Draw, watch: Watch = unwatched
    ) -> Tensor:
        """From x_start to x_0, with new noise in every step."""
        for t in watch(range(start, 0, -1), "new model"):
            x = self.mean(x, t, eps(x, t)) + float(self.sigma[t]) * draw(x)
        return x

    def code(self, x0: Tensor, start: int, draw: Draw) -> tuple[Tensor, list[Tensor]]:
        """x_start, and the noises that lead from x0 to it step by step: Eqs. 11 to 13."""
        x, noises = x0, []
        for t in range(1, start + 1):
            beta, noise = float(self.beta[t]), draw(x)
            x = (1 - beta) ** 0.5 * x + beta**0.5 * noise
            noises.append(noise)
        return x, noises

    def decode(self, x: Tensor, noises: list[Tensor]) -> Tensor:
        """The exact inverse of `code`: Eq. 14."""
        for t in range(len(noises), 0, -1):
            beta = float(self.beta[t])
            x = (x - beta**0.5 * noises[t - 1]) / (1 - beta) ** 0.5
        return x

    def invert(self, eps: Predictor, x0: Tensor, start: int, draw: Draw) -> Tensor:
        """Forward to `start`, and back with the model and the recorded noises: Eq. 15.

        Only x_start depends on x0, by the factor sqrt(alpha_bar): from the last step, an unrelated
        vector returns.
        """
        x, noises = self.code(x0, start, draw)
        for t in range(start, 0, -1):
            x = self.mean(x, t, eps(x, t)) - float(self.sigma[t]) * noises[t - 1]
        return x

    def renew(self, eps: Predictor, x0: Tensor, start: int, draw: Draw) -> Tensor:
        """Forward to `start`, and back with new noise: the baseline for Eq. 15."""
        return self.sample(eps, self.code(x0, start, draw)[0], start, draw)

    def transfer(
        self, eps: Predictor, source: Predictor, x0: Tensor, start: int, draw: Draw
    ) -> Tensor:
        """DPM-Encoder: noises that explain x0 under a source model, decoded by this one.

        The chain is drawn from the posterior given x0, so its noises depend on x0. With equal
        models, x0 itself returns.
        """
        bar = float(self.alpha_bar[start])
        x = bar**0.5 * x0 + (1 - bar) ** 0.5 * draw(x0)
        chain = x
        for t in range(start, 0, -1):
            sigma = float(self.sigma[t])
            below = self.posterior_mean(x, x0, t) + sigma * draw(x)
            recorded = below - self.mean(x, t, source(x, t))  # sigma times the noise
            chain = self.mean(chain, t, eps(chain, t)) + recorded
            x = below
        return chain

    def posterior_mean(self, x: Tensor, x0: Tensor, t: int) -> Tensor:
        """The mean of x_{t-1}, given x_t and x_0."""
        beta, bar = float(self.beta[t]), float(self.alpha_bar[t])
        before = float(self.alpha_bar[t - 1])
        return (before**0.5 * beta * x0 + (1 - beta) ** 0.5 * (1 - before) * x) / (1 - bar)

    def gaussian(self, mean: Tensor, variance: Tensor) -> Predictor:
        """The exact predictor for data from a diagonal Gaussian."""

        def eps(x: Tensor, t: int) -> Tensor:
            bar = float(self.alpha_bar[t])
            return (1 - bar) ** 0.5 * (x - bar**0.5 * mean) / (bar * variance + 1 - bar)

        return eps

    def guided(self, eps: Predictor, direction: Tensor, strength: float) -> Predictor:
        """A predictor that leads in the direction of local training: Eq. 10 with a corrected sign.

        The sampler subtracts the predicted noise, so the direction is subtracted from the
        prediction. Its size is that of the noise of each step, times 1 + strength.
        """
        unit = direction / direction.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-12)

        def guided_eps(x: Tensor, t: int) -> Tensor:
            return eps(x, t) - (1 + strength) * (1 - float(self.alpha_bar[t])) ** 0.5 * unit

        return guided_eps
