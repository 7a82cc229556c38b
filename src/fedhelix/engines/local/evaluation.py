"""Evaluates models on the clients' own samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedhelix.core.cpu import one_thread
from fedhelix.core.objective import evaluate_outputs
from fedhelix.core.shift import SHIFT, unshifted
from fedhelix.engines.local.batches import samples_of
from fedhelix.engines.local.network import predict
from fedhelix.engines.local.setup import ClientTask, Outputs, PersonalModel, Scores, Setup, Subset
from fedhelix.engines.local.training import personal_model


def evaluate_clients(
    setup: Setup, users: Mapping[int, PersonalModel], outputs: Outputs
) -> dict[int, Scores]:
    """Scores of clients whose models differ in their shifts alone; each sample is computed once.

    `outputs` are those of the model without any shift.
    """
    splits = [setup.splits[client] for client in users]
    shifts = [used.state.get(SHIFT) for used in users.values()]
    test = _evaluate_parts(setup, "test", [split.test for split in splits], shifts, outputs)
    valid = _evaluate_parts(setup, "train", [split.valid for split in splits], shifts, outputs)
    return {
        client: Scores(*on_test, on_valid[0], used.name)
        for (client, used), on_test, on_valid in zip(users.items(), test, valid, strict=True)
    }


def _evaluate_parts(
    setup: Setup,
    subset: Subset,
    parts: Sequence[np.ndarray],
    shifts: Sequence[Tensor | None],
    outputs: Outputs,
) -> list[tuple[float, float]]:
    samples = np.unique(np.concatenate(parts))
    if not len(samples):
        return [(math.nan, math.nan) for _ in parts]
    indices = torch.from_numpy(samples)
    predicted, targets = outputs(subset, indices), samples_of(setup, subset)[1]
    targets = targets[indices.to(targets.device)]
    places = [np.searchsorted(samples, part) for part in parts]
    if any(shift is not None for shift in shifts):
        predicted, targets, places = _shifted_apart(predicted, targets, places, shifts)
    if setup.objective.by_sample is None:
        at = [torch.from_numpy(place).to(predicted.device) for place in places]
        return [evaluate_outputs(setup.objective, predicted[place], targets[place]) for place in at]
    # One copy from the device for all clients, instead of several waits for each of them.
    values = (
        torch.as_tensor(rule(predicted, targets))
        for rule in (setup.objective.by_sample, setup.objective.losses)
    )
    table = torch.stack(list(values)).double().cpu().numpy()
    means = [table[:, place].mean(1) if len(place) else np.full(2, math.nan) for place in places]
    return [(float(metric), float(loss)) for metric, loss in means]


def _shifted_apart(
    predicted: Tensor,
    targets: Tensor,
    places: Sequence[np.ndarray],
    shifts: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor, list[np.ndarray]]:
    """The shifted outputs of one client after the other, their targets, and the new places."""
    none = torch.zeros_like(predicted[0])
    table = torch.stack([none if shift is None else shift for shift in shifts])
    owner = np.repeat(np.arange(len(places)), [len(place) for place in places])
    rows = torch.from_numpy(np.concatenate(places)).to(predicted.device)
    ends = np.cumsum([len(place) for place in places])
    new = [np.arange(end - len(place), end) for end, place in zip(ends, places, strict=True)]
    shift = table[torch.from_numpy(owner).to(table.device)]
    return predicted[rows] + shift, targets[rows], new


@one_thread()
def evaluate(setup: Setup, task: ClientTask) -> Scores:
    """A client's personal model on its own samples."""
    used = personal_model(setup, task)
    outputs = partial(predict, setup, unshifted(used.state))
    return evaluate_clients(setup, {task.client: used}, outputs)[task.client]
