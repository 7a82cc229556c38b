"""How a bench or leaderboard is run: the same for every study."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedhelix.core.errors import UserError, unknown
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


def wanted_names(
    only: Sequence[str], kind: str, scale: str, names: Mapping[str, Iterable[str]]
) -> list[str]:
    """The wanted names as the scale has them, whatever their case; refuses those it does not have.

    `names` are those of every scale, and `kind` says what they name.
    """
    known = {one: {name.lower(): name for name in of_scale} for one, of_scale in names.items()}
    for name in only:
        if name.lower() not in known[scale]:
            others = [f"--scale {one}" for one in known if name.lower() in known[one]]
            if not others:
                raise unknown(kind, name, known[scale].values())
            raise UserError(
                f"'{name}' is not in scale {scale}; choose {' or '.join(others)} for it."
            )
    return [known[scale][name.lower()] for name in only]


def are_wanted(places: Sequence[tuple[str, str]], only: Collection[str]) -> list[bool]:
    """Which places of a table, given by row and column, are in a wanted row and a wanted column;
    where no rows are named, all are wanted, and so with columns.
    """
    rows, columns = ({place[axis] for place in places} & set(only) for axis in (0, 1))
    if only and not (rows or columns):
        return [False] * len(places)
    return [
        (not rows or row in rows) and (not columns or column in columns) for row, column in places
    ]
