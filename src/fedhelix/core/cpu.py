"""How networks are computed on a CPU: in one thread, with subnormal numbers as zeros."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALLEST = sys.float_info.min  # the smallest normal number: half of it is subnormal


def flushes_subnormals() -> bool:
    """Whether this thread takes subnormal numbers as zeros, which PyTorch can set but not ask."""
    return SMALLEST / 2 == 0


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in the calling thread alone, and take subnormal numbers as zeros.

    Gradients have many of these numbers, next to zero, and some processors compute them a hundred
    times slower than others. How a thread takes them is passed on to threads that it starts, which
    would keep it; here it starts none, so that the caller finds everything as it was.
    """
    threads, flushed = torch.get_num_threads(), flushes_subnormals()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # False where the processor cannot
    try:
        yield
    finally:
        torch.set_flush_denormal(flushed)
        torch.set_num_threads(threads)
