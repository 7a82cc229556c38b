"""An engine whose clients are sites: the round loop does not notice the difference."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fedhelix.core.errors import EngineFailure, UserError
from fedhelix.core.tree import State, Tree, flatten, to_device
from fedhelix.deploy import messages
from fedhelix.deploy.messages import Message
from fedhelix.deploy.registry import SiteRegistry
from fedhelix.deploy.transport import Transport
from fedhelix.engines.base import Engine, Evaluation
from fedhelix.engines.local import ClientResult, ClientTask, Scores, Setup
from fedhelix.federation.uploads import finite


class Remote(Engine):
    """Sends jobs to sites and takes what comes back; whoever does not answer is in `missing`, with
    the reason.

    What a client keeps stays at its site, so outcomes come without it.
    """

    name: ClassVar[str] = "flower"

    def __init__(
        self,
        setup: Setup,
        transport: Transport,
        registry: SiteRegistry,
        common: Mapping[str, Any],
        enough: int | None,
        judges: bool,
    ):
        super().__init__(setup)
        self.why = "the clients are sites"
        self.transport, self.registry, self.judges = transport, registry, judges
        self.common = dict(common)  # words of every letter: experiment, plan, classes
        self.enough = enough  # that many answers end a round, where more clients were asked
        self.supplements: dict[int, Tree] = {}  # samples that clients have not got yet
        self.missing: dict[int, str] = {}
        self._refusing: set[int] = (
            set()
        )  # those of them who did answer, but not with what was asked for
        self._begun = False  # whether a round has had enough answers
        self._working = 0.0  # seconds that the slowest sites took for themselves
        self._largest = messages.room_for(setup.initial)

    def _ask(
        self, kind: str, tasks: Sequence[ClientTask], enough: int | None = None
    ) -> dict[int, Message]:
        """The letters that came back, by client; the others are in `missing`."""
        self.registry.enrol(self.transport.cards, self.transport.connected)
        requested, placed = {}, [task for task in tasks if task.client < len(self.registry.sites)]
        for task in placed:
            about = {
                "kind": kind,
                "round": task.round,
                "client": task.client,
                "arriving": task.arriving,
                **self.common,
            }
            body = {"payload": task.payload, "client_state": task.client_state}
            if task.client in self.supplements:
                body["supplement"] = self.supplements[task.client]
            requested[self.registry.sites[task.client]] = about, messages.write(about, body)
        answers, refusals, absences = self.transport.ask(requested, self._largest, enough)
        self.missing = {
            task.client: "no site has taken this place yet" for task in tasks if task not in placed
        }
        self.missing |= {
            self.registry.number(site): f"{site} {why}"
            for site, why in (refusals | absences).items()
        }
        self._refusing = {self.registry.number(site) for site in refusals}
        found = {self.registry.number(site): message for site, message in answers.items()}
        self.supplements = {
            client: tree for client, tree in self.supplements.items() if client not in found
        }
        times = [message.about.get("seconds") for message in found.values()]
        self._working += max((time for time in times if isinstance(time, float)), default=0.0)
        return found

    def _refuse(self, client: int, why: object) -> None:
        self.missing[client] = f"{self.registry.sites[client]} sent an answer that {why}"
        self._refusing.add(client)

    def run_clients(self, tasks: Sequence[ClientTask]) -> list[ClientResult]:
        """The outcomes of the sites that answered as they should."""
        self.transport.await_some(self.registry.sites)
        results = {}
        for client, message in self._ask("train", tasks, self.enough).items():
            try:
                messages.check_tree(message.body, self.setup.initial)
                samples = int(messages.number(message.about, "samples", low=1))
                loss = messages.number(message.about, "loss")
                upload = to_device(message.body, self.setup.device)
                results[client] = ClientResult(client, samples, upload, {}, loss)
            except (UserError, ValueError, OverflowError) as problem:
                self._refuse(client, problem)
        for client, why in odd_ones(results).items():
            self._refuse(client, why)
            del results[client]
        least = self.transport.policy.minimum
        if len(results) < least:
            self._stop_if_hopeless(len(tasks), least)
            for client in results:
                self.missing[client] = (
                    f"{self.registry.sites[client]} answered, but {least} answers are needed"
                )
            return []
        self._begun = True
        return [results[task.client] for task in tasks if task.client in results]

    def _stop_if_hopeless(self, requested: int, least: int) -> None:
        """Where so many sites refuse from the start that the others could not be enough, all rounds
        would be empty.
        """
        if not self._begun and self._refusing and requested - len(self._refusing) < least:
            raise _to_be_mended(self.missing[min(self._refusing)])

    def client_init(self, tasks: Sequence[ClientTask]) -> dict[int, Tree]:
        """What the sites tell before round 0; a method that wants hellos needs them all."""
        return self._told("client_init", tasks)

    def onboard_client(self, task: ClientTask) -> Tree:
        """A newcomer's turn in its dialogue with the server, which waits for it to connect."""
        self.transport.need(lambda: self._is_here(task.client), f"the site of client {task.client}")
        return self._told("onboard_client", [task])[task.client]

    def onboard_state(self, task: ClientTask) -> Tree:
        """What a newcomer keeps stays at its site."""
        return self._told("onboard_state", [task])[task.client]

    def _is_here(self, client: int) -> bool:
        self.registry.enrol(self.transport.cards, self.transport.connected)
        return (
            client < len(self.registry.sites)
            and self.registry.sites[client] in self.transport.connected
        )

    def _told(self, kind: str, tasks: Sequence[ClientTask]) -> dict[int, Tree]:
        """What sites say outside of rounds; without it the run cannot go on."""
        found = {}
        for client, message in self._ask(kind, tasks).items():
            try:
                messages.check_tree(message.body, self.setup.initial)
                found[client] = to_device(message.body, self.setup.device)
                if not finite([message.body])[0]:
                    raise UserError("holds values that are not finite.")
            except UserError as problem:
                self._refuse(client, problem)
        if self.missing:
            raise _to_be_mended(next(iter(self.missing.values())))
        return {task.client: found[task.client] for task in tasks}

    def personal(self, tasks: Sequence[ClientTask]) -> list[State]:
        """Personal models never leave their sites."""
        raise UserError("the personal models of a deployment are at its sites.")

    def evaluate(
        self, tasks: Sequence[ClientTask], model: State | None = None
    ) -> tuple[list[Scores], Evaluation | None]:
        """Every site judges its personal model; the server judges its own where it has test
        samples.
        """
        evaluation = self.score([model], "test")[0] if model is not None and self.judges else None
        return self._scores("evaluate", tasks), evaluation

    def evaluate_received(self, tasks: Sequence[ClientTask]) -> list[Scores]:
        """Every personal model as it is before `tune`."""
        return self._scores("evaluate_received", tasks)

    def _scores(self, kind: str, tasks: Sequence[ClientTask]) -> list[Scores]:
        nothing = Scores(math.nan, math.nan, math.nan)
        found: dict[int, Scores] = {}
        for client, message in self._ask(kind, tasks).items():
            try:
                found[client] = Scores(
                    *(messages.number(message.about, key) for key in Scores._fields)
                )
            except UserError as problem:
                self._refuse(client, problem)
        return [found.get(task.client, nothing) for task in tasks]

    def report(self) -> dict[str, Any]:
        """Bytes as they were sent, the slowest sites' seconds, and letters that came late, twice or
        from strangers.
        """
        wire = {
            "sent": self.transport.sent,
            "received": self.transport.received,
            "site_seconds": self._working,
        }
        told: dict[str, Any] = {"wire": wire}
        if self.transport.troubles:
            told["troubles"] = dict(self.transport.troubles)
        self.transport.sent, self.transport.received, self._working = 0, 0, 0.0
        self.transport.troubles.clear()
        return told


def _to_be_mended(why: str) -> EngineFailure:
    return EngineFailure(f"{why.rstrip('.')}; continue the run when that is mended.")


def odd_ones(results: Mapping[int, ClientResult]) -> dict[int, str]:
    """Answers without a part that all others have, or with another shape where all others agree.

    The model's own entries are checked against the network by the channel; of what else a method
    sends, the others are the only measure.
    """
    parts = {client: flatten(result.upload) for client, result in results.items() if result.upload}
    found = {}
    for client, mine in parts.items():
        others = [part for other, part in parts.items() if other != client]
        if len(others) < 2:
            continue
        groups = Counter(
            group for part in others for group in {path.partition("/")[0] for path in part}
        )
        lacking = {group for group, count in groups.items() if count == len(others)} - {
            path.partition("/")[0] for path in mine
        }
        if lacking:
            found[client] = f"lacks '{min(lacking)}', which all others have."
            continue
        for path, value in mine.items():
            shapes = {getattr(part[path], "shape", None) for part in others if path in part}
            if (
                not path.startswith("model/")
                and len(shapes) == 1
                and getattr(value, "shape", None) not in shapes
            ):
                found[client] = f"has another shape for '{path}' than all others."
    return found
