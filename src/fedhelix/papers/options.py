"""How a bench or leaderboard is run: the same for every study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedhelix.runs.jobs import Session


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Where runs are kept, which of them are wanted, and for how long they may take."""

    out: Path  # the folder of the runs
    overrides: Mapping[str, Any] = field(default_factory=dict)  # of all runs, such as the device
    seeds: int | None = None  # how many; None: the usual number
    only: Sequence[str] = ()  # these rows and columns; empty: all
    minutes: float | None = None  # None: until everything is done
    jobs: int = 1  # runs at once
    quiet: bool | None = None
    results: Path | None = None  # the folder of earlier reports, which are extended
    commit: str = ""  # of runs that record none

    def session(self) -> Session:
        """What the runs have in common."""
        return Session.limited(self.minutes, self.quiet, self.jobs)
