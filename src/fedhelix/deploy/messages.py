"""The messages between the server and its sites.

A message is one safetensors file: a JSON header and a tree of tensors. Reading one never executes
code, whoever wrote it. Invalid content is refused with a sentence that says what is wrong; what
a header may hold is in `schema.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fedhelix.core.errors import UserError
from fedhelix.core.tree import State, Tree, decode, encode, flatten, payload_bytes
from fedhelix.deploy import schema
from fedhelix.federation.uploads import LARGEST

# Header fields that an answer repeats from its request.
REPEATED = ("kind", "experiment", "round", "client")
HEADER_BYTES = 1 << 20  # allowed for names and header
MAX_DEPTH = 8  # levels of a tree
CHECK_SAMPLES = "check that the samples in --data have the shape and the classes of the run's"


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
        flat = flatten({"body": body})
    except (UserError, ValueError, KeyError, TypeError, RecursionError) as problem:
        raise UserError(f"is no message: {schema.clipped(problem)}") from None
    depth = max((path.count("/") for path in flat), default=0)
    if not isinstance(header, dict) or not isinstance(body, dict) or depth > MAX_DEPTH:
        raise UserError("is no message: it lacks its parts.")
    for path, value in flat.items():
        if unfit := _unfit(value):
            raise UserError(f"holds {unfit} at '{schema.clipped(path.removeprefix('body/'))}'.")
    return Message(header, body)


def _unfit(value: object) -> str | None:
    """What is wrong with a value as part of a tree."""
    if isinstance(value, Tensor):
        return None if str(value.dtype) in schema.DTYPES else f"a tensor of {value.dtype}"
    if value is None or isinstance(value, bool) or schema.is_real(value):
        return None
    large = isinstance(value, int | float)
    return "a number that is too large" if large else f"a {type(value).__name__}"


def read_request(content: bytes) -> Message:
    """Parse a request to a site."""
    message = read(content)
    kind = message.header.get("kind")
    if kind not in schema.KINDS:
        raise UserError(
            f"there is no request {schema.clipped(repr(kind))}; is the server's fedhelix newer "
            "than the site's?"
        )
    if kind != "describe":
        schema.check(message.header, schema.REQUEST)
    if not all(isinstance(part, dict) for part in message.body.values()):
        raise UserError("the message's parts are no trees.")
    return message


def read_answer(content: bytes, kind: str, max_bytes: int | None = None) -> Message:
    """Parse a site's answer to a request of a kind; its header may be an error's instead."""
    message = read(content, max_bytes)
    failed = "error" in message.header
    schema.check(message.header, schema.ERROR if failed else schema.ANSWERS[kind])
    if kind == "describe" and "shape" in message.header:
        schema.check(message.header, schema.OWN_DATA)
    return message


def method_name(header: Mapping[str, Any]) -> str | None:
    """Which method a request is about, as far as it says so."""
    try:
        return str(json.loads(header["spec"])["method"]["name"])
    except (KeyError, ValueError, TypeError):
        return None


def max_message_bytes(initial: State) -> int:
    """How large an answer may be, given the initial model."""
    return LARGEST * payload_bytes(initial) + HEADER_BYTES


def check_payload(payload: Tree, initial: State, plain: bool) -> None:
    """Raise UserError, at a site, for a payload that is not for its network."""
    try:
        check_tree(payload, initial)
        for name, value in payload.get("model", {}).items() if plain else ():
            if name not in initial:
                raise UserError(
                    f"has an entry '{schema.clipped(name)}' that the site's network has not; "
                    f"{CHECK_SAMPLES}."
                )
            if value.shape != initial[name].shape:
                raise UserError(
                    f"has another shape for '{name}' than the site's network; {CHECK_SAMPLES}."
                )
    except UserError as problem:
        raise UserError(f"what the server sent {problem}") from None


def check_tree(tree: Tree, initial: State) -> None:
    """Raise UserError for a tree that no method could have sent.

    Of an upload, names, shapes and finite values are checked later, with the others of the round.
    """
    for path, value in flatten(tree).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"holds {value} at '{schema.clipped(path)}'.")
    model = tree.get("model", {})
    if not isinstance(model, dict):
        raise UserError("holds something else than a model under 'model'.")
    for name, value in model.items():
        if not isinstance(value, Tensor):
            raise UserError(f"holds no tensor for '{schema.clipped(name)}'.")
        if name in initial and value.dtype != initial[name].dtype:
            raise UserError(f"has {value.dtype} for '{name}' instead of {initial[name].dtype}.")


def expect(header: Mapping[str, Any], **wanted: Any) -> None:
    """Raise UserError unless the header fields have these values."""
    for key, value in wanted.items():
        found = header.get(key)
        if type(found) is not type(value) or found != value:
            raise UserError(f"is about {key} {schema.clipped(repr(found))} instead of {value!r}.")
