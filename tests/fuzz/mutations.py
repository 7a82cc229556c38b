"""Bad messages: what a broken or malicious peer may make of an honest one.

Every mutation is a function of a `random.Random`, so that a crash can be repeated from its seed.
"""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable
from typing import Any

import torch

from fedhelix.core.tree import flatten, unflatten
from fedhelix.deploy import messages

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 2**31, -(2**63), 2**63, 2**64, 10**18, 10**400, -(10**400),
    0.0, -0.0, 1e-320, 1e30, 1.7e308, math.nan, math.inf, -math.inf, "", "0", "NaN", "None",
    "1e400",
    "../../etc/passwd", "a" * 5000, "\ud800", "\x00\x1b[2J", "<script>alert(1)</script>",
    [], [0], [-1], [10**9, 10**9], {}, {"a": {"b": []}}, "site-0", "site-1", "train", "describe",
]  # fmt: skip
DTYPES = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.float16, torch.bfloat16,
    torch.float64, torch.int8, torch.int64, torch.uint8, torch.uint16, torch.bool,
)  # fmt: skip
VALUES = (math.nan, math.inf, 3.4e38, -3.4e38, 1e20, 1e-40, 0.0, -1.0, 2**62, -(2**62))
Mutation = Callable[[bytes, random.Random], bytes]


def flip_bytes(content: bytes, draw: random.Random) -> bytes:
    """Other values for a few bytes."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 8)):
        if changed:
            changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def flip_header_bytes(content: bytes, draw: random.Random) -> bytes:
    """The same where names, types and shapes are."""
    size = min(8 + int.from_bytes(content[:8], "little"), len(content))
    return flip_bytes(content[:size], draw) + content[size:]


def cut(content: bytes, draw: random.Random) -> bytes:
    """A part is missing, there twice, or something else."""
    first, last = sorted(draw.randrange(len(content) + 1) for _ in range(2))
    middle = draw.choice([b"", 2 * content[first:last], draw.randbytes(draw.randrange(64))])
    return content[:first] + middle + content[last:]


def noise(content: bytes, draw: random.Random) -> bytes:
    """No message at all."""
    lengths = struct.pack("<Q", draw.choice([0, 2, 1 << 20, 1 << 60]))
    return draw.choice([b"", draw.randbytes(draw.randrange(200)), lengths + b"{}", b"\x80\x04N."])


def nested(content: bytes, draw: random.Random) -> bytes:
    """JSON that is nested deeply, in the header or in the index of entries."""
    deep = draw.choice(["[", '{"a":']) * draw.choice([100, 1000, 100_000])
    table = draw.choice([{"entries": deep}, {"entries": json.dumps({"header": deep})}])
    text = json.dumps({"__metadata__": table}).encode()
    return struct.pack("<Q", len(text)) + text


def change_header(content: bytes, draw: random.Random) -> bytes:
    """Odd values in the header."""
    header, body = messages.read(content)
    for _ in range(draw.randint(1, 3)):
        key = draw.choice([*header, "error", "site", "extra", "classes", "shape"])
        header[key] = draw.choice(ODD)
    if draw.random() < 0.1:
        header.pop(draw.choice(list(header)))
    return messages.write(header, body)


def change_tensors(content: bytes, draw: random.Random) -> bytes:
    """Other types, shapes and values of tensors, and odd numbers, in the body."""
    header, body = messages.read(content)
    flat = flatten(body)
    for path in draw.sample(sorted(flat), min(len(flat), draw.choice([1, 1, 2, 100]))):
        flat[path] = _changed(flat[path], draw)
    return messages.write(header, unflatten(flat))


def _changed(value: Any, draw: random.Random) -> Any:
    if not isinstance(value, torch.Tensor):
        return draw.choice([odd for odd in ODD if not isinstance(odd, list | dict)])
    kind = draw.randrange(4)
    if kind == 0:
        return value.to(torch.float32).to(draw.choice(DTYPES))
    if kind == 1:
        return draw.choice(
            [value[..., None], value.flatten()[:1], value[:0], value.reshape(-1)]
            if value.dim()
            else [value[None], torch.zeros(0)]
        )
    if kind == 2:
        return draw.choice([odd for odd in ODD if not isinstance(odd, list | dict)])
    number = draw.choice(VALUES)
    whole = not (value.is_floating_point() or value.is_complex())
    info = torch.iinfo(value.dtype) if whole and value.dtype != torch.bool else None
    if info is not None:
        number = max(info.min, min(info.max, int(number) if math.isfinite(number) else -1))
    return torch.full_like(value, number if info is not None or not whole else bool(number))


def change_names(content: bytes, draw: random.Random) -> bytes:
    """Entries that are missing, renamed or too many."""
    header, body = messages.read(content)
    flat = flatten(body)
    for _ in range(draw.randint(1, 3)):
        path = draw.choice(sorted(flat)) if flat else "x"
        value = flat.get(path, torch.zeros(1))
        match draw.randrange(4):
            case 0:
                flat.pop(path, None)
            case 1:
                flat[f"{path}x"] = value
            case 2:
                group = path.partition("/")[0]
                flat = {name: one for name, one in flat.items() if not name.startswith(group)}
            case _:
                flat["/".join(draw.choices(["model", "control", "packed", "a", "0"], k=3))] = value
    try:
        return messages.write(header, unflatten(flat))
    except ValueError:  # two of the new names contradict each other
        return messages.write(header, {})


ALL: tuple[Mutation, ...] = (
    flip_bytes, flip_header_bytes, cut, noise, nested, change_header, change_header,
    change_tensors, change_tensors, change_tensors, change_names,
)  # fmt: skip


def mutated(content: bytes, draw: random.Random) -> bytes:
    """A bad message."""
    for _ in range(draw.choice([1, 1, 1, 2])):
        try:
            content = draw.choice(ALL)(content, draw)
        except (ValueError, RuntimeError):  # the first mutation left no message to change
            return flip_bytes(content, draw)
    return content


def changed_file(content: bytes, draw: random.Random) -> bytes:
    """A file with a few other bytes, a part missing or there twice, or other numbers in it."""
    while True:
        match draw.randrange(3):
            case 0:
                changed = flip_bytes(content, draw)
            case 1:
                changed = cut(content, draw)
            case _:
                digits = [place for place, byte in enumerate(content) if byte in b"0123456789"]
                place = draw.choice(digits or range(len(content)))
                changed = content[:place] + str(draw.randrange(10)).encode() + content[place + 1 :]
        if changed != content:
            return changed
