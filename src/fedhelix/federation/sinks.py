"""Where the records of a run go: its folder, a tracker, the terminal. They know records only."""

from __future__ import annotations

import warnings
from collections import ChainMap
from collections.abc import Callable, Mapping
from types import TracebackType

from fedhelix.core.errors import Damaged
from fedhelix.core.tree import Tree
from fedhelix.federation.state import FederationState
from fedhelix.store import RunFolder
from fedhelix.store.mistakes import remedied
from fedhelix.store.progress import Progress
from fedhelix.store.records import (
    RISING,
    Record,
    at_clients,
    diverged_clients,
    diverged_since,
    is_number,
    risen,
    why_untrained,
    with_losses,
)
from fedhelix.store.trackers import Tracker


class Sink:
    """Use it in a `with` statement and give `update` every new record with the state after it."""

    def __enter__(self) -> Sink:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The run is over, or has failed."""

    def update(self, record: Record, state: FederationState) -> None:
        """One more round is over."""


class FolderSink(Sink):
    """The run folder: records, checkpoints, and after any failure all complete rounds.

    With `on_disk` what clients keep lies in the folder and is read when they are sampled.
    """

    def __init__(
        self,
        folder: RunFolder,
        choices: Mapping[str, str],
        rounds: int,
        every: int,
        device: str,
        on_disk: bool,
    ):
        self.folder, self.choices = folder, choices
        self.rounds, self.every = rounds, every
        self.device, self.on_disk = device, on_disk
        self.state: FederationState | None = None
        self.saved = 0  # the round of the last checkpoint

    def restore(self) -> tuple[list[Record], FederationState] | None:
        """The records and the state of the last checkpoint, if there is one."""
        restored = self.folder.restore(self.device, lazily=self.on_disk)
        return saved_run(self.folder, self.device, restored, self.on_disk)

    def update(self, record: Record, state: FederationState) -> None:
        """Append the record and, when it is due, write a checkpoint."""
        self.state = state
        self.folder.append(record)
        if state.round % self.every == 0 or state.round == self.rounds:
            self._checkpoint(state)
            if self.on_disk:
                state.client_states = _with_changes(self.folder.states(self.device))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Complete rounds are not lost; one whose record is not on disk yet is run again on resume.
        state = self.state
        if state and state.round > self.saved and len(self.folder.records()) == state.round:
            self._checkpoint(state)

    def _checkpoint(self, state: FederationState) -> None:
        changed = {client: state.client_states[client] for client in sorted(state.changed)}
        self.folder.write_choices(self.choices)
        self.folder.checkpoint(state.round, state.server, changed, state.timing())
        state.changed.clear()
        self.saved = state.round


class TrackerSink(Sink):
    """TensorBoard or MLflow."""

    def __init__(self, tracker: Tracker):
        self.tracker = tracker

    def __enter__(self) -> Sink:
        self.tracker.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.tracker.__exit__(kind, problem, trace)

    def update(self, record: Record, state: FederationState) -> None:
        """Write the record there."""
        self.tracker.update(record)


class ProgressSink(Sink):
    """The live display."""

    def __init__(self, progress: Progress, earlier: list[Record]):
        self.progress, self.earlier = progress, earlier

    def __enter__(self) -> Sink:
        self.progress.__enter__()
        for record in self.earlier:
            self.progress.update(record)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.progress.__exit__(kind, problem, trace)

    def update(self, record: Record, state: FederationState) -> None:
        """Show the record."""
        self.progress.update(record)


FEW = 3  # rounds, or evaluations, that tell whether something is wrong with all


class DivergenceSink(Sink):
    """Warns once when training has diverged; with `soon` already where losses have risen and models
    get no better.
    """

    def __init__(self, earlier: list[Record], advice: str, soon: bool = False, title: str = ""):
        self.records, self.advice, self.soon, self.warned = earlier, advice, soon, False
        self.title = f"{title}: " if title else ""  # of one run among several

    def update(self, record: Record, state: FederationState) -> None:
        """Compare the last rounds with the first one."""
        self.records.append(record)
        if self.warned:
            return
        problem = self._rising() if self.soon else ""
        if since := diverged_since(self.records):
            where = at_clients(diverged_clients(self.records))
            problem = f"training has diverged{where} since round {since}{self._change()}"
        if problem:
            self.warned = True
            warnings.warn(f"{self.title}{problem}; {self.advice}.", stacklevel=3)

    def _rising(self) -> str:
        losses = risen(self.records)
        if losses is None:
            return ""
        return (
            f"models get no better: the clients' mean loss was {losses[0]:.3g} in the first "
            f"{RISING} of {len(self.records)} rounds and is {losses[1]:.3g} in the last {RISING}"
        )

    def _change(self) -> str:
        """The clients' mean loss in the first round with any and in the last one."""
        rounds = with_losses(self.records)
        first, last = (rounds[at]["train_loss"] if rounds else None for at in (0, -1))
        if not is_number(first) or not is_number(last):
            return ": losses are no numbers any more"
        if rounds[-1].get("nonfinite_personal"):
            return ": the losses of the models that clients use are no numbers any more"
        return f": the clients' mean loss was {first:.3g} in the first round and is {last:.3g}"


class FirstRoundsSink(Sink):
    """Warns once of what is wrong with the first rounds, or with all of a short run."""

    def __init__(self, earlier: list[Record]):
        self.records = [record for record in earlier if self.counts(record)]

    def counts(self, record: Record) -> bool:
        """Whether a round tells anything."""
        return True

    def problem(self) -> str:
        """What is wrong with these rounds, if anything."""
        return ""

    def update(self, record: Record, state: FederationState) -> None:
        """Look at the first rounds."""
        if self.counts(record):
            self.records.append(record)
            if len(self.records) == FEW:
                self._warn(stacklevel=5)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if problem is None and 0 < len(self.records) < FEW:
            self._warn(stacklevel=6)

    def _warn(self, stacklevel: int) -> None:
        if words := self.problem():
            warnings.warn(f"{words}.", stacklevel=stacklevel)


class UntrainedSink(FirstRoundsSink):
    """Warns once when the first rounds have changed no model."""

    def problem(self) -> str:
        """That nothing was learned, and why."""
        why = why_untrained(self.records)
        if not why or diverged_since(self.records):
            return ""
        rounds = f"{len(self.records)} round{'s' * (len(self.records) > 1)}"
        return f"nothing was learned in {rounds}: {why}"


class UnmeasuredSink(FirstRoundsSink):
    """Warns once when the metric was no number for most clients in the first evaluations."""

    def __init__(self, earlier: list[Record], metric: str):
        super().__init__(earlier)
        self.metric = metric

    def counts(self, record: Record) -> bool:
        """Whether models were evaluated."""
        return "unmeasured" in record or "loss" in record

    def problem(self) -> str:
        """That there is no score, or whose are missing, and what to check."""
        check = "check what it returns, such as for few samples or for those of one class"
        words = f"the metric {self.metric} is not a number (NaN) for the test samples of"
        if all(record.get("unmeasured") for record in self.records):
            return f"{words} all clients, so that runs cannot be ranked; {check}"
        lacking = [len(record.get("unmeasured_clients") or ()) for record in self.records]
        number, of = min(lacking), len(self.records[-1].get("personal") or ())
        if 2 * number <= of:
            return ""
        return f"{words} {number} of {of} clients, who do not count in its mean; {check}"


class WatchSink(Sink):
    """A function of the caller's; it may raise KeyboardInterrupt to stop after that round."""

    def __init__(self, watch: Callable[[Record], None]):
        self.watch = watch

    def update(self, record: Record, state: FederationState) -> None:
        """Show the record."""
        self.watch(record)


def saved_run(
    folder: RunFolder,
    device: str,
    saved: tuple[int, Tree, Mapping[int, Tree]] | None,
    on_disk: bool = False,
) -> tuple[list[Record], FederationState] | None:
    """The records and the state of a checkpoint, if there is one."""
    if saved is None:
        return None
    round, server, states = saved
    records = [record for record in folder.records() if record["round"] <= round]
    if [record["round"] for record in records] != list(range(1, round + 1)):
        with remedied(folder):
            raise Damaged(
                f"'{folder.path / 'metrics.jsonl'}' lacks rounds that its checkpoint has."
            )
    state = FederationState(round, server, _with_changes(states) if on_disk else dict(states))
    state.set_timing(folder.timing(device))
    return records, state


def _with_changes(states: Mapping[int, Tree]) -> ChainMap[int, Tree]:
    """What clients keep; only what is newer than the states on disk is in memory."""
    return ChainMap({}, states)  # type: ignore[arg-type]
