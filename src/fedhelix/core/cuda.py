"""Recording steps of a program for a GPU, where several runs of it may be under way in threads of
their own.
"""

from __future__ import annotations

import gc
import importlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

RECORDING = threading.Lock()
WAKING = threading.Lock()
THREAD = threading.local()
WARM_UP = 2  # calls before something is recorded: they choose kernels and allocate workspaces
LARGE = 2**20  # values: a network of so many fills a GPU alone, and its steps outlast their launch
MOST = 16  # recordings of one function


@cache
def with_triton(module: str) -> ModuleType | None:
    """A module with Triton kernels, imported when a GPU first needs it; None without Triton."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def sent(values: Tensor, device: torch.device) -> Tensor:
    """The same on a device; a plain copy would wait for all that a GPU still has to do."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


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


class Recorded:
    """A function of tensors that a GPU does as one recorded program, where its many small steps
    would cost more in Python than on the GPU. A CPU calls it as it is.

    It must not wait for the GPU, and must return new tensors. Every combination of shapes has a
    recording of its own; after too many of them, the function is called as it is.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]):
        self.function = function
        self.lock = threading.Lock()  # a recording has one place for its inputs
        self.calls: Counter[Any] = Counter()  # before a recording, by shapes
        self.recordings: dict[Any, _Recording] = {}
        self.memory: Any = None  # of all recordings, of which one runs at a time

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What the function returns for these tensors."""
        if not inputs[0].is_cuda:
            return self.function(*inputs)
        stream = torch.cuda.current_stream(inputs[0].device)
        key = (stream, *((value.shape, value.dtype) for value in inputs))
        with self.lock:
            if key in self.recordings:
                return self.recordings[key].replay(inputs)
            self.calls[key] += 1
            if self.calls[key] > WARM_UP and len(self.recordings) < MOST:
                self.memory = self.memory or torch.cuda.graph_pool_handle()
                self.recordings[key] = _Recording(self.function, inputs, self.memory)
        return self.function(*inputs)


class _Recording:
    """The recorded program for tensors of certain shapes."""

    def __init__(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        inputs: tuple[Tensor, ...],
        memory: Any,
    ):
        self.inputs = [value.clone() for value in inputs]
        self.graph = torch.cuda.CUDAGraph()
        with recording(self.graph, pool=memory):
            self.outputs = function(*self.inputs)

    def replay(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The outputs for other inputs; copies, because the next call overwrites the originals."""
        torch._foreach_copy_(self.inputs, list(inputs))
        self.graph.replay()
        return tuple(value.clone() for value in self.outputs)
