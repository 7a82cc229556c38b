"""What to say about a folder that is not a run."""

from __future__ import annotations

from pathlib import Path

from fedhelix.core.errors import UserError

MOST_NAMED = 6  # runs in one sentence


def not_a_run(path: Path) -> UserError:
    """An error that names the runs in the folder or, where there is none of its name, beside it."""
    inside, beside = runs_in(path), [] if path.exists() else runs_in(path.parent)
    beside.sort(key=lambda name: not name.startswith(path.name))  # helix: helix-seed0 first
    hint = ""
    if inside:
        hint = f"; name one of the runs in it: {_some(inside)}"
    elif beside:
        hint = f"; the runs beside it are {_some(beside)}"
    return UserError(f"'{path}' is not a run: it holds no config.toml{hint}.")


def runs_in(folder: Path) -> list[str]:
    """The names of the runs that lie directly in a folder."""
    return sorted(path.parent.name for path in folder.glob("*/config.toml"))


def _some(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
