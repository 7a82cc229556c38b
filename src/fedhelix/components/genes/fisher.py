"""Fisher values: how sharply the likelihood of a client's data reacts to each parameter (Eqs. 5 and
6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad

from fedhelix.core.cpu import one_thread
from fedhelix.core.cuda import sent
from fedhelix.core.method import Client
from fedhelix.core.parts import Inputs, each
from fedhelix.core.samples import of_each_sample
from fedhelix.core.tree import State

SampleLoss = Callable[[State, Inputs, Tensor], Tensor]  # of one sample under a model
Normalisation = Literal["layer_minmax", "global_minmax", "layer_rank"]

AT_ONCE = 2**28  # gradient values that may be in memory at a time: 1 GiB


@one_thread()
def fisher_values(
    loss: SampleLoss, state: State, names: Iterable[str], x: Inputs, y: Tensor
) -> State:
    """The empirical diagonal Fisher: for each parameter the mean over samples of its squared
    gradient.

    `loss` is minus the log-likelihood of one sample. Gradients are per sample, many samples at
    once.
    """
    free = {name: state[name].detach() for name in names}
    fixed = {name: value for name, value in state.items() if name not in free}
    chunk = max(1, AT_ONCE // max(1, sum(value.numel() for value in free.values())))
    slope = grad(lambda mine, one, label: loss({**fixed, **mine}, one, label))
    total = {name: torch.zeros_like(value) for name, value in free.items()}
    for at in range(0, len(y), chunk):
        some, labels = each(itemgetter(slice(at, at + chunk)), x), y[at : at + chunk]
        for name, gradient in of_each_sample(slope, free, some, labels).items():
            total[name] += gradient.square().sum(0)
    return {name: value / len(y) for name, value in total.items()}


def normalise(fisher: Mapping[str, Tensor], how: Normalisation = "layer_minmax") -> State:
    """Fisher values on [0, 1]: by the range of each tensor or of all, or by the rank within each
    tensor.

    Fisher values have heavy tails: the range of all leaves nearly everything close to zero, ranks
    are even.
    """
    if how == "layer_rank":
        return {name: _ranks(value) for name, value in fisher.items()}
    ranges = {name: value.aminmax() for name, value in fisher.items()}
    low = {name: span.min for name, span in ranges.items()}
    high = {name: span.max for name, span in ranges.items()}
    if how == "global_minmax":
        least, most = torch.stack(list(low.values())).min(), torch.stack(list(high.values())).max()
        low, high = dict.fromkeys(fisher, least), dict.fromkeys(fisher, most)
    tiny = torch.finfo(torch.float32).tiny
    return {
        name: (value - low[name]) / (high[name] - low[name]).clamp_min(tiny)
        for name, value in fisher.items()
    }


def _ranks(values: Tensor) -> Tensor:
    """Each value's rank, from just above 0 to 1 for the largest."""
    flat = values.flatten()
    ranks = torch.empty_like(flat)
    ranks[flat.argsort(stable=True)] = torch.arange(
        1, len(flat) + 1, dtype=flat.dtype, device=flat.device
    )
    return (ranks / len(flat)).view_as(values)


def elastic_mask(
    normalised: Mapping[str, Tensor], epsilon: float, which: Literal["low", "high"] = "low"
) -> State:
    """One for the parameters that the elastic penalty holds: those of low (the paper's Eq. 6) or of
    high Fisher.
    """
    low = {name: (value <= epsilon).to(value.dtype) for name, value in normalised.items()}
    return low if which == "low" else {name: 1 - value for name, value in low.items()}


def client_fisher(
    client: Client, model: State, names: Sequence[str], mode: Literal["sample", "batch"], most: int
) -> State:
    """Fisher values from at most so many of a client's samples, or from its batches."""
    if mode == "batch":
        squares = [
            {name: gradient[name].square() for name in names}
            for gradient in client.gradients(model)
        ]
        return {name: torch.stack([part[name] for part in squares]).mean(0) for name in names}
    x, y = client.inputs(), client.targets()
    order = torch.randperm(len(y), generator=client.draw("fisher"))
    some = sent(order[:most], y.device)
    chosen = each(lambda part: part[some], x)
    found = client.squared_gradients(model, names, chosen, y[some])
    if found is None:
        return fisher_values(client.sample_loss, model, names, chosen, y[some])
    return found
