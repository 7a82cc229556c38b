"""Files that are written whole or not at all, and the user's cache folder."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

from fedhelix.core.errors import UserError


def cache_folder() -> Path:
    """Where downloads and timed choices are kept: ~/.cache/fedhelix, or the same
    in XDG_CACHE_HOME.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedhelix"


def write_atomically(path: Path, content: bytes, private: bool = False) -> None:
    """Write a whole file or nothing: a reader never sees half of it, whenever the writer dies.

    Only its owner may read a `private` one, from its first moment on.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_leftovers(folder: Path, *names: str) -> None:
    """Delete what killed writes of these files have left behind; nobody may be writing them."""
    for name in names:
        for left in folder.glob(f".{name}.*"):
            left.unlink(missing_ok=True)


def writable(folder: Path) -> None:
    """Make a folder, and say at once if nothing can be written there, before any work is done for
    it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as problem:
        raise UserError(
            f"'{folder}' cannot be written ({problem.strerror}); choose another folder."
        ) from None


def writable_file(*paths: Path) -> None:
    """Make the folders of files, and say at once if one of them cannot be written.

    An atomic write would replace a write-protected file, or a device, all the same.
    """
    for path in paths:
        if path.is_dir():
            raise UserError(f"'{path}' is a folder; name a file to write.")
        if path.exists() and not path.is_file():
            raise UserError(f"'{path}' is no regular file; name a file to write.")
        if path.exists() and not (os.access(path, os.W_OK) and path.stat().st_mode & 0o222):
            # The superuser may write any file, also one that is meant to stay.
            raise UserError(f"'{path}' is write-protected; allow writing, or name another file.")
        writable(path.parent)
