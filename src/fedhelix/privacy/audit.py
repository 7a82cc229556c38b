"""`fedhelix audit idlg`: what can be rebuilt of a client's pictures from what a method really
uploads.

The victim takes one step on one picture, the attacker's best case. It sees the gradient of the
entries that the method's own upload holds. Two attackers try: an `outsider` knows the victim's
values of these entries only and draws the others; an `insider` knows the victim's whole model, as
everybody does in the first round, when all start alike.
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

SHOWN = 6  # pictures of each row


def audit(specs: Sequence[str], requested: Audit) -> Iterator[dict[str, Any]]:
    """A row for every method or run and kind of attacker; the first one once more with noise on its
    gradients.
    """
    victims = [Victim.of(spec, requested) for spec in specs]
    cases = [(victim, 0.0) for victim in victims]
    if requested.noise:
        cases.insert(1, (victims[0], requested.noise))
    for victim, noise in cases:
        # Who sends everything makes everybody an insider.
        for insider in (
            (True,)
            if len(victim.sent) == len(victim.federation.layers.parameters)
            else (False, True)
        ):
            yield attack(victim, requested, noise, insider)


def attack(victim: Victim, requested: Audit, noise: float, insider: bool) -> dict[str, Any]:
    """Try to rebuild pictures, and judge the best attempt at each."""
    fed = victim.federation
    module, classes = fed.engine.setup.module.double().eval(), int(fed.data.classes or 0)
    places = torch.from_numpy(
        numpy_draw(requested.seed, "audit").permutation(len(fed.data.y))[: requested.images]
    )
    truth, labels = (part[places.to(fed.device)] for part in (fed.data.x, fed.data.y))
    truth, model = unscaled(truth).double(), doubled(victim.model)
    seen = vmap(Attacker(module, model, victim.sent).gradients)(
        truth, F.one_hot(labels, classes).double()
    )
    generator = draw(requested.seed, "audit-noise")
    for name, value in seen.items():
        blur = torch.randn(value.shape, generator=generator, dtype=value.dtype)
        seen[name] = value + noise**0.5 * blur.to(value.device)
    if not insider:
        drawn = models.build(
            victim.network,
            fed.data.shape,
            classes,
            data_name=fed.data.name,
            seed=requested.seed + 1,
        )
        other = doubled({name: value.to(fed.device) for name, value in drawn.state_dict().items()})
        model = {
            name: value if name in victim.sent else other[name] for name, value in model.items()
        }
    head = next((name for name in fed.layers.head if name in seen and seen[name].dim() == 3), None)
    told = (
        None
        if head is None
        else torch.tensor([label_of(one) for one in seen[head]], device=fed.device)
    )
    found, _ = invert(
        Attacker(module, model, victim.sent),
        seen,
        fed.data.shape,
        classes,
        told if told is not None else labels if requested.label == "granted" else None,
        restarts=requested.restarts,
        steps=requested.steps,
        optimiser=requested.optimiser,
        generator=draw(requested.seed, "audit-start"),
    )
    quality = torch.stack([psnr(found[:, at], truth) for at in range(found.shape[1])], 1)
    best = found[torch.arange(len(found)), quality.argmax(1)].clamp(0, 1)
    return {
        "method": victim.name + (" + noise" if noise else ""),
        "attacker": "insider" if insider else "outsider",
        "data": fed.data.name,
        "seen": sum(fed.layers.sizes[name] for name in victim.sent)
        / sum(fed.layers.sizes.values()),
        "labels": None if told is None else float((told == labels).double().mean()),
        "psnr": median(psnr(best, truth)),
        "best psnr": float(psnr(best, truth).max()),
        "ssim": median(ssim(best, truth)),
        "pictures": best[:SHOWN].cpu(),
        "truth": truth[:SHOWN].cpu(),
        "psnr of each": psnr(best, truth).tolist(),
    }


def doubled(state: State) -> State:
    """In double precision: second-order steps need it."""
    return {
        name: value.double() if value.is_floating_point() else value
        for name, value in state.items()
    }


def image(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """The pictures side by side: the true ones, and below them what each attacker made of each
    method's uploads.
    """
    shown = [
        ("truth", rows[0]["truth"], None),
        *((row_name(row), row["pictures"], row) for row in rows),
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
    """A picture as matplotlib wants it."""
    return values[0].numpy() if len(values) == 1 else values.permute(1, 2, 0).numpy()


def report(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without their pictures."""
    return [
        {key: value for key, value in row.items() if key not in ("pictures", "truth")}
        for row in rows
    ]
