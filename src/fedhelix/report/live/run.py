"""One run folder, as far as it has been read."""

from __future__ import annotations

import json
import math
import tomllib
from array import array
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeGuard

from fedhelix.report.live import files
from fedhelix.report.live.files import Stamp
from fedhelix.report.live.values import (
    as_number,
    as_text,
    as_whole,
    or_none,
    shortened,
    shortened_or_none,
)
from fedhelix.report.results import given_in_python
from fedhelix.store import writer_lives
from fedhelix.store.progress import time_left
from fedhelix.store.records import HOUR, MAIN_METRICS, diverged_since, with_losses

WATCHED_FILES = ("config.toml", "summary.json", "metrics.jsonl", "lock")
MOST_BYTES_OF_A_LOCK = 4096
MEASURES = (
    "personal_accuracy",
    "personal_score",
    "personal_p10",
    "accuracy",
    "score",
    "train_loss",
)
COSTS = {"uplink_bytes": ("mib", 2**20), "seconds": ("seconds", 1.0)}
"""Each cost with its name on the chart's horizontal axis, and its unit."""
OTHERS = ("clock", "loss", "arrival_bytes")


def is_round(number: object) -> TypeGuard[int]:
    """Whether a record's number can be that of a round."""
    return type(number) is int and 0 < number < 2**40


class WatchedRun:
    """One run folder: the small files, and the columns of its records that charts need."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.stamps: dict[str, Stamp] = {}
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.problems: dict[str, str] = {}  # by file, because each can be repaired by itself
        self.running = False
        self._forget_records()

    def _forget_records(self) -> None:
        self.offset, self.skipped, self.inode = 0, 0, 0
        self.rounds = array("q")
        self.last: dict[str, float] = {}  # each main metric in the last round that has it, or NaN
        self.diverged: int | None = None  # the round since which it has
        # NaN: there is no such entry; infinite: it is not a number
        self.columns = {key: array("d") for key in (*MEASURES, *COSTS, *OTHERS)}

    def refresh(self) -> bool:
        """Read the small files again if they changed; says whether any file changed."""
        before = dict(self.stamps), self.running
        self.stamps = {name: files.stamp(self.path / name) for name in WATCHED_FILES}
        self.running = bool(self.stamps["lock"]) and self._has_writer()
        if self.stamps["config.toml"] != before[0].get("config.toml"):
            self.config, self.problems["config.toml"] = files.read_table(
                self.path / "config.toml", tomllib.loads
            )
        if self.stamps["summary.json"] != before[0].get("summary.json"):
            self._read_summary()
        return (self.stamps, self.running) != before

    def _has_writer(self) -> bool:
        lock = files.read_small(self.path / "lock", MOST_BYTES_OF_A_LOCK)
        return lock is not None and writer_lives(lock)

    def _read_summary(self) -> None:
        self.summary, self.problems["summary.json"] = {}, ""
        if self.stamps["summary.json"]:  # a run that is not finished has none
            self.summary, self.problems["summary.json"] = files.read_table(
                self.path / "summary.json", json.loads
            )

    def follow(self) -> bool:
        """Read records that were appended since the last call; says whether there were any."""
        before = self.inode, self.offset
        for record in self._new_records():
            number = record.get("round")
            if not is_round(number):
                self.skipped += 1
                continue
            self.rounds.append(number)
            if not with_losses([record]):
                record.pop("train_loss", None)  # nobody's
            for key, column in self.columns.items():
                column.append(_kept(record, key))
            self.last |= {key: as_number(record[key]) for key in MAIN_METRICS if key in record}
        if (self.inode, self.offset) == before:
            return False
        self.diverged = diverged_since(self.kept_records())
        return True

    def _new_records(self) -> Iterator[dict[str, Any]]:
        inode, _, size = files.stamp(self.path / "metrics.jsonl") or (0, 0, 0)
        if inode != self.inode or size < self.offset:  # a resumed run has rewritten the file
            self._forget_records()
            self.inode = inode
        for line, end in files.read_lines(self.path / "metrics.jsonl", self.offset):
            self.offset = end
            record = files.parse_record(line)
            if record is None:
                self.skipped += 1
            else:
                yield record

    def records(self) -> Iterator[dict[str, Any]]:
        """The full records, read from the file: for what is not kept, such as clients' values."""
        return files.read_last_records(self.path / "metrics.jsonl")

    def census(self) -> dict[str, Any]:
        """The content of clients.json; empty where the file is missing or damaged."""
        content = files.read_small(self.path / "clients.json", files.MOST_BYTES_OF_A_FILE)
        return files.parse_record(content or b"{}") or {}

    def kept_records(self) -> list[dict[str, Any]]:
        """The records as far as they are kept; of a round that comes twice, the last one."""
        kept: dict[int, dict[str, Any]] = {}
        for place, number in enumerate(self.rounds):
            values = {key: column[place] for key, column in self.columns.items()}
            kept[number] = {"round": number} | {
                key: value if math.isfinite(value) else None
                for key, value in values.items()
                if not math.isnan(value)
            }
        return list(kept.values())

    @property
    def problem(self) -> str:
        """What is wrong with its files."""
        return "; ".join(filter(None, self.problems.values()))

    @property
    def status(self) -> str:
        """Damaged, complete, running, pruned or stopped."""
        if self.problem:
            return "damaged"
        if self.summary.get("complete") is True:
            return "complete"
        if self.running:
            return "running"
        return "pruned" if self.config.get("pruned") is True else "stopped"

    def overview(self) -> dict[str, Any]:
        """The row of this run in a list of runs."""
        finished = self.status == "complete"
        if not finished:
            self.follow()
        done = self.rounds[-1] if self.rounds else 0
        metric, value = self._metric()
        return {
            "id": self.name,
            "method": self._name_of("method"),
            "data": self._name_of("data"),
            "seed": as_whole(self.config.get("seed")),
            "status": self.status,
            "problem": as_text(self.problem),
            "done": as_whole(self.summary.get("rounds")) if finished else done,
            "rounds": as_whole(self.config.get("rounds")),
            "metric": metric,
            "value": value,
            "diverged": as_whole(self.summary.get("diverged")) if finished else self.diverged,
            "uploaded": self._total("uplink_bytes", finished),
            "seconds": self._total("seconds", finished),
            "left": self._time_left(),
            "setting": self._setting(),
            "skipped": self.skipped,
            "changed": max((stamp[1] for stamp in self.stamps.values() if stamp), default=0) / 1e9,
        }

    def _name_of(self, key: str) -> str:
        """The name of the method or data set, from the summary or else from the config."""
        entry = self.config.get(key, given_in_python(self.config, key))
        return as_text(
            self.summary.get(key) or (entry.get("name") if isinstance(entry, dict) else entry)
        )

    def _metric(self) -> tuple[str, float | None]:
        """The main metric and its last value; None where the run has diverged."""
        for key in MAIN_METRICS:
            final = self.summary.get(key if key.startswith("personal") else f"final_{key}")
            if final is not None or key in self.last:
                return key, or_none(as_number(self.last.get(key) if final is None else final))
        return "personal_accuracy", None

    def _total(self, cost: str, finished: bool) -> float | None:
        if finished:
            return or_none(as_number(self.summary.get(cost)))
        return sum(filter(math.isfinite, self.columns[cost]))

    def _time_left(self) -> float | None:
        """The seconds that a run in progress will still take."""
        if self.status != "running":
            return None
        done = self.rounds[-1] if self.rounds else 0
        return time_left(self.config.get("rounds"), done, self._total("seconds", False) or 0.0)

    def _setting(self) -> str:
        """On which data and in whose hands it runs: only runs with the same are compared."""
        words = [self._name_of(key) for key in ("data", "partition", "shift", "attack")]
        named = [word for word in words if word not in ("", "none")]
        newest = self.columns["clock"][-1:]
        is_timed = "clock" in self.summary or any(map(math.isfinite, newest))
        return " · ".join([*named, "simulated devices"] if is_timed else named)

    def line(self) -> dict[str, Any]:
        """Its curves, for the chart."""
        self.follow()
        x: dict[str, list[Any]] = {"round": list(self.rounds)}
        for key, (name, unit) in COSTS.items():
            spent = (value if math.isfinite(value) else 0.0 for value in self.columns[key])
            x[name] = [shortened(total / unit) for total in accumulate(spent)]
        if any(map(math.isfinite, self.columns["clock"])):
            x["hours"] = shortened_or_none(time / HOUR for time in self.columns["clock"])
        y = {
            key: {"mid": shortened_or_none(self.columns[key])}
            for key in MEASURES
            if any(map(math.isfinite, self.columns[key]))
        }
        sent = zip(self.rounds, self.columns["arrival_bytes"], strict=True)
        arrival = next((round for round, size in sent if math.isfinite(size)), None)
        return {"label": self.name, "x": x, "y": y, "arrival": arrival}


def _kept(record: Mapping[str, Any], key: str) -> float:
    """An entry of a record as a column keeps it."""
    if key not in record:
        return math.nan
    return math.inf if math.isnan(value := as_number(record[key])) else value
