"""Reading files that may be missing, huge, half written or hostile."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedhelix.store.json import loads
from fedhelix.store.records import current, is_valid

MOST_BYTES_OF_A_FILE = 2**24
MOST_BYTES_OF_A_LINE = 2**22
MOST_BYTES_AT_ONCE = 2**26

# Entries of a record that are lists or tables.
INCIDENTS = ("refused", "missing", "unevaluated", "troubles")
TABLES = (*INCIDENTS, "metadata", "valid")
SHAPES = {"participants": list, "personal": list, **dict.fromkeys(TABLES, dict)}

Stamp = tuple[int, ...]
"""Inode, modification time and size of a regular file; empty for anything else."""


def stamp(path: Path) -> Stamp:
    """What changes when a file changes."""
    try:
        info = os.lstat(path)
    except (OSError, ValueError):
        return ()
    return (info.st_ino, info.st_mtime_ns, info.st_size) if stat.S_ISREG(info.st_mode) else ()


def read_small(path: Path, most: int) -> bytes | None:
    """A whole file; None if it is missing or larger than `most` bytes."""
    handle = _open(path)
    if handle is None:
        return None
    with os.fdopen(handle, "rb") as file:
        content = file.read(most + 1)
    return content if len(content) <= most else None


def read_lines(path: Path, offset: int) -> Iterator[tuple[bytes, int]]:
    """Complete lines from an offset on, each with the offset of its end.

    A line that is too long comes in pieces, none of which is valid JSON.
    """
    handle = _open(path)
    if handle is None:
        return
    with os.fdopen(handle, "rb") as file:
        file.seek(offset)
        end, stop = offset, offset + MOST_BYTES_AT_ONCE
        while end < stop and (line := file.readline(MOST_BYTES_OF_A_LINE)):
            end += len(line)
            # Otherwise it is an incomplete line, which its writer has yet to finish.
            if line.endswith(b"\n") or len(line) == MOST_BYTES_OF_A_LINE:
                yield line, end


def read_last_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file; of one that is too large to be read at once, the last ones."""
    *_, size = stamp(path) or (0,)
    start = max(0, size - MOST_BYTES_AT_ONCE)
    lines = read_lines(path, start)
    if start:
        next(lines, None)  # most likely the end of a line
    return (record for line, _ in lines if (record := parse_record(line)) is not None)


def read_table(path: Path, parse: Callable[[str], Any]) -> tuple[dict[str, Any], str]:
    """The content of a small file, and what is wrong with it (empty if nothing is)."""
    content = read_small(path, MOST_BYTES_OF_A_FILE)
    if content is None:
        return {}, f"{path.name} cannot be read"
    try:
        table = parse(content.decode())
    except (ValueError, RecursionError):
        return {}, f"{path.name} is damaged"
    return (table, "") if isinstance(table, dict) else ({}, f"{path.name} is damaged")


def parse_record(line: bytes) -> dict[str, Any] | None:
    """A JSON object with the keys of this version, without entries of a wrong type; None for
    anything else.
    """
    try:
        record = loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    return {
        key: value
        for key, value in current(record).items()
        if isinstance(value, SHAPES.get(key, object)) and is_valid(key, value)
    }


def _open(path: Path) -> int | None:
    """A regular file, opened for reading: never a link, a pipe or a device."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        handle = os.open(path, flags)
    except (OSError, ValueError):
        return None
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    return None
