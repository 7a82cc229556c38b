"""How the server makes every client's vector out of the uploads: by generation, or by something cheaper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedhelix.generative.buffer import Buffer, neighbourhoods, shaken
from fedhelix.generative.diffusion import Inversion
from fedhelix.generative.generator import Generator, SizeName, size_for
from fedhelix.generative.vectors import Normalise
from fedhelix.options import Checked, option

How = Literal["invert", "direct", "reconstruct", "own", "own_mean", "neighbours", "shrink", "noise"]


@dataclass(frozen=True)
class Recipe(Checked):
    """The options of generation. The ways after `reconstruct` learn nothing: a generator has to beat them."""

    generate: How = option("invert", "what clients get: invert, direct, reconstruct, or a rival that learns nothing")
    learn: Literal["update", "upload"] = option(
        "update", "what vectors are: uploads, or what a client changed in the model that it had received"
    )
    inverted: Literal["last", "mean"] = option("last", "what is inverted: a client's last upload, or its uploads' mean")
    inversion_mode: Inversion = option("eq15", "noise of the way back: recorded, fresh, or by DPM-Encoder")
    inversion_start: int = option(250, "the step from which vectors are denoised again", low=1, high=1000)
    inversion_samples: int = option(1, "regenerations of every vector, whose mean counts", low=1)
    normalise: Normalise = option("residual", "centre on every coordinate's mean, or on every tensor's")
    size: SizeName = option(
        "auto", "networks: fast and linear (no autoencoder), default, paper; auto: fast on a CPU, otherwise default"
    )
    fit_steps: int | None = option(None, "most training steps of each network (auto: by size)", low=1)
    near: int = option(4, "vectors in a neighbourhood, for neighbours and shrink", low=1)
    amount: float = option(0.5, "how far shrink goes to the neighbourhood's mean, how loud noise is", low=0)

    @property
    def learns(self) -> bool:
        """Whether there is anything to fit."""
        return self.generate in ("invert", "direct", "reconstruct")

    def material(self, buffer: Buffer) -> tuple[Buffer, Tensor]:
        """The buffer to learn from, and what has to be added to its vectors to make them models of today."""
        if self.learn == "upload":
            return buffer, torch.zeros_like(buffer.starts[-1])
        return buffer.updates(), buffer.starts[-1]

    def fit(self, known: Buffer, sizes: Sequence[int], seed: int, steps: int | None = None) -> Generator | None:
        """A generator of vectors like those that are known, whose tensors have these sizes."""
        if not self.learns:
            return None
        size = size_for(self.size, known.vectors.device).shortened(self.fit_steps).shortened(steps)
        return Generator.fit(known.vectors, sizes, size, self.normalise, seed)

    def vectors(self, known: Buffer, generator: Generator | None, seed: int) -> Tensor:
        """A vector for every owner."""
        own = known.latest()
        if generator is not None:
            if self.generate == "direct":
                return generator.direct(len(own), seed)
            if self.generate == "reconstruct":
                return generator.reconstruct(own)
            inverted = own if self.inverted == "last" else known.means()
            return generator.invert(inverted, self.inversion_start, seed, self.inversion_mode, self.inversion_samples)
        if self.generate == "own_mean":
            return known.means()
        if self.generate == "noise":
            return shaken(own, self.amount, seed)
        share = {"own": 0.0, "neighbours": 1.0, "shrink": self.amount}[self.generate]
        return own + share * (neighbourhoods(own, self.near) - own)


def findings(known: Buffer, made: Tensor, generator: Generator | None) -> dict[str, Any]:
    """Whether vectors are new or a replay: distances to the nearest known one, beside those among the known ones."""
    own, everything = known.latest(), known.vectors
    to_mean = (own - everything.mean(0)).norm(dim=1)
    among = torch.cdist(own, everything)
    among = among.masked_fill(among < 1e-5 * to_mean.max(), torch.inf)  # a vector is not its own neighbour
    found: dict[str, Any] = {
        "distances": {
            "generated_to_nearest": torch.cdist(made, everything).amin(1).tolist(),
            "uploads_spread": to_mean.tolist(),
            "nearest_upload": among.amin(1).tolist(),
        }
    }
    if generator is not None:
        lost = (generator.reconstruct(own) - own).square().sum() / to_mean.square().sum()
        found = {"reconstruction": 1 - float(lost), **found}
    return found
