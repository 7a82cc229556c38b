"""One connection of a site to the SuperLink, from its activation to its end.

Flower has such a connection, too, but it ends the whole process: five seconds after the server has
refused it, and at once where a clock is wrong. This one raises errors.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Error, Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedhelix.core.errors import EngineFailure, UserError
from fedhelix.core.files import write_atomically
from fedhelix.deploy.logs import say
from fedhelix.deploy.packing import pack, unpack
from fedhelix.deploy.transport import PULL_RETRIES

POLL_SECONDS = 0.05  # between polls, each of which the SuperLink holds until there is a message
FIRST_WAIT, LONGEST_WAIT = 1.0, 10.0  # seconds before a request that nobody answered is repeated
AWAY = (httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.GATEWAY_TIMEOUT)

KeyPair = tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]


class Repeat:
    """Sends requests to a server, and repeats them for as long as nobody is there.

    `connected` is cleared meanwhile. Flower sends the objects of a message in several threads, of
    which one says that it waits.
    """

    def __init__(self, superlink: str, connected: threading.Event):
        self.superlink, self.connected = superlink, connected
        self._speaking = threading.Lock()

    def __call__(self, call: Callable[[Any], Any], request: Any) -> Any:
        """The answer to a request.

        A server that refuses it, or whose certificate is not the one that it should be, raises an
        httpx.HTTPError.
        """
        wait, speaks = FIRST_WAIT, False
        try:
            while True:
                try:
                    return call(request)
                except httpx.HTTPError as problem:
                    if not is_away(problem):
                        raise
                self.connected.clear()
                speaks = speaks or self._speaking.acquire(blocking=False)
                if speaks:
                    words = f"there is no connection to {self.superlink}"
                    say(f"{words}; the next attempt is in {wait:g} s", "warning")
                time.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT)
        finally:
            if speaks:
                self._speaking.release()


def is_away(problem: httpx.HTTPError) -> bool:
    """Whether nobody answered; a server may be there and refuse, or have another certificate."""
    if isinstance(problem, httpx.HTTPStatusError):
        return problem.response.status_code in AWAY
    words = ("certificate", "ssl", "tls")
    is_transport = isinstance(problem, httpx.TransportError)
    return is_transport and not any(word in str(problem).lower() for word in words)


@contextmanager
def activated(
    superlink: str, root: bytes, keys: KeyPair, node_file: Path, connected: threading.Event
) -> Iterator[Connection]:
    """A connection to the SuperLink; an httpx.HTTPError says why there is none.

    `node_file` holds the node's id: a process that was killed, or a connection that broke, has left
    one that counts as connected for another minute, and this key with it.
    """
    interceptors = (
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(*keys),
    )
    with FleetHttpClient.from_server_address(
        superlink, False, root, interceptors=interceptors
    ) as client:
        repeat = Repeat(superlink, connected)

        def activate(request: ActivateNodeRequest) -> Any:
            _deactivate(client, node_file)
            return client.ActivateNode(request)

        public = public_key_to_bytes(keys[1])
        request = ActivateNodeRequest(
            public_key=public, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
        )
        node = Node(node_id=repeat(activate, request).node_id)
        with suppress(OSError):  # a full disk
            write_atomically(node_file, str(node.node_id).encode())
        heartbeat = HeartbeatSender(partial(_is_known, client, node))
        heartbeat.start()
        try:
            yield Connection(client, node, repeat)
        finally:
            heartbeat.stop()
            _deactivate(client, node_file)


def _deactivate(client: FleetHttpClient, node_file: Path) -> None:
    with suppress(httpx.HTTPError, OSError, ValueError):
        client.DeactivateNode(DeactivateNodeRequest(node_id=int(node_file.read_text())))


def _is_known(client: FleetHttpClient, node: Node) -> bool:
    """Tell the SuperLink that the node is there; whether it has taken notice."""
    request = SendNodeHeartbeatRequest(node=node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
    try:
        return bool(client.SendNodeHeartbeat(request).success)
    except httpx.HTTPError:
        return False


class Connection:
    """Takes messages and sends answers.

    The request for messages is not repeated when it fails: the SuperLink would regard a message
    that got lost on its way as delivered. The connection ends, and when it is made anew, the server
    sends what has no answer again.
    """

    def __init__(self, client: FleetHttpClient, node: Node, repeat: Callable[..., Any]):
        self.client, self.node, self._repeat = client, node, repeat

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
        received = self.client.PullMessages(PullMessagesRequest(node=self.node))
        if not received.messages_list:
            return None
        run_id = received.messages_list[0].metadata.run_id
        tree = received.message_object_trees[0]
        pull, confirm = self.client.PullObject, self.client.ConfirmMessageReceived
        try:
            message = pull_and_inflate_object_from_tree(
                tree,
                make_pull_object_fn_protobuf(partial(self._ask, pull), self.node, run_id),
                make_confirm_message_received_fn_protobuf(
                    partial(self._ask, confirm), self.node, run_id
                ),
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
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with suppress(RunNotRunningException), no_object_id_recompute():
            self._send(reply, time.monotonic() - begun)

    def _send(self, reply: Message, seconds: float) -> None:
        """Send an answer: what it is, then the objects in it."""
        head = remove_content_from_message(reply) if reply.has_content() else reply
        request = PushMessagesRequest(
            node=self.node,
            messages_list=[message_to_proto(head)],
            message_object_trees=[get_object_tree(reply)],
            clientapp_runtime_list=[seconds],
        )
        wanted = self._ask(self.client.PushMessages, request)
        push = partial(self._ask, self.client.PushObject)
        push_objects(
            get_all_nested_objects(reply),
            make_push_object_fn_protobuf(push, self.node, reply.metadata.run_id, wanted.session_id),
            object_ids_to_push=set(wanted.objects_to_push),
        )

    def _ask(self, call: Callable[[Any], Any], request: Any) -> Any:
        """The answer to a request about a run, for as long as that goes on."""
        try:
            return self._repeat(call, request)
        except httpx.HTTPStatusError as problem:
            if problem.response.status_code == httpx.codes.FORBIDDEN:
                raise RunNotRunningException from None
            raise
