"""How a CPU computes a round: in one thread, with subnormal numbers as zeros.

Whoever changes these switches of PyTorch does so within `one_thread`, which puts them back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple

import torch

SMALLEST = sys.float_info.min  # the smallest normal number: half of it is subnormal


class CpuMode(NamedTuple):
    """How a thread computes, and with which library the process does."""

    threads: int  # that PyTorch uses
    flushed: bool  # subnormal numbers count as zeros
    onednn: bool  # PyTorch may use oneDNN


OUTSIDE: ContextVar[CpuMode | None] = ContextVar("OUTSIDE", default=None)


def flushes_subnormals() -> bool:
    """Whether this thread takes subnormal numbers as zeros, which PyTorch can set but not ask."""
    return SMALLEST / 2 == 0


@cache
def multiplies_bfloat16() -> bool:
    """Whether oneDNN multiplies matrices of bfloat16 on this processor."""
    operations = torch.ops.mkldnn
    return torch.backends.mkldnn.is_available() and operations._is_mkldnn_bf16_supported()


def prepare_bfloat16() -> None:
    """Switch oneDNN off, within `one_thread`, where it cannot multiply matrices of bfloat16.

    PyTorch would do so at the first product, with the trace of an error as a warning.
    """
    if not multiplies_bfloat16():
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]


@contextmanager
def one_thread(onednn: bool | None = None) -> Iterator[None]:
    """Compute in the calling thread alone, and take subnormal numbers as zeros; with oneDNN or
    without, or as before.

    Gradients have many of these numbers, next to zero, and some processors compute them a hundred
    times slower than others. How a thread takes them is passed on to threads that it starts, which
    would keep it; here it starts none, so that the caller finds everything as it was.
    More threads gain little on small networks, wait for each other on a busy machine, and results
    would depend on their number.
    """
    before = _mode()
    token = OUTSIDE.set(OUTSIDE.get() or before)
    used = before.onednn if onednn is None else onednn
    try:
        with _computing(CpuMode(threads=1, flushed=True, onednn=used)):
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
    onednn = bool(torch.backends.mkldnn.enabled)
    return CpuMode(torch.get_num_threads(), flushes_subnormals(), onednn)


def _set(mode: CpuMode) -> None:
    torch.set_num_threads(mode.threads)
    torch.set_flush_denormal(mode.flushed)  # does nothing where the processor cannot
    torch.backends.mkldnn.enabled = mode.onednn  # type: ignore[assignment]
