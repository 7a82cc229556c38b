"""Requests to sites, and what came of them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flwr.app import Message as FlowerMessage
from flwr.common.constant import ErrorCode

from fedhelix.deploy.audit_log import AuditLog, fingerprint
from fedhelix.deploy.messages import Message
from fedhelix.deploy.packing import pack
from fedhelix.deploy.schema import clipped

MESSAGE_TYPE = "query"  # of every Flower message; the kind of request is in our own header
EXPIRY_SECONDS = 60.0  # after its deadline Flower drops a message
WORK = ("train", "masking_keys")  # requests that a site refuses which takes no part in a round
PAUSE_SECONDS = 60.0  # until a node is asked again that has not said which site it is


@dataclass
class PendingRequest:
    """A request without an answer yet."""

    node: int
    site: str  # empty while the node has not been identified
    header: Mapping[str, Any]
    content: bytes
    due: float
    activated: str = ""  # when the node was last activated; after a restart the request is lost
    resent: bool = False  # because its answer was incomplete
    over: bool = False  # nobody waits for the answer any more
    received: dict[str, Any] = field(default_factory=dict)  # size and hash of the answer
    pause: float = PAUSE_SECONDS  # until a node that refuses is asked again; it may say another one

    def message(self) -> FlowerMessage:
        """As Flower sends it; a site that comes back long after the deadline need not see it."""
        ttl = max(self.due - time.monotonic(), 0.0) + EXPIRY_SECONDS
        round = str(self.header.get("round", ""))
        return FlowerMessage(pack(self.content), self.node, MESSAGE_TYPE, ttl=ttl, group_id=round)

    def is_lost(self, reply: FlowerMessage) -> bool:
        """Whether Flower replies that the node went away before it had answered.

        That an answer is incomplete counts as such once; the next time it is the site's fault.
        """
        code = reply.error.code if reply.has_error() else None
        if code != ErrorCode.MESSAGE_UNAVAILABLE:
            return code == ErrorCode.NODE_UNAVAILABLE
        first, self.resent = not self.resent, True
        return first


class Request(NamedTuple):
    """A request to a site: its header, and the whole message as bytes."""

    header: Mapping[str, Any]
    content: bytes


class Replies(NamedTuple):
    """What came of a set of requests, by site."""

    answers: dict[str, Message]
    refusals: dict[str, str]  # the site answered, but not with what was requested
    absences: dict[str, str]  # the site did not answer
    received: dict[str, dict[str, Any]]  # size and hash of each answer

    def outstanding(self, requests: Mapping[str, Request]) -> set[str]:
        """The sites whose reply is still missing."""
        return set(requests) - set(self.answers) - set(self.refusals) - set(self.absences)


class Refusals:
    """The sites whose policies have refused to work in the run: until they are started again, or
    their hours begin.
    """

    def __init__(self) -> None:
        self._said: dict[str, tuple[str, float]] = {}  # the words, and until when they hold

    def note(self, site: str, kind: str, header: Mapping[str, Any]) -> None:
        """What a site answers to a request."""
        if kind not in WORK:
            return
        self.forget(site)
        if "error" in header and header.get("policy"):
            until = time.monotonic() + (header.get("opens_in") or math.inf)
            self._said[site] = f"answered: {clipped(header['error'])}", until

    def forget(self, site: str) -> None:
        """The site may have another policy now."""
        self._said.pop(site, None)

    def now(self) -> dict[str, str]:
        """Who refuses now, and with which words."""
        now = time.monotonic()
        return {site: words for site, (words, until) in self._said.items() if until > now}

    def lasting(self) -> dict[str, str]:
        """Who refuses until its site is started again."""
        return {site: words for site, (words, until) in self._said.items() if until == math.inf}


class Exchanges:
    """What the server's audit log says of requests and answers.

    Sites describe themselves before the run's folder is locked; that waits for the log.
    """

    def __init__(self) -> None:
        self.log: AuditLog | None = None
        self._waiting: list[dict[str, Any]] = []

    def add(
        self,
        requests: Mapping[str, Request | PendingRequest],
        received: Mapping[str, Mapping[str, Any]],
        refused: Mapping[str, str],
    ) -> None:
        """Log what went to which site, and what came back."""
        if requests:
            header = next(iter(requests.values())).header
            asked = {site: fingerprint(request.content) for site, request in requests.items()}
            line = {
                "kind": header["kind"],
                "round": header.get("round"),
                "asked": {site: what["sha256"] for site, what in asked.items()},
                "received": {site: what for site, what in received.items() if what},
                "refused": dict(refused),
                "bytes": sum(what["bytes"] for what in asked.values()),
            }
            self._waiting.append(line)
        while self.log is not None and self._waiting:
            self.log.append(self._waiting.pop(0))
