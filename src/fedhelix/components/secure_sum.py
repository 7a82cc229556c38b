"""What secure aggregation sums, fixed-point numbers modulo 2^32, and what its messages weigh."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MODULUS = 1 << 32
UNITS = 1 << 30  # of a value at the bound; a bit for the sign, and one against overflow
KEY, SHARE, TAG = 32, 66, 16  # bytes of a key, of a share, and of what proves a message whole
SIGNATURE = 64  # bytes of a site's signature on its two keys


def to_words(values: Tensor, share: float, bound: float) -> Tensor:
    """A client's share of values, as words; longer values are cut at the bound.

    As the shares of all clients add up to at most one, their sum stays below the modulus.
    """
    scaled = values.double().clamp(-bound, bound) * (share * UNITS / bound)
    return scaled.round().to(torch.int32)


def sum_words(words: Sequence[Tensor]) -> Tensor:
    """The sum modulo 2^32, with the sign of words."""
    total = torch.stack([word.to(torch.int64) for word in words]).sum(0)
    return signed(total)


def signed(words: Tensor) -> Tensor:
    """Whole numbers modulo 2^32 as words between -2^31 and 2^31."""
    return ((words + MODULUS // 2) % MODULUS - MODULUS // 2).to(torch.int32)


def from_words(words: Tensor, share: float, bound: float) -> Tensor:
    """The mean that a sum of words stands for, given the shares in it."""
    return (words.double() * (bound / UNITS / share)).float()


def shares_needed(holders: int, threshold: float) -> int:
    """How many of those who hold shares of a secret must answer: two at least."""
    return max(2, math.ceil(threshold * holders - 1e-9))


def protocol_bytes(clients: int, degree: int | None, survivors: int) -> int:
    """What a round's keys and shares weigh in both directions, besides the uploads."""
    around = clients - 1 if degree is None else min(degree, clients - 1)
    keys = clients * (2 * KEY + SIGNATURE) * (1 + clients)
    shares = 2 * clients * around * (2 * SHARE + TAG)
    return keys + shares + survivors * (around + 1) * SHARE
