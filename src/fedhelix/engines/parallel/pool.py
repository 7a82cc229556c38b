"""A crew of worker processes: they share the data, take tasks, and are replaced when they die."""

from __future__ import annotations

import atexit
import copy
import itertools
import math
import os
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch import Tensor

from fedhelix.core.errors import EngineFailure, UserError
from fedhelix.data import Dataset
from fedhelix.data.datasets import POOLS
from fedhelix.engines.local import Setup
from fedhelix.engines.parallel.shared import (
    Unsendable,
    dumps,
    folder_for,
    loads,
    mapped,
    open_map,
    share,
)
from fedhelix.engines.parallel.worker import RELEASE, Failure, Opening

START = "import sys; from fedhelix.engines.parallel.worker import main; main(sys.argv[1])"


class NoWorkers(Exception):
    """Worker processes cannot be had; the message says why."""


class WorkItem(NamedTuple):
    """A call `function(setup, *arguments)` for a worker."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    size: int  # a measure of its duration
    whose: str  # for messages


def cores() -> int:
    """How many processors this process may use."""
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:  # a container's limit
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(count, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # there is none: no such file, or the quota is "max"
        return count


class Worker:
    """One worker process, seen from here."""

    def __init__(self) -> None:
        self.pipe, theirs = Pipe()
        # A program of our own and not one of `multiprocessing`, which would run the user's script
        # in every worker.
        command = [sys.executable, "-P", "-c", START, str(theirs.fileno())]
        settings = _inheriting(theirs.fileno())
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env=_environment(), **settings
        )
        theirs.close()

    @property
    def alive(self) -> bool:
        """Whether the process is still there."""
        return self.process.poll() is None

    def send(self, message: Any) -> None:
        """Pass a message on; if the worker has died, `receive` will tell."""
        with suppress(OSError):
            self.pipe.send_bytes(message)

    def receive(self) -> Any:
        """The answer; EOFError or OSError when the worker has died."""
        return loads(self.pipe.recv_bytes())

    def end(self) -> None:
        """Leave no process behind. The pipe closes last, or the worker would take us for dead and
        tidy up.
        """
        self.process.kill()
        self.process.wait()
        self.pipe.close()


def _inheriting(handle: int) -> dict[str, Any]:
    """How `Popen` lets a child have one end of a pipe, and nothing of Ctrl-C in the terminal."""
    if sys.platform == "win32":
        os.set_handle_inheritable(handle, True)
        info = subprocess.STARTUPINFO(lpAttributeList={"handle_list": [handle]})
        return {"startupinfo": info, "creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"pass_fds": [handle], "start_new_session": True}


def _environment() -> dict[str, str]:
    """Ours, with the same import path, and one thread for every library that would start more."""
    single = dict.fromkeys(["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"], "1")
    # Where PyTorch allocates with mimalloc, memory goes back to the system after 10 ms: every step
    # would fetch it anew.
    keeping = {"MIMALLOC_PURGE_DELAY": "1000"}
    return {**keeping, **os.environ, **single, "PYTHONPATH": os.pathsep.join(_import_path())}


def _import_path() -> list[str]:
    return [folder or str(Path.cwd()) for folder in sys.path]


IDLE: list[Worker] = []
"""Workers of finished crews, for a start takes seconds; they end with the program."""


@atexit.register
def shut_down() -> None:
    """End the workers that wait for a crew."""
    while IDLE:
        IDLE.pop().end()


class WorkerPool:
    """Workers that know a setup. The data lie in one file that all processes map."""

    def __init__(self, setup: Setup):
        tensors = {name: getattr(setup.data, name) for name in POOLS}
        size = sum(tensor.nbytes for tensor in tensors.values())
        model = sum(tensor.nbytes for tensor in setup.initial.values())
        self.folder = folder_for(size + 100 * model)
        self.workers: list[Worker] = []
        self.end = weakref.finalize(
            self, release, self.workers, self.folder
        )  # also at the program's end
        self.count = itertools.count()
        places = share(tensors.values(), self._new_file())
        self.data = changed(
            setup.data, **{name: mapped(*places[id(tensors[name])]) for name in POOLS}
        )
        open_map.cache_clear()  # the memory shall be free when the last of these tensors is
        lean = replace(setup, data=changed(setup.data, owners=None, owners_test=None), splits=())
        try:
            self.opening = dumps(
                Opening(_import_path(), self.folder.name, bytes(dumps(lean, places)))
            )
        except Unsendable as problem:
            raise NoWorkers(
                f"{problem}; put it into a module of its own and import it from there"
            ) from None
        except Exception as problem:
            raise NoWorkers(
                f"the federation cannot be sent to other processes ({problem})"
            ) from None

    def run(self, items: Sequence[WorkItem], shared: Iterable[Tensor], limit: int) -> list[Any]:
        """The results of the tasks, in their order, from at most `limit` workers; longest tasks
        begin first.

        Tensors in `shared` are laid into a file once, in whichever tasks they occur.
        """
        results: list[Any] = [None] * len(items)
        waiting = sorted(
            range(len(items)), key=lambda index: items[index].size
        )  # taken from the end
        deaths: Counter[int] = Counter()
        idle = self._ensure(min(limit, len(items)))
        busy: dict[Any, tuple[Worker, int]] = {}
        path = self._new_file()
        try:
            places = share(shared, path)
            while waiting or busy:
                while waiting and idle:
                    worker, index = idle.pop(), waiting.pop()
                    worker.send(dumps((items[index].function, items[index].arguments), places))
                    busy[worker.pipe] = worker, index
                for pipe in wait(list(busy)):
                    worker, index = busy.pop(pipe)
                    try:
                        results[index] = opened(worker.receive(), items[index].whose)
                    except (EOFError, OSError):
                        deaths[index] += 1
                        if deaths[index] > 1:
                            raise EngineFailure(
                                f"the worker process died twice with {items[index].whose}; perhaps the memory is "
                                "too small for so many workers."
                            ) from None
                        waiting.append(index)
                        self._remove(worker)
                        [worker] = self._spawn(1)
                    idle.append(worker)
        finally:
            with suppress(OSError):  # Windows keeps files that are mapped until the crew ends
                path.unlink()
        return results

    def release(self) -> None:
        """End in peace, all tasks being done: workers that imported nothing of the user's are kept
        for others.
        """
        for worker in self.workers:
            worker.send(dumps(RELEASE))
        for worker in list(self.workers):
            with suppress(EOFError, OSError):
                if worker.receive() is True:
                    self.workers.remove(worker)
                    IDLE.append(worker)
        self.end()

    def _ensure(self, count: int) -> list[Worker]:
        """As many workers as wanted, all alive."""
        for worker in [worker for worker in self.workers if not worker.alive]:
            self._remove(worker)
        self._spawn(count - len(self.workers))
        return self.workers[:count]

    def _spawn(self, count: int) -> list[Worker]:
        """Take on workers; new ones start all at once."""
        fresh = [
            worker for worker in (IDLE.pop() for _ in range(min(count, len(IDLE)))) if worker.alive
        ]
        fresh += [Worker() for _ in range(count - len(fresh))]
        self.workers += fresh
        for worker in fresh:
            worker.send(self.opening)
        for worker in fresh:
            try:
                failure = worker.receive()
            except (EOFError, OSError):
                raise NoWorkers("a worker process died while it started") from None
            if failure is not None:
                raise NoWorkers(
                    f"the federation cannot be sent to other processes ({failure.sentence})"
                )
        return fresh

    def _remove(self, worker: Worker) -> None:
        worker.end()
        self.workers.remove(worker)

    def _new_file(self) -> Path:
        return Path(self.folder.name) / str(next(self.count))


def release(workers: list[Worker], folder: TemporaryDirectory[str]) -> None:
    """End all workers, whatever they are doing, and remove the shared files."""
    for worker in workers:
        worker.end()
    workers.clear()
    folder.cleanup()


def opened(answer: Any, whose: str) -> Any:
    """A worker's answer, or its exception as one of ours."""
    if not isinstance(answer, Failure):
        return answer
    if not answer.trace:
        raise UserError(answer.sentence)
    raise EngineFailure(f"{whose} failed in a worker process: {answer.sentence}\n{answer.trace}")


def changed(data: Dataset, **fields: Any) -> Dataset:
    """The data set with other fields; `dataclasses.replace` would check every sample again."""
    other = copy.copy(data)
    for name, value in fields.items():
        object.__setattr__(other, name, value)
    return other
