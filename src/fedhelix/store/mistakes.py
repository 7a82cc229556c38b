"""What to say about a folder that is not a run, or that holds one already."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from fedhelix.core.errors import Damaged, UserError

MOST_NAMED = 6  # runs in one sentence


class Resumable(Protocol):
    """A run folder, as far as a sentence on how to continue it needs one."""

    path: Path

    @property
    def rounds_saved(self) -> int:
        """The number of rounds in the checkpoint."""

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the run."""

    @property
    def where(self) -> str:
        """The options of commands that name its deployment."""


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
    how = resumption(path, config, where)
    return UserError(
        f"'{path}' holds a run already; continue it with `{how}` or choose another folder."
    )


def resumption(path: Path | str, config: Mapping[str, Any], where: str) -> str:
    """The command, or the call, that continues a run."""
    if "deployment" in config:
        return f"fedhelix deploy resume {shlex.quote(str(path))}{where}"
    if config.get("library"):
        return f"fit(..., out='{path}', resume=True)"
    return f"fedhelix resume {shlex.quote(str(path))}"


def longer(records: Sequence[Mapping[str, Any]], how: str, clients: int, least: int = 1) -> str:
    """How a finished run gets more rounds, as the end of a sentence: not at all where fewer of its
    clients than `least` have privacy budget left.
    """
    last = records[-1].get("metadata", {}) if records else {}
    if (spent := last.get("budget_spent")) and clients - len(spent) < least:
        return (
            "its privacy budget is spent, so more rounds need a new run, with more noise or a "
            "larger epsilon"
        )
    return f"for more rounds: {how}"


@contextmanager
def remedied(folder: Resumable) -> Iterator[None]:
    """Inside of it the records of a run are read; where they are damaged, the sentence says what
    is lost, and how to go on.
    """
    try:
        yield
    except Damaged as problem:
        saved, words = folder.rounds_saved, str(problem).rstrip(".")
        config = folder.config
        how = resumption(folder.path, config, folder.where)
        if problem.line > saved:
            raise UserError(
                f"{words}; delete this line and those below it, and `{how}` runs the rounds from "
                f"{saved + 1} on again."
            ) from None
        backup = "restore it from a backup"
        words = words if words.endswith(backup) else f"{words}; {backup}"
        if "deployment" in config:  # its sites would refuse rounds that they have had
            raise UserError(f"{words}; nothing else can replace its records.") from None
        raise UserError(
            f"{words}; without one its records are lost: delete it and the folder "
            f"'{folder.path / 'checkpoint'}', and `{how}` runs all rounds again."
        ) from None
