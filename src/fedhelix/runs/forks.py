"""Runs that differ only in how they end have their beginning in common: it is run once and then copied.

A method says which of its options are asked for only at the end (`Method.late`).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedhelix import toml
from fedhelix.errors import BadInput
from fedhelix.records import Record
from fedhelix.runs.config import Plan
from fedhelix.store import FORMAT, RunFolder
from fedhelix.tree import write_atomically


class BeforeTheEnd(KeyboardInterrupt):
    """A run stops before its last round, like on Ctrl-C, so that others can go on from there as well."""


def siblings(plans: Mapping[Path, Plan]) -> dict[Path, list[Path]]:
    """Of unfinished runs those that are to be stopped before the end, each with the others that go on from there."""
    families: dict[Any, list[Path]] = {}
    for path, plan in sorted(plans.items(), key=lambda entry: not is_begun(entry[0])):
        # Evaluations on the way and newcomers would see how a model is used.
        silent = plan.config.eval_every >= plan.config.rounds > 1 and not plan.config.newcomers
        # A class that inherits the promise may use its options earlier.
        promised = "late" in vars(type(plan.method)) and plan.method.late
        if promised and silent and rounds_of(path) < plan.config.rounds:
            same = {name: value for name, value in plan.method.options().items() if name not in plan.method.late}
            families.setdefault(repr((plan.spec, same, plan.config)), []).append(path)
    fresh = {first: [path for path in others if not is_begun(path)] for first, *others in families.values()}
    return {first: others for first, others in fresh.items() if others}


def is_begun(path: Path) -> bool:
    """Whether there is a run to go on with."""
    return (path / "config.toml").exists()


def is_finished(path: Path) -> bool:
    """Whether a run has come to its end."""
    return is_begun(path) and RunFolder.open(path).summary is not None


def rounds_of(path: Path) -> int:
    """How many rounds of a run are kept."""
    return RunFolder.open(path).rounds_saved if is_begun(path) else 0


def is_there(plan: Plan, path: Path) -> bool:
    """Whether only the last round is missing."""
    return rounds_of(path) == plan.config.rounds - 1


def stop_before_the_end(plan: Plan, record: Record) -> None:
    """To be called with every record."""
    if record["round"] == plan.config.rounds - 1:
        raise BeforeTheEnd


def fork(source: Path, plan: Plan, target: Path) -> None:
    """A copy of a run that lacks only its last round, which it will play as another plan says."""
    half = target.with_name(f".{target.name}.half")
    with RunFolder.open(source):  # nobody plays on meanwhile
        if not is_there(plan, source):
            raise BadInput(f"'{source}' is not before its last round, so '{target}' cannot go on from it.")
        if target.exists() and any(not (child.name == "lock" or child.name[0] == ".") for child in target.iterdir()):
            raise BadInput(f"'{target}' is not empty; choose an empty or a new folder for the run.")
        for leftover in (half, target):  # of a process that was killed here
            shutil.rmtree(leftover, ignore_errors=True)
        shutil.copytree(source, half, ignore=shutil.ignore_patterns("lock", ".*"))
    config = toml.read(half / "config.toml") | {"format": FORMAT, "method": plan.as_dict()["method"]}
    write_atomically(half / "config.toml", toml.dumps(config).encode())
    half.rename(target)
