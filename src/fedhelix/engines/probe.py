"""Evaluates part of a model where clients keep the rest: the server fits the rest to its samples.

Missing BatchNorm layers take the statistics of these samples. A missing head becomes a ridge
regression on the body's features. Each sample is predicted by the head fitted to all the others,
because a head that has seen a sample would flatter any body; one fit suffices for all samples. Any
other missing entry is that of the initial model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedhelix.core.layers import Layer
from fedhelix.core.means import Means
from fedhelix.core.tree import State
from fedhelix.engines.kernels import applied
from fedhelix.engines.local import (
    EVALUATED_AT_ONCE,
    Setup,
    Subset,
    call,
    module_of,
    predict,
    samples_of,
)

RIDGE = 0.01  # of the mean variance of the features


def is_whole(setup: Setup, state: State) -> bool:
    """Whether a state has every entry of the network."""
    return state.keys() >= set(setup.layers.names)


def are_whole(setup: Setup, states: Sequence[State]) -> bool:
    """Whether all of them have; means that nobody has computed yet are not."""
    if isinstance(states, Means):
        return states.names >= set(setup.layers.names)
    return all(is_whole(setup, state) for state in states)


@torch.no_grad()
def probe(setup: Setup, part: State, subset: Subset, indices: Tensor) -> Tensor:
    """Outputs for some samples of a subset, with the missing entries fitted to these samples."""
    model = {**setup.initial, **part}
    norms = [
        layer
        for layer in setup.layers.all
        if layer.kind == "norm" and not part.keys() >= set(layer.entries)
    ]
    if norms:
        model |= with_statistics(setup, model, norms, subset, indices)
    if part.keys() >= set(setup.layers.head):
        return predict(setup, model, subset, indices)
    y = samples_of(setup, subset)[1][indices.to(setup.device)]
    y = y if setup.data.classes is None else F.one_hot(y, setup.data.classes)
    features = head_inputs(setup, model, subset, indices)
    return predicted_by_others(features, y.reshape(len(y), -1))


def probe_all(
    setup: Setup, parts: Sequence[State], subset: Subset, indices: Tensor
) -> list[Tensor]:
    """The same for several models."""
    return [probe(setup, part, subset, indices) for part in parts]


def with_statistics(
    setup: Setup, model: State, norms: list[Layer], subset: Subset, indices: Tensor
) -> State:
    """BatchNorm entries with the means and variances of one evenly spread batch of the samples."""
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
            batch = setup.data.prepare(samples_of(setup, subset)[0][chosen])
            call(setup, {**model, **fresh}, batch)
    finally:
        for module, momentum in zip(modules, momenta, strict=True):
            module.momentum = momentum
    return fresh


def head_inputs(setup: Setup, model: State, subset: Subset, indices: Tensor) -> Tensor:
    """The features that the head receives, one row per sample."""
    seen: list[Tensor] = []
    head = module_of(setup, setup.layers.weighted[-1])
    hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(1)))
    try:
        predict(setup, model, subset, indices)
    finally:
        hook.remove()
    return torch.cat(seen)


def predicted_by_others(x: Tensor, y: Tensor) -> Tensor:
    """For each row of y, the prediction of a ridge regression with intercept on all other rows.

    A row pulls the regression by its leverage h, so its leave-one-out error is its error / (1 - h).
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
