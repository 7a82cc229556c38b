"""All runs below a folder."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from fedhelix.report.live.run import WatchedRun
from fedhelix.report.live.values import is_unicode

MOST_RUNS = 20_000
QUICK, REST = 0.1, 4  # a scan that took longer than these seconds is followed by a rest
DEEPEST = 3  # runs/sweep/cell/seed is deep enough


class Watch:
    """The runs below a folder, by their names."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.runs: dict[str, WatchedRun] = {}
        self.lock = threading.RLock()
        self.due = 0.0  # the next scan, on the monotonic clock

    def refresh(self) -> tuple[list[str], list[str]]:
        """Scan the folder again, unless that was done just now; the names of runs that changed, and
        of runs that are gone.
        """
        with self.lock:
            begun = time.monotonic()
            if begun < self.due:
                return [], []
            found = self._scan()
            now = time.monotonic()
            self.due = now + REST * max(now - begun - QUICK, 0.0)
            return found

    def _scan(self) -> tuple[list[str], list[str]]:
        paths = dict(find_runs(self.root, self.root, DEEPEST))
        gone = [name for name in self.runs if name not in paths]
        for name in gone:
            del self.runs[name]
        for name, path in paths.items():
            self.runs.setdefault(name, WatchedRun(name, path))
        return [name for name, run in self.runs.items() if run.refresh()], gone

    def overview(self) -> list[dict[str, Any]]:
        """The runs for a list, newest first."""
        with self.lock:
            rows = [run.overview() for run in self.runs.values()]
            return sorted(rows, key=lambda row: -row["changed"])

    def get(self, name: str) -> WatchedRun | None:
        """A known run by its name; None for any other name."""
        return self.runs.get(name)


def find_runs(folder: Path, root: Path, depth: int) -> Iterator[tuple[str, Path]]:
    """The names and paths of the run folders at or below a folder, at most `MOST_RUNS`."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    if any(entry.name == "config.toml" for entry in entries):
        yield str(folder.relative_to(root)) if folder != root else folder.name, folder
    elif depth:
        below = (
            run
            for entry in entries
            if _is_visible_folder(entry)
            for run in find_runs(folder / entry.name, root, depth - 1)
        )
        yield from islice(below, MOST_RUNS)


def _is_visible_folder(entry: os.DirEntry[str]) -> bool:
    if entry.name.startswith(".") or not is_unicode(entry.name):
        return False
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False
