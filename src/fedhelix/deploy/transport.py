"""Letters to sites and back, through Flower's grid; a site that does not answer is a fact to
record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid

from fedhelix.core.errors import EngineFailure, UserError
from fedhelix.deploy import messages
from fedhelix.deploy.messages import Message
from fedhelix.deploy.policy import RoundPolicy

LETTER = "letter"
KIND = "query"  # of all messages; what is asked for stands in the letter
WHOLE = 1 << 20  # bytes up to which a letter is not cut into pieces
LOOK_AROUND = 1.0  # seconds between looks at who is connected
FORGOTTEN = 60.0  # seconds after its deadline
EARLY: dict[str, Any] = {
    "initial_backoff": 0.05,
    "backoff_cap": 1.0,
}  # seconds; parts of a letter come one by one
WHO = {"kind": "who"}


def envelope(content: bytes) -> RecordDict:
    """A letter as Flower carries it: whole, or if it is large as an array, which Flower cuts into
    pieces.
    """
    if len(content) <= WHOLE:
        return RecordDict({LETTER: ConfigRecord({LETTER: content})})
    array = Array("uint8", (len(content),), "fedhelix.letter", content)
    return RecordDict({LETTER: ArrayRecord({LETTER: array})})


def contents(message: FlowerMessage) -> bytes:
    """The letter in a message."""
    try:
        found = message.content[LETTER][LETTER]
    except (KeyError, TypeError, AttributeError, ValueError):
        found = None
    content = found.data if isinstance(found, Array) else found
    if not isinstance(content, bytes):
        raise UserError("is no letter: the message holds something else.")
    return content


def pause(waited: float) -> float:
    """How long to wait before looking again: short at first, then in proportion, so that long work
    is left alone.
    """
    return min(max(0.2 * waited, 0.05), 1.0)


@dataclass
class PendingRequest:
    """A letter on its way, until its answer is there."""

    node: int
    site: str  # empty while the node has not said who it is
    about: Mapping[str, Any]
    content: bytes
    due: float
    activated: str = (
        ""  # when the node last came to life; a later time means that it has forgotten the letter
    )
    again: bool = False


@dataclass
class Transport:
    """Knows which node is which site, sends letters and collects answers."""

    grid: Grid
    policy: RoundPolicy
    cards: dict[str, dict[str, Any]] = field(default_factory=dict)  # what each site said of itself
    sent: int = 0  # bytes, since somebody last asked
    received: int = 0
    troubles: dict[str, str] = field(default_factory=dict)  # what was dropped, and why
    _nodes: dict[int, str] = field(default_factory=dict)  # who is connected
    _activated: dict[int, str] = field(default_factory=dict)
    _requests: dict[str, PendingRequest] = field(default_factory=dict)
    _looked: float = 0.0

    @property
    def connected(self) -> set[str]:
        """The sites that are there now."""
        return {site for site in self._nodes.values() if site}

    def look_around(self) -> None:
        """Ask new nodes who they are, and send letters again that a restarted site has lost."""
        if time.monotonic() - self._looked < LOOK_AROUND:
            return
        self._looked = time.monotonic()
        nodes = {info.node_id: info for info in self.grid.get_nodes()}
        self._activated = {node: info.last_activated_at for node, info in nodes.items()}
        self._nodes = {node: site for node, site in self._nodes.items() if node in nodes}
        requested = {request.node for request in self._requests.values() if not request.site}
        due, question = time.monotonic() + self.policy.deadline, messages.write(WHO)
        requests = [
            PendingRequest(node, "", WHO, question, due)
            for node in sorted(set(nodes) - set(self._nodes) - requested)
        ]
        for key, request in list(self._requests.items()):
            if (
                request.node in nodes
                and request.activated < self._activated[request.node]
                and not request.again
            ):
                del self._requests[key]
                request.again = bool(request.site)
                requests.append(request)
        self._send(requests)

    def _send(self, requests: Sequence[PendingRequest]) -> list[str]:
        """Send letters; returns the sites that Flower does not know any more."""
        now, messages = time.monotonic(), []
        for request in requests:
            request.activated = self._activated.get(request.node, "")
            # Flower forgets a letter a while after the deadline: a site that comes back much later
            # need not read it.
            round, seconds = (
                str(request.about.get("round", "")),
                max(request.due - now, 0.0) + FORGOTTEN,
            )
            messages.append(
                FlowerMessage(
                    envelope(request.content), request.node, KIND, ttl=seconds, group_id=round
                )
            )
            self.sent += len(request.content)
        keys = list(self.grid.push_messages(messages)) if messages else []
        self._requests |= {key: request for key, request in zip(keys, requests, strict=True) if key}
        return [request.site for key, request in zip(keys, requests, strict=True) if not key]

    def ask(
        self,
        requested: Mapping[str, tuple[Mapping[str, Any], bytes]],
        largest: int,
        enough: int | None = None,
    ) -> tuple[dict[str, Message], dict[str, str], dict[str, str]]:
        """The sites' answers to their letters, what those said who refuse, and why there is nothing
        from the others.

        It ends when all have answered, when `enough` have, or at the deadline.
        """
        begun = time.monotonic()
        due = begun + self.policy.deadline
        self.look_around()
        answers: dict[str, Message] = {}
        refusals: dict[str, str] = {}
        absences = {site: "is not connected" for site in requested if site not in self.connected}
        nodes = {site: node for node, site in self._nodes.items()}
        here = {site: message for site, message in requested.items() if site not in absences}
        gone = self._send(
            [PendingRequest(nodes[site], site, *message, due) for site, message in here.items()]
        )
        absences |= dict.fromkeys(gone, "has left")
        while waiting := set(requested) - set(answers) - set(refusals) - set(absences):
            over = time.monotonic() > due  # what has come in by now still counts
            for request, answer in self._collect(largest):
                if request.site not in waiting or request.about is not requested[request.site][0]:
                    if isinstance(answer, Message):
                        self.troubles[request.site] = (
                            f"answered the letter of round {request.about['round'] + 1} too late"
                        )
                    continue
                if isinstance(answer, str):
                    refusals[request.site] = answer
                else:
                    answers[request.site] = answer
            waiting -= set(answers) | set(refusals)
            if enough is not None and len(answers) >= enough:
                absences |= dict.fromkeys(
                    waiting, f"was not waited for: {enough} answers are enough"
                )
            elif over:
                absences |= dict.fromkeys(
                    waiting, f"did not answer within {self.policy.deadline:g} s"
                )
            elif waiting:
                time.sleep(pause(time.monotonic() - begun))
                self.look_around()
        return answers, refusals, absences

    def gather(self, count: int) -> None:
        """Before the first round: wait until so many sites are connected."""
        self.need(lambda: len(self.connected) >= count, f"{count} sites")

    def await_some(self, sites: Iterable[str]) -> None:
        """Before a round: wait until enough of these sites are connected to make it worth while."""
        wanted = set(sites)
        least = min(self.policy.minimum, len(wanted))
        self.need(
            lambda: len(self.connected & wanted) >= least, f"{least} of {', '.join(sorted(wanted))}"
        )

    def hope_for(self, sites: Iterable[str]) -> None:
        """After a restart: give all these sites a moment to come back, so that the run goes on as
        it would have.
        """
        self._wait(lambda: set(sites) <= self.connected, self.policy.grace)

    def need(self, enough: Callable[[], bool], whom: str) -> None:
        """Wait for sites without which the run cannot go on."""
        if not self._wait(enough, self.policy.patience):
            here = ", ".join(sorted(self.connected)) or "none"
            raise EngineFailure(
                f"{whom} were not connected within {self.policy.patience:g} s (connected: {here}); "
                "start them and continue the run."
            )

    def _wait(self, enough: Callable[[], bool], seconds: float) -> bool:
        begun = time.monotonic()
        while not enough():
            if (waited := time.monotonic() - begun) > seconds:
                return False
            time.sleep(pause(waited))
            self.look_around()
            list(self._collect(messages.HEADER))
        return True

    def _collect(self, largest: int) -> Iterable[tuple[PendingRequest, Message | str]]:
        """The answers that have come in: letters, or what is wrong with them."""
        for message in self.grid.pull_messages(list(self._requests)) if self._requests else ():
            # Flower answers in the name of a dead node, so what counts is which letter it is the
            # answer to.
            request = self._requests.pop(message.metadata.reply_to_message_id, None)
            if request is None:
                self.troubles[f"node {message.metadata.src_node_id}"] = "answered twice"
                continue
            answer = self._open(message, request, largest)
            if not request.site:
                self._introduce(request, answer)
                continue
            yield request, answer

    def _open(self, message: FlowerMessage, request: PendingRequest, largest: int) -> Message | str:
        if message.has_error():
            return f"could not answer: {message.error.reason}"
        try:
            content = contents(message)
            self.received += len(content)
            answer = messages.read(content, largest)
            if "error" in answer.about:
                return f"answered: {answer.about['error']}"
            messages.expect(
                answer.about,
                **{key: request.about[key] for key in messages.REPEATED if key in request.about},
            )
            if request.site:
                messages.expect(answer.about, site=request.site)
        except UserError as problem:
            return f"sent an answer that {problem}"
        return answer

    def _introduce(self, request: PendingRequest, answer: Message | str) -> None:
        """A node has said who it is; a name that belongs to another key is refused."""
        if isinstance(answer, str):
            self.troubles[f"node {request.node}"] = answer
            return
        site = str(answer.about.get("site"))
        registered = next(
            (info.name for info in self.grid.get_nodes() if info.node_id == request.node), ""
        )
        if registered and registered != site:
            self.troubles[site] = f"is not let in: the key belongs to '{registered}'"
            site = ""
        for node in [node for node, name in self._nodes.items() if site and name == site]:
            self._nodes[node] = ""  # the site came back as another node
        self._nodes[request.node] = site  # a node without a name is not asked again
        if site:
            self.cards[site] = answer.about
