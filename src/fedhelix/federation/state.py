"""Where a federation stands after some rounds."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import dataclass, field

from fedhelix.core.tree import Tree


@dataclass
class FederationState:
    """All that the next round depends on."""

    round: int
    server: Tree
    client_states: dict[int, Tree] | ChainMap[int, Tree]
    changed: set[int] = field(default_factory=set)  # clients newer than the last checkpoint
    setup_bytes: int = 0  # sent before round 0 and by newcomers, until the next round reports them
