"""Start and resume runs, one or many, and compare them."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from fedhelix import toml
from fedhelix.client import Setup
from fedhelix.data import Dataset
from fedhelix.engines import Engine
from fedhelix.engines.together import together
from fedhelix.errors import BadInput
from fedhelix.federation import device_of
from fedhelix.progress import Progress
from fedhelix.records import Record
from fedhelix.runs.config import PLACES, Config, Plan, absolute, device_name, located, make_plans, read_plan
from fedhelix.runs.forks import (
    BeforeTheEnd,
    fork,
    is_begun,
    is_finished,
    is_there,
    rounds_of,
    siblings,
    stop_before_the_end,
)
from fedhelix.standing import Run
from fedhelix.store import COMPARISON, RUNS, RunFolder
from fedhelix.track import check_tracker
from fedhelix.tree import write_atomically

MOST_SEEDS = 1000
TOGETHER = 48  # runs in one program: more would not fill a GPU any better


def start(plan: Plan, out: Path, quiet: bool | None = None, **more: Any) -> Run:
    """Run a plan into a new folder."""
    return _fit(plan, out, resume=False, quiet=quiet, **more)


def resume(path: Path, quiet: bool | None = None, place: Config | None = None, **more: Any) -> Run:
    """Continue a run that was stopped at any moment, where it began or where `place` says."""
    config = RunFolder.open(path).config
    if "deployment" in config:
        raise BadInput(f"the clients of '{path}' are sites; continue it with `fedhelix deploy resume {path}`.")
    plan = read_plan(config, path)
    if place is not None:
        moved = device_name(place.device) != config.get("versions", {}).get("device")
        # Kernels were chosen by timing: on the same device the run computes as it began.
        new = {key: getattr(place, key) for key in PLACES if key != "kernels" or moved}
        plan = replace(plan, config=replace(plan.config, **new))
    return _fit(plan, path, resume=True, quiet=quiet, **more)


def go_on(plan: Plan, path: Path, quiet: bool | None = None, **more: Any) -> None:
    """Start a run, or continue it if it was begun, on this plan's device."""
    if is_begun(path):
        resume(path, quiet, place=plan.config, **more)
    else:
        start(plan, path, quiet, **more)


def _fit(
    plan: Plan,
    out: Path,
    resume: bool,
    quiet: bool | None,
    title: str | None = None,
    watch: Callable[[Record], None] | None = None,
    engine: Callable[[Setup], Engine] | None = None,
    data: Dataset | None = None,
    track: str | None = None,
) -> Run:
    federation = plan.config.federation(plan.method, engine, data)
    try:
        return federation.fit(
            plan.config.rounds,
            out=out,
            resume=resume,
            config=plan.as_dict() | plan.config.settled(federation),
            eval_every=plan.config.eval_every,
            checkpoint_every=plan.config.checkpoint_every,
            client_state=plan.config.client_state,
            quiet=quiet,
            title=title,
            watch=watch,
            track=track,
        )
    finally:
        federation.close()


def check_seeds(count: int) -> None:
    """Refuse a number of seeds that nobody can mean."""
    if not 1 <= count <= MOST_SEEDS:
        raise BadInput(f"seeds must lie between 1 and {MOST_SEEDS}, not {count}.")


class TimeIsUp(KeyboardInterrupt):
    """A run has to stop after its round, like on Ctrl-C."""


class Shelf:
    """Data sets that are read once for many runs: those that share the data can share a GPU's slots too."""

    def __init__(self) -> None:
        self.lock, self.found = threading.Lock(), dict[tuple[Any, ...], Dataset]()

    def take(self, asked: Config) -> Dataset:
        """The data of a run."""
        with self.lock:
            key = (asked.data, asked.data_dir, asked.train_samples, asked.test_samples)
            if key not in self.found:
                self.found[key] = asked.load()
            return self.found[key]


def run_all(
    plans: Mapping[Path, Plan],
    quiet: bool | None = None,
    minutes: float | None = None,
    shelf: Shelf | None = None,
    track: str | None = None,
) -> bool:
    """Run every plan into its folder; what is there already is continued or left as it is.

    On a GPU the runs go together as one program. After so many `minutes` they stop where they are and False is
    returned; the next call goes on from there.
    """
    if minutes is not None and not minutes >= 0:
        raise BadInput(f"minutes must be at least 0, not {minutes:g}.")
    ends, shelf = math.inf if minutes is None else monotonic() + 60 * minutes, shelf or Shelf()
    left = {path: plan for path, plan in plans.items() if not is_finished(path)}
    families = siblings(left) if track is None else {}  # a tracker has to see every run from its first round
    later = {path for others in families.values() for path in others}
    try:
        first = [path for path in left if path not in later]
        _run_in_groups(plans, first, set(families), quiet, _Clock(ends), shelf, track)
        for source, others in families.items():
            for path in others:
                fork(source, plans[path], path)
        _run_in_groups(
            plans, [path for path in left if path in later | set(families)], set(), quiet, _Clock(ends), shelf, track
        )
    except TimeIsUp:
        return False
    return True


def _run_in_groups(
    plans: Mapping[Path, Plan],
    chosen: Sequence[Path],
    paused: Set[Path],
    quiet: bool | None,
    clock: _Clock,
    shelf: Shelf,
    track: str | None,
) -> None:
    """Some of the plans, those together that can be; the paused ones stop before their last round."""
    stacked = [path for path in chosen if _can_share(plans[path].config)]
    groups = [stacked[at : at + TOGETHER] for at in range(0, len(stacked), TOGETHER)]
    groups += [[path] for path in chosen if path not in stacked]
    order, names = list(plans), [f"{plan.label} seed {plan.config.seed}" for plan in plans.values()]
    for group in groups:
        clock.check()
        numbers = [order.index(path) for path in group]
        title = names[numbers[0]] if len(group) == 1 else f"{len(group)} runs together"
        title += f" ({max(numbers) + 1}/{len(plans)})"
        if len(group) == 1:
            path, plan = group[0], plans[group[0]]
            _attend(plan, path, path in paused, clock, quiet, title=title, data=shelf.take(plan.config), track=track)
        else:
            _run_together({path: plans[path] for path in group}, paused, quiet, title, clock, shelf, track)


def _attend(
    plan: Plan, path: Path, paused: bool, clock: Callable[[Record], None], quiet: bool | None, **more: Any
) -> None:
    """One run, to its end or until just before it."""

    def watch(record: Record) -> None:
        clock(record)
        if paused:
            stop_before_the_end(plan, record)

    if paused and is_there(plan, path):
        return
    with suppress(BeforeTheEnd):
        go_on(plan, path, quiet, watch=watch, **more)


class _Clock:
    """Stops a run when the time is up, or when somebody has pressed Ctrl-C."""

    def __init__(self, ends: float):
        self.ends, self.interrupted = ends, threading.Event()

    def check(self) -> None:
        """Raise if it is time to stop."""
        if self.interrupted.is_set():
            raise KeyboardInterrupt
        if monotonic() >= self.ends:
            raise TimeIsUp

    def __call__(self, record: Record) -> None:
        self.check()


def _can_share(asked: Config) -> bool:
    """Whether a run is one for the batched engine, whose slots runs can share."""
    return asked.engine == "batched" or (asked.engine == "auto" and device_of(asked.device).type == "cuda")


def _run_together(
    plans: Mapping[Path, Plan],
    paused: Set[Path],
    quiet: bool | None,
    title: str,
    clock: _Clock,
    shelf: Shelf,
    track: str | None,
) -> None:
    """Runs as one program, with one display for all."""
    lock, done = threading.Lock(), sum(map(rounds_of, plans))
    total = sum(plan.config.rounds - (path in paused) for path, plan in plans.items())
    with Progress(total, title, done, quiet) as progress:

        def watch(record: Record) -> None:
            nonlocal done
            with lock:
                done += 1
                progress.update({"round": done, "uplink_bytes": record["uplink_bytes"]})
            clock(record)

        def attend(plan: Plan, path: Path, engine: Callable[[Setup], Engine]) -> None:
            data = shelf.take(plan.config)
            _attend(plan, path, path in paused, watch, True, engine=engine, data=data, track=track)

        runs = [partial(attend, plan, path) for path, plan in plans.items()]
        together(runs, on_interrupt=clock.interrupted.set)


def compare(
    methods: Sequence[str],
    values: Mapping[str, Any],
    seeds: int,
    out: Path,
    quiet: bool | None = None,
    minutes: float | None = None,
    track: str | None = None,
) -> list[RunFolder]:
    """Run every method with every seed into one folder; what is there already is continued or left as it is.

    All methods meet the same partitions and cohorts, seed by seed, so that their differences are paired.
    """
    check_seeds(seeds)
    asked = make_plans(methods, values)
    for one, other in itertools.combinations(asked, 2):
        if one.label == other.label or (one.method, one.config) == (other.method, other.config):
            raise BadInput(f"'{other.label}' is named twice; a comparison needs different methods.")
    plans = {
        out / f"{plan.label}-seed{seed}": replace(plan, config=replace(plan.config, seed=seed))
        for seed in range(asked[0].config.seed, asked[0].config.seed + seeds)
        for plan in asked
    }
    if any(plan.method.scores or plan.config.supplement_size for plan in asked):
        # Then all methods leave the same samples to the server.
        plans = {path: replace(plan, config=plan.config.resolved(needed=True)) for path, plan in plans.items()}
    if track is not None:
        check_tracker(track)
    shelf = Shelf()
    for plan in plans.values():  # every mistake shows before the first round
        plan.config.federation(plan.method, data=shelf.take(plan.config)).close()
    note = {"methods": [absolute(spec) for spec in methods], "seeds": seeds, "settings": located(values)}
    _note(out, {**note, "labels": [plan.label for plan in asked]})
    run_all(plans, quiet, minutes, shelf, track)
    return [RunFolder.open(path) for path in plans if (path / "config.toml").exists()]


def resume_comparison(path: Path, quiet: bool | None = None, track: str | None = None) -> list[RunFolder]:
    """Continue a comparison that was stopped."""
    note = toml.read(path / COMPARISON)
    for key, kind in (("methods", list), ("settings", dict), ("seeds", int)):
        if not isinstance(note.get(key), kind):
            raise BadInput(f"'{path / COMPARISON}' is damaged: it lacks its {key}.")
    return compare(note["methods"], note["settings"], note["seeds"], path, quiet, track=track)


def is_comparison(path: Path) -> bool:
    """Whether a folder holds a comparison."""
    try:
        return (path / COMPARISON).is_file()
    except OSError as problem:
        raise BadInput(f"'{path}' cannot be read: {problem.strerror}.") from None


def _note(out: Path, note: dict[str, Any]) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        if is_comparison(out):
            there = toml.read(out / COMPARISON)
            if any(there.get(key) != note[key] for key in ("methods", "seeds", "settings")):
                raise BadInput(f"'{out}' holds another comparison; choose another folder.")
        elif any(out.iterdir()):
            raise BadInput(f"'{out}' is not empty; choose an empty or a new folder for the comparison.")
        else:
            write_atomically(out / COMPARISON, toml.dumps(note).encode())
    except (FileExistsError, NotADirectoryError):
        raise BadInput(f"'{out}' is a file or lies below one; choose a folder.") from None
    except OSError as problem:
        raise BadInput(f"'{out}' cannot be written ({problem.strerror}); choose another folder.") from None


def free_folder(stem: str, parent: Path = RUNS) -> Path:
    """A new folder: runs/STEM, runs/STEM-2, ... It is made here, so that no other process chooses the same one."""
    stem = stem.replace("/", "_")
    found, number = parent / stem, 1
    while True:
        try:
            found.mkdir(parents=True)
        except FileExistsError:
            number += 1
            found = parent / f"{stem}-{number}"
        except OSError as problem:
            raise BadInput(
                f"'{found}' cannot be made ({problem.strerror}); choose another folder with --out."
            ) from None
        else:
            return found
