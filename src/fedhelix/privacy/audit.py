"""`fedhelix audit idlg`: rebuilds a client's images from what a method really uploads.

The victim takes one step on one image, which is the best case for the attacker. The attacker sees
the gradients of the entries in the method's own upload. An `outsider` knows the victim's values of
these entries only and draws the others; an `insider` knows the victim's whole model, as everybody
does in the first round, when all models are equal.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import vmap

from fedhelix import models
from fedhelix.core.files import write_atomically
from fedhelix.core.seeds import draw, numpy_draw
from fedhelix.core.tree import State
from fedhelix.engines.local.batches import unscaled
from fedhelix.privacy.inversion import Attacker, invert, label_of
from fedhelix.privacy.quality import median, psnr, ssim
from fedhelix.privacy.settings import Audit
from fedhelix.privacy.victim import Victim

SHOWN = 6  # images in each row of the figure


def audit(specs: Sequence[str], settings: Audit) -> Iterator[dict[str, Any]]:
    """A row for each method or run and kind of attacker.

    The first one comes once more with noise on its gradients.
    """
    victims = [Victim.of(spec, settings) for spec in specs]
    cases = [(victim, 0.0) for victim in victims]
    if settings.noise:
        cases.insert(1, (victims[0], settings.noise))
    for victim, noise in cases:
        # A method that uploads everything makes every attacker an insider.
        whole = len(victim.sent) == len(victim.federation.layers.parameters)
        for insider in (True,) if whole else (False, True):
            yield attack(victim, settings, noise, insider)


def attack(victim: Victim, settings: Audit, noise: float, insider: bool) -> dict[str, Any]:
    """Rebuild images, and measure the best attempt at each."""
    fed = victim.federation
    module, classes = fed.engine.setup.module.double().eval(), int(fed.data.classes or 0)
    truth, labels = chosen_images(victim, settings)
    model = doubled(victim.model)
    seen = noisy(observed(victim, truth, labels), noise, settings.seed)
    if not insider:
        model = outsiders_model(victim, model, settings.seed + 1)
    inferred = inferred_labels(victim, seen)
    granted = labels if settings.label == "granted" else None
    attempts, _ = invert(
        Attacker(module, model, victim.sent),
        seen,
        fed.data.shape,
        classes,
        granted if inferred is None else inferred,
        restarts=settings.restarts,
        steps=settings.steps,
        optimiser=settings.optimiser,
        generator=draw(settings.seed, "audit-start"),
    )
    attempts = fed.data.pixels(attempts)
    quality = torch.stack([psnr(attempts[:, at], truth) for at in range(attempts.shape[1])], 1)
    best = attempts[torch.arange(len(attempts)), quality.argmax(1)].clamp(0, 1)
    sizes = fed.layers.sizes
    return {
        "method": victim.name + (" + noise" if noise else ""),
        "attacker": "insider" if insider else "outsider",
        "data": fed.data.name,
        "seen": sum(sizes[name] for name in victim.sent) / sum(sizes.values()),
        "labels": None if inferred is None else float((inferred == labels).double().mean()),
        "psnr": median(psnr(best, truth)),
        "best psnr": float(psnr(best, truth).max()),
        "ssim": median(ssim(best, truth)),
        "images": best[:SHOWN].cpu(),
        "truth": truth[:SHOWN].cpu(),
        "psnr of each": psnr(best, truth).tolist(),
    }


def chosen_images(victim: Victim, settings: Audit) -> tuple[Tensor, Tensor]:
    """The images to attack, with pixels between 0 and 1, and their labels."""
    fed = victim.federation
    order = numpy_draw(settings.seed, "audit").permutation(len(fed.data.y))
    indices = torch.from_numpy(order[: settings.images]).to(fed.device)
    return unscaled(fed.data, fed.data.x[indices]).double(), fed.data.y[indices]


def observed(victim: Victim, truth: Tensor, labels: Tensor) -> State:
    """The gradients that the victim would send for each image, normalised as in its training."""
    fed, classes = victim.federation, int(victim.federation.data.classes or 0)
    attacker = Attacker(fed.engine.setup.module.double().eval(), doubled(victim.model), victim.sent)
    inputs, probabilities = fed.data.prepare(truth), F.one_hot(labels, classes).double()
    return vmap(attacker.gradients)(inputs, probabilities)


def noisy(gradients: State, variance: float, seed: int) -> State:
    """Gradients with Gaussian noise."""
    generator = draw(seed, "audit-noise")
    changed = {}
    for name, value in gradients.items():
        noise = torch.randn(value.shape, generator=generator, dtype=value.dtype)
        changed[name] = value + variance**0.5 * noise.to(value.device)
    return changed


def outsiders_model(victim: Victim, model: State, seed: int) -> State:
    """The victim's model with random values in the entries that it does not send."""
    fed, classes = victim.federation, int(victim.federation.data.classes or 0)
    random = models.build(
        victim.network, fed.data.shape, classes, data_name=fed.data.name, seed=seed
    ).state_dict()
    other = doubled({name: value.to(fed.device) for name, value in random.items()})
    return {name: value if name in victim.sent else other[name] for name, value in model.items()}


def inferred_labels(victim: Victim, seen: State) -> Tensor | None:
    """The labels that iDLG reads from the head's gradients; None if the head is not sent."""
    fed = victim.federation
    head = next((name for name in fed.layers.head if name in seen and seen[name].dim() == 3), None)
    if head is None:
        return None
    return torch.tensor([label_of(gradient) for gradient in seen[head]], device=fed.device)


def doubled(state: State) -> State:
    """A state in double precision, which second-order steps need."""
    return {
        name: value.double() if value.is_floating_point() else value
        for name, value in state.items()
    }


def image(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the true images, and below them those rebuilt from each method's uploads."""
    shown = [
        ("truth", rows[0]["truth"], None),
        *((row_name(row), row["images"], row) for row in rows),
    ]
    count = len(rows[0]["truth"])
    figure = Figure(figsize=(1.3 * count + 2.2, 1.4 * len(shown)), layout="constrained")
    axes = figure.subplots(len(shown), count, squeeze=False)
    for line, (name, images, row) in zip(axes, shown, strict=True):
        for place, (axis, values) in enumerate(zip(line, images, strict=True)):
            axis.imshow(pixels(values), cmap="gray", vmin=0, vmax=1)
            axis.set_xticks([])
            axis.set_yticks([])
            if row is not None:
                axis.set_xlabel(f"{row['psnr of each'][place]:.1f} dB", fontsize=8, labelpad=2)
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    write_atomically(path, content.getvalue())


def row_name(row: dict[str, Any]) -> str:
    """Method and attacker."""
    return f"{row['method']}\n{row['attacker']}"


def pixels(values: Tensor) -> Any:
    """An image as matplotlib expects it."""
    return values[0].numpy() if len(values) == 1 else values.permute(1, 2, 0).numpy()


def report(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without their images."""
    return [
        {key: value for key, value in row.items() if key not in ("images", "truth")} for row in rows
    ]
