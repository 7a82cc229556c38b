"""What the headers of messages may hold: types, ranges and lengths, checked where one is read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from fedhelix.core.errors import UserError

# Names of sites; they are safe as file names too.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
EXPERIMENT = re.compile(r"[0-9a-f]{32}")  # as `submit.create` draws them
SHA256 = re.compile(r"[0-9a-f]{64}")
MOST_FILES = 16  # with code that a run needs
LARGEST_NUMBER = 1e300  # sums of so large numbers are still finite
LARGEST_INTEGER = 2**63 - 1
LONGEST_TEXT = 1 << 20
LONGEST_WORDS = 300  # characters of a stranger's text in a sentence of ours
SAMPLE_VALUES = 10**7  # in one sample
# The types of tensors that every method can compute with.
TYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
)  # fmt: skip
DTYPES = {str(dtype): dtype for dtype in TYPES}


class HeaderField(NamedTuple):
    """One field of a header: what it must be in words, and the check of a value."""

    meaning: str
    holds: Callable[[Any], bool]


Schema = dict[str, HeaderField]


def clipped(text: object) -> str:
    """A stranger's text as part of one sentence: printable and not long."""
    words = str(text)[: LONGEST_WORDS + 1]
    plain = "".join(letter if letter.isprintable() else "?" for letter in words)
    return plain if len(plain) <= LONGEST_WORDS else f"{plain[:LONGEST_WORDS]}..."


def check(header: Mapping[str, Any], schema: Schema) -> None:
    """Raise UserError for the first field that is not as it must be."""
    for key, field in schema.items():
        if not field.holds(value := header.get(key)):
            raise UserError(f"has {clipped(repr(value))} for {key}, which must be {field.meaning}.")


def is_real(value: Any) -> bool:
    """Whether a value is a number that fits into sums: NaN and infinities, which models that
    diverge have, do.
    """
    if isinstance(value, float):
        return not math.isfinite(value) or abs(value) <= LARGEST_NUMBER
    return type(value) is int and abs(value) <= LARGEST_INTEGER


def whole(low: int, high: int) -> HeaderField:
    """A whole number within limits."""
    return HeaderField(
        f"a number from {low} to {high:,}",
        lambda value: type(value) is int and low <= value <= high,
    )


def text(pattern: re.Pattern[str], meaning: str) -> HeaderField:
    """A text of a form."""
    return HeaderField(
        meaning, lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None
    )


def optional(field: HeaderField) -> HeaderField:
    """A field that may be missing."""
    return HeaderField(field.meaning, lambda value: value is None or field.holds(value))


def _is_shape(value: Any) -> bool:
    """Whether a value is the shape of one sample."""
    if not isinstance(value, list) or len(value) > 8:
        return False
    sizes = all(type(size) is int and 1 <= size <= SAMPLE_VALUES for size in value)
    return sizes and math.prod(value) <= SAMPLE_VALUES


def _are_hashes(value: Any) -> bool:
    """Whether a value maps names of files to hashes."""
    if not isinstance(value, dict) or len(value) > MOST_FILES:
        return False
    return all(isinstance(h, str) and SHA256.fullmatch(h) for h in value.values())


REAL = HeaderField("a number", is_real)
EPSILON = HeaderField(
    "a finite number from 0", lambda value: is_real(value) and 0 <= value < math.inf
)
TIME = HeaderField("a number of seconds", lambda value: is_real(value) and value >= 0)
FLAG = HeaderField("true or false", lambda value: isinstance(value, bool))
SITE = text(NAME, "a name")
ANY_TEXT = HeaderField(
    "a text", lambda value: isinstance(value, str) and len(value) <= LONGEST_TEXT
)
CLASSES = optional(whole(1, 100_000))
SHAPE = HeaderField(f"a shape of at most {SAMPLE_VALUES:,} values", _is_shape)
HASHES = HeaderField("SHA-256 hashes of files by name", _are_hashes)
COUNT = 10**8  # samples

REQUEST: Schema = {
    "experiment": text(EXPERIMENT, "an experiment: 32 digits from 0 to f"),
    "client": whole(0, 10**6),
    "round": whole(0, 10**9),
    "spec": ANY_TEXT,
    "classes": CLASSES,
    "code": optional(HASHES),
    "trained": optional(FLAG),
    "final": optional(FLAG),
    "after": optional(whole(-1, 10**9)),
    "counted": optional(whole(0, 10**9)),
}
# `state_of`: the round whose state stands for one that the site does not keep; `anew`: the site
# has none although it has worked before.
ANSWER: Schema = {
    "site": SITE,
    "seconds": TIME,
    "state_of": optional(whole(0, 10**9)),
    "anew": optional(FLAG),
}
# `noisy_rounds`: how many rounds with noise the site has answered.
BUDGET: Schema = {
    "epsilon": optional(EPSILON),
    "delta": optional(REAL),
    "spent": optional(FLAG),
    "noisy_rounds": optional(whole(0, 10**9)),
}
ERROR: Schema = {
    "error": ANY_TEXT,
    "opens_in": optional(TIME),
    "policy": optional(FLAG),  # whether it is the site's policy that refuses
    **BUDGET,
}
SCORES: Schema = {"test": REAL, "test_loss": REAL, "valid": REAL, "used": SITE}
OWN_DATA: Schema = {
    "train": whole(1, COUNT),
    "test": whole(0, COUNT),
    "shape": SHAPE,
    "target": SHAPE,
    "dtype": HeaderField(
        "a type of tensors", lambda value: isinstance(value, str) and value in DTYPES
    ),
    "classes": CLASSES,
}
ANSWERS: Mapping[str, Schema] = {
    "describe": ANSWER | {"data": ANY_TEXT},
    "train": ANSWER | {"samples": whole(1, COUNT), "loss": optional(REAL)} | BUDGET,
    "evaluate": ANSWER | SCORES,
    "evaluate_received": ANSWER | SCORES,
    "client_init": ANSWER,
    "onboard_client": ANSWER,
    "onboard_state": ANSWER,
    "masking_keys": ANSWER,
    "masking_shares": ANSWER,
    "masking_agree": ANSWER,
    "masking_reveal": ANSWER,
}
KINDS = tuple(ANSWERS)
