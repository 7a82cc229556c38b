"""What to say about a folder that is not a run, or that holds one already."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def taken(path: Path | str, config: Mapping[str, Any], where: str) -> UserError:
    """An error that says how to continue the run that is in a folder already; `where` are the
    options that name its deployment, if it has one.
    """
    how = f"fedhelix resume {shlex.quote(str(path))}"
    if "deployment" in config:
        how = f"fedhelix deploy resume {shlex.quote(str(path))}{where}"
    if config.get("library"):
        how = f"fit(..., out='{path}', resume=True)"
    return UserError(
        f"'{path}' holds a run already; continue it with `{how}` or choose another folder."
    )
