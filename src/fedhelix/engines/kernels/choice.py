"""Which kernels are the fastest on the CPU depends on the processor and the network: time them
once.

Their results differ in the last bits. So that two runs with one seed are equal, a choice that was
timed once is kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
import typing
from contextlib import suppress
from pathlib import Path

import torch

from fedhelix.core.files import cache_folder, write_atomically
from fedhelix.core.tree import clone
from fedhelix.engines.kernels import Kernels, applied
from fedhelix.engines.kernels.compiled import available, processor
from fedhelix.engines.local import Setup, base_loss, gather

CLEARLY = 0.9  # kernels that are to replace others must take less than this share of their time
PATIENCE = 1.0  # seconds for all repetitions; a warm-up and the first one always happen
REPETITIONS = 15
EDITION = (
    3  # of the tuned and compiled kernels: choices that were timed with another one do not count
)


def choose(setup: Setup) -> Kernels:
    """The faster kernels for this network on this processor; timed at the first time, remembered
    afterwards.
    """
    convolves = any(layer.kind == "conv" for layer in setup.layers.all)
    if not convolves or setup.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return "onednn"
    path, key = cache_folder() / "kernels.json", signature(setup)
    known = read_choices(path)
    if key not in known:
        found = fastest(setup)
        known = {
            key: found,
            **read_choices(path),
        }  # of two runs that started together, both go by the first one
        with suppress(OSError):  # a cache that cannot be written only costs time in the next run
            write_atomically(path, json.dumps(known, indent=1).encode())
    return known[key]


def read_choices(path: Path) -> dict[str, Kernels]:
    """What was chosen before; an unreadable file counts as empty."""
    try:
        known = json.loads(path.read_bytes())
        return {key: choice for key, choice in known.items() if choice in typing.get_args(Kernels)}
    except (OSError, ValueError, AttributeError):
        return {}


def signature(setup: Setup) -> str:
    """All that the speed depends on: processor, kernels, network, sample and batch size."""
    entries = [
        (name, tuple(value.shape), str(value.dtype)) for name, value in setup.initial.items()
    ]
    network = hashlib.blake2b(f"{setup.module}{entries}".encode(), digest_size=8).hexdigest()
    sample = "x".join(map(str, setup.data.shape))
    versions = f"torch {torch.__version__} tuned {EDITION}"
    return f"{processor()} {versions} network {network} {sample} batch {setup.training.batch_size}"


def fastest(setup: Setup) -> Kernels:
    """Time one training step in each way, by turns, so that other work on the machine slows down
    all alike.
    """
    candidates = [
        kernels for kernels in typing.get_args(Kernels) if kernels != "compiled" or available()
    ]
    times: dict[Kernels, list[float]] = {kernels: [] for kernels in candidates}
    threads, mode = torch.get_num_threads(), setup.module.training
    with torch.random.fork_rng(
        devices=[]
    ):  # a network with dropout draws from the global generator
        try:
            torch.set_num_threads(1)  # as in worker processes
            for kernels in candidates:
                try:
                    step_seconds(setup, kernels)
                except (
                    RuntimeError
                ):  # a network may count on an order in memory that others do not keep
                    if kernels in ("onednn", "native"):
                        raise
                    del times[kernels]
            end = time.perf_counter() + PATIENCE
            while not times["onednn"] or (
                time.perf_counter() < end and len(times["onednn"]) < REPETITIONS
            ):
                for kernels, found in times.items():
                    found.append(step_seconds(setup, kernels))
        finally:
            torch.set_num_threads(threads)
            setup.module.train(mode)
    chosen: Kernels = "onednn"
    for kernels in times:
        if statistics.median(times[kernels]) < CLEARLY * statistics.median(times[chosen]):
            chosen = kernels
    return chosen


def step_seconds(setup: Setup, kernels: Kernels) -> float:
    """How long the gradient of one minibatch takes."""
    size = min(max(setup.training.batch_size, 2), len(setup.data.x))  # BatchNorm needs two samples
    batch, state = gather(setup, torch.arange(size), None), clone(setup.initial)
    leaves = [state[name].requires_grad_() for name in setup.layers.parameters]
    setup.module.train()
    with applied(kernels, setup.module):
        start = time.perf_counter()
        torch.autograd.grad(base_loss(setup, state, batch), leaves, allow_unused=True)
        return time.perf_counter() - start
