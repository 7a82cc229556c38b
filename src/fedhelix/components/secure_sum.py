"""What secure aggregation sums (whole numbers modulo a power of two), and what messages weigh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedhelix.core.errors import UserError

Bits = Literal[8, 16, 32]  # of a word
WORDS = {8: torch.int8, 16: torch.int16, 32: torch.int32}
KEY, SHARE, TAG = 32, 66, 16  # bytes of a key, of a share, and of what proves a message whole
SIGNATURE = 64  # bytes of a site's signature
DIGEST = 32  # bytes that stand for who has answered


def units(bits: int) -> int:
    """What stands for a value at the bound: a bit for the sign, and one against overflow."""
    return 1 << (bits - 2)


def to_words(
    values: Tensor, share: float, bound: float, bits: int, draw: torch.Generator
) -> Tensor:
    """A client's share of values, as words; longer values are cut at the bound.

    Rounding is up or down at random, and right in the mean, since many small values would vanish
    otherwise. As the shares of all clients add up to at most one, their sum stays below the
    modulus.
    """
    if not 0 < share <= 1:
        raise UserError(f"a client's share in a mean is above 0 and at most 1, not {share:g}.")
    scaled = values.double().clamp(-bound, bound) * (share * units(bits) / bound)
    chance = torch.rand(len(values), generator=draw, dtype=torch.float64)
    return (scaled + chance.to(values.device)).floor().to(WORDS[bits])


def sum_words(words: Sequence[Tensor]) -> Tensor:
    """The sum modulo 2^bits, with the sign of words."""
    modulus = 1 << torch.iinfo(words[0].dtype).bits
    total = torch.stack([word.to(torch.int64) for word in words]).sum(0)
    return ((total + modulus // 2) % modulus - modulus // 2).to(words[0].dtype)


def from_words(words: Tensor, share: float, bound: float) -> Tensor:
    """The mean that a sum of words stands for, given the shares in it."""
    step = bound / units(torch.iinfo(words.dtype).bits)
    return (words.double() * (step / share)).float()


def shares_needed(holders: int, threshold: float) -> int:
    """How many of those who hold shares of a secret must answer: two at least."""
    return max(2, math.ceil(threshold * holders - 1e-9))


def protocol_bytes(clients: int, degree: int | None, survivors: int) -> int:
    """What a round's keys and shares weigh in both directions, besides the uploads."""
    around = clients - 1 if degree is None else min(degree, clients - 1)
    keys = clients * (2 * KEY + SIGNATURE) * (1 + clients)
    shares = 2 * clients * around * (2 * SHARE + TAG)
    agreed = survivors * (DIGEST + SIGNATURE) * (1 + survivors)
    return keys + shares + agreed + survivors * (around + 1) * SHARE
