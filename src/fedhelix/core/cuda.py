"""Recording steps of a program for a GPU, where several runs of it may be under way in threads of
their own.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

RECORDING = threading.Lock()
WAKING = threading.Lock()
THREAD = threading.local()


def wake_up(device: torch.device) -> None:
    """Load what PyTorch loads when a thread first asks for it, such as the libraries' handles: two
    threads that ask at the same moment make it fail, and so does one that asks while it records.
    """
    if device.type != "cuda" or getattr(THREAD, "awake", False):
        return
    with WAKING:
        square = torch.eye(2, device=device)
        torch.linalg.svd(square @ square)
        F.conv2d(square[None, None], square[None, None])
    THREAD.awake = True


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, **how: Any) -> Iterator[None]:
    """What is computed inside goes into the graph instead of being done.

    One recording at a time, because each begins by waiting for the whole GPU; and without the
    garbage collector: what it frees, such as graphs of an older engine, would spoil a recording.
    """
    with RECORDING:
        wake_up(torch.device("cuda"))
        gc.disable()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local", **how):
                yield
        finally:
            gc.enable()
