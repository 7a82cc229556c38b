"""Checksums that chain the files of a run, so that a change does not go unnoticed.

They detect damage and edits, not forgery: who can write the folder can write new checksums.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from fedhelix.core.errors import Damaged

DIGEST = "digest"  # of all the rest of a manifest
SEALED = ("files", "metrics")  # what a manifest says of files outside of the checkpoint


def digest(content: bytes) -> str:
    """The checksum of a file."""
    return hashlib.sha256(content).hexdigest()


def with_digest(manifest: Mapping[str, Any]) -> bytes:
    """A manifest as it is written, with its own checksum in the last line."""
    own = digest(json.dumps(manifest, indent=1).encode())
    return json.dumps({**manifest, DIGEST: own}, indent=1).encode()


class Tally:
    """Length and checksum of a file that only grows."""

    def __init__(self, content: bytes = b""):
        self.bytes, self._hash = len(content), hashlib.sha256(content)

    def add(self, content: bytes) -> None:
        """More content at the end."""
        self.bytes += len(content)
        self._hash.update(content)

    def seal(self) -> dict[str, Any]:
        """What the file is now."""
        return {"bytes": self.bytes, "sha256": self._hash.hexdigest()}


def changed(path: object, more: str = "") -> Damaged:
    """An error that names a file which is not as the checkpoint knows it."""
    return Damaged(
        f"'{path}' was changed after the run had written it; restore it from a backup{more}."
    )


def sealed_part(content: bytes, seal: Mapping[str, Any], path: object) -> bytes:
    """The part of a growing file that was there at the checkpoint."""
    try:
        part = content[: seal["bytes"]]
        whole = len(part) == seal["bytes"] and digest(part) == seal["sha256"]
    except (LookupError, TypeError):
        whole = False
    if not whole:
        raise changed(path)
    return part
