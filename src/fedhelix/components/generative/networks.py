"""The networks of the generative model: autoencoders of vectors, and predictors of noise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

KERNEL = 7
PERIODS = 10_000.0  # the longest period of the time embedding, in steps


class Projection(nn.Module):
    """The best linear autoencoder: principal components, which need no training."""

    def __init__(self, values: int, latent: int):
        super().__init__()
        self.basis: Tensor
        self.register_buffer("basis", torch.zeros(latent, values))

    @classmethod
    def fit(cls, x: Tensor, latent: int) -> Projection:
        """The directions in which centred vectors differ most, at most `latent` of them."""
        # n vectors span at most n dimensions, so the small Gram matrix suffices.
        power, mix = torch.linalg.eigh((x @ x.T).double())
        power, mix = power.flip(0)[:latent], mix.flip(1)[:, :latent]
        kept = max(1, int((power > 1e-6 * power[0]).sum()))
        basis = (x.T.double() @ mix[:, :kept] / power[:kept].clamp(min=1e-30).sqrt()).T
        # The sign of a direction is arbitrary: its largest entry is made positive.
        largest = basis.gather(1, basis.abs().argmax(1, keepdim=True))
        made = cls(x.shape[1], kept).to(x.device)
        made.basis.copy_(basis * torch.where(largest < 0, -1.0, 1.0))
        return made

    def encode(self, x: Tensor) -> Tensor:
        """Coordinates along the directions."""
        return x @ self.basis.T

    def decode(self, z: Tensor) -> Tensor:
        """The vectors with these coordinates."""
        return z @ self.basis


class Autoencoder(nn.Module):
    """Strided 1-D convolutions down to a short code, and the mirror image back (p-diff, 2024)."""

    def __init__(self, values: int, latent: int, channels: Sequence[int]):
        super().__init__()
        self.values, factor = values, 2 ** len(channels)
        self.length = math.ceil(values / factor)
        self.padding = self.length * factor - values
        down = [
            nn.Sequential(
                nn.Conv1d(a, b, KERNEL, 2, KERNEL // 2), nn.BatchNorm1d(b), nn.LeakyReLU()
            )
            for a, b in itertools.pairwise([1, *channels])
        ]
        up = [
            nn.Sequential(
                nn.ConvTranspose1d(a, b, KERNEL, 2, KERNEL // 2, 1), nn.BatchNorm1d(b), nn.ELU()
            )
            for a, b in itertools.pairwise([*reversed(channels), channels[0]])
        ]
        self.down = nn.Sequential(
            *down, nn.Flatten(), nn.Linear(channels[-1] * self.length, latent)
        )
        self.up = nn.Sequential(
            nn.Linear(latent, channels[-1] * self.length),
            nn.Unflatten(1, (channels[-1], self.length)),
            *up,
            nn.Conv1d(channels[0], 1, KERNEL, 1, KERNEL // 2),
        )

    def encode(self, x: Tensor) -> Tensor:
        """The codes of vectors."""
        return self.down(pad(x, (0, self.padding)).unsqueeze(1))

    def decode(self, z: Tensor) -> Tensor:
        """The vectors of codes."""
        return self.up(z).squeeze(1)[:, : self.values]


class Time(nn.Module):
    """A step of the diffusion as features: waves of many lengths, then a small network."""

    def __init__(self, width: int, waves: int = 128):
        super().__init__()
        self.rates: Tensor
        rates = torch.exp(-math.log(PERIODS) * torch.arange(waves) / waves)
        self.register_buffer("rates", rates, persistent=False)
        self.layers = nn.Sequential(nn.Linear(2 * waves, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:
        """One row of features for each step."""
        angle = t.float().unsqueeze(1) * self.rates
        return self.layers(torch.cat([angle.sin(), angle.cos()], 1))


class Perceptron(nn.Module):
    """A residual network of linear layers that predicts the noise in a code."""

    def __init__(self, latent: int, width: int, blocks: int):
        super().__init__()
        self.time, self.inward = Time(width), nn.Linear(latent, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
            for _ in range(blocks)
        )
        self.last, self.outward = nn.LayerNorm(width), nn.Linear(width, latent)
        nn.init.zeros_(self.outward.weight)  # so that it starts without an effect

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """The noise in every row of x, which is at its step of t."""
        time, h = self.time(t), self.inward(x)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            h = h + block(norm(h) + time)
        return self.outward(self.last(h))


class Convolutions(nn.Module):
    """p-diff's denoiser: 1-D convolutions that widen and narrow, with skips at equal widths."""

    def __init__(self, latent: int, widths: Sequence[int]):
        super().__init__()
        self.waist = len(widths) - 1
        channels = list(itertools.pairwise([1, *widths, *reversed(widths[:-1])]))
        self.times = nn.ModuleList(Time(latent) for _ in channels)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv1d(a, b, KERNEL, 1, KERNEL // 2), nn.BatchNorm1d(b), nn.ELU())
            for a, b in channels
        )
        self.outward = nn.Conv1d(widths[0], 1, KERNEL, 1, KERNEL // 2)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """The noise in every row of x, which is at its step of t."""
        h, kept = x.unsqueeze(1), []
        for place, (time, stage) in enumerate(zip(self.times, self.stages, strict=True)):
            h = stage(h + time(t).unsqueeze(1))
            if place < self.waist:
                kept.append(h)
            elif place > self.waist:
                h = h + kept.pop()
        return self.outward(h).squeeze(1)


class Informed(nn.Module):
    """A network that learns only how codes differ from independent Gaussians of known variances.

    For these the best prediction is known, so generation is sensible from the first training step.
    """

    def __init__(self, network: nn.Module, variance: Tensor, bars: Tensor):
        super().__init__()
        self.network = network
        self.variance: Tensor
        self.bars: Tensor
        self.register_buffer("variance", variance.clone())
        self.register_buffer("bars", bars, persistent=False)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """The noise in every row of x, which is at its step of t."""
        bar = self.bars[t].unsqueeze(1)
        total = bar * self.variance + 1 - bar
        return (1 - bar).sqrt() * x / total + self.network(x / total.sqrt(), t)
