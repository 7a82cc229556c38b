"""A run is a folder of plain files that survives a kill at any moment.

    config.toml      the settings
    clients.json     samples per client and class, and which clients are malicious
    metrics.jsonl    one record per round
    checkpoint/      the last complete state, from which the run continues
    choices.json     what the engine has chosen by timing
    summary.json     the result
    lock             present while a process writes the run

Reading needs no lock, so a report can watch a run that is still going on.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhelix.core import toml
from fedhelix.core.errors import UserError
from fedhelix.core.files import write_atomically
from fedhelix.core.tree import Tree
from fedhelix.store.checkpoint import Checkpoint, States
from fedhelix.store.json import json_line, read_json, strict
from fedhelix.store.lock import Lock
from fedhelix.store.records import current

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 2  # 1: version 0.1, with other names for some keys of records and clients
RUNS = Path("runs")  # where the command line puts runs
COMPARISON = "comparison.toml"  # the file that makes a folder of runs a comparison


class RunFolder:
    """One run on disk. Use it in a `with` statement to write; reading works without.

    The first write acquires the folder's lock; `close` or the end of the `with` statement releases
    it.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._lock = Lock(self.path / "lock")
        self._checkpoint = Checkpoint(self.path / "checkpoint")

    @classmethod
    def create(cls, path: Path | str, config: Mapping[str, Any]) -> RunFolder:
        """Start a new run in a folder that is missing or empty."""
        folder = cls(path)
        text = toml.dumps(
            {"format": FORMAT} | {key: value for key, value in config.items() if key != "format"}
        )
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise UserError(
                f"'{path}' is a file or lies below one; choose a folder for the run."
            ) from None
        except OSError as problem:
            raise UserError(
                f"'{path}' cannot be written ({problem.strerror}); choose another folder."
            ) from None
        if folder._config_path.exists():
            how = f"fedhelix resume {shlex.quote(str(path))}"
            raise UserError(
                f"'{path}' holds a run already; continue it with `{how}` or choose another folder."
            )
        # Left behind by a `create` that was killed half way; they are not the user's.
        ours = {folder._lock.path, *folder.path.glob(".config.toml.*")}
        if set(folder.path.iterdir()) - ours:
            raise UserError(f"'{path}' is not empty; choose an empty or a new folder for the run.")
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
        """Remove a new folder whose run cannot start."""
        for path in (self._config_path, self._clients_path):
            path.unlink(missing_ok=True)
        self.close()
        with suppress(OSError):  # the folder holds other files
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
        """The settings of the run, with the number of the folder's format."""
        if not self._config_path.is_file():
            raise UserError(f"'{self.path}' is not a run: it holds no config.toml.")
        config = toml.read(self._config_path)
        number = config.get("format")
        if type(number) is not int:
            raise UserError(
                f"'{self._config_path}' is not a run's config: "
                f"it lacks the line `format = {FORMAT}`."
            )
        if number > FORMAT:
            raise UserError(
                f"'{self.path}' was written by a newer fedhelix "
                f"(format {number}, this one reads up to {FORMAT}); upgrade fedhelix to read it."
            )
        return config

    def records(self) -> list[dict[str, Any]]:
        """The records of all rounds; a last line that is only half written is left out."""
        if not self._metrics_path.exists():
            return []
        try:
            complete_lines = self._metrics_path.read_bytes().split(b"\n")[:-1]
        except OSError as problem:
            raise UserError(f"'{self._metrics_path}' cannot be read: {problem.strerror}.") from None
        return [self._record(line, number) for number, line in enumerate(complete_lines, start=1)]

    def _record(self, line: bytes, number: int) -> dict[str, Any]:
        damaged = f"line {number} of '{self._metrics_path}' is damaged"
        try:
            record = json.loads(line)
        except ValueError as problem:
            raise UserError(f"{damaged}: {problem}.") from None
        if not isinstance(record, dict) or type(record.get("round")) is not int:
            raise UserError(f"{damaged}: it is not the record of a round.")
        for key, value in record.items():
            if not _is_valid(key, value):
                raise UserError(f"{damaged}: its {key} cannot be {value}.")
        return current(record)

    @property
    def metrics(self) -> pd.DataFrame:
        """The records as a table: one row per round, one column per key."""
        # Imported here, because it takes longer than all the rest of this module.
        import pandas as pd

        return pd.DataFrame(self.records() or {"round": []})

    def append(self, record: Mapping[str, Any]) -> None:
        """Append the record of one round; it is on disk when this returns."""
        self._lock.acquire()
        with self._metrics_path.open("ab") as file:
            file.write(json_line(record))
            file.flush()
            os.fsync(file.fileno())

    @property
    def summary(self) -> dict[str, Any] | None:
        """The result, or None if the run has not written one."""
        return read_json(self._summary_path)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the result, replacing an earlier one."""
        self._lock.acquire()
        write_atomically(
            self._summary_path,
            json.dumps(strict(summary), indent=2, allow_nan=False).encode() + b"\n",
        )

    @property
    def clients(self) -> dict[str, Any]:
        """The clients' data and which are malicious; empty if the run has not written it."""
        return current(read_json(self._clients_path) or {})

    def write_clients(self, census: Mapping[str, Any]) -> None:
        """Write the clients' data and which are malicious."""
        self._lock.acquire()
        write_atomically(
            self._clients_path, json.dumps(strict(census), allow_nan=False).encode() + b"\n"
        )

    @property
    def choices(self) -> dict[str, Any]:
        """The choices that the engine has made by timing."""
        return read_json(self.path / "choices.json") or {}

    def write_choices(self, choices: Mapping[str, str]) -> None:
        """Save the engine's choices, so that a resumed run computes the same numbers."""
        if choices and choices != self.choices:
            self._lock.acquire()
            write_atomically(
                self.path / "choices.json", json.dumps(dict(choices), indent=1).encode() + b"\n"
            )

    def checkpoint(
        self,
        round: int,
        server: Tree,
        client_states: Mapping[int, Tree],
        timing: Tree | None = None,
    ) -> None:
        """Save the state after a round, with those client states that changed since the last.

        A client state that is empty is removed. If the process is killed meanwhile, the previous
        checkpoint stays valid.
        """
        self._lock.acquire()
        self._checkpoint.write(round, server, client_states, timing or {})

    @property
    def rounds_saved(self) -> int:
        """The number of rounds in the checkpoint."""
        return self._checkpoint.rounds()

    def timing(self, device: str = "cpu") -> Tree:
        """The clock of the last checkpoint, and the work under way; empty without a clock."""
        return self._checkpoint.timing(device)

    def states(self, device: str = "cpu") -> Mapping[int, Tree]:
        """The client states of the last checkpoint; each is read only when it is used."""
        return States(self._checkpoint, device)

    def state(self, device: str = "cpu") -> tuple[int, Tree, Mapping[int, Tree]] | None:
        """The last complete checkpoint as (round, server, client states), without any write."""
        return self._checkpoint.read(device)

    def restore(
        self, device: str = "cpu", lazily: bool = False
    ) -> tuple[int, Tree, Mapping[int, Tree]] | None:
        """The last complete checkpoint as (round, server, client states), to continue from.

        None if there is none yet. Records of later rounds are removed, because these rounds will
        run again. All checksums are verified; with `lazily`, client states are read only when they
        are used, as in `states`.
        """
        self._lock.acquire()
        records = self.records()
        state = self._checkpoint.read(device, lazily)
        kept = [record for record in records if state is not None and record["round"] <= state[0]]
        write_atomically(self._metrics_path, b"".join(map(json_line, kept)))
        return state


def _is_valid(key: str, value: Any) -> bool:
    """Whether an entry of a record has its type; somebody may have edited the file."""
    if key in ("refused", "missing"):
        return isinstance(value, dict)
    if key.endswith(("_bytes", "seconds", "clock")):
        return isinstance(value, int | float)
    scored = key.endswith(("accuracy", "score"))
    return not scored or value is None or isinstance(value, int | float)
