"""The site registry: which site is which client.

It is stored with the run, because client numbers must not change when the run is resumed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedhelix.core.errors import UserError
from fedhelix.core.files import remove_leftovers, write_atomically
from fedhelix.store.json import loads

SITES_FILE = "sites.json"  # in the folder of a run
SiteDescription = Mapping[str, Any]  # what a site says about its data


def read_sites(path: Path) -> dict[str, SiteDescription]:
    """The sites of a run by client number, with their descriptions; none before it has begun."""
    if not path.exists():
        return {}
    try:
        return dict(loads(path.read_bytes()))
    except (ValueError, TypeError) as problem:
        raise UserError(f"'{path}' is damaged: {problem}.") from None


def site_names(sites: Sequence[str], clients: int) -> tuple[str, ...]:
    """The names of all clients; who comes later is not known yet."""
    return (*sites, *map(str, range(len(sites), clients)))


class SiteRegistry:
    """The sites of a run in the order of their client numbers; a new site takes the next one."""

    def __init__(self, path: Path | None, capacity: int):
        self.path, self.capacity = path, capacity
        self.descriptions: dict[str, SiteDescription] = {}
        # Called with the client number and description of every site that joins.
        self.on_join: Callable[[int, SiteDescription], None] = lambda client, description: None
        if path is not None:
            remove_leftovers(path.parent, path.name)
            self.descriptions = read_sites(path)

    @property
    def sites(self) -> list[str]:
        """The sites' names, by client number."""
        return list(self.descriptions)

    def client_of(self, site: str) -> int:
        """A site's client number."""
        return self.sites.index(site)

    def enrol(self, descriptions: Mapping[str, SiteDescription], connected: Iterable[str]) -> None:
        """Number the connected sites that are new, in the order of their names, up to capacity."""
        free = self.capacity - len(self.descriptions)
        new = sorted(set(connected) - set(self.descriptions))[:free]
        if not new:
            return
        self.descriptions |= {site: descriptions[site] for site in new}
        if self.path is not None:
            write_atomically(self.path, json.dumps(self.descriptions, indent=1).encode())
        for site in new:
            self.on_join(self.client_of(site), self.descriptions[site])
