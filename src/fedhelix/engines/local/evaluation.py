"""Evaluates models on the clients' own samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from fedhelix.core.objective import evaluate_outputs
from fedhelix.engines.local.batches import samples_of
from fedhelix.engines.local.network import predict
from fedhelix.engines.local.setup import ClientTask, Outputs, Scores, Setup, Subset
from fedhelix.engines.local.training import personal_model


def evaluate_clients(setup: Setup, clients: Sequence[int], outputs: Outputs) -> dict[int, Scores]:
    """Scores of clients that use the same model; each sample is computed once."""
    parts = [setup.splits[client] for client in clients]
    test = _evaluate_parts(setup, "test", [part.test for part in parts], outputs)
    valid = _evaluate_parts(setup, "train", [part.valid for part in parts], outputs)
    return {
        client: Scores(*on_test, on_valid[0])
        for client, on_test, on_valid in zip(clients, test, valid, strict=True)
    }


def _evaluate_parts(
    setup: Setup, subset: Subset, parts: Sequence[np.ndarray], outputs: Outputs
) -> list[tuple[float, float]]:
    samples = np.unique(np.concatenate(parts))
    if not len(samples):
        return [(math.nan, math.nan) for _ in parts]
    indices = torch.from_numpy(samples)
    predicted, targets = outputs(subset, indices), samples_of(setup, subset)[1]
    targets = targets[indices.to(targets.device)]
    places = [np.searchsorted(samples, part) for part in parts]
    if setup.objective.by_sample is None:
        at = [torch.from_numpy(place).to(predicted.device) for place in places]
        return [evaluate_outputs(setup.objective, predicted[place], targets[place]) for place in at]
    # One copy from the device for all clients, instead of several waits for each of them.
    values = (
        torch.as_tensor(rule(predicted, targets))
        for rule in (setup.objective.by_sample, setup.objective.loss)
    )
    table = torch.stack(list(values)).double().cpu().numpy()
    means = [table[:, place].mean(1) if len(place) else np.full(2, math.nan) for place in places]
    return [(float(metric), float(loss)) for metric, loss in means]


def evaluate(setup: Setup, task: ClientTask) -> Scores:
    """A client's personal model on its own samples."""
    state = personal_model(setup, task)
    return evaluate_clients(setup, [task.client], partial(predict, setup, state))[task.client]
