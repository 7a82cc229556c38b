"""Where a federation stands after some rounds."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass, field

from fedhelix.core.tree import Tree
from fedhelix.engines.local import ClientResult, ClientTask
from fedhelix.federation.schedule import Work


@dataclass
class FederationState:
    """All that the next round depends on."""

    round: int
    server: Tree
    client_states: dict[int, Tree] | ChainMap[int, Tree]
    changed: set[int] = field(default_factory=set)  # clients newer than the last checkpoint
    setup_bytes: int = 0  # sent before round 0 and by newcomers, until the next round reports them
    clock: float = 0.0  # simulated seconds since the start
    pending: Sequence[Work] = ()  # under way by the clock, and not there yet

    def timing(self) -> Tree:
        """Clock and pending work as a tree, for a checkpoint; empty without a clock."""
        works = {
            str(work.task.client): {
                "arrives": work.arrives,
                "round": work.task.round,
                "payload": work.task.payload,
                "samples": work.result.samples,
                "upload": work.result.upload,
                "client_state": work.result.client_state,
                "loss": work.result.loss,
            }
            for work in self.pending
        }
        return {"clock": self.clock, "pending": works} if self.clock or works else {}

    def set_timing(self, tree: Tree) -> None:
        """The inverse of `timing`."""
        self.clock = tree.get("clock", 0.0)
        self.pending = sorted(
            _work(int(client), parts, self.client_states.get(int(client), {}))
            for client, parts in tree.get("pending", {}).items()
        )


def _work(client: int, parts: Tree, kept: Tree) -> Work:
    """A client's work out of a checkpoint; what it keeps has not changed since it began."""
    return Work(
        parts["arrives"],
        ClientTask(client, parts["round"], parts["payload"], kept),
        ClientResult(
            client, parts["samples"], parts["upload"], parts["client_state"], parts["loss"]
        ),
    )
