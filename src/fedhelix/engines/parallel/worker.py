"""A worker process of the parallel engine: it gets a setup once, and then one task after the other."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from fedhelix.core.errors import UserError
from fedhelix.core.tree import Tree
from fedhelix.data import Split
from fedhelix.engines.blame import described
from fedhelix.engines.local import ClientTask, Setup, make_client
from fedhelix.engines.parallel.shared import dumps, loads, open_map

if sys.platform == "win32":
    from multiprocessing.connection import PipeConnection as Connection
else:
    from multiprocessing.connection import Connection


class Opening(NamedTuple):
    """The first message of a crew to its workers."""

    path: list[str]  # where to import from
    folder: str  # where the shared files lie
    setup: bytes  # pickled on its own, for it can be read only when the path is set


class Failure(NamedTuple):
    """An exception, as it travels home."""

    sentence: str
    trace: str  # empty: a mistake of the user's, whom the sentence alone helps


# the last message of a crew; the answer says whether the next crew can take the worker over
RELEASE = "retire"


def client_init(setup: Setup, task: ClientTask) -> Tree:
    """What a client tells before round 0."""
    return setup.hooks.client_init(make_client(setup, task))


def for_client(
    setup: Setup, function: Callable[[Setup, ClientTask], Any], task: ClientTask, split: Split
) -> Any:
    """A function of one client. Its split comes with the task, for those of all clients may be
    many.
    """
    return function(replace(setup, splits={task.client: split}), task)  # type: ignore[arg-type]


class WorkerLoop:
    """Does tasks for the process at the other end of a pipe."""

    def __init__(self, pipe: Connection):
        self.pipe = pipe
        self.inbox: SimpleQueue[bytes] = SimpleQueue()
        self.folder = ""
        self.setup: Setup | None = None
        self.known = packages()

    def serve(self) -> None:
        """Answer one message after the other."""
        threading.Thread(target=self.listen, daemon=True).start()
        while True:
            self.pipe.send_bytes(self.answer(self.inbox.get()))

    def listen(self) -> None:
        """Take in messages. When the other end vanishes, tidy up for it and end at once, even amid
        a long task.
        """
        try:
            while True:
                self.inbox.put(self.pipe.recv_bytes())
        except (EOFError, OSError):
            if self.folder:
                shutil.rmtree(self.folder, ignore_errors=True)
            os._exit(0)

    def answer(self, message: bytes) -> memoryview:
        """What comes of a message, or how it failed."""
        try:
            return dumps(self.obey(loads(message)))
        except UserError as problem:
            return dumps(Failure(str(problem), ""))
        except Exception as problem:
            return dumps(Failure(described(problem), traceback.format_exc()))

    def obey(self, message: Any) -> Any:
        """Get ready, retire, or do a task: a function and its arguments."""
        if isinstance(message, Opening):
            sys.path[:], self.folder = message.path, message.folder
            self.setup = loads(message.setup)
            return None
        if message == RELEASE:
            self.folder, self.setup = "", None
            open_map.cache_clear()
            return packages() == self.known
        function, arguments = message
        return function(self.setup, *arguments)


def packages() -> set[str]:
    """The packages that were imported here: those of the user's may change on disk until the next
    crew.
    """
    return {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names


def main(handle: str) -> None:
    """Serve over the pipe whose end was handed down to this process."""
    torch.set_num_threads(1)
    WorkerLoop(Connection(int(handle))).serve()
