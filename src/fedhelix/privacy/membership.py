"""`fedhelix audit membership`: can one tell from the final model whether a sample was trained on?

The attacker knows the sample, the final global model, and reference models that were trained in the
same way on other samples of the same kind. A sample whose loss is lower than its mean loss under
references without it is called a member (a threshold with calibration, after Watson et al. 2022).
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from fedhelix.core.errors import UserError
from fedhelix.core.files import write_atomically
from fedhelix.core.method import Method
from fedhelix.core.options import Checked, option
from fedhelix.core.seeds import numpy_draw
from fedhelix.data import Dataset, load, partitions
from fedhelix.federation.federation import Federation
from fedhelix.runs.spec import make_spec


@dataclass(frozen=True)
class MembershipAudit(Checked):
    """How hard an attacker tries to tell members, and on what."""

    data: str = option("digits", "data set")
    data_dir: str | None = option(None, "folder with the data sets")
    model: str = option("mlp", "the network")
    samples: int = option(400, "samples to tell apart, half of which are members", low=20)
    clients: int = option(4, "clients, all of which take part in every round", low=2)
    rounds: int = option(20, "rounds", low=1)
    epochs: int = option(5, "local epochs of a round", low=1)
    lr: float = option(0.1, "learning rate", above=0)
    references: int = option(8, "reference models", low=2)
    trials: int = option(3, "target models, each with other members", low=1)
    seed: int = option(0, "every random draw follows from it", low=0)
    device: str = option("auto", "cpu, cuda or auto")


def bound(epsilon: float, delta: float) -> float:
    """The largest advantage that any attacker can have against (epsilon, delta)."""
    return (math.expm1(epsilon) + 2 * delta) / (math.exp(epsilon) + 1) if epsilon < 700 else 1.0


def advantage(scores: np.ndarray, members: np.ndarray, draw: np.random.Generator) -> float:
    """True minus false positive rate at a threshold that was chosen on the other half."""
    order = draw.permutation(len(scores))
    halves = np.array_split(order, 2)
    found = []
    for fit, held in (halves, halves[::-1]):
        rates = [_difference(scores[fit], members[fit], level) for level in scores[fit]]
        level = scores[fit][int(np.argmax(rates))]
        found.append(_difference(scores[held], members[held], level))
    return float(np.mean(found))


def _difference(scores: np.ndarray, members: np.ndarray, level: float) -> float:
    called = scores >= level
    return float(called[members].mean() - called[~members].mean())


def membership(specs: Sequence[str], settings: MembershipAudit) -> Iterator[dict[str, Any]]:
    """A row for each method."""
    plans = [make_spec(spec, {}) for spec in specs]
    data = load(settings.data, data_dir=settings.data_dir)
    if data.classes is None or settings.samples > len(data.x):
        raise UserError(f"'{data.name}' has no {settings.samples} training samples with classes.")
    for plan in plans:
        yield attack(plan.label, plan.method, data, settings)


def attack(name: str, method: Method, data: Dataset, settings: MembershipAudit) -> dict[str, Any]:
    """Train targets and references, and tell the members of the targets."""
    draw = numpy_draw(settings.seed, "membership")
    pool = draw.permutation(len(data.x))[: settings.samples]
    count = settings.trials + settings.references
    inside = np.stack([_half(settings.samples, draw) for _ in range(count)])
    trained = [_losses(method, data, pool, chosen, settings) for chosen in inside]
    losses = np.stack([losses for losses, *_ in trained])
    found = []
    for trial in range(settings.trials):
        others = np.delete(np.arange(count), trial)
        absent = np.where(inside[others], np.nan, losses[others])  # of references without it
        expected = np.nanmean(np.where(np.isnan(absent).all(0), losses[others], absent), axis=0)
        found.append(advantage(expected - losses[trial], inside[trial], draw))
    epsilons = [spent for *_, spent in trained[: settings.trials] if spent is not None]
    epsilon = max(epsilons) if epsilons else None
    delta = method.options().get("delta", 0.0)
    return {
        "method": name,
        "advantage": float(np.mean(found)),
        "of each": found,
        "accuracy": float(np.mean([score for _, score, _ in trained[: settings.trials]])),
        "epsilon": epsilon,
        "delta": None if epsilon is None else delta,
        "bound": None if epsilon is None else bound(epsilon, delta),
    }


def _half(size: int, draw: np.random.Generator) -> np.ndarray:
    chosen = np.zeros(size, dtype=bool)
    chosen[draw.permutation(size)[: size // 2]] = True
    return chosen


def _losses(
    method: Method, data: Dataset, pool: np.ndarray, chosen: np.ndarray, settings: MembershipAudit
) -> tuple[np.ndarray, float, float | None]:
    """The losses of all samples under a model of the chosen ones, its accuracy, and epsilon."""
    own = replace(data, x=data.x[pool[chosen]], y=data.y[pool[chosen]], owners=None)
    fed = Federation(
        own, partitions.iid(clients=settings.clients, valid=0), model=settings.model, method=method,
        cohort=settings.clients, epochs=settings.epochs, lr=settings.lr, seed=settings.seed,
        device=settings.device, engine="serial", kernels="onednn",
    )  # fmt: skip
    run = fed.fit(settings.rounds, eval_every=settings.rounds, quiet=True)
    model = run.model()
    if model is None:
        raise UserError(
            f"{method.label} has no global model whose members could be told; audit one that has."
        )
    x = torch.from_numpy(pool)
    with torch.no_grad():
        outputs = model.eval()(fed.data.prepare(data.x[x].to(fed.device)))
        losses = F.cross_entropy(outputs, data.y[x].to(fed.device), reduction="none")
    last = run.records[-1]
    spent = last["metadata"].get("epsilon")
    return losses.cpu().numpy(), last["accuracy"], max(spent.values()) if spent else None


def figure(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write advantages as bars, with the bounds of their epsilons."""
    content = io.BytesIO()
    drawn(rows).savefig(content, format="png", dpi=150)
    write_atomically(path, content.getvalue())


def drawn(rows: Sequence[dict[str, Any]]) -> Figure:
    """The figure; its legend stands outside, since its mark could be taken for a bound."""
    drawing = Figure(figsize=(6.5, 0.5 * len(rows) + 1.2), layout="constrained")
    axis = drawing.subplots()
    places = range(len(rows))
    axis.barh(places, [row["advantage"] for row in rows], height=0.6)
    limits = [(place, row["bound"]) for place, row in enumerate(rows) if row["bound"] is not None]
    if limits:
        axis.plot(
            [limit for _, limit in limits], [place for place, _ in limits], "k|", markersize=16,
            label="bound of epsilon",
        )  # fmt: skip
        drawing.legend(loc="outside upper right", frameon=False)
    axis.set_yticks(places, [row["method"] for row in rows])
    axis.invert_yaxis()
    axis.set_xlim(min(0, *(row["advantage"] for row in rows)), 1.02)
    axis.set_xlabel("advantage of the attacker (true minus false positive rate)")
    return drawing
