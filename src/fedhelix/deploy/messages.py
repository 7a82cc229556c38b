"""The messages between the server and its sites.

A message is one safetensors file: a JSON header and a tree of tensors. Reading one never executes
code, whoever wrote it. Invalid content is refused with a sentence that says what is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fedhelix.core.errors import UserError
from fedhelix.core.tree import State, Tree, decode, encode, flatten, payload_bytes
from fedhelix.federation.uploads import LARGEST

# Names of sites and experiments; they are safe as file names too.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
# Header fields that an answer repeats from its request.
REPEATED = ("kind", "experiment", "round", "client")
HEADER_BYTES = 1 << 20  # allowed for names and header
MAX_DEPTH = 8  # levels of a tree


class Message(NamedTuple):
    """A header of texts and numbers, and a tree of tensors."""

    header: dict[str, Any]
    body: Tree


def write(header: Mapping[str, Any], body: Tree | None = None) -> bytes:
    """Serialise a message."""
    return encode({"header": json.dumps(dict(header)), "body": body or {}})


def read(content: bytes, max_bytes: int | None = None) -> Message:
    """Parse a message; larger ones than `max_bytes` are refused unread."""
    if max_bytes is not None and len(content) > max_bytes:
        raise UserError(f"has {len(content):,} bytes, and {max_bytes:,} are allowed.")
    try:
        tree = decode(content)
        header, body = json.loads(tree["header"]), tree.get("body", {})
        depth = max((path.count("/") for path in flatten({"body": body})), default=0)
    except (UserError, ValueError, KeyError, TypeError, RecursionError) as problem:
        raise UserError(f"is no message: {problem}") from None
    if not isinstance(header, dict) or not isinstance(body, dict) or depth > MAX_DEPTH:
        raise UserError("is no message: it lacks its parts.")
    return Message(header, body)


def max_message_bytes(initial: State) -> int:
    """How large an answer may be, given the initial model."""
    return LARGEST * payload_bytes(initial) + HEADER_BYTES


def check_tree(tree: Tree, initial: State) -> None:
    """Raise UserError for a tree that no method could have sent.

    Shapes and finite values are checked later, with the other uploads of the round.
    """
    for path, value in flatten(tree).items():
        if not isinstance(value, Tensor | int | float | None):
            raise UserError(f"holds a {type(value).__name__} at '{path}'.")
    model = tree.get("model", {})
    if not isinstance(model, dict):
        raise UserError("holds something else than a model under 'model'.")
    for name, value in model.items():
        if not isinstance(value, Tensor):
            raise UserError(f"holds no tensor for '{name}'.")
        if name in initial and value.dtype != initial[name].dtype:
            raise UserError(f"has {value.dtype} for '{name}' instead of {initial[name].dtype}.")


def expect(header: Mapping[str, Any], **wanted: Any) -> None:
    """Raise UserError unless the header fields have these values."""
    for key, value in wanted.items():
        if header.get(key) != value:
            raise UserError(f"is about {key} {header.get(key)!r} instead of {value!r}.")


def name(header: Mapping[str, Any], key: str) -> str:
    """A short text from a header."""
    value = header.get(key)
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise UserError(f"has {value!r} for {key}, which must be a name.")
    return value


def number(header: Mapping[str, Any], key: str, low: float = float("-inf")) -> float:
    """A number from a header; NaN is allowed."""
    value = header.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < low:
        raise UserError(f"has {value!r} for {key}, which must be a number.")
    return value
