"""Answers of sites, taken from the SuperLink as soon as they are whole.

A site announces an answer, then sends the objects in it. Flower's grid waits for these as soon as
the answer is announced; for a site that was stopped in between that takes three minutes, in which
nobody else is served. Here such an answer is put aside, and everything else goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Error, Message, Metadata
from flwr.app.message import make_message
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    inflate_object_from_contents,
    pull_objects,
)
from flwr.superlink.grid.http_grid import HttpGrid

from fedhelix.deploy.schema import clipped
from fedhelix.deploy.transport import PULL_RETRIES

WAIT_SECONDS = 0.5  # at each look, for the rest of answers: most arrive at once


@dataclass
class Announced:
    """An answer whose objects have not all arrived."""

    object_ids: list[str]  # the last is the message's own
    contents: dict[str, bytes] = field(default_factory=dict)
    is_gone: bool = False  # the SuperLink does not wait for the rest any more


class WholeReplies:
    """Pulls answers for Flower's grid; each request has at most one."""

    def __init__(self, grid: HttpGrid):
        self.grid, self._announced = grid, dict[str, Announced]()  # by the request's id

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The whole answers to these requests; what was put aside for others is forgotten."""
        wanted, ready = set(message_ids), list[Message]()
        self._announced = {key: one for key, one in self._announced.items() if key in wanted}
        if new := wanted - self._announced.keys():
            found = self._client.PullMessages(PullAppMessagesRequest(message_ids=new))
            heads = zip(found.messages_list, found.message_object_trees, strict=True)
            for head, tree in heads:
                ids = [node.object_id for node in iterate_object_tree(tree)]
                self._announced[head.metadata.reply_to_message_id] = Announced(ids)
        until = time.monotonic() + WAIT_SECONDS
        for key, one in list(self._announced.items()):
            if message := self._whole(key, one, until - time.monotonic()):
                del self._announced[key]
                ready.append(message)
        return ready

    @property
    def _client(self) -> Any:
        return self.grid._runtime_client

    def _whole(self, key: str, one: Announced, seconds: float) -> Message | None:
        """An answer whose objects arrive within some seconds; an error if they never will.

        Objects that make no message cost their sender's answer, not those of all others.
        """
        run_id, node = self.grid.run.run_id, self.grid.node
        pull = make_pull_object_fn_protobuf(self._client.PullObject, node, run_id)

        def keep(object_id: str) -> bytes:
            try:
                one.contents[object_id] = pull(object_id)
            except ObjectPullError:
                one.is_gone = True
                raise
            return b""

        missing = [object_id for object_id in one.object_ids if object_id not in one.contents]
        try:
            pull_objects(missing, keep, max_time=seconds, **PULL_RETRIES)
        except ObjectPullError as problem:
            return self._unusable(key, str(problem)) if one.is_gone else None
        message_id = one.object_ids[-1]
        try:
            message = inflate_object_from_contents(message_id, one.contents)
        except Exception as problem:
            return self._unusable(key, clipped(repr(problem)))
        if not isinstance(message, Message):
            return self._unusable(key, f"it is no message, but a {type(message).__name__}")
        self._client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(node=node, run_id=run_id, message_object_id=message_id)
        )
        message.metadata.__dict__["_message_id"] = message_id
        return message

    def _unusable(self, key: str, why: str) -> Message:
        """What Flower says in place of an answer that it cannot put together."""
        metadata = Metadata(
            run_id=self.grid.run.run_id,
            message_id="",
            src_node_id=self.grid.node.node_id,
            dst_node_id=self.grid.node.node_id,
            reply_to_message_id=key,
            group_id="",
            created_at=time.time(),
            ttl=0,
            message_type=SYSTEM_MESSAGE_TYPE,
        )
        reason = f"the answer did not arrive as a whole: {why}"
        return make_message(metadata, error=Error(ErrorCode.MESSAGE_UNAVAILABLE, reason))
