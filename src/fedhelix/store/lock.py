"""A lock file: one process at a time writes a run."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedhelix.core.errors import UserError


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
            handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
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
        with os.fdopen(handle, "w") as file:
            json.dump(
                {"pid": os.getpid(), "host": socket.gethostname(), "process": self.this_process},
                file,
            )
        self.held = True

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
        except (ValueError, KeyError, TypeError):
            unsigned_for = time.time() - self.path.stat().st_mtime
            dead = {"pid": 0, "host": socket.gethostname(), "process": ""}
            return dead if unsigned_for > self.seconds_to_sign else None


def writer_lives(lock: bytes) -> bool:
    """Whether the process that signed a lock is still running."""
    try:
        return _alive(_signature(lock))
    except (ValueError, KeyError, TypeError, OverflowError):
        return False


def _signature(lock: bytes) -> dict[str, Any]:
    owner = json.loads(lock)
    return {"pid": int(owner["pid"]), "host": str(owner["host"]), "process": str(owner["process"])}


def _alive(owner: Mapping[str, Any]) -> bool:
    if owner["host"] != socket.gethostname():
        return True  # unknown from here
    if owner["pid"] == os.getpid():
        return owner["process"] == Lock.this_process
    if owner["pid"] <= 0:
        return False
    if os.name == "nt":
        return True  # on Windows os.kill would end the process instead of probing it
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
