"""How a CPU computes a round: in one thread, with subnormal numbers as zeros."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

SMALLEST = sys.float_info.min  # the smallest normal number: half of it is subnormal


class CpuMode(NamedTuple):
    """How a thread computes."""

    threads: int  # that PyTorch uses
    flushed: bool  # subnormal numbers count as zeros


OUTSIDE: ContextVar[CpuMode | None] = ContextVar("OUTSIDE", default=None)


def flushes_subnormals() -> bool:
    """Whether this thread takes subnormal numbers as zeros, which PyTorch can set but not ask."""
    return SMALLEST / 2 == 0


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in the calling thread alone, and take subnormal numbers as zeros.

    Gradients have many of these numbers, next to zero, and some processors compute them a hundred
    times slower than others. How a thread takes them is passed on to threads that it starts, which
    would keep it; here it starts none, so that the caller finds everything as it was.
    More threads gain little on small networks, wait for each other on a busy machine, and results
    would depend on their number.
    """
    outside = OUTSIDE.get() or _mode()
    token = OUTSIDE.set(outside)
    try:
        with _computing(CpuMode(threads=1, flushed=True)):
            yield
    finally:
        OUTSIDE.reset(token)


@contextmanager
def all_threads() -> Iterator[None]:
    """Within `one_thread`, compute as outside of it: for large products of matrices."""
    with _computing(OUTSIDE.get() or _mode()):
        yield


@contextmanager
def _computing(mode: CpuMode) -> Iterator[None]:
    before = _mode()
    _set(mode)
    try:
        yield
    finally:
        _set(before)


def _mode() -> CpuMode:
    return CpuMode(torch.get_num_threads(), flushes_subnormals())


def _set(mode: CpuMode) -> None:
    torch.set_num_threads(mode.threads)
    torch.set_flush_denormal(mode.flushed)  # does nothing where the processor cannot
