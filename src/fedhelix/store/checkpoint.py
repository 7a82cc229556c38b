"""The state of a run between two rounds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhelix.core.errors import UserError
from fedhelix.core.files import remove_leftovers, write_atomically
from fedhelix.store.json import json_object, read_bytes
from fedhelix.store.seal import DIGEST, SEALED, with_digest

if TYPE_CHECKING:  # it imports PyTorch, which reports and the dashboard can do without
    from fedhelix.core.tree import Tree

# All files that a checkpoint may write, temporary ones included.
OURS = (
    "server-*.safetensors", "client-*.safetensors", "timing-*.safetensors",
    ".*.safetensors.*", ".manifest.json.*",
)  # fmt: skip


class Checkpoint:
    """One tensor file for the server, one per client, and a manifest that lists the valid ones.

    The manifest is replaced last and atomically: before that moment the old checkpoint is complete,
    after it the new one. No file that the manifest lists is ever overwritten.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest_path = path / "manifest.json"

    def write(
        self,
        round: int,
        server: Tree,
        client_states: Mapping[int, Tree],
        timing: Tree,
        seals: Mapping[str, Any],
    ) -> None:
        """Save the server's state, the changed client states and, if there is a clock, what it says
        and who is at work; an empty state is removed. `seals` says how the run's other files are.
        """
        old = self._manifest() or {"server": None, "clients": {}}
        in_use = _named_files(old)
        clients = dict(old["clients"])
        for client, state in client_states.items():
            before = clients.pop(str(client), None)
            if state:
                stem = f"client-{client:06d}-{round:06d}"
                clients[str(client)] = self._write_file(stem, state, before, in_use)
        entry = self._write_file(f"server-{round:06d}", server, old["server"], in_use)
        manifest = {"round": round, "server": entry, "clients": clients, **seals}
        if timing:
            manifest["timing"] = self._write_file(
                f"timing-{round:06d}", timing, old.get("timing"), in_use
            )
        write_atomically(self.manifest_path, with_digest(manifest))
        self._sweep(_named_files(manifest))

    def seals(self) -> dict[str, Any]:
        """How the run's other files were at the last checkpoint; empty in runs of version 0.1."""
        manifest = self._manifest() or {}
        return {key: manifest[key] for key in SEALED if key in manifest}

    def seal(self, name: str, digest: str | None) -> None:
        """Change what is known of one file; with None it may be written."""
        files = self.seals().get("files", {})
        if files.get(name) != digest:
            files = {**files, name: digest}
            self._set("files", {key: value for key, value in files.items() if value is not None})

    def seal_metrics(self, seal: Mapping[str, Any] | None) -> None:
        """Change what is known of metrics.jsonl; with None it may be written."""
        self._set("metrics", seal)

    def _set(self, key: str, value: Mapping[str, Any] | None) -> None:
        manifest = self._manifest()
        if manifest is None:
            return
        manifest[key] = value
        if value is None:
            del manifest[key]
        write_atomically(self.manifest_path, with_digest(manifest))

    def clean(self) -> None:
        """Delete what killed writes have left behind."""
        remove_leftovers(self.path, "*.safetensors", self.manifest_path.name)

    def read(
        self, device: str, lazily: bool = False
    ) -> tuple[int, Tree, Mapping[int, Tree]] | None:
        """Round, server state and client states, with checksums verified; None if there is none.

        With `lazily`, a client state is read only when it is used.
        """
        manifest = self._manifest()
        if manifest is None:
            return None
        states = States(self, device)
        for entry in states.entries.values() if lazily else ():
            self._checked(entry)
        server = self._read_file(manifest["server"], device)
        return manifest["round"], server, states if lazily else dict(states)

    def verify(self) -> None:
        """Verify the checksum of every file, without reading it as tensors.

        A file that another process has just replaced is no longer part of the checkpoint.
        """
        for entry in self._listed():
            try:
                self._checked(entry)
            except UserError:
                if entry in self._listed():
                    raise

    def _listed(self) -> list[Any]:
        manifest = self._manifest()
        return [] if manifest is None else _entries(manifest)

    def timing(self, device: str) -> Tree:
        """The clock and the work under way; empty without a clock."""
        entry = (self._manifest() or {}).get("timing")
        return self._read_file(entry, device) if entry else {}

    def rounds(self) -> int:
        """The number of rounds it holds."""
        manifest = self._manifest()
        return 0 if manifest is None else int(manifest["round"])

    def _manifest(self) -> dict[str, Any] | None:
        content = read_bytes(self.manifest_path)  # once: another process may replace it
        if content is None:
            return None
        manifest = json_object(content, self.manifest_path)
        digest = manifest.pop(DIGEST, None)
        if (digest or manifest.keys() & SEALED) and content != with_digest(manifest):
            raise UserError(
                f"'{self.manifest_path}' is damaged: its checksum is wrong; "
                "restore it from a backup."
            )
        try:
            complete = type(manifest["round"]) is int and all(
                map(str.isdecimal, manifest["clients"])
            )
            entries = _entries(manifest)
            complete = complete and all(
                isinstance(entry[key], str) for entry in entries for key in ("file", "sha256")
            )
        except (KeyError, TypeError, AttributeError):
            complete = False
        if not complete:
            raise UserError(
                f"'{self.manifest_path}' is damaged: it is not the manifest of a checkpoint."
            )
        return manifest

    def _write_file(
        self, stem: str, state: Tree, before: dict[str, str] | None, in_use: set[str]
    ) -> dict[str, str]:
        from fedhelix.core import tree

        content = tree.encode(state)
        checksum = hashlib.sha256(content).hexdigest()
        if before and before["sha256"] == checksum:
            return before
        # A second checkpoint of a round must not overwrite the first, which is still valid.
        names = (f"{stem}.safetensors", f"{stem}-again.safetensors")
        name = next(name for name in names if name not in in_use)
        write_atomically(self.path / name, content)
        return {"file": name, "sha256": checksum}

    def _read_file(self, entry: dict[str, str], device: str) -> Tree:
        from fedhelix.core import tree

        return tree.load(self._checked(entry), device)

    def _checked(self, entry: dict[str, str]) -> Path:
        """The path of a file, after verifying its checksum."""
        path = self.path / entry["file"]
        try:
            with path.open("rb") as file:
                checksum = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as problem:
            raise UserError(
                f"'{path}' of the checkpoint cannot be read: {problem.strerror}."
            ) from None
        if checksum != entry["sha256"]:
            raise UserError(
                f"'{path}' of the checkpoint is damaged: its checksum is wrong; "
                "restore it from a backup."
            )
        return path

    def _sweep(self, named: set[str]) -> None:
        """Delete files of earlier checkpoints and of killed writes."""
        for pattern in OURS:
            for path in self.path.glob(pattern):
                if path.name not in named:
                    path.unlink(missing_ok=True)


class States(Mapping[int, "Tree"]):
    """The client states of a checkpoint, read one by one; valid until the next checkpoint."""

    def __init__(self, checkpoint: Checkpoint, device: str) -> None:
        self.checkpoint, self.device = checkpoint, device
        manifest = checkpoint._manifest() or {"clients": {}}
        self.entries = {int(client): entry for client, entry in manifest["clients"].items()}

    def __getitem__(self, client: int) -> Tree:
        return self.checkpoint._read_file(self.entries[client], self.device)

    def __iter__(self) -> Iterator[int]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def _entries(manifest: Mapping[str, Any]) -> list[Any]:
    timing = [manifest["timing"]] if "timing" in manifest else []
    return [manifest["server"], *manifest["clients"].values(), *timing]


def _named_files(manifest: Mapping[str, Any]) -> set[str]:
    return {entry["file"] for entry in _entries(manifest) if entry}
