"""A lock file: one process at a time writes a run."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedhelix.core.errors import UserError

# What a file raises that is no lock of ours.
UNSIGNED = (
    ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip


MOVED_SECONDS = 60  # after which a lock that was moved aside is nobody's


class Lock:
    """A file that names its process; it is void once the process is dead."""

    # Distinguishes processes that have the same number, as in a restarted container.
    this_process = uuid.uuid4().hex
    seconds_to_sign = 5.0

    def __init__(self, path: Path) -> None:
        self.path = path
        self.held = False

    def acquire(self) -> None:
        """Acquire the lock, or raise an error that names its holder; may be called twice."""
        if self.held:
            return
        try:
            known = self._identity(self.path)
            owner = self._owner()
            if owner is not None and not _alive(owner):
                self._remove(known)
            self._create()
        except FileExistsError:
            who = f"process {owner['pid']} on {owner['host']}" if owner else "another process"
            raise UserError(
                f"'{self.path.parent}' is being written by {who}; "
                f"wait for it, or delete '{self.path}' if it is gone."
            ) from None
        except OSError as problem:
            raise UserError(
                f"'{self.path.parent}' cannot be written: {problem.strerror}."
            ) from None
        self.held = True
        self._clean()

    def _clean(self) -> None:
        """Delete the halves of locks whose processes were killed."""
        for half in self.path.parent.glob(f".{self.path.name}.*"):
            with suppress(OSError):
                age = time.time() - half.stat().st_mtime
                if age > MOVED_SECONDS or _is_of_the_dead(half):
                    half.unlink()

    def _create(self) -> None:
        """Make the file with its signature in one step, so that no kill leaves an unsigned one."""
        owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "process": self.this_process,
            "started": started(os.getpid()),
        }
        signed = self.path.with_name(f".lock.{_here()}-{os.getpid()}-{secrets.token_hex(8)}")
        _write_new(signed, owner)
        try:
            os.link(signed, self.path)
        except PermissionError:  # a file system without hard links
            _write_new(self.path, owner)
        finally:
            signed.unlink(missing_ok=True)

    def release(self) -> None:
        """Release the lock, if this process holds it."""
        if self.held:
            self.path.unlink(missing_ok=True)
            self.held = False

    def _remove(self, dead: tuple[int, int] | None) -> None:
        """Remove the file of a dead process; of several processes that try, only one succeeds."""
        moved = self.path.with_name(f".lock.{self.this_process}")
        with suppress(FileNotFoundError):
            self.path.rename(moved)
            if self._identity(moved) != dead:  # another process was faster, and this is its lock
                moved.rename(self.path)
            moved.unlink(missing_ok=True)

    @staticmethod
    def _identity(path: Path) -> tuple[int, int] | None:
        """Inode and time, which differ between files of the same name."""
        try:
            status = path.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def _owner(self) -> dict[str, Any] | None:
        """The holder of the lock; None if there is none, or if it has not signed the file yet."""
        try:
            return _signature(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except UNSIGNED:
            unsigned_for = time.time() - self.path.stat().st_mtime
            dead = {"pid": 0, "host": socket.gethostname(), "process": "", "started": None}
            return dead if unsigned_for > self.seconds_to_sign else None


def _write_new(path: Path, owner: Mapping[str, Any]) -> None:
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    with os.fdopen(handle, "w") as file:
        json.dump(owner, file)


def writer_lives(lock: bytes) -> bool:
    """Whether the process that signed a lock is still running."""
    try:
        return _alive(_signature(lock))
    except UNSIGNED:
        return False


def _here() -> str:
    """This machine, as a word that may be part of a file's name."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def _is_of_the_dead(half: Path) -> bool:
    """Whether the process that made a half of a lock is dead: it may not have signed it yet."""
    try:
        return not _alive(_signature(half.read_bytes()))
    except UNSIGNED:
        machine, _, rest = half.suffix[1:].partition("-")
        pid = rest.partition("-")[0]
        return machine == _here() and pid.isdigit() and not _is_running(int(pid))


def _signature(lock: bytes) -> dict[str, Any]:
    owner = json.loads(lock)
    return {
        "pid": int(owner["pid"]),
        "host": str(owner["host"]),
        "process": str(owner["process"]),
        "started": owner.get("started"),
    }


def started(pid: int) -> int | None:
    """When a process started, in ticks since the machine did; None where it cannot be known."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
        return int(status.rpartition(b")")[2].split()[19])  # its name may hold anything
    except (OSError, ValueError, IndexError):
        return None


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _alive(owner: Mapping[str, Any]) -> bool:
    if owner["host"] != socket.gethostname():
        return True  # unknown from here
    if owner["pid"] == os.getpid():
        return owner["process"] == Lock.this_process
    if not 0 < owner["pid"] < 2**31:
        return False
    if os.name == "nt":
        return True  # on Windows os.kill would end the process instead of probing it
    if not _is_running(owner["pid"]):
        return False
    # The number may belong to another program by now.
    now = started(owner["pid"])
    return owner["started"] is None or now is None or owner["started"] == now
