"""A site's audit log: who asked for what, and what left; one JSON line each.

Every line holds the hash of the line before it and is signed with the site's key. A second file,
the head, holds the signed hash of the last line, so that lines missing at the end are found, too.

The line is written first, then the head. Where this is cut short, by a crash or a full disk, the
log ends in half a line, which counts as none, or is one whole line ahead of its head; whoever opens
it next signs that line. A line more, or one that the key has not signed, is no accident.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    load_pem_public_key,
)
from torch import Tensor

from fedhelix.core.errors import UserError
from fedhelix.core.files import remove_leftovers, write_atomically
from fedhelix.core.tree import Tree, flatten
from fedhelix.deploy.keys import public_bytes, read_either_key, read_private_key
from fedhelix.deploy.policy import also
from fedhelix.store.json import strict

GENESIS = "0" * 64
ALGORITHM = ec.ECDSA(SHA256())
MOST_NAMES = 8  # of sites in a sentence
# What a site's line holds besides the values of its answer; every answer names site and seconds.
NO_VALUES = (
    "line", "time", "previous", "hash", "kind", "experiment", "round", "client", "method", "asked",
    "site", "seconds", "sent", "bytes", "sha256", "error",
)  # fmt: skip


def head_path(path: Path) -> Path:
    """The file with the hash of the last line."""
    return path.with_suffix(".head")


def shapes(tree: Tree) -> dict[str, Any]:
    """The names in a tree with the shapes of tensors, or the types of other values."""
    return {
        name: list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        for name, value in flatten(tree).items()
    }


def fingerprint(message: bytes) -> dict[str, Any]:
    """Size and hash of a whole message, the same where it was written and where it was read."""
    return {"bytes": len(message), "sha256": hashlib.sha256(message).hexdigest()}


def moved(entry: Mapping[str, Any]) -> str:
    """What left, by a line of a log: kinds of values and bytes; at the server also what came, and
    which sites refused or did not answer.
    """
    size = f"{entry.get('bytes', 0):,} bytes left"
    if "received" in entry:
        asked, answers = entry.get("asked", {}), entry["received"]
        came = sum(answer["bytes"] for answer in answers.values())
        back = f"{came:,} bytes came back{_named(' from ', answers)}"
        return f"{size}{_named(' for ', asked)}, {back}{also(entry.get('refused', {}).items())}"
    if "sent" not in entry:
        return ""
    names = [key for key in entry if key not in NO_VALUES and entry[key] is not None]
    if count := len(entry["sent"]):
        names.append(f"{count} tensor{'s' * (count > 1)}")
    return f"{', '.join(names) or 'no values'}: {size}"


def _named(word: str, sites: Collection[str]) -> str:
    """A word and some sites by name, if there are any."""
    names = [*sites][:MOST_NAMES]
    more = f" and {len(sites) - MOST_NAMES} more" if len(sites) > MOST_NAMES else ""
    return f"{word}{', '.join(names)}{more}" if names else ""


def now() -> str:
    """The time of a line."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


class AuditLog:
    """An append-only log; opening it checks that it is whole."""

    def __init__(self, path: Path, key: Path):
        private = read_private_key(key)
        self.path, self._key = path, private
        public = public_bytes(private.public_key())
        self._lines, self._last, self._size = 0, GENESIS, 0
        try:
            self._open(public)
        except OSError as problem:
            raise UserError(f"'{path}' cannot be written ({problem.strerror}).") from None

    def _open(self, public: bytes) -> None:
        """Go on with a log that is whole, or begin one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.path.parent, head_path(self.path).name)
        if not self.path.exists() and not head_path(self.path).exists():
            self._write_head()  # so that a log without a head is never an accident
        if _tells_nothing(self.path, public):
            self._write_head()
            self.path.unlink()
        _check_owner(self.path, public)
        for entry in verified(self.path, public):
            self._lines, self._last = entry["line"], entry["hash"]
        self._size = len(_whole_lines(self.path))
        if json.loads(head_path(self.path).read_bytes())["line"] < self._lines:
            self._write_head()
        if not self._lines:
            self.append({"kind": "opened", "public_key": public.decode()})

    def append(self, event: Mapping[str, Any]) -> None:
        """Add a line; it is on the disk before this returns, or an OSError says why it is not."""
        entry = strict({"line": self._lines + 1, "time": now(), "previous": self._last, **event})
        line = json.dumps({**entry, "signature": self._signed(canonical(entry))}, sort_keys=True)
        before, text = (self._lines, self._last, self._size), line.encode() + b"\n"
        try:
            self._write_line(text)
            self._lines, self._last = self._lines + 1, hashlib.sha256(text[:-1]).hexdigest()
            self._size += len(text)
            self._write_head()
        except OSError:
            self._lines, self._last, self._size = before
            with suppress(OSError):  # else the next line replaces this one
                os.truncate(self.path, self._size)
            raise

    def _write_line(self, text: bytes) -> None:
        """Write a line behind those that count, in place of what was cut short there."""
        with self.path.open("ab") as file:
            file.truncate(self._size)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def _write_head(self) -> None:
        head: dict[str, Any] = {"line": self._lines, "hash": self._last}
        head["signature"] = self._signed(canonical(head))
        write_atomically(head_path(self.path), json.dumps(head).encode())

    def _signed(self, content: bytes) -> str:
        return base64.b64encode(self._key.sign(content, ALGORITHM)).decode()


def canonical(entry: Mapping[str, Any]) -> bytes:
    """The bytes that are signed."""
    return json.dumps(dict(entry), sort_keys=True).encode()


def verified(path: Path, public_key: bytes | None = None) -> Iterator[dict[str, Any]]:
    """The entries of a log, each checked, with their hashes; UserError names the first wrong one.

    Without a key the one in the first line counts, which whoever replaces the log replaces too.
    """
    lines = _whole_lines(path).split(b"\n")[:-1]
    previous, key, number = GENESIS, public_key, 0
    hashes = {0: GENESIS}
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            key = key or entry["public_key"].encode()
            signature = entry.pop("signature")
            _check_signature(key, canonical(entry), signature)
            whole = entry["line"] == number and entry["previous"] == previous
        except (ValueError, KeyError, TypeError, AttributeError, InvalidSignature):
            other = ", or the key is another site's" if public_key and number == 1 else ""
            raise UserError(
                f"'{path}' was changed: line {number} is not as signed{other}."
            ) from None
        if not whole:
            raise UserError(
                f"'{path}' was changed: line {number} does not follow the one before it."
            )
        previous = hashes[number] = hashlib.sha256(line).hexdigest()
        yield {**entry, "hash": previous}
    _check_head(path, key, hashes)


def _whole_lines(path: Path) -> bytes:
    """The content of a log without a last line that was cut short."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        if head_path(path).exists():
            return b""  # which the head may be of
        raise UserError(f"there is no log '{path}'.") from None
    except OSError as problem:
        raise UserError(f"'{path}' cannot be read ({problem.strerror}).") from None
    return content[: content.rfind(b"\n") + 1]


def _owner(path: Path) -> bytes | None:
    """The key that a log names in its first line, if it does."""
    try:
        key = json.loads(_whole_lines(path).partition(b"\n")[0])["public_key"]
        return bytes(key.encode())
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # whatever is wrong with it, `verified` says it


def _tells_nothing(path: Path, public_key: bytes) -> bool:
    """Whether a log of another key holds nothing but the line that begins it, as after a start
    with a wrong key.

    Its head is that key's, or this one's where a new beginning was cut short.
    """
    if _owner(path) in (None, public_key) or _whole_lines(path).count(b"\n") != 1:
        return False
    try:
        return [entry["kind"] for entry in verified(path)] == ["opened"]
    except UserError:
        with suppress(UserError):
            _check_head(path, public_key, {0: GENESIS})
            return True
    return False


def _check_owner(path: Path, public_key: bytes) -> None:
    """Refuse to go on with a log that names another key in its first line."""
    if _owner(path) not in (None, public_key):
        raise UserError(
            f"'{path}' was written with another key; to begin a new log with this one, move it and "
            f"'{head_path(path)}' to another folder, and keep them with the old public key."
        )


def _check_head(path: Path, key: bytes | None, hashes: Mapping[int, str]) -> None:
    """The head may be one line behind, where a write was cut short, and never ahead."""
    try:
        head = json.loads(head_path(path).read_bytes())
        signature = head.pop("signature")
        if key is None:
            raise UserError(f"'{path}' was changed: it is empty.")
        _check_signature(key, canonical(head), signature)
        line, last = head["line"], head["hash"]
    except (OSError, ValueError, KeyError, InvalidSignature):
        raise UserError(f"'{head_path(path)}' is missing or not as signed.") from None
    if line > max(hashes):
        raise UserError(
            f"'{path}' was changed: at its end {line - max(hashes)} of {line} lines are missing."
        )
    if hashes.get(line) != last or max(hashes) - line > 1:
        raise UserError(f"'{path}' was changed: its end is not the one that was signed last.")


def _check_signature(key: bytes, content: bytes, signature: str) -> None:
    public = load_pem_public_key(key)
    assert isinstance(public, ec.EllipticCurvePublicKey)
    public.verify(base64.b64decode(signature), content, ALGORITHM)


def read_log(path: Path, key: Path | None) -> list[dict[str, Any]]:
    """All entries of a log that is whole; `key` is either file of the pair that signed it."""
    return list(verified(path, None if key is None else read_either_key(key)))
