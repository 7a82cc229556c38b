"""pFedGPA's server: a generative model of clients' parameters, fitted to what they uploaded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from fedhelix.components.generative.diffusion import Diffusion, Draw, Inversion, Predictor
from fedhelix.components.generative.networks import (
    Autoencoder,
    Convolutions,
    Informed,
    Perceptron,
    Projection,
)
from fedhelix.components.generative.training import (
    Watch,
    noise,
    plain_kernels,
    rows,
    train,
    unwatched,
)
from fedhelix.components.generative.vectors import Normalise, Normaliser
from fedhelix.core.errors import UserError
from fedhelix.core.fit import LENT
from fedhelix.core.seeds import key, seeded
from fedhelix.core.tree import Tree

CPU = torch.device("cpu")
FEWEST = 3  # vectors: with fewer there is no spread to learn

SizeName = Literal["auto", "fast", "linear", "default", "paper"]


class Course(NamedTuple):
    """The training of one network."""

    steps: int
    batch: int
    lr: float


@dataclass(frozen=True)
class Size:
    """The size of the networks, and their training."""

    latent: int
    # Of the autoencoder; if there are none, principal components, which need no training.
    channels: tuple[int, ...]
    # Of the denoiser; one is the width of linear layers, several are those of convolutions.
    widths: tuple[int, ...]
    autoencoder: Course
    denoiser: Course
    blocks: int = 4  # of a denoiser with linear layers
    informed: bool = True  # the denoiser starts from the best guess for Gaussian codes
    average: float = 0.999  # decay of the moving average of the denoiser's weights
    input_noise: float = 0.001  # on vectors, while the autoencoder learns
    code_noise: float = 0.1  # on their codes

    def shortened(self, steps: int | None) -> Size:
        """The same size with at most that many training steps of each network."""
        if steps is None:
            return self
        autoencoder = self.autoencoder._replace(steps=min(steps, self.autoencoder.steps))
        denoiser = self.denoiser._replace(steps=min(steps, self.denoiser.steps))
        # The average must forget the random initial weights.
        return replace(
            self,
            autoencoder=autoencoder,
            denoiser=denoiser,
            average=min(self.average, 1 - 10 / (10 + steps)),
        )


SIZES = {
    "fast": Size(
        64, (), (128,), Course(0, 64, 1e-3), Course(750, 64, 1e-3), blocks=2, average=0.99
    ),
    "linear": Size(256, (), (512,), Course(0, 64, 1e-3), Course(4000, 256, 5e-4)),
    "default": Size(
        256, (16, 32, 64, 64, 32), (1024,), Course(3000, 64, 1e-3), Course(8000, 256, 3e-4)
    ),
    "paper": Size(
        256,
        (64, 128, 256, 256, 32),
        (64, 128, 256, 512),
        Course(5000, 64, 1e-3),
        Course(10_000, 64, 1e-3),
        informed=False,
    ),
}


def size_for(name: SizeName, device: torch.device) -> Size:
    """A size by name; `auto` avoids the autoencoder, which is slow, on a CPU far too slow."""
    return SIZES[("linear" if device.type == "cuda" else "fast") if name == "auto" else name]


class Generator:
    """Normalisation, autoencoder and diffusion model of parameter vectors.

    vectors --normalise--> residuals --encode--> codes --standardise--> diffusion; generated codes
    go the way back.
    """

    def __init__(
        self,
        normaliser: Normaliser,
        codec: Projection | Autoencoder,
        codes: Normaliser,
        variance: Tensor,
        denoiser: nn.Module,
        size: Size,
    ):
        self.normaliser, self.codec, self.codes, self.variance = normaliser, codec, codes, variance
        self.size = size
        self.diffusion, self.denoiser = Diffusion(), denoiser

    @classmethod
    def fit(
        cls,
        vectors: Tensor,
        sizes: Sequence[int],
        size: Size,
        normalise: Normalise = "residual",
        seed: int = 0,
        watch: Watch = unwatched,
    ) -> Generator:
        """A generator fitted to vectors (rows) whose tensors have these sizes."""
        if len(vectors) < FEWEST:
            raise UserError(
                f"a generator cannot be fitted to {len(vectors)} uploads; "
                f"it needs at least {FEWEST}."
            )
        if not bool(vectors.isfinite().all()):
            raise UserError(
                "a generator cannot be fitted to uploads that hold values that are not finite."
            )
        normaliser = Normaliser.fit(vectors, sizes, normalise)
        x = normaliser.apply(vectors)
        codec = fit_codec(x, size, key(seed, "autoencoder"), watch)
        with torch.no_grad():
            z = codec.encode(x)
        codes = Normaliser(z.mean(0), spread_of(z, each=bool(size.channels)))
        z = codes.apply(z)
        denoiser = fit_denoiser(z, size, key(seed, "denoiser"), watch)
        return cls(normaliser, codec, codes, z.var(0), denoiser, size)

    @torch.no_grad()
    def encode(self, vectors: Tensor) -> Tensor:
        """The codes of vectors, as the diffusion model sees them."""
        return self.codes.apply(self.codec.encode(self.normaliser.apply(vectors)))

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """The vectors of codes."""
        return self.normaliser.undo(self.codec.decode(self.codes.undo(codes)))

    def eps(self, x: Tensor, t: int) -> Tensor:
        """The denoiser's prediction of the noise in x."""
        return self.denoiser(x, torch.full((len(x),), t, device=x.device))

    def reconstruct(self, vectors: Tensor) -> Tensor:
        """Vectors after encoding and decoding: a loss here cannot be repaired later."""
        return self.decode(self.encode(vectors))

    @torch.no_grad()
    def direct(self, count: int, seed: int) -> Tensor:
        """New vectors from pure noise, independent of any client."""
        draw = self.drawing(seed, "direct")
        x = draw(self.variance.expand(count, -1))
        with self._kernels():
            x = self.diffusion.sample(self.eps, x, self.diffusion.steps, draw)
        return self.decode(x)

    @torch.no_grad()
    def invert(
        self, vectors: Tensor, start: int, seed: int, mode: Inversion = "eq15", samples: int = 1
    ) -> Tensor:
        """Every client's vector, diffused and regenerated; the mean of several samples."""
        draw, x = self.drawing(seed, "invert"), self.encode(vectors).repeat(samples, 1)
        with self._kernels():
            if mode == "eq15":
                x = self.diffusion.invert(self.eps, x, start, draw)
            elif mode == "fresh":
                x = self.diffusion.renew(self.eps, x, start, draw)
            else:
                x = self.diffusion.transfer(self.eps, self.source, x, start, draw)
        return self.decode(x.view(samples, len(vectors), -1).mean(0))

    @torch.no_grad()
    def guide(
        self,
        before: Tensor,
        after: Tensor,
        steps: int,
        strength: float,
        seed: int,
        watch: Watch = unwatched,
    ) -> Tensor:
        """Vectors after local training, denoised towards known ones along the training's direction.

        What codes cannot express is kept: otherwise a newcomer would lose classes that nobody else
        has.
        """
        z = self.encode(after)
        eps = self.diffusion.guided(self.eps, z - self.encode(before), strength)
        x = float(self.diffusion.alpha_bar[steps]) ** 0.5 * z
        draw = self.drawing(seed, "guide")
        with self._kernels():
            x = self.diffusion.sample(eps, x, steps, draw, watch)
        made = self.decode(x)
        return made + after - self.reconstruct(after)

    def _kernels(self) -> AbstractContextManager[None]:
        """For the many short steps of a denoiser; encoding and decoding are large products."""
        return plain_kernels(sum(parameter.numel() for parameter in self.denoiser.parameters()))

    def drawing(self, seed: int, purpose: str) -> Draw:
        """Noise that follows from the seed, drawn on the generator's device."""
        return partial(noise, draws=generator_on(self.variance.device, key(seed, purpose)))

    @property
    def source(self) -> Predictor:
        """DPM-Encoder's source model: independent Gaussians with the variances of the codes."""
        return self.diffusion.gaussian(torch.zeros_like(self.variance), self.variance)

    def tree(self) -> Tree:
        """The generator as named tensors and numbers, to be sent or saved."""
        shape = {
            key: torch.tensor(getattr(self.size, key), dtype=torch.int64)
            for key in ("channels", "widths")
        }
        return {
            "size": {**shape, "blocks": self.size.blocks, "informed": self.size.informed},
            "normaliser": self.normaliser._asdict(),
            "codes": self.codes._asdict(),
            "variance": self.variance,
            "codec": dict(self.codec.state_dict()),
            "denoiser": dict(self.denoiser.state_dict()),
        }

    @classmethod
    def of(cls, tree: Tree) -> Generator:
        """The inverse of `tree`; the generator cannot be trained further."""
        normaliser, codes = Normaliser(**tree["normaliser"]), Normaliser(**tree["codes"])
        values, latent = len(normaliser.centre), len(codes.centre)
        channels, widths = (tuple(tree["size"][key].tolist()) for key in ("channels", "widths"))
        idle = Course(0, 0, 0.0)
        size = Size(
            latent, channels, widths, idle, idle, tree["size"]["blocks"], tree["size"]["informed"]
        )
        with LENT, seeded(0, CPU):  # constructors draw initial weights, which are replaced below
            codec = (
                Autoencoder(values, latent, size.channels)
                if size.channels
                else Projection(values, latent)
            )
            denoiser = make_denoiser(tree["variance"], size)
        for module, state in ((codec, tree["codec"]), (denoiser, tree["denoiser"])):
            module.to(normaliser.centre.device).load_state_dict(state)
        return cls(normaliser, codec.eval(), codes, tree["variance"], denoiser.eval(), size)


def generator_on(device: torch.device, number: int) -> torch.Generator:
    """Random numbers on a device."""
    return torch.Generator(device).manual_seed(number)


def fit_codec(x: Tensor, size: Size, seed: int, watch: Watch) -> Projection | Autoencoder:
    """Principal components, or an autoencoder trained with noise on its inputs and codes."""
    if not size.channels:
        return Projection.fit(x, size.latent)
    with LENT, seeded(seed, CPU):
        codec = Autoencoder(x.shape[1], size.latent, size.channels).to(x.device)
    course, draws = size.autoencoder, generator_on(x.device, seed)

    def loss() -> Tensor:
        batch = rows(x, course.batch, draws)
        codes = codec.encode(batch + size.input_noise * noise(batch, draws))
        return (codec.decode(codes + size.code_noise * noise(codes, draws)) - batch).square().mean()

    train(codec, loss, draws, course.steps, course.lr, watch=watch, title="autoencoder")
    return codec


def spread_of(codes: Tensor, each: bool) -> Tensor:
    """The scale of codes: the spread of each value, or one for all.

    Principal components keep their different sizes, so that the noise hides first what hardly
    differs between clients.
    """
    apart = codes.std(0).clamp(min=1e-8)
    return apart if each else apart.square().mean().sqrt().expand_as(apart).clone()


def make_denoiser(variance: Tensor, size: Size) -> nn.Module:
    """A noise predictor for codes with these variances."""
    latent = len(variance)
    network = (
        Convolutions(latent, size.widths)
        if len(size.widths) > 1
        else Perceptron(latent, size.widths[0], size.blocks)
    )
    informed = (
        Informed(network, variance.cpu(), Diffusion().alpha_bar.float())
        if size.informed
        else network
    )
    return informed.to(variance.device)


def fit_denoiser(codes: Tensor, size: Size, seed: int, watch: Watch) -> nn.Module:
    """A noise predictor trained on the codes at all steps of the diffusion."""
    diffusion, course, device = Diffusion(), size.denoiser, codes.device
    with LENT, seeded(seed, CPU):
        denoiser = make_denoiser(codes.var(0), size)
    draws = generator_on(device, seed)
    bars = diffusion.alpha_bar.float().to(device)

    def loss() -> Tensor:
        batch = rows(codes, course.batch, draws)
        t = torch.randint(1, diffusion.steps + 1, (course.batch,), generator=draws, device=device)
        return diffusion.loss(denoiser, batch, t, bars[t], noise(batch, draws))

    train(denoiser, loss, draws, course.steps, course.lr, size.average, watch, "diffusion model")
    return denoiser
