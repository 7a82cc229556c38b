"""Where a federation stands after some rounds, and what a finished run has to offer."""

from __future__ import annotations

import copy
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedhelix import describe
from fedhelix.errors import BadInput
from fedhelix.records import Record, summarise
from fedhelix.store import RunFolder
from fedhelix.tree import State, Tree, to_device

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from fedhelix.federation import Federation


@dataclass
class Standing:
    """Where a federation stands after some rounds: all that the next round depends on."""

    round: int
    server: Tree
    own: dict[int, Tree] | ChainMap[int, Tree]
    changed: set[int] = field(default_factory=set)  # clients whose state is newer than the last checkpoint
    greeting_bytes: int = 0  # of hellos, replies and welcomes, until the next round has reported them


def _with_changes(states: Mapping[int, Tree]) -> ChainMap[int, Tree]:
    """What clients keep, of which only that is in memory which is newer than the states on disk."""
    return ChainMap({}, states)  # type: ignore[arg-type]


@dataclass
class Run:
    """A finished run: its records, and the models that came out of it."""

    federation: Federation
    records: list[Record] = field(repr=False)
    standing: Standing = field(repr=False)
    folder: RunFolder | None = None

    def restore(self, on_disk: bool = False) -> None:
        """Go back to the last checkpoint of its folder, if there is one; `on_disk` as for `checkpoint`."""
        assert self.folder is not None
        restored = self.folder.restore(str(self.federation.device), lazily=on_disk)
        if restored is None:
            return
        round, server, own = restored
        self.records = self.folder.records()
        self.standing = Standing(round, server, _with_changes(own) if on_disk else dict(own))
        if [record["round"] for record in self.records] != list(range(1, self.standing.round + 1)):
            raise BadInput(f"the metrics.jsonl of '{self.folder.path}' lacks rounds that its checkpoint has.")

    def keep(self, record: Record, standing: Standing) -> None:
        """One more round is over."""
        self.records.append(record)
        self.standing = standing
        if self.folder is not None:
            self.folder.append(record)

    def checkpoint(self, on_disk: bool = False) -> None:
        """Write down what the next round depends on; `on_disk` leaves what clients keep there until it is needed."""
        if self.folder is None or not self.standing.round:
            return
        own = {client: self.standing.own[client] for client in sorted(self.standing.changed)}
        self.folder.write_choices(self.federation.engine.choices)
        self.folder.checkpoint(self.standing.round, self.standing.server, own)
        self.standing.changed.clear()
        if on_disk:
            states = self.folder.states(str(self.federation.device))
            self.standing.own = _with_changes(states)

    @property
    def metrics(self) -> pd.DataFrame:
        """One row per round."""
        import pandas as pd  # slow to import, and worker processes have no use for it

        return pd.DataFrame(self.records).set_index("round")

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of the whole run."""
        return summarise(self.records, describe.facts(self.federation), self.federation.task.name)

    def plot(self, path: str | Path | None = None) -> Figure:
        """How fast it learnt, what it sent, and how each client fares; with a path (.png, .svg, .pdf) also as a file.

        `fedhelix plot RUN` draws more: who has what, and what the method noted.
        """
        from fedhelix.report import plots, results, style

        config, census = describe.config(self.federation, len(self.records)), describe.census(self.federation)
        result = results.make("this run", config, self.summary, self.records, census)
        figure = plots.overview(results.grouped([result]))
        if path is not None:
            style.save(figure, path)
        return figure

    def model(self) -> nn.Module | None:
        """The server's model, if the method has one."""
        fed = self.federation
        state = fed.method.model(self.standing.server, fed.context(self.standing.round, self.standing.round))
        return None if state is None else self._module(state)

    def welcome(self, data: Any) -> int:
        """An unseen client with its own data joins (see `Federation.welcome`); its number."""
        number, self.standing = self.federation.welcome(data, self.standing)
        return number

    def personal(self, client: int) -> nn.Module:
        """The model that one client would use."""
        fed = self.federation
        if not 0 <= client < fed.clients:
            raise BadInput(f"there is no client {client}; clients are numbered from 0 to {fed.clients - 1}.")
        ctx = fed.context(self.standing.round, self.standing.round)
        return self._module(fed.engine.personal(fed._jobs(self.standing, [client], ctx))[0])

    def _module(self, state: State) -> nn.Module:
        fed = self.federation
        module = fed.engine.setup.module
        clean = copy.deepcopy(module)
        clean.load_state_dict(to_device(state, fed.device), strict=False)
        return clean.eval()
