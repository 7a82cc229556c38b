"""Every random draw is a function of (seed, purpose, round, client); nothing else is random, but
for the noise that protects clients in a deployment.

No global generator is ever touched, so a run can be resumed without saved generator state, clients
can be worked on in any order or process, and two methods with one seed meet the same cohorts.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


def key(seed: int, purpose: str, *where: int) -> int:
    """A 63-bit number that depends on every argument; `where` is usually (round, client)."""
    text = "|".join([str(int(seed)), purpose, *(str(int(part)) for part in where)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def draw(seed: int, purpose: str, *where: int) -> torch.Generator:
    """A fresh torch generator (on the CPU, so that every device sees the same draws)."""
    return torch.Generator().manual_seed(key(seed, purpose, *where))


def numpy_draw(seed: int, purpose: str, *where: int) -> np.random.Generator:
    """A fresh NumPy generator for the same kind of place."""
    return np.random.default_rng(key(seed, purpose, *where))


def secret_normal(count: int) -> Tensor:
    """Standard normal numbers out of the operating system's generator, which nobody can repeat."""
    words = torch.frombuffer(bytearray(os.urandom(8 * count)), dtype=torch.int64)
    uniform = ((words >> 12).double() + 2**51 + 0.5) / 2**52  # 52 bits, never 0 or 1
    return torch.special.ndtri(uniform).float()


@contextmanager
def seeded(number: int, device: torch.device) -> Iterator[None]:
    """Layers such as dropout draw from PyTorch's own generators: lend them a seed, and put
    everything back after.
    """
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(number)
        if cuda:
            torch.cuda.manual_seed(number)
        yield
