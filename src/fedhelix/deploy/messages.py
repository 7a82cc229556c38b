"""What server and sites write to each other.

A letter is one safetensors file: words and numbers in its header, tensors below. Reading one
executes nothing, whoever wrote it; what is not as it should be is refused with a sentence.
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

NAME = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
)  # of a site or an experiment; also good for files
REPEATED = (
    "kind",
    "experiment",
    "round",
    "client",
)  # what an answer must have in common with its question
HEADER = 1 << 20  # bytes that names and words may take
DEEPEST = 8  # levels of a tree


class Message(NamedTuple):
    """Words and numbers, and a tree of tensors."""

    about: dict[str, Any]
    body: Tree


def write(about: Mapping[str, Any], body: Tree | None = None) -> bytes:
    """A letter as it travels."""
    return encode({"about": json.dumps(dict(about)), "body": body or {}})


def read(content: bytes, largest: int | None = None) -> Message:
    """A letter that came in; `largest` is how many bytes it may have."""
    if largest is not None and len(content) > largest:
        raise UserError(f"has {len(content):,} bytes, and {largest:,} are allowed.")
    try:
        tree = decode(content)
        about, body = json.loads(tree["about"]), tree.get("body", {})
        levels = max((path.count("/") for path in flatten({"body": body})), default=0)
    except (UserError, ValueError, KeyError, TypeError, RecursionError) as problem:
        raise UserError(f"is no letter: {problem}") from None
    if not isinstance(about, dict) or not isinstance(body, dict) or levels > DEEPEST:
        raise UserError("is no letter: it lacks its parts.")
    return Message(about, body)


def room_for(initial: State) -> int:
    """How many bytes a letter may have, where the model is this large."""
    return LARGEST * payload_bytes(initial) + HEADER


def check_tree(tree: Tree, initial: State) -> None:
    """Raise BadInput for what no method could have sent; shapes and finite values are the channel's
    business.
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


def expect(about: Mapping[str, Any], **wanted: Any) -> None:
    """Raise BadInput unless a letter is the answer to what was asked, from whom, and about which
    round.
    """
    for key, value in wanted.items():
        if about.get(key) != value:
            raise UserError(f"is about {key} {about.get(key)!r} instead of {value!r}.")


def number(about: Mapping[str, Any], key: str, low: float = float("-inf")) -> float:
    """A number in a letter; NaN is one too."""
    value = about.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < low:
        raise UserError(f"has {about.get(key)!r} for {key}, which must be a number.")
    return value
