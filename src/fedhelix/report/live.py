"""Many run folders, read a little at a time: what has been read is remembered, and only what is new
is read.

Folders may be half written, damaged, deleted meanwhile or made by a stranger. So nothing here
follows a symbolic link, opens anything but regular files, believes a size, or builds a path from
what a browser sent.
"""

from __future__ import annotations

import json
import os
import stat
import threading
import tomllib
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedhelix.store import writer_lives
from fedhelix.store.records import MAIN_METRICS, current

MOST_RUNS = 5000
DEEPEST = 3  # runs/sweep/cell/seed is deep enough
MOST_BYTES_OF_A_FILE = 2**24
MOST_BYTES_OF_A_LINE = 2**22
MOST_BYTES_AT_ONCE = 2**26
MOST_CHARACTERS = 300

MEASURES = (
    "personal_accuracy",
    "personal_score",
    "personal_p10",
    "accuracy",
    "score",
    "train_loss",
)
INCIDENTS = (
    "refused",
    "missing",
    "unevaluated",
    "troubles",
)  # each a mapping of clients or sites to reasons
MOST_INCIDENTS = 50
COSTS = {"uplink_bytes": 2**20, "seconds": 1.0}
NAN = float("nan")


class Watched:
    """One run folder as far as it has been read."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.stamps: dict[str, tuple[int, ...]] = {}
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.problems: dict[str, str] = {}  # by file, since each is mended by itself
        self.running = False
        self._forget_records()

    def _forget_records(self) -> None:
        self.offset, self.skipped, self.inode = 0, 0, 0
        self.rounds = array("q")
        self.last: dict[
            str, float
        ] = {}  # what the last round that has such an entry says, a number or not
        self.columns = {key: array("d") for key in (*MEASURES, *COSTS)}

    def look(self) -> bool:
        """Read the small files again if they changed; says whether anything did, records included."""
        before = dict(self.stamps), self.running
        for name in ("config.toml", "summary.json", "metrics.jsonl", "lock"):
            self.stamps[name] = _stamp(self.path / name)
        lock = _read(self.path / "lock", 4096) if self.stamps["lock"] else None
        self.running = lock is not None and writer_lives(lock)
        if self.stamps["config.toml"] != before[0].get("config.toml"):
            self.config, self.problems["config.toml"] = _parsed(
                self.path / "config.toml", tomllib.loads
            )
        if self.stamps["summary.json"] != before[0].get("summary.json"):
            self.summary, self.problems["summary.json"] = (
                _parsed(self.path / "summary.json", json.loads)
                if self.stamps["summary.json"]
                else ({}, "")
            )
        return (self.stamps, self.running) != before

    def follow(self) -> None:
        """Read the records that are new since the last time."""
        for record in self._new_records():
            number = record.get("round")
            if type(number) is not int or not 0 < number < 2**40:
                self.skipped += 1
                continue
            self.rounds.append(number)
            for key, column in self.columns.items():
                column.append(_number(record.get(key)))
            self.last |= {key: _number(record[key]) for key in MAIN_METRICS if key in record}

    def _new_records(self) -> Iterator[dict[str, Any]]:
        inode, _, size = _stamp(self.path / "metrics.jsonl") or (0, 0, 0)
        if inode != self.inode or size < self.offset:  # a resumed run has written the file anew
            self._forget_records()
            self.inode = inode
        for line, end in _lines(self.path / "metrics.jsonl", self.offset):
            self.offset = end
            record = _object(line)
            if record is None:
                self.skipped += 1
            else:
                yield record

    def records(self) -> Iterator[dict[str, Any]]:
        """The records in full, read anew: for what is not remembered, such as clients and notes.

        Of a file that is too large to be read at once these are the last ones.
        """
        path = self.path / "metrics.jsonl"
        *_, size = _stamp(path) or (0,)
        start = max(0, size - MOST_BYTES_AT_ONCE)
        lines = _lines(path, start)
        if start:
            next(lines, None)  # most likely the end of one
        return (record for line, _ in lines if (record := _object(line)) is not None)

    @property
    def problem(self) -> str:
        """What is wrong with its files."""
        return "; ".join(filter(None, self.problems.values()))

    @property
    def status(self) -> str:
        """What became of it."""
        if self.problem:
            return "damaged"
        if self.summary.get("complete") is True:
            return "complete"
        return "running" if self.running else "stopped"

    def overview(self) -> dict[str, Any]:
        """What a list of runs shows of this one."""
        finished = self.status == "complete"
        if not finished:
            self.follow()
        metric, value = self._metric()
        method, data = self.config.get("method"), self.config.get("data")
        return {
            "id": self.name,
            "method": _text(
                self.summary.get("method")
                or (method.get("name") if isinstance(method, dict) else method)
            ),
            "data": _text(
                self.summary.get("data") or (data.get("name") if isinstance(data, dict) else data)
            ),
            "seed": _whole(self.config.get("seed")),
            "status": self.status,
            "problem": _text(self.problem),
            "done": _whole(self.summary.get("rounds"))
            if finished
            else (self.rounds[-1] if self.rounds else 0),
            "rounds": _whole(self.config.get("rounds")),
            "metric": metric,
            "value": value,
            "uploaded": self._spent("uplink_bytes", finished),
            "seconds": self._spent("seconds", finished),
            "skipped": self.skipped,
            "changed": max((stamp[1] for stamp in self.stamps.values() if stamp), default=0) / 1e9,
        }

    def _metric(self) -> tuple[str, float | None]:
        """What it is judged by, and its last value; none where it has diverged."""
        for key in MAIN_METRICS:
            known = self.summary.get(key if key.startswith("personal") else f"final_{key}")
            if known is not None or key in self.last:
                value = _number(self.last.get(key) if known is None else known)
                return key, value if value == value else None
        return "personal_accuracy", None

    def _spent(self, key: str, finished: bool) -> float | None:
        value = (
            _number(self.summary.get(key))
            if finished
            else sum(x for x in self.columns[key] if x == x)
        )
        return value if value == value else None

    def line(self) -> dict[str, Any]:
        """Its curves, for the chart."""
        self.follow()
        x: dict[str, list[float | None]] = {"round": list(self.rounds)}
        for key, name in (("uplink_bytes", "mib"), ("seconds", "seconds")):
            total, sums = 0.0, []
            for value in self.columns[key]:
                total += value if value == value else 0.0
                sums.append(float(f"{total / COSTS[key]:.6g}"))
            x[name] = [*sums]
        y = {
            key: {"mid": _plain(self.columns[key])}
            for key in MEASURES
            if any(v == v for v in self.columns[key])
        }
        return {"label": self.name, "x": x, "y": y}

    def details(self) -> dict[str, Any]:
        """Everything about one run but its clients' histories."""
        last: dict[str, Any] = {}
        finals: dict[int, float] = {}
        incidents: deque[list[Any]] = deque(maxlen=MOST_INCIDENTS)
        evaluated, attackers, samples = self._census()
        for record in self.records():
            last = record
            finals = dict(_clients(record, evaluated)) if _list(record.get("personal")) else finals
            for kind in INCIDENTS:
                reasons = record.get(kind)
                if isinstance(reasons, dict):
                    number = _whole(record.get("round"))
                    incidents.extend(
                        [number, kind, _text(who), _text(why)] for who, why in reasons.items()
                    )
        clients = [
            {
                "client": client,
                "value": value,
                "attacker": client in attackers,
                "samples": samples.get(client),
            }
            for client, value in sorted(finals.items())
        ]
        metadata = json.dumps(last.get("metadata") or {}, indent=1)
        config = "\n".join(f"{key} = {_text(value)}" for key, value in _flat(self.config))
        return {
            **self.overview(),
            "line": self.line(),
            "clients": clients,
            "incidents": list(incidents),
            "metadata": metadata if len(metadata) < 5000 else metadata[:5000] + " …",
            "config": config,
        }

    def client(self, client: int) -> dict[str, Any]:
        """One client's history: its metric, and the rounds that it worked in."""
        evaluated, *_ = self._census()
        rounds, values, worked = [], [], []
        for record in self.records():
            number = record.get("round")
            if type(number) is not int:
                continue
            value = dict(_clients(record, evaluated)).get(client)
            if value is not None:
                rounds.append(number)
                values.append(value)
            there = record.get("participants")
            if isinstance(there, list) and client in there:
                worked.append(number)
        return {"client": client, "rounds": rounds, "values": values, "worked": worked}

    def _census(self) -> tuple[list[int], set[int], dict[int, int]]:
        """Who is judged, who attacks, and how many samples each has."""
        census = _object(_read(self.path / "clients.json", MOST_BYTES_OF_A_FILE) or b"{}") or {}
        evaluated, attackers, samples = ([v for v in _list(census.get(key)) if type(v) is int]
                                      for key in ("evaluated", "attackers", "samples"))  # fmt: skip
        return evaluated, set(attackers), dict(enumerate(samples))


class Watch:
    """All runs below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.runs: dict[str, Watched] = {}
        self.guard = threading.RLock()

    def look(self) -> tuple[list[str], list[str]]:
        """Look at the folder again; the names of runs that changed, and of runs that are gone."""
        with self.guard:
            there = dict(_find(self.root, self.root, DEEPEST))
            gone = [name for name in self.runs if name not in there]
            for name in gone:
                del self.runs[name]
            for name, path in there.items():
                self.runs.setdefault(name, Watched(name, path))
            return [name for name, run in self.runs.items() if run.look()], gone

    def overview(self, names: list[str] | None = None) -> list[dict[str, Any]]:
        """The runs for a list, newest first."""
        with self.guard:
            wanted = (
                list(self.runs) if names is None else [name for name in names if name in self.runs]
            )
            return sorted(
                (self.runs[name].overview() for name in wanted), key=lambda run: -run["changed"]
            )

    def get(self, name: str) -> Watched | None:
        """A run by its name; whatever is not the name of a known run is nothing."""
        return self.runs.get(name)


def _find(folder: Path, root: Path, depth: int) -> Iterator[tuple[str, Path]]:
    """The run folders at or below a folder."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    if any(entry.name == "config.toml" for entry in entries):
        yield str(folder.relative_to(root)) if folder != root else folder.name, folder
        return
    count = 0
    for entry in entries:
        try:
            inside = (
                entry.is_dir(follow_symlinks=False)
                and not entry.name.startswith(".")
                and _printable(entry.name)
            )
        except OSError:
            continue
        if inside and depth:
            for found in _find(folder / entry.name, root, depth - 1):
                yield found
                count += 1
                if count >= MOST_RUNS:
                    return


def _printable(name: str) -> bool:
    """Whether a name is proper Unicode: names that are not cannot be sent."""
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False


def _stamp(path: Path) -> tuple[int, ...]:
    """What changes when a file changes; nothing for what is no regular file."""
    try:
        found = os.lstat(path)
    except (OSError, ValueError):
        return ()
    return (found.st_ino, found.st_mtime_ns, found.st_size) if stat.S_ISREG(found.st_mode) else ()


def _open(path: Path) -> int | None:
    """A regular file, opened for reading; nothing that waits, and nothing behind a link."""
    try:
        handle = os.open(
            path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        )
    except (OSError, ValueError):
        return None
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    return None


def _read(path: Path, most: int) -> bytes | None:
    """A small file whole; nothing for one that is missing or larger than allowed."""
    handle = _open(path)
    if handle is None:
        return None
    with os.fdopen(handle, "rb") as file:
        content = file.read(most + 1)
    return content if len(content) <= most else None


def _lines(path: Path, offset: int) -> Iterator[tuple[bytes, int]]:
    """Complete lines from an offset on, each with the offset of its end; one too long comes in
    useless pieces.
    """
    handle = _open(path)
    if handle is None:
        return
    with os.fdopen(handle, "rb") as file:
        file.seek(offset)
        end, stop = offset, offset + MOST_BYTES_AT_ONCE
        while end < stop and (line := file.readline(MOST_BYTES_OF_A_LINE)):
            end += len(line)
            if line.endswith(b"\n") or len(line) == MOST_BYTES_OF_A_LINE:
                yield line, end  # otherwise it is half a line, whose writer is not done yet


def _parsed(path: Path, parse: Any) -> tuple[dict[str, Any], str]:
    """The content of a small file, or what is wrong with it."""
    content = _read(path, MOST_BYTES_OF_A_FILE)
    if content is None:
        return {}, f"{path.name} cannot be read"
    try:
        found = parse(content.decode())
    except (ValueError, RecursionError):
        return {}, f"{path.name} is damaged"
    return (found, "") if isinstance(found, dict) else ({}, f"{path.name} is damaged")


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return current(found) if isinstance(found, dict) else None


def _clients(record: Mapping[str, Any], evaluated: list[int]) -> Iterator[tuple[int, float]]:
    values = _list(record.get("personal"))
    for client, value in zip(
        evaluated if len(evaluated) == len(values) else range(len(values)), values, strict=True
    ):
        if (number := _number(value)) == number:
            yield client, number


def _number(value: object) -> float:
    """A finite number, or NaN."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
        return float(value)
    return NAN


def _plain(values: array[float]) -> list[float | None]:
    return [float(f"{value:.6g}") if value == value else None for value in values]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _whole(value: object) -> int | None:
    return value if type(value) is int and abs(value) < 2**53 else None


def _text(value: object) -> str:
    text = "" if value is None else str(value).encode(errors="replace").decode()
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + "…"


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in list(table.items())[:500]:
        if isinstance(value, dict) and prefix.count(".") < 4:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield _text(f"{prefix}{key}"), value
