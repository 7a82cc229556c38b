"""One writer at a time."""

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
    """A file that names its process, and that counts for nothing once the process is dead."""

    this_process = (
        uuid.uuid4().hex
    )  # tells a restarted container's process from the one that had its number before
    seconds_to_sign = 5.0

    def __init__(self, path: Path) -> None:
        self.path = path
        self.held = False

    def acquire(self) -> None:
        """Take it, or say who holds it; taking it twice does no harm."""
        if self.held:
            return
        try:
            known = self._identity(self.path)
            owner = self._owner()
            if owner is not None and not _alive(owner):
                self._bury(known)
            handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            who = f"process {owner['pid']} on {owner['host']}" if owner else "another process"
            raise UserError(
                f"'{self.path.parent}' is being written by {who}; wait for it, or delete '{self.path}' if it is gone."
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
        """Give it back, if it is ours."""
        if self.held:
            self.path.unlink(missing_ok=True)
            self.held = False

    def _bury(self, dead: tuple[int, int] | None) -> None:
        """Take the file of a dead process away; of several who try, one alone gets hold of it."""
        grave = self.path.with_name(f".lock.{self.this_process}")
        with suppress(FileNotFoundError):
            self.path.rename(grave)
            if self._identity(grave) != dead:  # somebody was faster, and this is a new one
                grave.rename(self.path)
            grave.unlink(missing_ok=True)

    @staticmethod
    def _identity(path: Path) -> tuple[int, int] | None:
        """What tells a file from another one of the same name."""
        try:
            found = path.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _owner(self) -> dict[str, Any] | None:
        """Who holds the lock; None when nobody does, or when the owner is just about to sign."""
        try:
            return _signature(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            unsigned_for = time.time() - self.path.stat().st_mtime
            dead = {"pid": 0, "host": socket.gethostname(), "process": ""}
            return dead if unsigned_for > self.seconds_to_sign else None


def writer_lives(lock: bytes) -> bool:
    """Whether the process that signed a lock is still there."""
    try:
        return _alive(_signature(lock))
    except (ValueError, KeyError, TypeError, OverflowError):
        return False


def _signature(lock: bytes) -> dict[str, Any]:
    owner = json.loads(lock)
    return {"pid": int(owner["pid"]), "host": str(owner["host"]), "process": str(owner["process"])}


def _alive(owner: Mapping[str, Any]) -> bool:
    if owner["host"] != socket.gethostname():
        return True  # nobody here can know
    if owner["pid"] == os.getpid():
        return owner["process"] == Lock.this_process
    if owner["pid"] <= 0:
        return False
    if os.name == "nt":
        return True  # on Windows asking a process with os.kill would end it
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
