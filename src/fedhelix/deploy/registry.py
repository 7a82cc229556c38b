"""Which site is which client: written down with the run, because numbers must not change when it is
resumed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fedhelix.core.errors import UserError
from fedhelix.core.files import write_atomically

Card = Mapping[str, Any]


class SiteRegistry:
    """The sites of a run by their numbers; whoever connects later takes the next free one."""

    def __init__(self, path: Path | None, places: int):
        self.path, self.places = path, places
        self.cards: dict[str, Card] = {}
        self.joined: Callable[[int, Card], None] = lambda number, card: (
            None
        )  # told of whoever joins later
        if path is not None and path.exists():
            try:
                self.cards = dict(json.loads(path.read_bytes()))
            except (ValueError, TypeError) as problem:
                raise UserError(f"'{path}' is damaged: {problem}.") from None

    @property
    def sites(self) -> list[str]:
        """Their names, in the order of their numbers."""
        return list(self.cards)

    def number(self, site: str) -> int:
        """The client that a site is."""
        return self.sites.index(site)

    def enrol(self, cards: Mapping[str, Card], connected: Iterable[str]) -> None:
        """Give numbers to sites that have none yet, by name, as long as there are places."""
        new = sorted(set(connected) - set(self.cards))[: self.places - len(self.cards)]
        if not new:
            return
        self.cards |= {site: cards[site] for site in new}
        if self.path is not None:
            write_atomically(self.path, json.dumps(self.cards, indent=1).encode())
        for site in new:
            self.joined(self.number(site), self.cards[site])
