"""A run is a folder of plain files that survives a kill at any moment.

    config.toml      what was asked for
    clients.json     who has what: samples per client and class, and who is malicious
    metrics.jsonl    one record per round
    checkpoint/      the last complete state, from which the run continues
    choices.json     what the engine chose by timing
    summary.json     the result
    lock             present while a process writes the run

Reading needs no lock, so a report can watch a run that is still going on.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedhelix import toml, tree
from fedhelix.errors import BadInput
from fedhelix.tree import Tree, write_atomically

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 1
COMPARISON = "comparison.toml"  # the file that makes a folder of runs a comparison


class RunFolder:
    """One run on disk. Use it in a `with` statement to write; reading works without.

    The first write takes the folder's lock, and `close` (or the end of the `with` statement) gives it back.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._lock = _Lock(self.path / "lock")
        self._checkpoint = _Checkpoint(self.path / "checkpoint")

    @classmethod
    def create(cls, path: Path | str, config: Mapping[str, Any]) -> RunFolder:
        """Start a new run in a folder that is missing or empty."""
        folder = cls(path)
        text = toml.dumps({"format": FORMAT} | {key: value for key, value in config.items() if key != "format"})
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise BadInput(f"'{path}' is a file or lies below one; choose a folder for the run.") from None
        except OSError as problem:
            raise BadInput(f"'{path}' cannot be written ({problem.strerror}); choose another folder.") from None
        if folder._config_path.exists():
            raise BadInput(
                f"'{path}' holds a run already; continue it with `fedhelix resume {path}` or choose another folder."
            )
        # A create that was killed half way may have left these behind; they are not the user's.
        ours = {folder._lock.path, *folder.path.glob(".config.toml.*")}
        if set(folder.path.iterdir()) - ours:
            raise BadInput(f"'{path}' is not empty; choose an empty or a new folder for the run.")
        with folder:
            write_atomically(folder._config_path, text.encode())
        return folder

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """An existing run."""
        folder = cls(path)
        _ = folder.config  # refuses what is no run, or a run of a newer version
        return folder

    def __enter__(self) -> RunFolder:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RunFolder('{self.path}')"

    def close(self) -> None:
        """Let other processes write this run."""
        self._lock.release()

    def withdraw(self) -> None:
        """Take a new folder away again, since the run that it was made for cannot begin."""
        for path in (self._config_path, self._clients_path):
            path.unlink(missing_ok=True)
        self.close()
        with suppress(OSError):  # something of somebody else lies in it
            self.path.rmdir()

    @property
    def _config_path(self) -> Path:
        return self.path / "config.toml"

    @property
    def _metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def _summary_path(self) -> Path:
        return self.path / "summary.json"

    @property
    def _clients_path(self) -> Path:
        return self.path / "clients.json"

    @property
    def config(self) -> dict[str, Any]:
        """What was asked for, with the number of the folder's format."""
        if not self._config_path.is_file():
            raise BadInput(f"'{self.path}' is not a run: it holds no config.toml.")
        config = toml.read(self._config_path)
        number = config.get("format")
        if type(number) is not int:
            raise BadInput(f"'{self._config_path}' is not a run's config: it lacks the line `format = {FORMAT}`.")
        if number > FORMAT:
            raise BadInput(
                f"'{self.path}' was written by a newer fedhelix (format {number}, this one reads up to {FORMAT}); "
                "upgrade fedhelix to read it."
            )
        return config

    def records(self) -> list[dict[str, Any]]:
        """The records of all rounds; a last line that was only half written when its writer died is left out."""
        if not self._metrics_path.exists():
            return []
        complete_lines = self._metrics_path.read_bytes().split(b"\n")[:-1]
        return [self._record(line, number) for number, line in enumerate(complete_lines, start=1)]

    def _record(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except ValueError as problem:
            raise BadInput(f"line {number} of '{self._metrics_path}' is damaged: {problem}.") from None
        if not isinstance(record, dict) or type(record.get("round")) is not int:
            raise BadInput(f"line {number} of '{self._metrics_path}' is damaged: it is not the record of a round.")
        return record

    @property
    def metrics(self) -> pd.DataFrame:
        """The records as a table: one row per round, one column per key."""
        import pandas as pd  # here, because it takes longer to import than all the rest of this module

        return pd.DataFrame(self.records() or {"round": []})

    def append(self, record: Mapping[str, Any]) -> None:
        """Add the record of one round; it is on disk when this returns."""
        self._lock.acquire()
        with self._metrics_path.open("ab") as file:
            file.write(_json_line(record))
            file.flush()
            os.fsync(file.fileno())

    @property
    def summary(self) -> dict[str, Any] | None:
        """The result, or None for a run that has not written one."""
        return _read_json(self._summary_path)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the result, in place of an earlier one."""
        self._lock.acquire()
        write_atomically(self._summary_path, json.dumps(_strict(summary), indent=2, allow_nan=False).encode() + b"\n")

    @property
    def clients(self) -> dict[str, Any]:
        """Who has what; empty for a run that has not written it."""
        return _read_json(self._clients_path) or {}

    def write_clients(self, census: Mapping[str, Any]) -> None:
        """Write who has what."""
        self._lock.acquire()
        write_atomically(self._clients_path, json.dumps(_strict(census), allow_nan=False).encode() + b"\n")

    @property
    def choices(self) -> dict[str, Any]:
        """What the engine has chosen by timing."""
        return _read_json(self.path / "choices.json") or {}

    def write_choices(self, choices: Mapping[str, str]) -> None:
        """Keep what the engine has chosen, so that a resumed run computes as it began."""
        if choices and choices != self.choices:
            self._lock.acquire()
            write_atomically(self.path / "choices.json", json.dumps(dict(choices), indent=1).encode() + b"\n")

    def checkpoint(self, round: int, server: Tree, own: Mapping[int, Tree]) -> None:
        """Save the state after a round; `own` holds only the clients that changed since the last checkpoint.

        A client whose tree is empty is forgotten. A kill while this runs leaves the previous checkpoint in force.
        """
        self._lock.acquire()
        self._checkpoint.write(round, server, own)

    @property
    def rounds_saved(self) -> int:
        """How many rounds the checkpoint holds."""
        return self._checkpoint.rounds()

    def states(self, device: str = "cpu") -> Mapping[int, Tree]:
        """The clients' states of the last checkpoint, each of them read when it is asked for."""
        return _States(self._checkpoint, device)

    def restore(self, device: str = "cpu") -> tuple[int, Tree, dict[int, Tree]] | None:
        """The last complete checkpoint as (round, server, own), or None when there is none yet.

        Records of later rounds are removed, because those rounds will be run again. All of it is read and checked.
        """
        self._lock.acquire()
        records = self.records()
        state = self._checkpoint.read(device)
        kept = [record for record in records if state is not None and record["round"] <= state[0]]
        write_atomically(self._metrics_path, b"".join(map(_json_line, kept)))
        return state


class _Checkpoint:
    """One tensor file for the server and one per client, and a manifest that says which of them count.

    The manifest is replaced last and in one piece: before that moment the old checkpoint is complete, after it the
    new one. No file that the manifest names is ever written over.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest_path = path / "manifest.json"

    def write(self, round: int, server: Tree, own: Mapping[int, Tree]) -> None:
        old = self._manifest() or {"server": None, "clients": {}}
        in_use = _named_files(old)
        clients = dict(old["clients"])
        for client, state in own.items():
            before = clients.pop(str(client), None)
            if state:
                stem = f"client-{client:06d}-{round:06d}"
                clients[str(client)] = self._write_file(stem, state, before, in_use)
        entry = self._write_file(f"server-{round:06d}", server, old["server"], in_use)
        manifest = {"round": round, "server": entry, "clients": clients}
        write_atomically(self.manifest_path, json.dumps(manifest, indent=1).encode())
        self._sweep(_named_files(manifest))

    def read(self, device: str) -> tuple[int, Tree, dict[int, Tree]] | None:
        manifest = self._manifest()
        if manifest is None:
            return None
        return manifest["round"], self._read_file(manifest["server"], device), dict(_States(self, device))

    def rounds(self) -> int:
        manifest = self._manifest()
        return 0 if manifest is None else int(manifest["round"])

    def _manifest(self) -> dict[str, Any] | None:
        manifest = _read_json(self.manifest_path)
        if manifest is None:
            return None
        try:
            complete = type(manifest["round"]) is int and all(map(str.isdecimal, manifest["clients"]))
            entries = [manifest["server"], *manifest["clients"].values()]
            complete = complete and all(isinstance(entry[key], str) for entry in entries for key in ("file", "sha256"))
        except (KeyError, TypeError, AttributeError):
            complete = False
        if not complete:
            raise BadInput(f"'{self.manifest_path}' is damaged: it is not the manifest of a checkpoint.")
        return manifest

    def _write_file(self, stem: str, state: Tree, before: dict[str, str] | None, in_use: set[str]) -> dict[str, str]:
        content = tree.encode(state)
        checksum = hashlib.sha256(content).hexdigest()
        if before and before["sha256"] == checksum:
            return before
        # A second checkpoint of one round must not write over the first, which still counts.
        name = next(name for name in (f"{stem}.safetensors", f"{stem}-again.safetensors") if name not in in_use)
        write_atomically(self.path / name, content)
        return {"file": name, "sha256": checksum}

    def _read_file(self, entry: dict[str, str], device: str) -> Tree:
        path = self.path / entry["file"]
        try:
            with path.open("rb") as file:
                checksum = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as problem:
            raise BadInput(f"'{path}' of the checkpoint cannot be read: {problem.strerror}.") from None
        if checksum != entry["sha256"]:
            raise BadInput(f"'{path}' of the checkpoint is damaged: its checksum is wrong; restore it from a backup.")
        return tree.load(path, device)

    def _sweep(self, named: set[str]) -> None:
        """Delete files of earlier checkpoints, and what a killed write left behind."""
        for pattern in ("server-*.safetensors", "client-*.safetensors", ".*.safetensors.*", ".manifest.json.*"):
            for path in self.path.glob(pattern):
                if path.name not in named:
                    path.unlink(missing_ok=True)


class _States(Mapping[int, Tree]):
    """The clients' states of a checkpoint, read one by one; good until the next checkpoint is written."""

    def __init__(self, checkpoint: _Checkpoint, device: str) -> None:
        self.checkpoint, self.device = checkpoint, device
        manifest = checkpoint._manifest() or {"clients": {}}
        self.entries = {int(client): entry for client, entry in manifest["clients"].items()}

    def __getitem__(self, client: int) -> Tree:
        return self.checkpoint._read_file(self.entries[client], self.device)

    def __iter__(self) -> Iterator[int]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class _Lock:
    """One writer at a time: a file that names its process, and that counts for nothing once the process is dead."""

    this_process = uuid.uuid4().hex  # tells a restarted container's process from the one that had its number before
    seconds_to_sign = 5.0

    def __init__(self, path: Path) -> None:
        self.path = path
        self.held = False

    def acquire(self) -> None:
        if self.held:
            return
        try:
            owner = self._owner()
            if owner is not None and not _alive(owner):
                self.path.unlink(missing_ok=True)
            handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            who = f"process {owner['pid']} on {owner['host']}" if owner else "another process"
            raise BadInput(
                f"'{self.path.parent}' is being written by {who}; wait for it, or delete '{self.path}' if it is gone."
            ) from None
        except OSError as problem:
            raise BadInput(f"'{self.path.parent}' cannot be written: {problem.strerror}.") from None
        with os.fdopen(handle, "w") as file:
            json.dump({"pid": os.getpid(), "host": socket.gethostname(), "process": self.this_process}, file)
        self.held = True

    def release(self) -> None:
        if self.held:
            self.path.unlink(missing_ok=True)
            self.held = False

    def _owner(self) -> dict[str, Any] | None:
        """Who holds the lock; None when nobody does, or when the owner is just about to sign."""
        try:
            return _signature(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            unsigned_for = time.time() - self.path.stat().st_mtime
            dead = {"pid": 0, "host": socket.gethostname(), "process": ""}
            return dead if unsigned_for > self.seconds_to_sign else None


def writer_lives(lock: bytes) -> bool:
    """Whether the process that signed a lock is still there."""
    try:
        return _alive(_signature(lock))
    except (ValueError, KeyError, TypeError, OverflowError):
        return False


def _signature(lock: bytes) -> dict[str, Any]:
    owner = json.loads(lock)
    return {"pid": int(owner["pid"]), "host": str(owner["host"]), "process": str(owner["process"])}


def _alive(owner: Mapping[str, Any]) -> bool:
    if owner["host"] != socket.gethostname():
        return True  # nobody here can know
    if owner["pid"] == os.getpid():
        return owner["process"] == _Lock.this_process
    if owner["pid"] <= 0:
        return False
    if os.name == "nt":
        return True  # on Windows asking a process with os.kill would end it
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _named_files(manifest: Mapping[str, Any]) -> set[str]:
    return {entry["file"] for entry in [manifest["server"], *manifest["clients"].values()] if entry}


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise BadInput(f"'{path}' cannot be read: {problem.strerror}.") from None
    except ValueError as problem:
        raise BadInput(f"'{path}' is damaged: {problem}.") from None
    if not isinstance(content, dict):
        raise BadInput(f"'{path}' is damaged: it does not hold a JSON object.")
    return content


def _json_line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(_strict(record), allow_nan=False).encode() + b"\n"


def _strict(value: Any) -> Any:
    """The value as JSON knows it: NaN and infinity, which JSON lacks, become null; NumPy's numbers become plain."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value
