"""All runs below a folder."""

from __future__ import annotations

import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

from fedhelix.report.live.run import WatchedRun
from fedhelix.report.live.values import is_unicode
from fedhelix.report.locate import runs_below

MOST_RUNS = 20_000
QUICK, REST = 0.1, 4  # a scan that took longer than these seconds is followed by a rest


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
        found = islice(runs_below(self.root), MOST_RUNS)
        paths = {name: path for path in found if is_unicode(name := self._name(path))}
        gone = [name for name in self.runs if name not in paths]
        for name in gone:
            del self.runs[name]
        for name, path in paths.items():
            self.runs.setdefault(name, WatchedRun(name, path))
        return [name for name, run in self.runs.items() if run.refresh()], gone

    def _name(self, path: Path) -> str:
        return path.name if path == self.root else str(path.relative_to(self.root))

    def overview(self) -> list[dict[str, Any]]:
        """The runs for a list, newest first."""
        with self.lock:
            rows = [run.overview() for run in self.runs.values()]
            return sorted(rows, key=lambda row: -row["changed"])

    def get(self, name: str) -> WatchedRun | None:
        """A known run by its name; None for any other name."""
        return self.runs.get(name)
