"""Parallel CUDA streams; on a CPU there are none, and everything runs in order."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

STREAMS = 10


def fork_streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """Streams that continue from the current one; none on a CPU."""
    if device.type != "cuda":
        return []
    streams = _side_streams(device)[:count]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    return streams


@cache
def _side_streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Always the same streams: cuBLAS keeps a workspace of 32 MiB for every stream it has seen."""
    return [torch.cuda.Stream(device) for _ in range(STREAMS)]


def on_stream(streams: list[torch.cuda.Stream], turn: int) -> AbstractContextManager[Any]:
    """Run on the streams in turn."""
    return torch.cuda.stream(streams[turn % len(streams)]) if streams else nullcontext()


def join_streams(streams: list[torch.cuda.Stream]) -> None:
    """Let the current stream wait for all of them."""
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
