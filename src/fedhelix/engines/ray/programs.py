"""Whole programs on the actors of a cluster, one on each at a time: the runs of a sweep."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fedhelix.data import Dataset
from fedhelix.engines.base import Engine
from fedhelix.engines.local import Setup
from fedhelix.engines.parallel.pool import unwrap
from fedhelix.engines.ray.cluster import AHEAD, REFRESH_SECONDS, Cluster, Member, check_loaded
from fedhelix.engines.ray.connection import HOLDERS, connect, equal_nodes
from fedhelix.engines.ray.parcel import Unpacker
from fedhelix.engines.ray.placing import Placed, place, place_samples, place_value

Program = Callable[[Engine], Iterator[Any]]


class ActorLost(Exception):
    """The actor of a program is gone, with all that the program had not yielded yet."""


class Seats:
    """The actors of a cluster, each of which somebody's thread may take for itself."""

    def __init__(self, address: str | None, workers: int | None, gpus: bool):
        for other in list(HOLDERS):  # they would wait for each other's processors
            other.close()
        HOLDERS.add(self)
        self.ray = connect(address, workers)
        nodes = equal_nodes(self.ray)
        self._cluster = Cluster(
            self.ray, lambda actor: actor.release.remote(), nodes, workers, gpus
        )
        self._freed = threading.Condition()
        self._taken: list[Member] = []
        self._samples: WeakKeyDictionary[Dataset, Any] = WeakKeyDictionary()
        self.ended = False

    @contextmanager
    def seat(self) -> Iterator[Seat]:
        """An actor of one's own, as soon as there is one."""
        seat = Seat(self)
        try:
            seat.take()
            yield seat
        except BaseException:
            seat.lose()  # it may be busy with something that nobody awaits any more
            raise
        finally:
            seat.leave()

    def take(self) -> Member:
        """An actor that nobody has; waits for one."""
        with self._freed:
            while not self.ended:
                for member in self._cluster.ready():
                    if member not in self._taken:
                        self._taken.append(member)
                        return member
                self._freed.wait(REFRESH_SECONDS)
        raise KeyboardInterrupt

    def leave(self, member: Member, lost: bool) -> None:
        """Somebody needs an actor no longer, or has lost it."""
        with self._freed:
            self._taken.remove(member)
            if lost:
                self._cluster.remove(member)
                self._cluster.looked = -float("inf")
            self._freed.notify()

    def place(self, setup: Setup) -> Placed:
        """Put a setup into the object store; runs on the same data share their samples."""
        with self._freed:
            if setup.data not in self._samples:
                self._samples[setup.data] = place_samples(self.ray, setup.data)
            samples = self._samples[setup.data]
        return place(self.ray, setup, samples)

    def end(self) -> None:
        """End all actors, whatever they are doing; who waits for one is interrupted."""
        with self._freed:
            self.ended = True
            self._cluster.end()
            self._freed.notify_all()

    def close(self) -> None:
        """Leave the actors to the next engine of this program."""
        HOLDERS.discard(self)
        if not self.ended:
            self._cluster.release()


class Seat:
    """One thread's actor; a lost one can be replaced."""

    def __init__(self, seats: Seats):
        self.seats = seats
        self.member: Member | None = None

    def take(self) -> Member:
        """The actor; another one if it was lost."""
        if self.member is None:
            self.member = self.seats.take()
        return self.member

    def lose(self) -> None:
        """Give the actor up for good."""
        if self.member is not None:
            member, self.member = self.member, None
            self.seats.leave(member, lost=True)

    def leave(self) -> None:
        """Let somebody else have the actor."""
        if self.member is not None:
            member, self.member = self.member, None
            self.seats.leave(member, lost=False)

    def stream(self, placed: Placed, choices: dict[str, str], program: Program) -> Iterator[Any]:
        """What a program yields on the actor, with the choices that it makes by timing."""
        ray, actor = self.seats.ray, self.take().actor
        try:
            begun = [
                actor.configure.remote(list(placed), dict(choices)),
                actor.begin.remote([place_value(ray, program)]),
            ]
            for answer in begun:
                check_loaded(ray.get(answer))
            coming = deque(actor.advance.remote() for _ in range(AHEAD))
            while True:
                received = unwrap(ray.get(coming.popleft()), "the run")
                item, chosen = Unpacker(torch.device("cpu")).unpack(received)
                if item is None:
                    return
                coming.append(actor.advance.remote())
                choices.update(chosen)
                yield item
        except ray.exceptions.RayError:
            self.lose()
            if self.seats.ended:
                raise KeyboardInterrupt from None
            raise ActorLost from None
