"""Whose work ends in which round: all at once, or as a virtual clock says."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fedhelix.core.errors import UserError
from fedhelix.core.method import Method, Upload
from fedhelix.core.tree import Tree, payload_bytes
from fedhelix.engines.local import ClientResult, ClientTask
from fedhelix.federation.devices import Device, DeviceModel, Devices
from fedhelix.federation.sampling import Sampler
from fedhelix.store.records import Record


class Work(NamedTuple):
    """One client's work, from what it received to what it sends; whatever arrives first is less."""

    arrives: float  # in simulated seconds since the start
    task: ClientTask
    result: ClientResult


@dataclass(frozen=True)
class Turn:
    """What a round makes of clients' work."""

    arrived: list[Work]
    participants: list[int]  # who took part
    sent: dict[int, Tree]  # the payloads of those who started in the round
    pending: list[Work] = field(default_factory=list)  # goes on into the next round
    late: list[int] = field(default_factory=list)  # whose work is lost
    clock: float | None = None

    @property
    def results(self) -> list[ClientResult]:
        """What has arrived."""
        return [work.result for work in self.arrived]

    @property
    def payloads(self) -> dict[int, Tree]:
        """What those whose work has arrived had received."""
        return {work.task.client: work.task.payload for work in self.arrived}

    def dated(self, uploads: Sequence[Upload], t: int) -> list[Upload]:
        """Uploads with what their clients had received, and how many rounds ago."""
        tasks = {work.task.client: work.task for work in self.arrived}
        return [
            upload._replace(
                payload=tasks[upload.client].payload, staleness=t - tasks[upload.client].round
            )
            for upload in uploads
        ]

    def record(self, t: int) -> Record:
        """What a record says about time."""
        if self.clock is None:
            return {}
        staleness = [t - work.task.round for work in self.arrived]
        times = {"clock": self.clock, "started": sorted(self.sent)}
        return {**times, "staleness": staleness, "late": self.late}


class Schedule:
    """Without a clock: all who start in a round end in it."""

    def cohort(
        self,
        sampler: Sampler,
        t: int,
        clock: float,
        pending: Sequence[Work],
        candidates: Collection[int],
    ) -> list[int]:
        """Who of the candidates can start in round t."""
        return sampler.cohort(t, [i for i in sampler.members if i in candidates])

    def turn(
        self,
        t: int,
        clock: float,
        pending: Sequence[Work],
        tasks: Sequence[ClientTask],
        results: Sequence[ClientResult],
    ) -> Turn:
        """What becomes of the work that is under way and of what starts in round t."""
        sent = {task.client: task.payload for task in tasks}
        return Turn(paired(tasks, results), list(sent), sent)


@dataclass(frozen=True)
class ClockedSchedule(Schedule):
    """Devices take their time; a round ends when enough work has arrived, or at the deadline.

    With a `buffer` the server is asynchronous: `slots` clients are always at work, and a round ends
    with that many uploads. Otherwise a round waits for `enough` of those who started in it.
    """

    device: Callable[[int], Device]  # of each client
    samples: Callable[[ClientTask], int]  # that a client trains on
    slots: int
    enough: int | None  # None: for all of them
    buffer: int | None
    deadline: float
    keep: bool  # late work arrives in a later round

    def cohort(
        self,
        sampler: Sampler,
        t: int,
        clock: float,
        pending: Sequence[Work],
        candidates: Collection[int],
    ) -> list[int]:
        """Who can start in round t: candidates that are available and not at work.

        An asynchronous server replaces everyone whose upload arrives in the round but for the last.
        """
        busy = {work.task.client for work in pending}
        idle = [i for i in sampler.members if i in candidates and i not in busy]
        begin = self._begin(clock, pending, idle)
        ready = [i for i in idle if self.device(i).next_available(begin) <= begin]
        if self.buffer is None:
            return sampler.cohort(t, ready)
        first = sampler.some(t, self.slots - len(pending), ready)
        rest = [client for client in ready if client not in first]
        return first + sampler.some(t, self.buffer - 1, rest, "cohort, later")

    def _begin(self, clock: float, pending: Sequence[Work], idle: Sequence[int]) -> float:
        """When the round begins: now, unless nobody is at work or available."""
        if pending or not idle:
            return clock
        return min(self.device(client).next_available(clock) for client in idle)

    def turn(
        self,
        t: int,
        clock: float,
        pending: Sequence[Work],
        tasks: Sequence[ClientTask],
        results: Sequence[ClientResult],
    ) -> Turn:
        """What becomes of the work that is under way and of what starts in round t."""
        begin = self._begin(clock, pending, [task.client for task in tasks])
        limit, needed = begin + self.deadline, self._needed(len(tasks))
        waiting, arrived = deque(paired(tasks, results)), list[Work]()
        free = len(waiting) if self.buffer is None else self.slots - len(pending)
        started = self._started(waiting, free, begin)
        under_way = [*pending, *started]
        heapq.heapify(under_way)
        now, free, counted = begin, 0, 0
        while counted < needed and under_way and under_way[0].arrives <= limit:
            work = heapq.heappop(under_way)
            now, free = work.arrives, free + 1
            arrived.append(work)
            counted += self.buffer is not None or not tasks or work.task.round == t
            # What arrives at one moment arrives together, before anybody takes a free place.
            if counted < needed and not (under_way and under_way[0].arrives == now):
                new = self._started(waiting, free, now)
                for work in new:
                    heapq.heappush(under_way, work)
                started, free = started + new, 0
        if counted < needed and under_way:
            now = limit
        if under_way and not arrived and not self.keep and t == 0:
            self._refuse_deadline(under_way, begin)
        left = sorted(under_way)
        arrived.sort(key=lambda work: work.task.client)
        return Turn(
            arrived,
            [work.task.client for work in arrived],
            {work.task.client: work.task.payload for work in started},
            left if self.keep else [],
            [] if self.keep else [work.task.client for work in left],
            now,
        )

    def _needed(self, starting: int) -> int:
        """How much work ends the round; at least some has to arrive."""
        if self.buffer is not None:
            return self.buffer
        return max(1, starting if self.enough is None else min(self.enough, starting))

    def _started(self, waiting: deque[Work], places: int, now: float) -> list[Work]:
        """The next clients, who begin now, with the time at which their work arrives."""
        works = [waiting.popleft() for _ in range(min(places, len(waiting)))]
        return [self._timed(work, now) for work in works]

    def _timed(self, work: Work, now: float) -> Work:
        device = self.device(work.task.client)
        seconds = device.seconds(
            payload_bytes(work.task.payload),
            self.samples(work.task),
            payload_bytes(work.result.upload),
        )
        return work._replace(arrives=device.finish(now, seconds))

    def _refuse_deadline(self, works: Sequence[Work], begin: float) -> None:
        fastest = min(work.arrives for work in works) - begin
        raise UserError(
            f"no client of the first round meets the deadline of {self.deadline:g} simulated "
            f"seconds; the fastest needs {fastest:.4g}."
        )


def schedule_for(
    settings: Devices,
    devices: DeviceModel | None,
    method: Method,
    cohort: int,
    samples: Callable[[ClientTask], int],
) -> Schedule:
    """The schedule of a federation: with a clock if its clients have devices."""
    buffer = method.capabilities.buffer
    if devices is None:
        return Schedule()
    return ClockedSchedule(
        device=devices.device,
        samples=samples,
        slots=settings.places(cohort),
        enough=cohort if settings.over_select > 1 else None,
        buffer=buffer,
        deadline=math.inf if settings.deadline is None else settings.deadline,
        keep=settings.late == "keep" or buffer is not None,
    )


def paired(tasks: Sequence[ClientTask], results: Sequence[ClientResult]) -> list[Work]:
    """Tasks with their results; who did not answer is left out."""
    done = {result.client: result for result in results}
    return [Work(0.0, task, done[task.client]) for task in tasks if task.client in done]
