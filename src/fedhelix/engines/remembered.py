"""Choices made by timing, kept in the user's cache so that the next process starts at once.

What can be chosen differs in the last bits. Two runs with the same seed are equal because both use
what was chosen first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from fedhelix.core.files import cache_folder, write_atomically

Choice = TypeVar("Choice", bound=str)


def remembered(
    file: str, key: str, allowed: Sequence[Choice], choose: Callable[[], Choice]
) -> Choice:
    """The choice that is kept under a key, or else a new one, which is kept."""
    path = cache_folder() / file
    known = read_choices(path, allowed)
    if key not in known:
        # Read the file again: of two runs that start together, both use the choice of the first.
        known = {key: choose()} | read_choices(path, allowed)
        with suppress(OSError):  # without a cache the next run times them again
            write_atomically(path, json.dumps(known, indent=1).encode())
    return known[key]


def read_choices(path: Path, allowed: Sequence[Choice]) -> dict[str, Choice]:
    """Earlier choices; an unreadable file counts as empty."""
    try:
        known = json.loads(path.read_bytes())
        return {key: choice for key, choice in known.items() if choice in allowed}
    except (OSError, ValueError, AttributeError):
        return {}
