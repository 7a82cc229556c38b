"""`fedhelix audit inversion`: rebuilds a client's images from what really leaves it in a round.

Each client takes one step on a few images, by the method itself with its noise, codes or masks. The
server is the attacker: it knows the model that it sent, and sees one client's upload, or with
secure aggregation the sum of all. It searches for images whose gradient points the same way and
which are smooth (Geiping et al., NeurIPS 2020, arXiv:2003.14053).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vmap

from fedhelix.core.errors import UserError
from fedhelix.core.method import Method, Upload
from fedhelix.core.options import Checked, option
from fedhelix.core.seeds import draw, numpy_draw
from fedhelix.core.tree import State
from fedhelix.data import Dataset, load, partitions
from fedhelix.engines.local import ClientTask, run_client
from fedhelix.engines.local.batches import unscaled
from fedhelix.federation.federation import Federation
from fedhelix.privacy.minimise import adam
from fedhelix.privacy.quality import median, psnr, ssim
from fedhelix.runs.spec import make_spec

VICTIM = 0
SHOWN = 6  # images in each row of the figure


@dataclass(frozen=True)
class InversionAudit(Checked):
    """How hard an attacker tries to rebuild a client's images, and on what."""

    data: str = option("digits", "data set of the images")
    data_dir: str | None = option(None, "folder with the data sets")
    model: str = option("lenet-sigmoid", "the network")
    clients: int = option(4, "clients, all of which take part", low=2)
    images: int = option(2, "images of every client", low=1)
    lr: float = option(0.1, "learning rate of the clients", above=0)
    steps: int = option(1500, "steps of an attempt", low=1)
    restarts: int = option(2, "attempts, of which the one with the lowest loss counts", low=1)
    smooth: float = option(1e-3, "weight of the total variation", low=0)
    seed: int = option(0, "every random draw follows from it", low=0)
    device: str = option("auto", "cpu, cuda or auto")


def inversion(specs: Sequence[str], settings: InversionAudit) -> Iterator[dict[str, Any]]:
    """A row for each method."""
    plans = [make_spec(spec, {}) for spec in specs]
    data = load(settings.data, data_dir=settings.data_dir)
    if data.classes is None or len(data.shape) != 3:
        raise UserError(f"'{data.name}' does not classify images; an audit rebuilds images.")
    for plan in plans:
        yield attack(plan.label, plan.method, data, settings)


def attack(name: str, method: Method, data: Dataset, settings: InversionAudit) -> dict[str, Any]:
    """One round, and what the server makes of it."""
    fed = _federation(method, data, settings)
    seen, epsilon = observed(fed)
    summed = method.capabilities.masks is not None
    victims = range(settings.clients) if summed else (VICTIM,)
    rows = torch.cat([torch.from_numpy(fed.splits[i].train) for i in victims])
    truth = unscaled(fed.data, fed.data.x[rows.to(fed.device)]).double()
    labels = fed.data.y[rows.to(fed.device)]
    module = fed.engine.setup.module.double().eval()
    model = {name: value.double() for name, value in fed.initial.items()}
    counts = label_counts(module, model, fed, seen, len(labels))
    true = torch.bincount(labels, minlength=int(fed.data.classes or 0))
    guess = true if counts is None else counts
    images = rebuilt(module, model, seen, fed, guess, settings)
    best = matched(fed.data.pixels(images).clamp(0, 1), truth)[: settings.images]
    own = truth[: settings.images]
    return {
        "method": name,
        "attacker": f"sum of {settings.clients}" if summed else "one upload",
        "data": fed.data.name,
        "seen": sum(fed.layers.sizes[name] for name in seen) / sum(fed.layers.sizes.values()),
        "labels": None if counts is None else found_share(counts, true),
        "psnr": median(psnr(best, own)),
        "best psnr": float(psnr(best, own).max()),
        "ssim": median(ssim(best, own)),
        "epsilon": epsilon,
        "images": best[:SHOWN].cpu(),
        "truth": own[:SHOWN].cpu(),
        "psnr of each": psnr(best, own).tolist(),
    }


def _federation(method: Method, data: Dataset, settings: InversionAudit) -> Federation:
    count = settings.clients * settings.images
    if count > len(data.x):
        raise UserError(f"'{data.name}' has only {len(data.x)} training samples.")
    chosen = numpy_draw(settings.seed, "inversion").permutation(len(data.x))[:count]
    own = replace(data, x=data.x[chosen], y=data.y[chosen], owners=None)
    return Federation(
        own, partitions.iid(clients=settings.clients, valid=0), model=settings.model, method=method,
        cohort=settings.clients, epochs=1, batch_size=settings.images, momentum=0.0,
        lr=settings.lr, seed=settings.seed, device=settings.device, engine="serial",
        kernels="onednn",
    )  # fmt: skip


def observed(fed: Federation) -> tuple[State, float | None]:
    """The gradient that the server reads from a round, and what epsilon that cost a client."""
    ctx, state = fed.context(0, 1), fed.initialize(1)
    method, setup = fed.method, fed.engine.setup
    uploads = []
    for client in range(ctx.clients):
        payload = method.download(state.server, client, ctx)
        task = ClientTask(client, 0, payload, state.client_states.get(client, {}))
        result = run_client(setup, task)
        tree = method.decode(result.upload, payload, ctx)
        uploads.append(Upload(client, result.samples, tree, payload))
    weights = method.weights(state.server, uploads, ctx)
    after = method.aggregate(state.server, uploads, weights, ctx)
    spent = ctx.metadata.get("epsilon", {}).get(str(VICTIM))
    model = after["model"] if method.capabilities.masks else uploads[VICTIM].tree.get("model", {})
    names = [name for name in fed.layers.parameters if name in model]
    if not names:
        raise UserError(f"{method.label} uploads no parameters, so there is nothing to attack.")
    step = -setup.training.lr
    return {name: ((model[name] - fed.initial[name]) / step).double() for name in names}, spent


def label_counts(
    module: nn.Module, model: State, fed: Federation, seen: State, count: int
) -> Tensor | None:
    """How many images each class has, from the gradient of the head's bias; None if that is not
    seen.

    It is the mean probability of a class less its share, and probabilities of an untrained model
    hardly depend on the image.
    """
    bias = next((name for name in fed.layers.head if name in seen and seen[name].dim() == 1), None)
    if bias is None:
        return None
    blank = torch.zeros(1, *fed.data.shape, dtype=torch.double, device=fed.device)
    share = functional_call(module, model, (blank,)).softmax(1)[0] - seen[bias]
    share = torch.where(share.isfinite(), share, 0).clamp_min(0)
    exact = share * count / share.sum().clamp_min(1e-12)
    counts = exact.floor()
    lacking = int(count - counts.sum())  # these go to the largest remainders
    counts[(exact - counts).topk(min(lacking, len(counts))).indices] += 1
    return counts.long()


def found_share(counts: Tensor, true: Tensor) -> float:
    """The share of the labels that are in the counts."""
    return float(torch.minimum(counts, true).sum() / true.sum())


def rebuilt(
    module: nn.Module,
    model: State,
    seen: State,
    fed: Federation,
    counts: Tensor,
    settings: InversionAudit,
) -> Tensor:
    """Smooth images with these labels whose gradient has the direction of the one seen."""
    classes, shape = len(counts), fed.data.shape
    labels = F.one_hot(torch.arange(classes, device=fed.device).repeat_interleave(counts), classes)
    labels, size = labels.double(), len(labels)
    wanted = torch.cat([value.flatten() for value in seen.values()])
    free = {name: model[name] for name in seen}

    def gradient(images: Tensor) -> Tensor:
        def loss(free: State) -> Tensor:
            return F.cross_entropy(functional_call(module, {**model, **free}, (images,)), labels)

        return torch.cat([value.flatten() for value in grad(loss)(free).values()])

    def distance(row: Tensor) -> Tensor:
        images = row.view(size, *shape)
        angle = 1 - F.cosine_similarity(gradient(images), wanted, dim=0)
        return angle + settings.smooth * total_variation(images)

    def evaluate(rows: Tensor) -> tuple[Tensor, Tensor]:
        slopes, values = vmap(grad_and_value(distance))(rows)
        return values, slopes.sign()

    pixels = size * torch.Size(shape).numel()
    start = torch.randn(settings.restarts, pixels, generator=draw(settings.seed, "inversion-start"))
    best = adam(evaluate, start.double().to(fed.device), settings.steps)
    return best.points[best.values.argmin()].view(size, *shape)


def total_variation(images: Tensor) -> Tensor:
    """The mean difference of neighbouring pixels, down and to the right."""
    down, right = images.diff(dim=-2).abs(), images.diff(dim=-1).abs()
    return down.mean() + right.mean()


def matched(images: Tensor, truth: Tensor) -> Tensor:
    """The images in the order in which they fit the true ones best, as only their owner can
    tell.
    """
    apart = (truth.flatten(1)[:, None] - images.flatten(1)[None]).square().mean(2)
    _, order = linear_sum_assignment(apart.cpu().numpy())
    return images[torch.from_numpy(order).to(images.device)]
