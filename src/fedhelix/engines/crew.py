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

from fedhelix.client import Setup
from fedhelix.data import Dataset
from fedhelix.data.datasets import POOLS
from fedhelix.engines.shared import Unsendable, dumps, folder_for, loads, mapped, open_map, share
from fedhelix.engines.worker import RETIRE, Failure, Opening
from fedhelix.errors import BadInput, EngineFailure

START = "import sys; from fedhelix.engines.worker import main; main(sys.argv[1])"


class NoCrew(Exception):
    """Worker processes cannot be had; the message says why."""


class Task(NamedTuple):
    """A call `function(setup, *arguments)` for a worker."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    size: int  # a measure of its duration
    whose: str  # for messages


def cores() -> int:
    """How many processors this process may use."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:  # a container's limit
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(count, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # there is none: no such file, or the quota is "max"
        return count


class Member:
    """One worker process, seen from here."""

    def __init__(self) -> None:
        self.pipe, theirs = Pipe()
        # A program of our own and not one of `multiprocessing`, which would run the user's script in every worker.
        command = [sys.executable, "-P", "-c", START, str(theirs.fileno())]
        settings = _inheriting(theirs.fileno())
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=_environment(), **settings)
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
        """Leave no process behind. The pipe closes last, or the worker would take us for dead and tidy up."""
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
    # Where PyTorch allocates with mimalloc, memory goes back to the system after 10 ms: every step would fetch it anew.
    keeping = {"MIMALLOC_PURGE_DELAY": "1000"}
    return {**keeping, **os.environ, **single, "PYTHONPATH": os.pathsep.join(_import_path())}


def _import_path() -> list[str]:
    return [folder or str(Path.cwd()) for folder in sys.path]


RESERVE: list[Member] = []
"""Workers of finished crews, for a start takes seconds; they end with the program."""


@atexit.register
def disband() -> None:
    """End the workers that wait for a crew."""
    while RESERVE:
        RESERVE.pop().end()


class Crew:
    """Workers that know a setup. The data lie in one file that all processes map."""

    def __init__(self, setup: Setup):
        tensors = {name: getattr(setup.data, name) for name in POOLS}
        size = sum(tensor.nbytes for tensor in tensors.values())
        model = sum(tensor.nbytes for tensor in setup.initial.values())
        self.folder = folder_for(size + 100 * model)
        self.members: list[Member] = []
        self.end = weakref.finalize(self, release, self.members, self.folder)  # also at the program's end
        self.count = itertools.count()
        places = share(tensors.values(), self._new_file())
        self.data = changed(setup.data, **{name: mapped(*places[id(tensors[name])]) for name in POOLS})
        open_map.cache_clear()  # the memory shall be free when the last of these tensors is
        lean = replace(setup, data=changed(setup.data, owners=None, owners_test=None), splits=())
        try:
            self.opening = dumps(Opening(_import_path(), self.folder.name, bytes(dumps(lean, places))))
        except Unsendable as problem:
            raise NoCrew(f"{problem}; put it into a module of its own and import it from there") from None
        except Exception as problem:
            raise NoCrew(f"the federation cannot be sent to other processes ({problem})") from None

    def run(self, tasks: Sequence[Task], shared: Iterable[Tensor], limit: int) -> list[Any]:
        """The results of the tasks, in their order, from at most `limit` workers; longest tasks begin first.

        Tensors in `shared` are laid into a file once, in whichever tasks they occur.
        """
        results: list[Any] = [None] * len(tasks)
        waiting = sorted(range(len(tasks)), key=lambda index: tasks[index].size)  # taken from the end
        deaths: Counter[int] = Counter()
        idle = self._muster(min(limit, len(tasks)))
        busy: dict[Any, tuple[Member, int]] = {}
        path = self._new_file()
        try:
            places = share(shared, path)
            while waiting or busy:
                while waiting and idle:
                    member, index = idle.pop(), waiting.pop()
                    member.send(dumps((tasks[index].function, tasks[index].arguments), places))
                    busy[member.pipe] = member, index
                for pipe in wait(list(busy)):
                    member, index = busy.pop(pipe)
                    try:
                        results[index] = opened(member.receive(), tasks[index].whose)
                    except (EOFError, OSError):
                        deaths[index] += 1
                        if deaths[index] > 1:
                            raise EngineFailure(
                                f"the worker process died twice with {tasks[index].whose}; perhaps the memory is "
                                "too small for so many workers."
                            ) from None
                        waiting.append(index)
                        self._dismiss(member)
                        [member] = self._hire(1)
                    idle.append(member)
        finally:
            with suppress(OSError):  # Windows keeps files that are mapped until the crew ends
                path.unlink()
        return results

    def retire(self) -> None:
        """End in peace, all tasks being done: workers that imported nothing of the user's are kept for others."""
        for member in self.members:
            member.send(dumps(RETIRE))
        for member in list(self.members):
            with suppress(EOFError, OSError):
                if member.receive() is True:
                    self.members.remove(member)
                    RESERVE.append(member)
        self.end()

    def _muster(self, count: int) -> list[Member]:
        """As many workers as wanted, all alive."""
        for member in [member for member in self.members if not member.alive]:
            self._dismiss(member)
        self._hire(count - len(self.members))
        return self.members[:count]

    def _hire(self, count: int) -> list[Member]:
        """Take on workers; new ones start all at once."""
        fresh = [member for member in (RESERVE.pop() for _ in range(min(count, len(RESERVE)))) if member.alive]
        fresh += [Member() for _ in range(count - len(fresh))]
        self.members += fresh
        for member in fresh:
            member.send(self.opening)
        for member in fresh:
            try:
                failure = member.receive()
            except (EOFError, OSError):
                raise NoCrew("a worker process died while it started") from None
            if failure is not None:
                raise NoCrew(f"the federation cannot be sent to other processes ({failure.sentence})")
        return fresh

    def _dismiss(self, member: Member) -> None:
        member.end()
        self.members.remove(member)

    def _new_file(self) -> Path:
        return Path(self.folder.name) / str(next(self.count))


def release(members: list[Member], folder: TemporaryDirectory[str]) -> None:
    """End all workers, whatever they are doing, and remove the shared files."""
    for member in members:
        member.end()
    members.clear()
    folder.cleanup()


def opened(answer: Any, whose: str) -> Any:
    """A worker's answer, or its exception as one of ours."""
    if not isinstance(answer, Failure):
        return answer
    if not answer.trace:
        raise BadInput(answer.sentence)
    raise EngineFailure(f"{whose} failed in a worker process: {answer.sentence}\n{answer.trace}")


def changed(data: Dataset, **fields: Any) -> Dataset:
    """The data set with other fields; `dataclasses.replace` would check every sample again."""
    other = copy.copy(data)
    for name, value in fields.items():
        object.__setattr__(other, name, value)
    return other
