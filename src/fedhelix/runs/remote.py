"""A federation whose rounds run elsewhere, in one piece, while its records are kept here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

from fedhelix.core.errors import EngineFailure
from fedhelix.core.tree import Tree, to_device
from fedhelix.engines import Engine, Serial
from fedhelix.engines.ray.placing import Placed
from fedhelix.engines.ray.programs import ActorLost, Seat, Seats
from fedhelix.engines.ray.spread import ATTEMPTS
from fedhelix.federation import Federation
from fedhelix.federation.state import FederationState
from fedhelix.runs.config import Config
from fedhelix.store.records import Record

MOST_THREADS = 256  # runs at once: each has its federation in this process
SETTING_UP = threading.Lock()  # kernels are timed then, and switched for the whole process


class RoundResult(NamedTuple):
    """A record and what has changed in the state since the last one."""

    record: Record
    round: int
    server: Tree
    client_states: Mapping[int, Tree]  # of those that changed
    setup_bytes: int
    timing: Tree

    @classmethod
    def of(cls, record: Record, state: FederationState) -> RoundResult:
        """What has changed; from now on it counts as known."""
        changed = {client: state.client_states[client] for client in sorted(state.changed)}
        state.changed.clear()
        timing = state.timing()
        return cls(record, state.round, state.server, changed, state.setup_bytes, timing)

    def after(self, state: FederationState) -> FederationState:
        """The new state, where the old one is known."""
        new = FederationState(
            self.round,
            self.server,
            state.client_states | dict(self.client_states),
            state.changed | set(self.client_states),
            self.setup_bytes,
        )
        new.set_timing(self.timing)
        return new


@dataclass
class RemoteRounds:
    """The rounds of a federation as a program for an actor: before them, its first state."""

    federation: RemoteFederation
    rounds: int
    eval_every: int
    state: FederationState | None

    def __call__(self, engine: Engine) -> Iterator[RoundResult]:
        """The rounds, with the engine of the actor."""
        fed, setup = self.federation, engine.setup
        fed.engine, fed.device, fed.initial = engine, setup.device, setup.initial
        fed.splits = setup.splits  # type: ignore[assignment]
        if self.state is None:
            yield RoundResult.of({}, Federation.initialize(fed, self.rounds))
            return
        here = {
            client: to_device(kept, fed.device) for client, kept in self.state.client_states.items()
        }
        server = to_device(self.state.server, fed.device)
        state = replace(self.state, server=server, client_states=here)
        state.set_timing(to_device(self.state.timing(), fed.device))
        for record, new in Federation.run_rounds(fed, self.rounds, state, self.eval_every):
            yield RoundResult.of(record, new)


class RemoteFederation(Federation):
    """A federation whose rounds an actor of a cluster runs.

    The states that it yields are kept here, so that a lost actor costs no more than its last round.
    """

    def __init__(self, *arguments: Any, seat: Seat, **more: Any):
        with SETTING_UP:
            super().__init__(*arguments, **more | {"engine": OnActor, "device": "cpu"})
        self.seat = seat

    def initialize(self, rounds: int) -> FederationState:
        """The state before the first round."""
        nothing = FederationState(0, {}, {})
        [(_, first)] = self._progress(rounds, 1, None, nothing)
        return first

    def run_rounds(
        self, rounds: int, state: FederationState | None = None, eval_every: int = 1
    ) -> Iterator[tuple[Record, FederationState]]:
        """Yields a record and the new state after every round."""
        first = self.initialize(rounds) if state is None else state
        return self._progress(rounds, eval_every, first, first)

    def _progress(
        self, rounds: int, eval_every: int, first: FederationState | None, state: FederationState
    ) -> Iterator[tuple[Record, FederationState]]:
        """Records and states from an actor; another one goes on where it is lost."""
        losses, complete = 0, False
        while not complete:
            begin = first if first is None else state
            program = RemoteRounds(self, rounds, eval_every, _sent(begin))
            try:
                for progress in self.seat.stream(self._placed, self.engine.choices, program):
                    state, losses = progress.after(state), 0
                    yield progress.record, state
                complete = True
            except ActorLost:
                losses += 1
                if losses == ATTEMPTS:
                    raise EngineFailure(
                        f"the actors died again and again in round {state.round + 1} of "
                        f"{self.method.label}; perhaps the memory of the nodes is too small."
                    ) from None

    @cached_property
    def _placed(self) -> Placed:
        return self.seat.seats.place(self.engine.setup)

    def __getstate__(self) -> dict[str, Any]:
        """This federation as it travels: the actor has its data already, and an engine."""
        left_out = ("engine", "splits", "seat", "_placed")
        return {key: value for key, value in self.__dict__.items() if key not in left_out}


class OnActor(Serial):
    """Stands for the engine of the actor that runs all rounds."""

    name: ClassVar[str] = "ray"
    why = "the whole run on one actor"


def _sent(state: FederationState | None) -> FederationState | None:
    """A state as it travels: nothing of it is new to us."""
    return state and replace(state, client_states=dict(state.client_states), changed=set())


def run_on_actors(
    runs: Sequence[Callable[..., None]], config: Config, on_interrupt: Callable[[], None]
) -> None:
    """Call each run with a `kind` of federation that leaves its rounds to an actor of a cluster.

    A failure ends all of them. Ctrl-C reaches only the main thread, so `on_interrupt` has to stop
    the runs.
    """

    def execute(run: Callable[..., None]) -> None:
        with seats.seat() as seat:
            run(kind=partial(RemoteFederation, seat=seat))

    seats = Seats(config.address, config.workers, gpus=config.device != "cpu")
    with closing(seats), ThreadPoolExecutor(min(len(runs), MOST_THREADS)) as threads:
        futures = [threads.submit(execute, run) for run in runs]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            on_interrupt()
            threads.shutdown(wait=False, cancel_futures=True)
            seats.end()
            raise
