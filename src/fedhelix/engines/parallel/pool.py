"""A pool of worker processes that share the data; a worker that dies is replaced."""

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

import torch
from torch import Tensor

from fedhelix.core.errors import EngineFailure, UserError
from fedhelix.data import Dataset
from fedhelix.data.datasets import POOLS
from fedhelix.engines.local import Setup
from fedhelix.engines.parallel.shared import (
    Places,
    Unsendable,
    dumps,
    folder_for,
    mapped,
    open_map,
    share,
    unpack,
)
from fedhelix.engines.parallel.stacking import unstack_uploads
from fedhelix.engines.parallel.worker import RELEASE, Calls, Configure, Failure
from fedhelix.engines.splits import PackedSplits

START = "import sys; from fedhelix.engines.parallel.worker import main; main(sys.argv[1])"


MESSAGES_EACH = 16  # to a worker and round, if there are as many clients
MESSAGE = 1 << 25  # bytes of models in an answer, about


class NoWorkers(Exception):
    """Worker processes cannot start; the message gives the reason."""


class WorkItem(NamedTuple):
    """A call `function(setup, *arguments)` for a worker."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    size: int  # proportional to its duration
    label: str  # for error messages


def cores() -> int:
    """The number of processors that this process may use."""
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:  # a container's limit
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(count, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # there is none: no such file, or the quota is "max"
        return count


class Worker:
    """The handle of one worker process."""

    def __init__(self) -> None:
        self.pipe, theirs = Pipe()
        # Not through `multiprocessing`, which would run the user's script again in every worker.
        command = [sys.executable, "-P", "-c", START, str(theirs.fileno())]
        settings = _inheriting(theirs.fileno())
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env=_environment(), **settings
        )
        theirs.close()

    @property
    def alive(self) -> bool:
        """Whether the process is still running."""
        return self.process.poll() is None

    def send(self, message: Any) -> None:
        """Send a message; if the worker has died, `receive` will raise."""
        with suppress(OSError):
            self.pipe.send_bytes(message)

    def receive(self) -> Any:
        """The answer; EOFError or OSError when the worker has died."""
        return unpack(self.pipe.recv_bytes())

    def end(self) -> None:
        """Kill the process.

        The pipe closes last: a worker that sees it closed removes the shared files.
        """
        self.process.kill()
        self.process.wait()
        self.pipe.close()


def _inheriting(handle: int) -> dict[str, Any]:
    """Arguments of `Popen`: the child inherits one end of a pipe, and Ctrl-C does not reach it."""
    if sys.platform == "win32":
        os.set_handle_inheritable(handle, True)
        info = subprocess.STARTUPINFO(lpAttributeList={"handle_list": [handle]})
        return {"startupinfo": info, "creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"pass_fds": [handle], "start_new_session": True}


def _environment() -> dict[str, str]:
    """Our environment with the same import path, and one thread for each numerical library."""
    single = dict.fromkeys(["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"], "1")
    # mimalloc, which some builds of PyTorch use, returns memory after 10 ms: every step would have
    # to allocate it again.
    keeping = {"MIMALLOC_PURGE_DELAY": "1000"}
    return {**keeping, **os.environ, **single, "PYTHONPATH": os.pathsep.join(_import_path())}


def _import_path() -> list[str]:
    return [folder or str(Path.cwd()) for folder in sys.path]


IDLE: list[Worker] = []
"""Released workers, kept until the program ends because starting one takes seconds."""


@atexit.register
def shut_down() -> None:
    """Kill the idle workers."""
    while IDLE:
        IDLE.pop().end()


class WorkerPool:
    """Workers that have received a setup. The data lie in one file that all processes map."""

    def __init__(self, setup: Setup):
        tensors = {name: getattr(setup.data, name).contiguous() for name in POOLS}
        size = sum(tensor.nbytes for tensor in tensors.values())
        self.model = sum(tensor.nbytes for tensor in setup.initial.values())
        self.folder = folder_for(size + 100 * self.model)
        self.workers: list[Worker] = []
        # Also called when the pool is garbage collected, and at the end of the program.
        self.end = weakref.finalize(self, end_workers, self.workers, self.folder)
        self.count = itertools.count()
        packed = PackedSplits.of(setup.splits)
        splits = [torch.from_numpy(packed.samples), torch.from_numpy(packed.ends)]
        places = share([*tensors.values(), *splits], self._new_file())
        self.data = with_fields(
            setup.data, **{name: mapped(*places[id(tensors[name])]) for name in POOLS}
        )
        open_map.cache_clear()  # the last of these tensors shall free the memory
        data = with_fields(setup.data, **tensors, owners=None, owners_test=None)
        lean = replace(setup, data=data, splits=())
        try:
            self.message = dumps(
                Configure(_import_path(), self.folder.name, bytes(dumps((lean, splits), places)))
            )
        except Unsendable as problem:
            raise NoWorkers(
                f"{problem}; put it into a module of its own and import it from there"
            ) from None
        except Exception as problem:
            raise NoWorkers(
                f"the federation cannot be sent to other processes ({problem})"
            ) from None

    def living(self) -> int:
        """How many workers there are, without those that have died."""
        for worker in [worker for worker in self.workers if not worker.alive]:
            self._remove(worker)
        return len(self.workers)

    def start(self, count: int) -> None:
        """Have so many workers."""
        self._spawn(count - self.living())

    def run(self, items: Sequence[WorkItem], shared: Iterable[Tensor]) -> list[Any]:
        """The results of the items, in order.

        Each tensor in `shared` is written to a file once, however many items refer to it.
        """
        idle = self.workers[: len(items)]
        path = self._new_file()
        try:
            chunks = in_chunks(
                [item.size for item in items], len(idle), MESSAGE // max(1, self.model)
            )
            return self._run(items, chunks, share(shared, path), idle)
        finally:
            with suppress(OSError):  # Windows keeps a mapped file until the workers end
                path.unlink()

    def _run(
        self,
        items: Sequence[WorkItem],
        waiting: list[list[int]],
        places: Places,
        idle: list[Worker],
    ) -> list[Any]:
        """Give the last of the waiting chunks to idle workers; retry once if a worker dies."""
        results: list[Any] = [None] * len(items)
        deaths: Counter[int] = Counter()
        busy: dict[Any, tuple[Worker, list[int]]] = {}

        def give_work() -> None:
            while waiting and idle:
                worker, chunk = idle.pop(), waiting.pop()
                worker.send(dumps(calls_of([items[index] for index in chunk]), places))
                busy[worker.pipe] = worker, chunk

        give_work()
        while busy:
            for pipe in wait(list(busy)):
                worker, chunk = busy.pop(pipe)
                try:
                    answer = worker.pipe.recv_bytes()
                except (EOFError, OSError):
                    deaths.update(chunk)
                    if deaths[chunk[0]] > 1:
                        raise EngineFailure(
                            f"the worker process died twice with {items[chunk[0]].label}; "
                            "perhaps the memory is too small for so many workers."
                        ) from None
                    waiting += [[index] for index in chunk]  # alone, so that it is known who fails
                    self._remove(worker)
                    idle += self._spawn(1)
                    give_work()
                    continue
                idle.append(worker)
                give_work()  # the worker shall not wait until its answer is read
                for index, result in zip(chunk, answers(answer), strict=False):
                    results[index] = unwrap(result, items[index].label)
        return results

    def release(self) -> None:
        """End the pool after its last item.

        Workers that have imported no module of the user's become idle; the others end.
        """
        for worker in self.workers:
            worker.send(dumps(RELEASE))
        for worker in list(self.workers):
            with suppress(EOFError, OSError):
                if worker.receive() is True:
                    self.workers.remove(worker)
                    IDLE.append(worker)
        self.end()

    def _spawn(self, count: int) -> list[Worker]:
        """Add workers, idle ones first; new ones start side by side."""
        fresh = [
            worker for worker in (IDLE.pop() for _ in range(min(count, len(IDLE)))) if worker.alive
        ]
        fresh += [Worker() for _ in range(count - len(fresh))]
        self.workers += fresh
        for worker in fresh:
            worker.send(self.message)
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


def in_chunks(sizes: Sequence[int], workers: int, most: int) -> list[list[int]]:
    """Items that go to a worker in one message: long ones alone, many short ones together.

    The longest are last. No message is for more than `most` items.
    """
    enough = sum(sizes) / (MESSAGES_EACH * max(1, workers))
    chunks: list[list[int]] = []
    filled = 0
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        if not chunks or filled + sizes[index] > enough or len(chunks[-1]) >= most:
            chunks.append([])
            filled = 0
        chunks[-1].append(index)
        filled += sizes[index]
    return chunks[::-1]


def calls_of(items: Sequence[WorkItem]) -> Calls:
    """One message; what several items have in common, such as their payload, is in it once."""
    return Calls([(item.function, item.arguments) for item in items])


def answers(message: bytes) -> list[Any]:
    """The results in a worker's answer, or the one failure that it is."""
    value = unpack(message)
    return [value] if isinstance(value, Failure) else unstack_uploads(value)


def end_workers(workers: list[Worker], folder: TemporaryDirectory[str]) -> None:
    """Kill all workers, whatever they are doing, and remove the shared files."""
    for worker in workers:
        worker.end()
    workers.clear()
    folder.cleanup()


def unwrap(answer: Any, label: str) -> Any:
    """A worker's answer; if it is a failure, raise the exception here."""
    if not isinstance(answer, Failure):
        return answer
    if not answer.trace:
        raise UserError(answer.sentence)
    raise EngineFailure(f"{label} failed in a worker process: {answer.sentence}\n{answer.trace}")


def with_fields(data: Dataset, **fields: Any) -> Dataset:
    """The data set with other fields; `dataclasses.replace` would validate every sample again."""
    other = copy.copy(data)
    for name, value in fields.items():
        object.__setattr__(other, name, value)
    return other
