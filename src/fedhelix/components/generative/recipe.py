"""How the server makes every client's vector from the uploads: by generation, or more cheaply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedhelix.components.generative.buffer import Buffer, distances, neighbourhoods, shaken
from fedhelix.components.generative.diffusion import Inversion
from fedhelix.components.generative.generator import FEWEST, Generator, Size, SizeName, size_for
from fedhelix.components.generative.mixture import Known, denoised, fitted_width, own_noise
from fedhelix.components.generative.training import Watch, unwatched
from fedhelix.components.generative.vectors import Layout, Normalise
from fedhelix.core.errors import UserError
from fedhelix.core.options import Checked, option
from fedhelix.core.tree import Tree

How = Literal[
    "invert", "direct", "reconstruct", "mixture", "own", "own_mean", "neighbours", "shrink", "noise"
]


@dataclass(frozen=True)
class Recipe(Checked):
    """The options of generation.

    The ways after `mixture` learn nothing; they are baselines that a generator has to beat.
    """

    # Generated models are good already; steps as large as in training would undo some of that.
    ft_rate: float = option(
        0.1, "factor on the learning rate while fine-tuning (1: as the paper does it)", above=0
    )
    mode: Literal["experiment", "online"] = option(
        "experiment", "generate once, in the last round, or in every round"
    )
    warmup: int = option(5, "rounds of plain FedAvg before the online mode generates", low=0)
    online_steps: int = option(
        300, "training steps of each network in a round of the online mode", low=1
    )

    generate: How = option(
        "invert",
        "what clients get: invert, direct, reconstruct, mixture (of other clients' vectors, in "
        "closed form), or a baseline that learns nothing",
    )
    learn: Literal["update", "upload"] = option(
        "update",
        "what vectors are: uploads, or their difference from the model that the round began with",
    )
    inverted: Literal["last", "mean", "near"] = option(
        "last",
        "what is inverted: a client's last upload, the mean of its uploads, "
        "or that of the nearest clients' last",
    )
    inversion_mode: Inversion = option(
        "eq15", "noise of the way back: recorded, fresh, or by DPM-Encoder"
    )
    inversion_start: int = option(
        250, "the step from which vectors are denoised again", low=1, high=1000
    )
    inversion_samples: int = option(1, "regenerations of every vector, whose mean counts", low=1)
    normalise: Normalise = option(
        "residual", "centre on every coordinate's mean, or on every tensor's"
    )
    size: SizeName = option(
        "auto",
        "networks: fast and linear (no autoencoder), default, paper; "
        "auto: fast on a CPU, otherwise linear",
    )
    fit_steps: int | None = option(
        None, "most training steps of each network (auto: by size)", low=1
    )
    near: int = option(4, "vectors in a neighbourhood, for neighbours, shrink and near", low=1)
    amount: float = option(
        0.5, "how far shrink goes to the neighbourhood's mean, how loud noise is", low=0
    )

    by_age: bool = option(
        True, "mixture: compare vectors of one age, and generate what they would be today"
    )
    age_fade: float = option(
        0.5, "mixture: how much less vectors explain for each round that their ages differ", low=0
    )

    newcomer: Literal["guide", "alone", "nearest", "model", "random"] = option(
        "guide",
        "what newcomers start from: guided generation, local training as long as guidance takes "
        "but without it, the nearest upload, the average, or the initial model",
    )
    guide_from: Literal["model", "random"] = option(
        "model", "where guidance begins: the average, or the initial model"
    )
    guide_turns: int = option(
        5, "rounds of local training and guidance before a newcomer starts", low=1
    )
    guide_steps: int = option(300, "denoising steps in each of them", low=1, high=1000)
    guide_strength: float = option(0.0, "how much stronger than the noise the guidance is", low=-1)

    @property
    def learns(self) -> bool:
        """Whether a generator has to be fitted."""
        return self.generate in ("invert", "direct", "reconstruct")

    def check_enough(self, uploads: int) -> None:
        """Refuse, before the first round, a run with too few uploads for the generator."""
        if self.learns and uploads < FEWEST:
            raise UserError(
                f"the generator would be fitted to {uploads} uploads, "
                f"but it needs at least {FEWEST}; "
                "use more rounds, a larger cohort or a larger buffer_rounds."
            )

    def serve(
        self, buffer: Buffer, layout: Layout, seed: int, steps: int | None, watch: Watch = unwatched
    ) -> tuple[Tree, dict[str, Any]]:
        """Every client's part of the model, with the generator that made it, and metadata."""
        known, base = self.material(buffer)
        # If too few uploads are left to learn from, clients get back their own.
        enough = self.learns and len(known.trusted()) >= FEWEST
        generator = self.fit(known, layout.sizes, seed, steps, watch) if enough else None
        made = self.vectors(known, generator, seed)
        rows = zip(buffer.owners, base + made, strict=True)
        state: Tree = {"personal": {str(owner): layout.unflatten(row) for owner, row in rows}}
        if generator is not None:
            state["generator"] = generator.tree()
        return state, novelty(known, made, generator)

    def material(self, buffer: Buffer) -> tuple[Buffer, Tensor]:
        """The buffer to learn from, and the base to add to its vectors to get models.

        Updates are added to the average that the last round began with, so that a client's own
        last update gives its own upload. Layers outside the slice are the average after that round.
        """
        if self.learn == "upload":
            return buffer, torch.zeros_like(buffer.starts[-1])
        return buffer.updates(), buffer.starts[-1]

    def sized(self, device: torch.device) -> Size:
        """The size of the networks."""
        return size_for(self.size, device).shortened(self.fit_steps)

    def fit(
        self,
        known: Buffer,
        sizes: Sequence[int],
        seed: int,
        steps: int | None = None,
        watch: Watch = unwatched,
    ) -> Generator:
        """A generator of vectors like the known ones, whose tensors have these sizes."""
        size = self.sized(known.vectors.device).shortened(steps)
        return Generator.fit(known.trusted(), sizes, size, self.normalise, seed, watch)

    def vectors(self, known: Buffer, generator: Generator | None, seed: int) -> Tensor:
        """A vector for every client with an upload."""
        uploads = known.latest()
        if generator is not None:
            if self.generate == "direct":
                return generator.direct(len(uploads), seed)
            if self.generate == "reconstruct":
                return generator.reconstruct(uploads)
            inverted = {
                "last": uploads,
                "mean": known.means(),
                "near": neighbourhoods(uploads, self.near),
            }[self.inverted]
            return generator.invert(
                inverted, self.inversion_start, seed, self.inversion_mode, self.inversion_samples
            )
        if self.generate == "mixture":
            return self.mixture(known)
        if self.generate == "own_mean":
            return known.means()
        if self.generate == "noise":
            return shaken(uploads, self.amount, seed)
        share = {"neighbours": 1.0, "shrink": self.amount}.get(self.generate, 0.0)
        return uploads + share * (neighbourhoods(uploads, self.near) - uploads)

    def mixture(self, known: Buffer) -> Tensor:
        """The last upload of every client, denoised by the exact mixture of all others'."""
        latest = known.rounds.max()
        everything = Known(known.vectors, known.clients, (latest - known.rounds).float())
        everything = Known(*(column.to(known.vectors.device) for column in everything))
        noise, fade = own_noise(everything), self.age_fade if self.by_age else 0.0
        last = {client: row for row, client in enumerate(known.clients.tolist())}
        rows = [last[client] for client in known.owners]
        observed = Known(*(column[rows] for column in everything))
        width = fitted_width(everything, noise, fade)
        return denoised(everything, observed, width, noise[rows], fade, self.by_age)


def novelty(known: Buffer, made: Tensor, generator: Generator | None) -> dict[str, Any]:
    """Metadata that tells whether vectors are new or replay known ones.

    Distances to the nearest known vector, and, for comparison, those among the known vectors.
    """
    uploads, everything = known.latest(), known.vectors
    to_mean = (uploads - everything.mean(0)).norm(dim=1)
    among = distances(uploads, everything)
    # A vector is not its own neighbour.
    among = among.masked_fill(among < 1e-5 * to_mean.max(), torch.inf)
    metadata: dict[str, Any] = {
        "distances": {
            "generated_to_nearest": distances(made, everything).amin(1).tolist(),
            "uploads_spread": to_mean.tolist(),
            "nearest_upload": among.amin(1).tolist(),
        }
    }
    if generator is not None:
        error = (generator.reconstruct(uploads) - uploads).square().sum()
        lost = error / to_mean.square().sum()
        metadata = {"reconstruction": 1 - float(lost), **metadata}
    return metadata
