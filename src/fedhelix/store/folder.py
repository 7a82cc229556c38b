"""A run is a folder of plain files that survives a kill at any moment.

    config.toml      the settings
    clients.json     samples per client and class, which clients are malicious, and the shapes of
                     the network's entries
    metrics.jsonl    one record per round
    checkpoint/      the last complete state, from which the run continues
    choices.json     what the engine has chosen by timing
    summary.json     the result
    lock             present while a process writes the run

The checkpoint's manifest has checksums of the other files too. Reading needs no lock, so a report
can watch a run that is still going on.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhelix.core import toml
from fedhelix.core.errors import UserError
from fedhelix.core.files import remove_leftovers, write_atomically
from fedhelix.store.checkpoint import Checkpoint, States
from fedhelix.store.json import json_line, read_json, strict
from fedhelix.store.lock import Lock
from fedhelix.store.mistakes import not_a_run, remedied, taken
from fedhelix.store.records import current, read_record
from fedhelix.store.seal import Tally, changed, digest, sealed_part

if TYPE_CHECKING:
    import pandas as pd

    from fedhelix.core.tree import Tree

FORMAT = 2  # 1: version 0.1, with other names for some keys of records and clients
RUNS = Path("runs")  # where the command line puts runs
CHOICES = "choices.json"
FILES = ("config.toml", "clients.json", CHOICES, "summary.json")  # those with a checksum
COMPARISON = "comparison.toml"  # the file that makes a folder of runs a comparison


class RunFolder:
    """One run on disk. Use it in a `with` statement to write; reading works without.

    The first write acquires the folder's lock; `close` or the end of the `with` statement releases
    it.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._config_path = self.path / "config.toml"
        self._clients_path = self.path / "clients.json"
        self._metrics_path = self.path / "metrics.jsonl"
        self._summary_path = self.path / "summary.json"
        self._lock = Lock(self.path / "lock")
        self._checkpoint = Checkpoint(self.path / "checkpoint")
        self._tally: Tally | None = None  # of metrics.jsonl, once this process writes it

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
            raise taken(path, folder.config, folder.where)
        # Left behind by a `create` that was killed half way; they are not the user's.
        halves = (folder.path.glob(f".{name}.*") for name in ("config.toml", "lock"))
        ours = {folder._lock.path, *itertools.chain.from_iterable(halves)}
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

    @property
    def where(self) -> str:
        """The options of commands that name the run's deployment, as it was begun."""
        deployment = self.config.get("deployment")
        return str(deployment.get("where", "")) if isinstance(deployment, Mapping) else ""

    def __enter__(self) -> RunFolder:
        self._lock.acquire()
        self._clean()
        return self

    def _clean(self) -> None:
        """Delete the temporary files of a process that was killed."""
        remove_leftovers(self.path, *FILES, self._metrics_path.name)
        self._checkpoint.clean()

    def tidy(self) -> None:
        """Clean up after a process that was killed when the run was complete already."""
        if any(self.path.glob("**/.*")) or self._lock.path.exists():
            with suppress(UserError), self:
                pass

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
    def config(self) -> dict[str, Any]:
        """The settings of the run, with the number of the folder's format."""
        if not self._config_path.is_file():
            raise not_a_run(self.path)
        self._check(self._config_path.name, "; `resume --set` changes what may change")
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

    def _check(self, name: str, more: str = "") -> None:
        """Raise UserError if a file is not as the checkpoint knows it."""
        path = self.path / name
        for again in (True, False):
            known = self._checkpoint.seals().get("files", {}).get(name)
            try:
                if known is None or digest(path.read_bytes()) == known:
                    return
            except FileNotFoundError:
                pass
            except OSError as problem:
                raise UserError(f"'{path}' cannot be read: {problem.strerror}.") from None
            if not again:  # the second look: a process may be writing both just now
                raise changed(path, more)

    def _metrics(self) -> bytes:
        """The content of metrics.jsonl, as far as there is a checkpoint with its checksum."""
        seal = self._checkpoint.seals().get("metrics")
        try:
            content = self._metrics_path.read_bytes()
        except FileNotFoundError:
            content = b""
        except OSError as problem:
            raise UserError(f"'{self._metrics_path}' cannot be read: {problem.strerror}.") from None
        if seal is not None:
            sealed_part(content, seal, self._metrics_path)
        return content

    def records(self) -> list[dict[str, Any]]:
        """The records of all rounds; a last line that is only half written is left out."""
        path = self._metrics_path
        with remedied(self):
            lines = enumerate(self._metrics().split(b"\n")[:-1], 1)
            return [read_record(line, number, path) for number, line in lines]

    @property
    def metrics(self) -> pd.DataFrame:
        """The records as a table: one row per round, one column per key."""
        import pandas as pd  # it takes longer than all the rest of this module

        return pd.DataFrame(self.records() or {"round": []})

    def append(self, record: Mapping[str, Any]) -> None:
        """Append the record of one round; it is on disk when this returns."""
        self._lock.acquire()
        line = json_line(record)
        self._tallied().add(line)
        with self._metrics_path.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def replace_last(self, record: Mapping[str, Any]) -> None:
        """Change the record of the last round, after `restore`."""
        self._lock.acquire()
        content = b"".join(map(json_line, [*self.records()[:-1], record]))
        self._checkpoint.seal_metrics(None)
        write_atomically(self._metrics_path, content)
        self._tally = Tally(content)
        self._checkpoint.seal_metrics(self._tally.seal())

    def _tallied(self) -> Tally:
        if self._tally is None:
            self._tally = Tally(self._metrics())
        return self._tally

    @property
    def summary(self) -> dict[str, Any] | None:
        """The result, or None if the run has not written one, or if somebody has deleted it."""
        if self._summary_path.exists():
            self._check(self._summary_path.name, "; without one, delete it and resume the run")
        return read_json(self._summary_path)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the result, replacing an earlier one."""
        content = json.dumps(strict(summary), indent=2, allow_nan=False).encode() + b"\n"
        self._replace(self._summary_path.name, content)
        self._checkpoint.seal(self._summary_path.name, digest(content))

    def remove_summary(self) -> None:
        """The run is no longer complete."""
        self._lock.acquire()
        self._checkpoint.seal(self._summary_path.name, None)
        self._summary_path.unlink(missing_ok=True)

    def _replace(self, name: str, content: bytes) -> None:
        """Write a file anew; the checkpoint forgets the old one first, in case of a kill."""
        self._lock.acquire()
        self._checkpoint.seal(name, None)
        write_atomically(self.path / name, content)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Change the settings on purpose."""
        content = toml.dumps({"format": FORMAT, **config}).encode()
        self._replace(self._config_path.name, content)
        self._checkpoint.seal(self._config_path.name, digest(content))

    def change(self, **settings: Any) -> None:
        """Write down what is other in a run that goes on: more rounds, another device."""
        if (config := self.config) != (new := config | settings):
            self.write_config(new)

    @property
    def clients(self) -> dict[str, Any]:
        """The clients' data and which are malicious; empty if the run has not written it."""
        self._check(self._clients_path.name)
        return current(read_json(self._clients_path) or {})

    def write_clients(self, census: Mapping[str, Any]) -> None:
        """Write the clients' data and which are malicious."""
        content = json.dumps(strict(census), allow_nan=False).encode() + b"\n"
        if not self._clients_path.exists() or self._clients_path.read_bytes() != content:
            self._replace(self._clients_path.name, content)

    @property
    def choices(self) -> dict[str, Any]:
        """The choices that the engine has made by timing."""
        self._check(CHOICES)
        return read_json(self.path / CHOICES) or {}

    def write_choices(self, choices: Mapping[str, str]) -> None:
        """Save the engine's choices, so that a resumed run computes the same numbers."""
        if choices and choices != self.choices:
            self._replace(CHOICES, json.dumps(dict(choices), indent=1).encode() + b"\n")

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
        paths = [self.path / name for name in FILES if (self.path / name).exists()]
        seals = {
            "files": {path.name: digest(path.read_bytes()) for path in paths},
            "metrics": self._tallied().seal(),
        }
        self._checkpoint.write(round, server, client_states, timing or {}, seals)

    def verify(self) -> None:
        """Raise UserError that names a file of the checkpoint that was changed; the other files
        are checked when they are read.
        """
        self._checkpoint.verify()

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
        records, seal = self.records(), self._checkpoint.seals().get("metrics")
        state = self._checkpoint.read(device, lazily)
        if seal is None:
            last = 0 if state is None else state[0]
            content = b"".join(json_line(record) for record in records if record["round"] <= last)
        else:
            content = sealed_part(self._metrics(), seal, self._metrics_path)
        write_atomically(self._metrics_path, content)
        self._tally = Tally(content)
        return state
