"""`UserError` means "you can mend this": a sentence for the user, exit code 2 on
the command line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

SHOWN = 60  # characters of a value in a sentence


class UserError(ValueError):
    """Something given by the user is wrong; the message says what, where, and what
    would be right.
    """


class NoMoreRounds(UserError):
    """Nobody may take part in another round; a run that has had some ends with them."""


class BudgetSpent(UserError):
    """The privacy budget of one client does not last for another round."""


class Damaged(UserError):
    """A file is not as it was written: as a whole, or in one line."""

    def __init__(self, sentence: str, line: int = 0):
        super().__init__(sentence)
        self.line = line


BadInput = UserError  # its name until version 0.1


class EngineFailure(RuntimeError):
    """A client's work could not be done, through no fault of what the user gave; exit code 1 on the
    command line.
    """


class UnusableMessage(EngineFailure):
    """What one client sent, or that it sent nothing, stands in the way."""


def unknown(kind: str, name: object, known: Iterable[str]) -> UserError:
    """An error for a name that does not exist, with the nearest one that does."""
    return UserError(f"unknown {kind} '{name}'; {nearest(name, known)}")


def nearest(name: object, known: Iterable[str]) -> str:
    """The end of a sentence about a name that does not exist: the nearest one that does, or all."""
    names, given = {one.lower(): one for one in sorted(known)}, str(name).lower()
    similar = {1: 1.0, 2: 0.5}.get(len(given), 0.62)  # of two letters one may be wrong
    close = difflib.get_close_matches(given, names, n=1, cutoff=similar)
    shown = (f"'{one}'" if "," in one else one for one in names.values())
    all_names = ", ".join(shown) or "none"
    return f"did you mean '{names[close[0]]}'?" if close else f"there are: {all_names}."


def brief(value: object) -> str:
    """A value for a sentence; the end of a long one is left out."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
