"""The worker process of the parallel engine: it receives a setup once, then calls to answer."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, cast

import torch

from fedhelix.core.cpu import one_thread
from fedhelix.core.errors import UserError
from fedhelix.core.tree import Tree
from fedhelix.data import Split
from fedhelix.engines.blame import described
from fedhelix.engines.local import ClientTask, Setup, make_client
from fedhelix.engines.parallel.shared import loads, open_map, pack
from fedhelix.engines.parallel.stacking import stack_uploads
from fedhelix.engines.splits import PackedSplits

if sys.platform == "win32":
    from multiprocessing.connection import PipeConnection as Connection
else:
    from multiprocessing.connection import Connection


class Configure(NamedTuple):
    """The first message from a pool."""

    path: list[str]  # the import path
    folder: str  # of the shared files
    # Pickled on its own, because it can be loaded only once the path is set; and the arrays of the
    # splits.
    setup: bytes


class Calls(NamedTuple):
    """Some calls `function(setup, *arguments)`, answered together."""

    calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]


class Failure(NamedTuple):
    """An exception, as it is sent back."""

    sentence: str
    trace: str  # empty for a user's error, where the sentence is enough


# The last message from a pool. The answer is True if another pool can reuse the worker.
RELEASE = "release"


@one_thread()
def client_init(setup: Setup, task: ClientTask) -> Tree:
    """What a client sends before round 0."""
    return setup.hooks.client_init(make_client(setup, task))


class WorkerLoop:
    """Answers the messages of the process at the other end of a pipe."""

    def __init__(self, pipe: Connection):
        self.pipe = pipe
        self.inbox: SimpleQueue[bytes] = SimpleQueue()
        self.folder = ""
        self.count = itertools.count()
        self.setup: Setup | None = None
        self.imported = own_modules()

    def serve(self) -> None:
        """Answer one message after the other."""
        threading.Thread(target=self.listen, daemon=True).start()
        while True:
            self.pipe.send_bytes(self.answer(self.inbox.get()))

    def listen(self) -> None:
        """Queue messages. When the other end dies, remove its files and exit, even in mid-task."""
        try:
            while True:
                self.inbox.put(self.pipe.recv_bytes())
        except (EOFError, OSError):
            if self.folder:
                shutil.rmtree(self.folder, ignore_errors=True)
            os._exit(0)

    def answer(self, message: bytes) -> memoryview:
        """The result of a message, or a `Failure`."""
        path = Path(self.folder) / f"{os.getpid()}-{next(self.count)}"
        try:
            value = self.handle(loads(message))
            if not isinstance(value, list):
                return pack(value, path)
            stacked = stack_uploads(value)  # which the server soon forgets
            return pack(stacked, path, stacked.tensors())
        except Exception as problem:
            return pack(failure(problem), path)

    def handle(self, message: Any) -> Any:
        """Configure, release, or do some work."""
        if isinstance(message, Configure):
            sys.path[:], self.folder = message.path, message.folder
            lean, packed = loads(message.setup)
            splits = PackedSplits(*(part.numpy() for part in packed))
            self.setup = replace(lean, splits=cast("Sequence[Split]", splits))
            return None
        if message == RELEASE:
            self.folder, self.setup = "", None
            open_map.cache_clear()
            return own_modules() == self.imported
        return self.results(message)

    def results(self, work: Calls) -> list[Any]:
        """The results of the calls, up to the first failure."""
        results: list[Any] = []
        for function, arguments in work.calls:
            try:
                results.append(function(self.setup, *arguments))
            except Exception as problem:
                return [*results, failure(problem)]
        return results


def failure(problem: Exception) -> Failure:
    """An exception as it is sent back; to be called where it is handled."""
    if isinstance(problem, UserError):
        return Failure(str(problem), "")
    return Failure(described(problem), traceback.format_exc())


def own_modules() -> set[str]:
    """The user's own modules imported so far, which may change before the next pool."""
    installed = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    return {
        name
        for name, file in files.items()
        if file and not file.startswith(installed) and name.partition(".")[0] != "fedhelix"
    }


def main(handle: str) -> None:
    """Serve over the pipe whose end this process has inherited."""
    torch.set_num_threads(1)
    WorkerLoop(Connection(int(handle))).serve()
