"""A site's connection to the server: takes letters from Flower's SuperLink, hands them to the
worker, sends answers.

It stands in for `flower-supernode`, which starts a new process for every message and looks for
messages every three seconds, and which runs code that comes with a run. This one runs nothing but
fedhelix as it is installed here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Error, Message
from flwr.proto.fleet_pb2 import DeactivateNodeRequest
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import (
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.fleet_http_connection import http_request_response
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedhelix.core.errors import EngineFailure, UserError
from fedhelix.core.files import write_atomically
from fedhelix.deploy.transport import EARLY, contents, envelope

AGAIN = 3.0  # seconds before a broken connection is made anew
# seconds between questions for letters, each of which the SuperLink holds until there are some
BREATH = 0.05

Keys = tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]


def read_key(path: Path) -> Keys:
    """A site's private key, and the public one that goes with it."""
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError) as problem:
        raise UserError(f"'{path}' cannot be read as a private key: {problem}.") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"'{path}' is no ECDSA key; make one with `fedhelix deploy keys`.")
    return key, key.public_key()


class Answerer(Protocol):
    """Whoever answers the letters."""

    def start(self) -> object:
        """Get ready: the site is connected."""

    def answer(self, content: bytes) -> bytes:
        """The answer to a letter."""


def connect(superlink: str, certificate: Path, key: Path, answerer: Answerer, memory: Path) -> None:
    """Answer letters from a SuperLink, for ever; when the connection breaks, make a new one."""
    keys, root = read_key(key), certificate.read_bytes()
    sign_off(superlink, root, keys, memory)
    while True:
        with http_request_response(superlink, False, root, keys) as connection:
            write_atomically(memory, str(connection[0]).encode())
            print(f"fedhelix: connected to {superlink}.", file=sys.stderr, flush=True)
            answerer.start()
            Node(*connection).serve(answerer.answer)
        time.sleep(AGAIN)


def sign_off(superlink: str, root: bytes, keys: Keys, memory: Path) -> None:
    """End the connection of a process that was killed; else the SuperLink lets nobody in for
    another minute.
    """
    if not memory.exists():
        return
    checks = (
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(*keys),
    )
    with (
        suppress(httpx.HTTPError, ValueError),
        FleetHttpClient.from_server_address(superlink, False, root, interceptors=checks) as client,
    ):
        client.DeactivateNode(DeactivateNodeRequest(node_id=int(memory.read_text())))


class Node:
    """One connection: what Flower calls a SuperNode."""

    def __init__(
        self,
        number: int,
        receive: Any,
        send: Any,
        get_run: Any,
        get_fab: Any,
        pull: Any,
        push: Any,
        confirm: Any,
    ):
        self.number = number
        self._receive, self._send, self._pull, self._push, self._confirm = (
            receive,
            send,
            pull,
            push,
            confirm,
        )

    def serve(self, answer: Callable[[bytes], bytes]) -> None:
        """Answer letters until the connection breaks."""
        while True:
            if (message := self.receive()) is None:
                time.sleep(BREATH)
            else:
                self.reply(message, answer)

    def receive(self) -> Message | None:
        """The next message with its content, if there is one."""
        try:
            if (received := self._receive()) is None:
                return None
            run, tree = received[0].metadata.run_id, received[1]
            message = pull_and_inflate_object_from_tree(
                tree,
                lambda it: self._pull(run, it),
                lambda it: self._confirm(run, it),
                return_type=Message,
                **EARLY,
            )
        except RunNotRunningException:
            return None
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message

    def reply(self, message: Message, answer: Callable[[bytes], bytes]) -> None:
        """Answer a message; an answer for a run that is over is dropped."""
        begun = time.monotonic()
        try:
            reply = Message(envelope(answer(contents(message))), reply_to=message)
        except (UserError, EngineFailure) as problem:
            reply = Message(Error(code=0, reason=str(problem)), reply_to=message)
        run = message.metadata.run_id
        reply.metadata.__dict__["_message_id"] = reply.object_id
        try:
            with no_object_id_recompute():
                wanted, session = self._send(
                    reply, get_object_tree(reply), time.monotonic() - begun
                )
                push_objects(
                    get_all_nested_objects(reply),
                    lambda it, content: self._push(run, session, it, content),
                    object_ids_to_push=wanted,
                )
        except RunNotRunningException:
            pass
