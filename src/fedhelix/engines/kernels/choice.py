"""Chooses the fastest CPU kernels for a processor and a network, by timing them once."""

from __future__ import annotations

import hashlib
import statistics
import time
import typing

import torch

from fedhelix.core.compiler import processor
from fedhelix.core.tree import clone
from fedhelix.engines.kernels import Kernels, applied
from fedhelix.engines.kernels.library import available
from fedhelix.engines.local import Setup, base_loss, gather
from fedhelix.engines.remembered import remembered

CLEARLY = 0.9  # faster kernels must take less than this share of the others' time
PATIENCE = 1.0  # seconds for all repetitions; a warm-up and one repetition always happen
REPETITIONS = 15
EDITION = 4  # of the tuned and compiled kernels: choices timed with another edition do not count


def choose(setup: Setup) -> Kernels:
    """The fastest kernels for this network on this processor, timed once and then remembered."""
    convolves = any(layer.kind == "conv" for layer in setup.layers.all)
    if not convolves or setup.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return "onednn"
    return remembered(
        "kernels.json", signature(setup), typing.get_args(Kernels), lambda: fastest(setup)
    )


def signature(setup: Setup) -> str:
    """Everything that the speed depends on: processor, kernels, network, sample and batch size."""
    entries = [
        (name, tuple(value.shape), str(value.dtype)) for name, value in setup.initial.items()
    ]
    network = hashlib.blake2b(f"{setup.module}{entries}".encode(), digest_size=8).hexdigest()
    sample = "x".join(map(str, setup.data.shape))
    versions = f"torch {torch.__version__} tuned {EDITION}"
    return f"{processor()} {versions} network {network} {sample} batch {setup.training.batch_size}"


def fastest(setup: Setup) -> Kernels:
    """The kernels with the smallest median time of a training step."""
    mode = setup.module.training
    with torch.random.fork_rng(devices=[]):  # dropout draws from the global generator
        try:
            times = time_steps(setup, working_kernels(setup))
        finally:
            setup.module.train(mode)
    chosen: Kernels = "onednn"
    for kernels in times:
        if statistics.median(times[kernels]) < CLEARLY * statistics.median(times[chosen]):
            chosen = kernels
    return chosen


def working_kernels(setup: Setup) -> list[Kernels]:
    """The kernels that can compute this network; one step warms each of them up."""
    working: list[Kernels] = []
    for kernels in typing.get_args(Kernels):
        if kernels == "compiled" and not available():
            continue
        try:
            step_seconds(setup, kernels)
        except RuntimeError:  # a network may rely on a memory layout that other kernels change
            if kernels in ("onednn", "native"):
                raise
            continue
        working.append(kernels)
    return working


def time_steps(setup: Setup, candidates: list[Kernels]) -> dict[Kernels, list[float]]:
    """Times of training steps, in turn, so that other work on the machine slows all down alike."""
    times: dict[Kernels, list[float]] = {kernels: [] for kernels in candidates}
    end = time.perf_counter() + PATIENCE
    for repetition in range(REPETITIONS):
        if repetition and time.perf_counter() >= end:
            break
        for kernels in candidates:
            times[kernels].append(step_seconds(setup, kernels))
    return times


def step_seconds(setup: Setup, kernels: Kernels) -> float:
    """The time of one minibatch's gradient."""
    size = min(max(setup.training.batch_size, 2), len(setup.data.x))  # BatchNorm needs two samples
    batch, state = gather(setup, torch.arange(size), None), clone(setup.initial)
    leaves = [state[name].requires_grad_() for name in setup.layers.parameters]
    setup.module.train()
    with applied(kernels, setup.module):
        start = time.perf_counter()
        torch.autograd.grad(base_loss(setup, state, batch), leaves, allow_unused=True)
        return time.perf_counter() - start
