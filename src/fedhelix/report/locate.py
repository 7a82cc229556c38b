"""Which runs a command means: run folders, folders of runs, comparisons, or the last one made."""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedhelix.core import toml
from fedhelix.core.errors import UserError
from fedhelix.report.results import Result, grouped, read
from fedhelix.report.wording import count
from fedhelix.store import COMPARISON, RUNS, RunFolder

MOST_NAMES = 6  # of runs in a sentence


@dataclass(frozen=True)
class Selection:
    """Runs, the commands that would make them again, and a sentence per comparison that lacks
    some of its runs.
    """

    folders: list[RunFolder]
    commands: list[str]
    lacking: list[str] = field(default_factory=list)


def select(paths: Sequence[Path]) -> Selection:
    """The runs in the given folders; without any, the last comparison (or run) in runs/."""
    selection = Selection([], [])
    for path in paths or [last(RUNS)]:
        runs = inside(path)
        shown = {*runs, *paths}
        deeper = [run for run in runs_below(path) if not {run, run.parent} & shown]
        if others := list(dict.fromkeys(run.parent for run in deeper)):
            found = f"{count(len(deeper), 'run')} further down"
            if not runs:
                raise UserError(
                    f"'{path}' holds no run, but {found}; name a folder with runs, such "
                    f"as '{others[0]}'."
                )
            warnings.warn(
                f"left out of '{path}': {found}; name their folder to see them, such as "
                f"'{others[0]}'.",
                stacklevel=2,
            )
        if not runs:
            raise UserError(
                f"'{path}' holds no run; "
                "give the folder of a run, of a comparison, or of several runs."
            )
        known = {folder.path for folder in selection.folders}
        selection.folders.extend(RunFolder.open(run) for run in runs if run not in known)
        selection.commands.extend(_commands(path, runs))
        selection.lacking.extend(_lacking(path, runs))
    if twins := _idle_twins(selection.folders):
        names = ", ".join(str(run.path) for run in twins[:MOST_NAMES])
        more = f" and {len(twins) - MOST_NAMES} more" if len(twins) > MOST_NAMES else ""
        warnings.warn(
            f"left out: {count(len(twins), 'run')} without any round ({names}{more}), since "
            "another run here has the same method, settings and seed.",
            stacklevel=2,
        )
    chosen = [folder for folder in selection.folders if folder not in twins]
    return replace(selection, folders=chosen)


def _idle_twins(folders: Sequence[RunFolder]) -> list[RunFolder]:
    """The runs without any round that cannot be told from another one; of several, all but one."""
    idle = [folder for folder in folders if folder.summary is None and not folder.records()]
    if not idle or len(folders) == 1:
        return []
    twins: list[RunFolder] = []
    results = {folder.path: read(folder) for folder in folders}
    for folder in idle:
        mine = results.pop(folder.path)
        if any(_are_twins(mine, other) for other in results.values()):
            twins.append(folder)
        else:
            results[folder.path] = mine
    return twins


def _are_twins(one: Result, other: Result) -> bool:
    try:
        grouped([one, other])
    except UserError:
        return True
    return False


def inside(path: Path) -> list[Path]:
    """The run itself, or the runs in the folder: in the comparison's order of methods, by seed."""
    try:
        if is_run(path):
            return [path]
        runs = [child for child in visible(path) if is_run(child)] if path.is_dir() else []
    except OSError as problem:
        raise UserError(f"'{path}' cannot be read: {problem.strerror}.") from None
    settings = toml.read(path / COMPARISON) if (path / COMPARISON).is_file() else {}
    labels = settings.get("labels", settings.get("methods"))
    order = {
        str(label): place for place, label in enumerate(labels if isinstance(labels, list) else [])
    }

    def rank(run: Path) -> tuple[int, str, int, str]:
        method, seed = _label_and_seed(run)
        number = int(seed) if seed.isdecimal() and len(seed) < 10 else 0
        return order.get(method, len(order)), method, number, run.name

    return sorted(runs, key=rank)


def runs_below(path: Path) -> Iterator[Path]:
    """The run itself, or all runs in the folder and its folders, however deep; links and names that
    start with a dot are left out.
    """
    folders = [path]
    while folders:
        folder = folders.pop()
        with suppress(OSError):  # it is gone, or not ours to read
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name, reverse=True)
            if any(entry.name == "config.toml" for entry in entries):
                yield folder
                continue
            shown = (entry for entry in entries if not entry.name.startswith("."))
            folders += [folder / one.name for one in shown if one.is_dir(follow_symlinks=False)]


def _label_and_seed(run: Path) -> tuple[str, str]:
    """The label and the seed in the name of a comparison's run folder."""
    label, _, seed = run.name.rpartition("-seed")
    return label, seed


def visible(path: Path) -> list[Path]:
    """The entries of a folder without unfinished copies, whose names start with a dot."""
    return [child for child in path.iterdir() if not child.name.startswith(".")]


def is_run(path: Path) -> bool:
    """Whether a folder holds a run."""
    return (path / "config.toml").is_file()


def last(root: Path) -> Path:
    """The newest comparison below a folder, or the newest run where nothing was compared."""
    children = [child for child in visible(root) if child.is_dir()] if root.is_dir() else []
    for kind in (COMPARISON, "config.toml"):
        dated = [
            ((child / kind).stat().st_mtime, child)
            for child in children
            if (child / kind).is_file()
        ]
        if dated:
            return max(dated)[1]
    raise UserError(
        f"there is no run in '{root}/' yet; "
        "make some with `fedhelix compare fedavg genfed`, or name a folder."
    )


def _commands(path: Path, runs: Sequence[Path]) -> list[str]:
    """The commands that would make these runs again."""
    if (path / COMPARISON).is_file():
        comparison = toml.read(path / COMPARISON)
        methods, settings = comparison.get("methods"), comparison.get("settings")
        if isinstance(methods, list) and isinstance(settings, dict):
            seeds = str(comparison.get("seeds"))
            words = ["fedhelix", "compare", *map(str, methods), "--seeds", seeds]
            return [shlex.join([*words, *_each("--set", _used(settings, methods, runs))])]
    return [command for run in runs if (command := _command(run)) is not None]


def _lacking(path: Path, runs: Sequence[Path]) -> Iterator[str]:
    """Which runs of a comparison have not begun."""
    note = toml.read(path / COMPARISON) if (path / COMPARISON).is_file() else {}
    labels, seeds, settings = (note.get(key) for key in ("labels", "seeds", "settings"))
    if not isinstance(labels, list) or type(seeds) is not int or not isinstance(settings, dict):
        return  # an older one does not name its runs, or it is damaged
    seed = str(settings.get("seed", 0))
    first = int(seed) if seed.isdecimal() else 0
    planned = [f"{label}-seed{first + number}" for number in range(seeds) for label in labels]
    there = {run.name for run in runs}
    if absent := [name for name in planned if name not in there]:
        names = ", ".join(absent[:MOST_NAMES])
        more = f" and {len(absent) - MOST_NAMES} more" if len(absent) > MOST_NAMES else ""
        have = "has" if len(absent) == 1 else "have"
        yield (
            f"{len(absent)} of {count(len(planned), 'run')} {have} not begun ({names}{more}); "
            f"continue with `fedhelix resume {shlex.quote(str(path))}`."
        )


def _command(run: Path) -> str | None:
    """The command that would make a run again; None for a run that was made from Python."""
    folder = RunFolder.open(run)
    config = folder.config
    method, deployment = config.get("method"), config.get("deployment")
    name = str(method.get("name")) if isinstance(method, dict) else str(method)
    words = [name, "--config", str(run / "config.toml")]
    if isinstance(deployment, dict):
        own = ("experiment", "where")
        policy = [f"{key}={value}" for key, value in deployment.items() if key not in own]
        command = ["fedhelix", "deploy", "run", *words, *_each("--term", policy)]
        return shlex.join(command) + folder.where
    return None if config.get("library") else shlex.join(["fedhelix", "run", *words])


def _used(settings: dict[str, Any], methods: Sequence[object], runs: Sequence[Path]) -> list[str]:
    """The settings without options of methods that did not run.

    A preset may hold such options, a command may not.
    """
    specs = [str(method).partition("@")[0] for method in methods]
    # Labels name methods that come from a file.
    labels = [_label_and_seed(run)[0].partition("@")[0] for run in runs]
    groups = {"method", *(name for spec in (*specs, *labels) for name in (spec, *spec.split("+")))}
    plain = {key for run in runs for key in RunFolder.open(run).config}

    def is_used(key: str) -> bool:
        group, dot, _ = key.partition(".")
        # Settings of all methods may have a dot too: attack.share is attack_share.
        return not dot or group in groups or key.replace(".", "_").replace("-", "_") in plain

    return [f"{key}={value}" for key, value in settings.items() if is_used(key)]


def _each(flag: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (flag, value)]
