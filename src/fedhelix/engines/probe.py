"""What a part of a model is worth where clients keep the rest at home: the server fits the rest to
its own samples.

Missing BatchNorm layers take the statistics of these samples. A missing head becomes a ridge
regression on what the body makes of them, and each sample is judged by the head that was fitted to
all others (one fit does for all), since a head that has seen a sample would praise any body. All
else that is missing is as in the initial model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fedhelix.core.layers import Layer
from fedhelix.core.tree import State
from fedhelix.engines.kernels import applied
from fedhelix.engines.local import EVALUATED_AT_ONCE, Setup, Subset, module_of, predict, samples_of

RIDGE = 0.01  # of the mean variance of the features


def is_whole(setup: Setup, state: State) -> bool:
    """Whether a state has every entry of the network."""
    return state.keys() >= set(setup.layers.names)


@torch.no_grad()
def probe(setup: Setup, part: State, pool: Subset, indices: Tensor) -> Tensor:
    """What a part of a model says to some samples of a pool when the rest is fitted to them."""
    model = {**setup.initial, **part}
    norms = [
        layer
        for layer in setup.layers.all
        if layer.kind == "norm" and not part.keys() >= set(layer.entries)
    ]
    if norms:
        model |= with_statistics(setup, model, norms, pool, indices)
    if part.keys() >= set(setup.layers.head):
        return predict(setup, model, pool, indices)
    targets = samples_of(setup, pool)[1][indices.to(setup.device)]
    wanted = targets if setup.data.classes is None else F.one_hot(targets, setup.data.classes)
    return predicted_by_others(
        head_inputs(setup, model, pool, indices), wanted.reshape(len(wanted), -1)
    )


def with_statistics(
    setup: Setup, model: State, norms: list[Layer], pool: Subset, indices: Tensor
) -> State:
    """Entries of BatchNorm layers, with the means and variances of an evenly spread batch of the
    samples.
    """
    most = EVALUATED_AT_ONCE[setup.device.type == "cuda"]
    chosen = indices[:: -(-len(indices) // most)].to(setup.device)
    fresh = {name: model[name].clone() for layer in norms for name in layer.entries}
    setup.module.eval()
    modules: list[Any] = [module_of(setup, layer) for layer in norms]
    momenta = [module.momentum for module in modules]
    for module in modules:
        module.train()
        module.momentum = 1.0  # the batch's statistics replace the old ones
    try:
        with applied(setup.kernels, setup.module):
            batch = setup.data.prepare(samples_of(setup, pool)[0][chosen])
            functional_call(setup.module, {**model, **fresh}, (batch,))
    finally:
        for module, momentum in zip(modules, momenta, strict=True):
            module.momentum = momentum
    return fresh


def head_inputs(setup: Setup, model: State, pool: Subset, indices: Tensor) -> Tensor:
    """What the body hands to the head, one row per sample."""
    seen: list[Tensor] = []
    head = module_of(setup, setup.layers.weighted[-1])
    hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(1)))
    try:
        predict(setup, model, pool, indices)
    finally:
        hook.remove()
    return torch.cat(seen)


def predicted_by_others(x: Tensor, y: Tensor) -> Tensor:
    """For each row of y the prediction of the ridge regression (with an intercept) on all other
    rows.

    A row that a regression has seen pulls it by its leverage h, so its error without itself is its
    error / (1 - h).
    """
    x, y = x.double(), y.double()
    if not x.isfinite().all():
        return torch.full_like(y, torch.nan).float()
    x = x - x.mean(0)
    ridge = (RIDGE * x.square().sum() / x.shape[1]).clamp(min=1e-9)
    gram = x.T @ x + ridge * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    pull = torch.linalg.solve(gram, x.T)
    error = y - y.mean(0) - x @ (pull @ (y - y.mean(0)))
    leverage = 1 / len(x) + (x * pull.T).sum(1, keepdim=True)
    return (y - error / (1 - leverage).clamp(min=1e-9)).float()
