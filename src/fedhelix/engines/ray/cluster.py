"""The actors of a run: one per GPU or CPU of the cluster, on the nodes that are there now."""

from __future__ import annotations

import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from fedhelix.core.errors import EngineFailure, UserError
from fedhelix.engines.parallel.pool import unwrap
from fedhelix.engines.parallel.worker import Failure
from fedhelix.engines.ray.actor import ClientActor
from fedhelix.engines.ray.connection import IDLE, alive_nodes, first_line, on_node, unlike
from fedhelix.engines.ray.spread import TaskQueue

START_SECONDS = 60.0  # after so long we go on with the actors that have started
REFRESH_SECONDS = 1.0  # between looks at which nodes there are
AHEAD = 2  # calls that an actor has at once: the next one begins without a wait


class Member(NamedTuple):
    """An actor and where it is."""

    actor: Any
    node: str
    gpu: bool


class Call(NamedTuple):
    """A call of an actor, and the tasks in it."""

    member: Member
    taken: list[int]


class Cluster:
    """Actors on all nodes; those that are lost are replaced where that is possible.

    `prepare` makes the first call of an actor. `known` nodes run our versions. `limit` is the
    largest number of actors.
    """

    def __init__(
        self,
        ray: Any,
        prepare: Callable[[Any], Any],
        known: Iterable[str],
        limit: int | None,
        gpus: bool,
    ):
        self.ray, self.prepare, self.limit, self.gpus = ray, prepare, limit, gpus
        self.known = dict.fromkeys(known, True)  # nodes, and whether they run our versions
        self.starting: dict[Any, Member] = {}  # by the answer to the first call
        self.members: list[Member] = []
        # An engine that nobody uses any more leaves its actors to the next one.
        weakref.finalize(self, IDLE.extend, self.members).atexit = False
        self.looked = -float("inf")

    def nodes(self) -> dict[str, Mapping[str, Any]]:
        """The nodes that are there now and run our versions."""
        try:
            nodes = alive_nodes(self.ray)
        except Exception as problem:
            raise nobody_left(first_line(problem)) from None
        new = [node for name, node in nodes.items() if name not in self.known]
        others = unlike(self.ray, new) if new else {}
        self.known |= {node["NodeID"]: node["NodeID"] not in others for node in new}
        for sentence in others.values():
            warnings.warn(f"a node is left out: {sentence}", stacklevel=2)
        return {name: node for name, node in nodes.items() if self.known[name]}

    def refresh(self) -> None:
        """Follow nodes that have joined or left, and start the actors that are missing."""
        nodes = self.nodes()
        for member in [*self.members, *self.starting.values()]:
            if member.node not in nodes:
                self.remove(member)
        for name, node in nodes.items():
            self._fill(name, node["Resources"])
        self.looked = time.monotonic()

    def _fill(self, name: str, resources: Mapping[str, float]) -> None:
        """Start the missing actors of a node."""
        count, gpu = capacity(resources, self.gpus)
        everybody = [*self.members, *self.starting.values()]
        missing = count - sum(member.node == name for member in everybody)
        if self.limit is not None:
            missing = min(missing, self.limit - len(everybody))
        needs = {"num_cpus": 0, "num_gpus": 1} if gpu else {"num_cpus": 1}
        for _ in range(missing):
            kind = self.ray.remote(ClientActor).options(
                **needs, scheduling_strategy=on_node(self.ray, name), max_restarts=0
            )
            actor = idle_actor(name, gpu) or kind.remote(gpu)
            self.starting[self.prepare(actor)] = Member(actor, name, gpu)

    def gather(self, wait: bool) -> None:
        """Take the actors that have started; where there is none yet, wait for them."""
        end = time.monotonic() + START_SECONDS
        while self.starting:
            left = end - time.monotonic() if wait and not self.members else 0.0
            left = max(left, 0.0)
            count = len(self.starting) if wait else 1
            ready, _ = self.ray.wait(list(self.starting), num_returns=count, timeout=left)
            for answer in ready:
                self._join(answer, self.starting.pop(answer))
            if not ready:
                return

    def _join(self, answer: Any, member: Member) -> None:
        try:
            failure = self.ray.get(answer)
        except self.ray.exceptions.RayError:
            self.remove(member)  # its node has left, or it died
            return
        check_loaded(failure)
        self.members.append(member)

    def remove(self, member: Member) -> None:
        """Forget an actor, and end it where it still is."""
        self.members[:] = [one for one in self.members if one is not member]
        self.starting = {key: one for key, one in self.starting.items() if one is not member}
        with suppress(Exception):  # it is gone already
            self.ray.kill(member.actor)

    def ready(self) -> list[Member]:
        """The actors to work with, at least one."""
        if time.monotonic() - self.looked > REFRESH_SECONDS:
            first = not self.members
            self.refresh()
            self.gather(wait=first)
        if not self.members:
            self.refresh()
            self.gather(wait=True)
        if not self.members:
            raise nobody_left("it has no free GPU or CPU for an actor")
        return self.members

    def release(self) -> None:
        """Keep the actors for the next engine of this program; starting one takes seconds."""
        for member in self.members:
            member.actor.release.remote()
        IDLE.extend(self.members)
        self.members.clear()
        self.end()

    def end(self) -> None:
        """End all actors, whatever they are doing."""
        for member in [*self.members, *self.starting.values()]:
            self.remove(member)

    def run(self, work: Tasks) -> list[Any]:
        """The answers to all tasks, in order; those of a lost actor are given to the others."""
        queue, results = TaskQueue(work.sizes), [None] * len(work.sizes)
        busy: dict[Any, Call] = {}
        while queue or busy:
            members = self.ready()
            self._hand_out(queue, members, work, busy)
            done, _ = self.ray.wait(list(busy), num_returns=1, timeout=REFRESH_SECONDS)
            for answer in done:
                if answer in busy:
                    self._receive(answer, work, queue, busy, results)
        return results

    def _hand_out(
        self, queue: TaskQueue, members: Sequence[Member], work: Tasks, busy: dict[Any, Call]
    ) -> None:
        """Calls for all actors that have too few, in turn."""
        for depth in range(1, AHEAD + 1):
            for member in members:
                waiting = sum(call.member is member for call in busy.values())
                if queue and waiting < depth:
                    taken = queue.take(len(members), whole=work.even or member.gpu)
                    answer = member.actor.work.remote(*work.message(taken))
                    busy[answer] = Call(member, taken)

    def _receive(
        self, answer: Any, work: Tasks, queue: TaskQueue, busy: dict[Any, Call], results: list[Any]
    ) -> None:
        call = busy.pop(answer)
        try:
            received = unwrap(self.ray.get(answer), work.label(call.taken[0]))
        except self.ray.exceptions.RayError:
            self._lost(call, work, queue, busy)
            return
        for index, result in zip(call.taken, work.opened(received), strict=True):
            results[index] = result

    def _lost(self, call: Call, work: Tasks, queue: TaskQueue, busy: dict[Any, Call]) -> None:
        """An actor died: its tasks wait again, also those that it had not begun."""
        self.remove(call.member)
        self.looked = -float("inf")
        culprit = queue.give_back(call.taken)
        for answer, other in list(busy.items()):
            if other.member is call.member:
                queue.give_back(busy.pop(answer).taken, died=False)
        if culprit is not None:
            raise EngineFailure(
                f"the actors died again and again with {work.label(culprit)}; perhaps the memory "
                "of the nodes is too small for so many of them."
            )


class Tasks(ABC):
    """Tasks of one kind, and how they are sent and received; the engine says how."""

    sizes: Sequence[int]
    even: bool = False  # all take the same short time, so that one call of every actor is best

    @abstractmethod
    def message(self, taken: Sequence[int]) -> tuple[Any, ...]:
        """The arguments of an actor's `work` for some of the tasks."""

    @abstractmethod
    def opened(self, received: Any) -> Sequence[Any]:
        """The results in an answer."""

    @abstractmethod
    def label(self, index: int) -> str:
        """A task in error messages."""


def idle_actor(node: str, gpu: bool) -> Any | None:
    """A released actor of that kind, if there is one."""
    for member in IDLE:
        if (member.node, member.gpu) == (node, gpu):
            IDLE.remove(member)
            return member.actor
    return None


def capacity(resources: Mapping[str, float], gpus: bool) -> tuple[int, bool]:
    """How many actors a node can have, and whether they have a GPU each."""
    if gpus and resources.get("GPU", 0) >= 1:
        return int(resources["GPU"]), True
    return int(resources.get("CPU", 0)), False


def check_loaded(answer: Failure | None) -> None:
    """Raise if an actor could not load what was sent to it."""
    if answer is not None and "ModuleNotFoundError" in answer.sentence:
        raise UserError(
            f"a node of the Ray cluster cannot load the federation ({answer.sentence}); "
            "install the same packages there, or define it in the script itself."
        )
    unwrap(answer, "the federation")


def nobody_left(why: str) -> EngineFailure:
    """No actor can work; the rounds so far are kept."""
    return EngineFailure(
        f"nobody in the Ray cluster can go on with the round: {why.rstrip('.')}; the run can be "
        "resumed when the cluster is back."
    )
