"""How our messages travel inside of Flower's."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.app import Message as FlowerMessage

from fedhelix.core.errors import UserError

RECORD = "message"  # key of our content in a Flower message
INLINE_BYTES = 1 << 20  # larger messages travel as an array, which Flower cuts into pieces


def pack(content: bytes) -> RecordDict:
    """Wrap a serialised message for Flower."""
    if len(content) <= INLINE_BYTES:
        return RecordDict({RECORD: ConfigRecord({RECORD: content})})
    array = Array("uint8", (len(content),), "fedhelix.message", content)
    return RecordDict({RECORD: ArrayRecord({RECORD: array})})


def unpack(message: FlowerMessage) -> bytes:
    """The serialised message inside a Flower message."""
    try:
        record = message.content[RECORD][RECORD]
    except (KeyError, TypeError, AttributeError, ValueError):
        record = None
    content = record.data if isinstance(record, Array) else record
    if not isinstance(content, bytes):
        raise UserError("is no message: the Flower message holds something else.")
    return content
