"""A worker process of the parallel engine: it gets the setup once, and then one task after the other.

It is started as `python -m fedhelix.engines.worker`, not through `multiprocessing`, which would run the user's
script once more in every worker.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import connection
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from fedhelix.client import Job, Setup, client_of
from fedhelix.data import Split
from fedhelix.engines.kernels import Kernels, applied
from fedhelix.engines.shared import dumps, loads
from fedhelix.errors import BadInput
from fedhelix.tree import Tree


class Failure(NamedTuple):
    """An exception of a task, as it travels home."""

    sentence: str | None  # a user's mistake, in one sentence
    trace: str


def hello(setup: Setup, job: Job) -> Tree:
    """What a client tells before round 0."""
    return setup.method.hello(client_of(setup, job))


def for_client(setup: Setup, function: Callable[[Setup, Job], Any], job: Job, split: Split) -> Any:
    """A function of one client. Its split comes with the task, for those of all clients may be many."""
    return function(replace(setup, splits={job.client: split}), job)


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns, or how it failed."""
    try:
        return function(*arguments)
    except BadInput as problem:
        return Failure(str(problem), "")
    except Exception:
        return Failure(None, traceback.format_exc())


def read(pipe: Any, inbox: SimpleQueue[bytes], folder: str) -> None:
    """Keep an ear on the parent: when it vanishes, tidy up for it and end at once, even amid a long task."""
    try:
        while True:
            inbox.put(pipe.recv_bytes())
    except (EOFError, OSError):
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


def serve(pipe: Any, folder: str, kernels: Kernels) -> None:
    """Answer every message: first the setup, then tasks (a function and its arguments)."""
    inbox: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=read, args=(pipe, inbox, folder), daemon=True).start()
    torch.set_num_threads(1)
    with applied(kernels):
        setup = attempt(loads, inbox.get())
        pipe.send_bytes(dumps(setup if isinstance(setup, Failure) else None))
        while True:
            function, arguments = loads(inbox.get())
            pipe.send_bytes(dumps(attempt(function, setup, *arguments)))


def main(handle: str, folder: str, kernels: Any) -> None:
    """Serve over the pipe whose end the parent handed down."""
    kind = connection.PipeConnection if sys.platform == "win32" else connection.Connection
    serve(kind(int(handle)), folder, kernels)


if __name__ == "__main__":
    main(*sys.argv[1:])
