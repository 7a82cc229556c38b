"""Requests to sites and their answers, through Flower's grid.

A site that does not answer is recorded with the reason; it does not stop the round. One that is
away for less than the grace period gets its request when it is back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid

from fedhelix.core.errors import EngineFailure, UserError
from fedhelix.deploy import messages
from fedhelix.deploy.audit_log import fingerprint
from fedhelix.deploy.messages import Message
from fedhelix.deploy.packing import unpack
from fedhelix.deploy.policy import GO_ON, RoundPolicy, also
from fedhelix.deploy.registry import SiteDescription
from fedhelix.deploy.requests import Exchanges, PendingRequest, Refusals, Replies, Request
from fedhelix.deploy.schema import clipped
from fedhelix.deploy.spending import Spending
from fedhelix.deploy.waiting import Waiting, poll_interval

REFRESH_SECONDS = 1.0  # between updates of who is connected
WORD_SECONDS = 5.0  # until the run says whom it waits for
PULL_RETRIES: dict[str, Any] = {"initial_backoff": 0.05, "backoff_cap": 1.0}  # seconds
DESCRIBE = {"kind": "describe"}  # the request that identifies a new node


@dataclass
class Transport:
    """Knows which node is which site, sends requests and collects answers."""

    grid: Grid
    policy: RoundPolicy
    descriptions: dict[str, SiteDescription] = field(default_factory=dict)  # by site
    sent: int = 0  # bytes since the last report
    reached: set[str] = field(default_factory=set)  # sites to which the last request went
    received: int = 0
    dropped: dict[str, str] = field(default_factory=dict)  # whose answer was dropped, and why
    spending: Spending = field(default_factory=Spending)
    # Nodes that are no sites of the run: who they are, and why.
    left_out: dict[int, tuple[str, str]] = field(default_factory=dict)
    # What is wrong with the description of a site that comes later, if anything.
    unfit: Callable[[SiteDescription], str | None] = lambda description: None
    exchanges: Exchanges = field(default_factory=Exchanges)
    refusals: Refusals = field(default_factory=Refusals)
    waiting: Waiting = field(default_factory=Waiting)
    _nodes: dict[int, str] = field(default_factory=dict)  # connected nodes and their sites
    _activated: dict[int, str] = field(default_factory=dict)
    _ask_again: dict[int, float] = field(default_factory=dict)  # when to, by node
    _pending: dict[str, PendingRequest] = field(default_factory=dict)  # by Flower's message id
    _held: list[PendingRequest] = field(default_factory=list)  # until their sites are connected
    _seen: dict[str, float] = field(default_factory=dict)  # when a site was last connected
    _refreshed: float = 0.0

    @property
    def connected(self) -> set[str]:
        """The sites that are connected now."""
        return {site for site in self._nodes.values() if site}

    def refresh(self) -> None:
        """Identify new nodes, and send requests that a restarted site has lost or has not got.

        A node that was activated again is new: its site may have been started with other data.
        """
        if time.monotonic() - self._refreshed < REFRESH_SECONDS:
            return
        self._refreshed = time.monotonic()
        before, nodes = self._activated, self.grid.get_nodes()
        self._activated = {info.node_id: info.last_activated_at for info in nodes}
        here = {site for node, site in self._nodes.items() if site and node in self._activated}
        self._seen |= dict.fromkeys(here, self._refreshed)
        same = {node for node, when in self._activated.items() if before.get(node) == when}
        self._nodes = {node: site for node, site in self._nodes.items() if node in same}
        self.left_out = {node: who for node, who in self.left_out.items() if node in same}
        self._held += self._take_lost()
        identifying = {request.node for request in self._pending.values() if not request.site}
        resting = {node for node in same if self._ask_again.get(node, 0.0) > self._refreshed}
        due, content = self._refreshed + self.policy.deadline, messages.write(DESCRIBE)
        new = sorted(set(self._activated) - set(self._nodes) - identifying - resting)
        requests = [PendingRequest(node, "", DESCRIBE, content, due) for node in new]
        self._send(requests + self._take_held())

    def _take_lost(self) -> list[PendingRequest]:
        """Remove requests whose node has gone or was activated again; return this round's."""
        lost = [
            key
            for key, request in self._pending.items()
            if request.activated != self._activated.get(request.node) and not request.over
        ]
        return [request for key in lost if (request := self._pending.pop(key)).site]

    def _take_held(self) -> list[PendingRequest]:
        """Remove and return requests whose sites are connected."""
        nodes = {site: node for node, site in self._nodes.items()}
        ready = [request for request in self._held if request.site in nodes]
        self._held = [request for request in self._held if request.site not in nodes]
        for request in ready:
            request.node = nodes[request.site]
        return ready

    def _send(self, requests: Sequence[PendingRequest]) -> None:
        """Send requests; those to nodes that Flower does not know any more are held."""
        for request in requests:
            request.activated = self._activated.get(request.node, "")
        outgoing = [request.message() for request in requests]
        keys = list(self.grid.push_messages(outgoing)) if outgoing else []
        sent = list(zip(keys, requests, strict=True))
        self.sent += sum(len(request.content) for key, request in sent if key)
        self._pending |= {key: request for key, request in sent if key}
        self.reached |= {request.site for key, request in sent if key and request.site}
        self._held += [request for key, request in sent if request.site and not key]

    def request(
        self, requests: Mapping[str, Request], max_bytes: int, enough: int | None = None
    ) -> Replies:
        """Send each site its request and collect what comes back.

        It ends when all sites have answered, when `enough` have, or at the deadline. Sites that
        are not connected are waited for if they were within the grace period.
        """
        begun = time.monotonic()
        due = begun + self.policy.deadline
        self.refresh()
        replies = Replies({}, {}, {}, {})
        self.reached = set()
        self._held = [PendingRequest(0, site, *request, due) for site, request in requests.items()]
        self._send(self._take_held())
        while replies.outstanding(requests):
            overdue = time.monotonic() > due  # what has come in by now still counts
            self._sort_replies(requests, max_bytes, replies)
            self.refresh()
            replies.absences.update(self._give_up_held())
            waiting = replies.outstanding(requests)
            if enough is not None and len(replies.answers) >= enough:
                why = "was not waited for: the round had enough answers"
                replies.absences.update(dict.fromkeys(waiting, why))
            elif overdue:
                why = f"did not answer within {self.policy.deadline:g} s"
                replies.absences.update(dict.fromkeys(waiting, why))
            elif waiting:
                time.sleep(poll_interval(time.monotonic() - begun))
        self._end_round()
        self.exchanges.add(requests, replies.received, {**replies.refusals, **replies.absences})
        return replies

    def _end_round(self) -> None:
        """Send nothing of this round any more: a site that works on it again would go back."""
        self._held = []
        for request in self._pending.values():
            request.over = bool(request.site)

    def _sort_replies(
        self, requests: Mapping[str, Request], max_bytes: int, replies: Replies
    ) -> None:
        """File what has come in under answers or refusals; answers to older requests are late."""
        waiting = replies.outstanding(requests)
        for request, answer in self._pull(max_bytes):
            site = request.site
            if site not in waiting or request.header is not requests[site].header:
                if isinstance(answer, Message):
                    round = request.header["round"] + 1
                    self.dropped[site] = f"answered the request of round {round} too late"
            elif answer is None:
                self._held.append(request)
            else:
                replies.received[site] = request.received
                if isinstance(answer, str):
                    replies.refusals[site] = answer
                else:
                    replies.answers[site] = answer

    def _give_up_held(self) -> dict[str, str]:
        """Drop the requests to sites that are away for longer than the grace period, and why."""
        gone = {one.site for one in self._held if not self.may_return(one.site)}
        self._held = [request for request in self._held if request.site not in gone]
        reasons = dict(self.left_out.values())
        return {site: reasons.get(site, "is not connected") for site in gone}

    def may_return(self, site: str) -> bool:
        """Whether a site was connected within the grace period."""
        return self._seen.get(site, -math.inf) >= time.monotonic() - self.policy.grace

    def require(self, condition: Callable[[], bool], who: str) -> None:
        """Wait for sites without which the run cannot go on."""
        if not self.wait(condition, self.policy.patience, lambda: who):
            raise EngineFailure(
                f"waited {self.policy.patience:g} s for {who} ({self._here()}); start what is "
                f"missing and {GO_ON}."
            )

    def _here(self) -> str:
        """Who is connected, who was left out, and who refuses to work."""
        here = ", ".join(sorted(self.connected)) or "none"
        return f"connected: {here}{also([*self.left_out.values(), *self.refusals.now().items()])}"

    def wait(self, condition: Callable[[], bool], seconds: float, who: Callable[[], str]) -> bool:
        """Wait so many seconds at most, and say for whom; whether the condition holds."""
        begun = time.monotonic()
        try:
            while not condition():
                if (waited := time.monotonic() - begun) > seconds:
                    return False
                if waited > WORD_SECONDS:
                    self.waiting.say(f"waits at most {seconds:g} s for {who()} ({self._here()})")
                time.sleep(poll_interval(waited))
                self.refresh()
                list(self._pull(messages.HEADER_BYTES))
                self._give_up_identifying()
            return True
        finally:
            self.waiting.end()

    def _give_up_identifying(self) -> None:
        """Leave out the nodes that have not said in time which sites they are."""
        for key, request in list(self._pending.items()):
            if not request.site and request.due < time.monotonic():
                del self._pending[key]
                who = self._admitted(request.node) or f"node {request.node}"
                self._leave_out(request.node, who, "did not say which site it is")

    def _admitted(self, node: int) -> str:
        """The name under which a node's key was admitted."""
        return next((i.name for i in self.grid.get_nodes() if i.node_id == node), "")

    def _leave_out(self, node: int, who: str, why: str) -> None:
        """Go on without a node; the next record says so."""
        self.left_out[node], self.dropped[who] = (who, why), why

    def _tell(self, node: int, site: str, why: str) -> None:
        """Tell a site why the run goes on without it; nobody waits for an answer."""
        header = {**DESCRIBE, "left_out": why}
        notice = PendingRequest(node, site, header, messages.write(header), time.monotonic())
        self.grid.push_messages([notice.message()])
        self.sent += len(notice.content)
        self.exchanges.add({site: notice}, {}, {})

    def turn_away(self, site: str, why: str) -> None:
        """Leave out a site that is connected."""
        self._seen.pop(site, None)
        for node in [node for node, name in self._nodes.items() if name == site]:
            self._nodes[node] = ""
            self._leave_out(node, site, why)
            self._tell(node, site, why)

    def _pull(self, max_bytes: int) -> Iterator[tuple[PendingRequest, Message | str | None]]:
        """The replies that have come in: answers, what is wrong with them, or None if lost."""
        for message in self.grid.pull_messages(list(self._pending)) if self._pending else ():
            # Flower answers in the name of a dead node, so only the request's id identifies it.
            request = self._pending.pop(message.metadata.reply_to_message_id, None)
            if request is None:
                self.dropped[f"node {message.metadata.src_node_id}"] = "answered twice"
                continue
            answer = None if request.is_lost(message) else self._read(message, request, max_bytes)
            if request.site:
                yield request, answer
            elif answer is not None:  # else it is asked again
                self._identify(request, answer)

    def _read(
        self, message: FlowerMessage, request: PendingRequest, max_bytes: int
    ) -> Message | str:
        """A site's answer, or why there is none: whatever it sent, it does not stop the round."""
        try:
            if message.has_error():
                return f"could not answer: {clipped(message.error.reason)}"
            content = unpack(message)
            self.received += len(content)
            request.received = fingerprint(content)
            answer = messages.read_answer(content, request.header["kind"], max_bytes)
            if request.site:
                self.spending.read(request.site, answer.header)  # refusals have it, too
            if request.site and not request.over:
                self.refusals.note(request.site, request.header["kind"], answer.header)
            if "error" in answer.header:
                request.pause = answer.header.get("opens_in") or request.pause
                return f"answered: {clipped(answer.header['error'])}"
            wanted = {key: request.header.get(key) for key in messages.REPEATED}
            wanted |= {"site": request.site} if request.site else {}
            messages.expect(answer.header, **wanted)
        except UserError as problem:
            return f"sent an answer that {problem}"
        except Exception as problem:
            return f"sent an answer that cannot be read: {clipped(repr(problem))}"
        return answer

    def _identify(self, request: PendingRequest, answer: Message | str) -> None:
        """Store which site a node is; a name that belongs to another key is refused."""
        admitted = self._admitted(request.node)
        if isinstance(answer, str):
            who = admitted or f"node {request.node}"
            self.exchanges.add({who: request}, {who: request.received}, {who: answer})
            self._leave_out(request.node, who, answer)
            self._ask_again[request.node] = time.monotonic() + request.pause
            return
        site = answer.header["site"]
        owner = admitted or site
        why = self.unfit(answer.header)
        if owner != site:
            why = f"is not let in as '{site}': the key belongs to '{owner}'"
        refused = {owner: why} if why else {}
        self.exchanges.add({owner: request}, {owner: request.received}, refused)
        if why:
            self._nodes[request.node] = ""  # it is not identified again until it is started again
            self._leave_out(request.node, owner, why)
            self._tell(request.node, owner, why)
            self._seen.pop(owner, None)
            return
        for node in [node for node, name in self._nodes.items() if name == site]:
            self._nodes[node] = ""  # the site came back as another node
        self._nodes[request.node] = site
        self._seen[site] = time.monotonic()
        self.refusals.forget(site)
        self.left_out.pop(request.node, None)
        self.descriptions[site] = answer.header
