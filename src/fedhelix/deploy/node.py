"""A site's connection to the server: takes requests from Flower's SuperLink and sends answers.

It replaces `flower-supernode`, which starts a process for every message, polls every three
seconds, and runs code that comes with a run. This one runs only the fedhelix installed here.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Error, Message
from flwr.proto.fleet_pb2 import DeactivateNodeRequest, PullMessagesRequest
from flwr.proto.node_pb2 import Node as NodeNumber
from flwr.supercore.error import ApiErrorCode, FlowerError
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
from fedhelix.core.files import remove_leftovers, writable, write_atomically
from fedhelix.deploy.keys import KEY_IN_USE, read_private_key
from fedhelix.deploy.logs import say
from fedhelix.deploy.transport import PULL_RETRIES, pack, unpack

if sys.platform != "win32":
    import fcntl

RECONNECT_SECONDS = 3.0  # before a broken connection is made anew
POLL_SECONDS = 0.05  # between polls, each of which the SuperLink holds until there is a message
FAILED = "Connection attempt failed"  # so Flower begins a line about a request that it will repeat

KeyPair = tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]


def read_certificate(path: Path) -> bytes:
    """Read the certificate of the server's authority."""
    try:
        return path.read_bytes()
    except OSError as problem:
        raise UserError(
            f"the certificate '{path}' cannot be read ({problem.strerror}); it is the server's "
            "ca.pem."
        ) from None


@contextmanager
def only_process(folder: Path, name: str) -> Iterator[None]:
    """Refuse a second process of a site in the same folder: it would end the connection of the
    first. The system ends the lock with its process, however that dies.
    """
    writable(folder)
    with (folder / f"{name}.lock").open("ab") as file:
        try:
            if sys.platform != "win32":
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process runs the site {name} in '{folder}' already; stop that one first."
            ) from None
        yield


class RequestHandler(Protocol):
    """Whatever answers the requests, such as a `SiteProcess`."""

    def start(self) -> object:
        """Get ready: the site is connected."""

    def answer(self, content: bytes) -> bytes:
        """The answer to a request."""


def connect(
    superlink: str,
    certificate: Path,
    key: Path,
    handler: RequestHandler,
    node_file: Path,
    connected: threading.Event,
) -> None:
    """Answer a SuperLink's requests for ever, and reconnect whenever the connection breaks.

    `node_file` holds the node's id while it is connected. `connected` is set except while there is
    no connection, or while Flower repeats a request because nobody answers.
    """
    private = read_private_key(key)
    keys, root = (private, private.public_key()), read_certificate(certificate)
    remove_leftovers(node_file.parent, node_file.name)
    logging.getLogger("flwr").addFilter(partial(_noticed, superlink, connected))
    was_connected = False
    while True:
        deactivate(superlink, root, keys, node_file)
        try:
            with _activated(superlink, root, keys, key) as connection:
                was_connected = True
                write_atomically(node_file, str(connection.node_id).encode())
                say(f"connected to {superlink}")
                handler.start()
                try:
                    connection.serve(handler.answer, connected)
                finally:
                    connected.clear()
        except Refusal as refusal:
            if not (was_connected and refusal.may_pass):
                raise
        time.sleep(RECONNECT_SECONDS)


def _noticed(superlink: str, connected: threading.Event, record: logging.LogRecord) -> bool:
    """What Flower logs about a failed request, which it repeats for ever: nobody else hears of it.

    Its page about a failed connection is left out; one sentence says it, with the address.
    """
    if FAILED in str(record.msg):
        connected.clear()
        record.msg = record.msg.replace(FAILED, f"there is no connection to {superlink}")
    return not record.getMessage().startswith("Exit Code:")


class Refusal(UserError):
    """The server did not let this site in; it may do so later to a site that it knows."""

    def __init__(self, why: str, may_pass: bool):
        super().__init__(why)
        self.may_pass = may_pass


@contextmanager
def _activated(superlink: str, root: bytes, keys: KeyPair, key: Path) -> Iterator[Node]:
    """A connection to the SuperLink; raises a Refusal where there is none."""
    with ExitStack() as stack:
        try:
            functions = stack.enter_context(http_request_response(superlink, False, root, keys))
        except SystemExit as end:
            raise _refusal(end.__context__, superlink, key) from None
        client = stack.enter_context(_client(superlink, root, keys))
        yield Node(client, *functions)


def _refusal(problem: BaseException | None, superlink: str, key: Path) -> Refusal:
    """Why the server did not let a site in, and what to do."""
    if not isinstance(problem, httpx.HTTPStatusError):  # in the middle of a handshake, for instance
        return Refusal(f"there is no connection to {superlink}: {problem}.", may_pass=True)
    said = FlowerError.from_json(problem.response.text)
    in_use = said is not None and said.public_details == KEY_IN_USE
    if problem.response.status_code == httpx.codes.UNAUTHORIZED:
        why = "its signature is not valid; set the clocks of both machines"
    elif in_use:
        why = "another site is connected with it; stop that one, or wait a minute after a crash"
    elif said is not None and said.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
        why = f"it is not admitted; on the server, `fedhelix deploy admit {key.stem}` admits it"
    else:
        why = said.message if said else problem.response.text or str(problem)
    return Refusal(f"the server at {superlink} refuses the key '{key}': {why}.", may_pass=in_use)


def _client(superlink: str, root: bytes, keys: KeyPair) -> FleetHttpClient:
    """A client whose requests are signed with the site's key, and not repeated when they fail."""
    interceptors = (
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(*keys),
    )
    return FleetHttpClient.from_server_address(superlink, False, root, interceptors=interceptors)


def deactivate(superlink: str, root: bytes, keys: KeyPair, node_file: Path) -> None:
    """End the connection of a process that was killed, or of one that broke.

    Otherwise the SuperLink would refuse this key for another minute.
    """
    if not node_file.exists():
        return
    with suppress(httpx.HTTPError, ValueError), _client(superlink, root, keys) as client:
        client.DeactivateNode(DeactivateNodeRequest(node_id=int(node_file.read_text())))


class Node:
    """One connection, which Flower calls a SuperNode; its arguments are Flower's own functions.

    Only messages are taken with a client of our own, since Flower repeats a request that failed:
    the SuperLink would regard a message that got lost on its way as delivered. Here the connection
    ends, and when it is made anew, the server sends what has no answer again.
    """

    def __init__(
        self,
        client: FleetHttpClient,
        node_id: int,
        receive: Any,
        send: Any,
        get_run: Any,
        get_fab: Any,
        pull: Any,
        push: Any,
        confirm: Any,
    ):
        self.client, self.node_id = client, node_id
        self._send, self._confirm = send, confirm
        self._pull, self._push = pull, push

    def serve(self, answer: Callable[[bytes], bytes], connected: threading.Event) -> None:
        """Answer messages until the connection breaks."""
        while True:
            connected.set()
            message = self.receive()
            connected.set()  # whatever had to be repeated meanwhile
            if message is None:
                time.sleep(POLL_SECONDS)
            else:
                self.reply(message, answer)

    def receive(self) -> Message | None:
        """The next message with its content, if there is one."""
        try:
            request = PullMessagesRequest(node=NodeNumber(node_id=self.node_id))
            received = self.client.PullMessages(request)
            if not received.messages_list:
                return None
            run_id = received.messages_list[0].metadata.run_id
            tree = received.message_object_trees[0]
            message = pull_and_inflate_object_from_tree(
                tree,
                lambda object_id: self._pull(run_id, object_id),
                lambda object_id: self._confirm(run_id, object_id),
                return_type=Message,
                **PULL_RETRIES,
            )
        except RunNotRunningException:
            return None
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message

    def reply(self, message: Message, answer: Callable[[bytes], bytes]) -> None:
        """Answer a message; an answer for a run that is over is dropped."""
        begun = time.monotonic()
        try:
            reply = Message(pack(answer(unpack(message))), reply_to=message)
        except (UserError, EngineFailure) as problem:
            reply = Message(Error(code=0, reason=str(problem)), reply_to=message)
        run_id = message.metadata.run_id
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with suppress(RunNotRunningException), no_object_id_recompute():
            seconds = time.monotonic() - begun
            missing, session = self._send(reply, get_object_tree(reply), seconds)
            push_objects(
                get_all_nested_objects(reply),
                lambda object_id, content: self._push(run_id, session, object_id, content),
                object_ids_to_push=missing,
            )
