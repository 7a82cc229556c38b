"""Start, resume and repeat runs, one by one or many in one program."""

from __future__ import annotations

import math
import shlex
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from time import monotonic
from typing import Any

from fedhelix.core.errors import UserError
from fedhelix.core.imports import check_extra
from fedhelix.data import Dataset
from fedhelix.engines import Engine
from fedhelix.engines.batched.multirun import run_together
from fedhelix.engines.local import Setup
from fedhelix.federation import Federation, Run
from fedhelix.federation.inputs import device_of
from fedhelix.federation.provenance import device_name
from fedhelix.runs.apart import run_apart
from fedhelix.runs.config import PLACES, Config
from fedhelix.runs.remote import run_on_actors
from fedhelix.runs.spec import RunSpec, changed_settings, changed_spec, check_files, read_spec
from fedhelix.store import RUNS, RunFolder
from fedhelix.store.progress import Progress
from fedhelix.store.records import Record

MOST_JOBS = 1000
TOGETHER = 48  # runs in one program: more would not fill a GPU any better

EngineMaker = Callable[[Setup], Engine]


def start(spec: RunSpec, out: Path, quiet: bool | None = None, track: str | None = None) -> Run:
    """Run a spec into a new folder."""
    return Session(quiet=quiet, track=track).start(spec, out)


def resume(
    path: Path,
    quiet: bool | None = None,
    track: str | None = None,
    address: str | None = None,
    changes: Sequence[str] = (),
) -> Run:
    """Continue a run that was stopped at any moment, where it began or on another Ray cluster.

    `changes` are KEY=VALUE of settings that are to be others from now on.
    """
    return Session(quiet=quiet, track=track).resume(path, address=address, changes=changes)


class TimeIsUp(KeyboardInterrupt):
    """A run has to stop after its round, like on Ctrl-C."""


class DatasetCache:
    """Data sets that are read once for many runs, which can then share a GPU's slots too."""

    def __init__(self) -> None:
        self._lock, self._loaded = threading.Lock(), dict[tuple[Any, ...], Dataset]()

    def load(self, config: Config) -> Dataset:
        """The data of a run."""
        with self._lock:
            key = (config.data, config.data_dir, config.train_samples, config.test_samples)
            if key not in self._loaded:
                self._loaded[key] = config.load()
            return self._loaded[key]


@dataclass
class Session:
    """What the runs of one command have in common: display, tracker, data, and when to stop."""

    quiet: bool | None = None
    track: str | None = None
    jobs: int = 1  # runs at once, each in a process of its own
    ends: float = math.inf  # on the monotonic clock
    cache: DatasetCache = field(default_factory=DatasetCache)
    interrupted: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def limited(cls, minutes: float | None, quiet: bool | None = None, jobs: int = 1) -> Session:
        """One that stops after some minutes; None: when everything is done."""
        if minutes is not None and not minutes >= 0:
            raise UserError(f"minutes must be at least 0, not {minutes:g}.")
        if not 1 <= jobs <= MOST_JOBS:
            raise UserError(f"jobs must lie between 1 and {MOST_JOBS}, not {jobs}.")
        ends = math.inf if minutes is None else monotonic() + 60 * minutes
        return cls(quiet=quiet, jobs=jobs, ends=ends)

    def check_time(self) -> None:
        """Raise if it is time to stop."""
        if self.interrupted.is_set():
            raise KeyboardInterrupt
        if monotonic() >= self.ends:
            raise TimeIsUp

    def start(self, spec: RunSpec, out: Path, **more: Any) -> Run:
        """Run a spec into a new folder."""
        return self._fit(spec, out, resume=False, **more)

    def resume(
        self,
        path: Path,
        place: Config | None = None,
        address: str | None = None,
        changes: Sequence[str] = (),
        **more: Any,
    ) -> Run:
        """Continue a run that was stopped at any moment, where it began or where `place` says."""
        folder = RunFolder.open(path)
        config = folder.config
        if "deployment" in config:
            command = ["fedhelix", "deploy", "resume", str(path)]
            how = shlex.join([*command, *(word for text in changes for word in ("--set", text))])
            how += folder.where
            raise UserError(f"the clients of '{path}' are sites; continue it with `{how}`.")
        begun = spec = read_spec(config, path)
        if changes:
            spec = changed_spec(begun, path, changes)
        otherwise = f"say where it is now: fedhelix resume {shlex.quote(str(path))} --set KEY=PLACE"
        check_files(vars(spec.config), path, otherwise)
        changed = list(changed_settings(begun, spec))
        if place is not None:
            moved = device_name(place.device) != config.get("versions", {}).get("device")
            # Kernels were chosen by timing: on the same device the run computes as it began.
            new = {key: getattr(place, key) for key in PLACES if key != "kernels" or moved}
            spec = replace(spec, config=replace(spec.config, **new))
        if address is not None:
            spec = replace(spec, config=replace(spec.config, address=address))
        if place is None and not folder.rounds_saved:
            words = "there is no checkpoint; the run starts again from its first round."
            warnings.warn(words, stacklevel=2)
        return self._fit(spec, path, resume=True, changed=changed, **more)

    def start_or_resume(self, spec: RunSpec, path: Path, **more: Any) -> None:
        """Start a run, or continue it if it was begun, on this spec's device."""
        if is_begun(path):
            self.resume(path, place=spec.config, **more)
        else:
            self.start(spec, path, **more)

    def set_up(self, specs: Iterable[RunSpec]) -> None:
        """Make every federation once, so that every mistake shows before the first round."""
        for spec in specs:
            check_extra(spec.method)
            spec.config.federation(spec.method, data=self.cache.load(spec.config)).close()

    def run_all(self, specs: Mapping[Path, RunSpec]) -> bool:
        """Run every spec into its folder; what is there already is continued or left as it is.

        On a GPU the runs go together as one program, on a Ray cluster each goes to an actor, and
        with several `jobs` each has a process of its own. When the time is up they stop where they
        are and False is returned; the next call goes on from there.
        """
        left = [path for path in specs if not is_finished(path)]
        for path in specs.keys() - set(left):
            RunFolder(path).tidy()
        if self.jobs > 1 and len(left) > 1:
            return self._run_apart({path: specs[path] for path in left})
        stacked = [path for path in left if _can_share(specs[path].config)]
        groups = [stacked[at : at + TOGETHER] for at in range(0, len(stacked), TOGETHER)]
        groups += _spread_groups({path: specs[path].config for path in left})
        grouped = {path for group in groups for path in group}
        groups += [[path] for path in left if path not in grouped]
        try:
            for group in groups:
                self.check_time()
                self._run_group(group, specs)
        except TimeIsUp:
            return False
        return True

    def _run_group(self, group: Sequence[Path], specs: Mapping[Path, RunSpec]) -> None:
        order = list(specs)
        place = f" ({max(map(order.index, group)) + 1}/{len(specs)})"
        if len(group) > 1:
            together = {path: specs[path] for path in group}
            self._run_together(together, f"{len(group)} runs together{place}")
            return
        path, spec = group[0], specs[group[0]]
        title = f"{spec.label} seed {spec.config.seed}{place}"
        self.start_or_resume(spec, path, title=title, watch=lambda record: self.check_time())

    def _run_together(self, specs: Mapping[Path, RunSpec], title: str) -> None:
        """Runs as one program, or each on an actor of a cluster, with one display for all."""
        lock, done = threading.Lock(), sum(map(rounds_of, specs))
        total = sum(spec.config.rounds for spec in specs.values())
        silent = replace(self, quiet=True)
        with Progress(total, title, done, self.quiet) as progress:

            def watch(record: Record) -> None:
                nonlocal done
                with lock:
                    done += 1
                    progress.update({"round": done, "uplink_bytes": record["uplink_bytes"]})
                self.check_time()

            runs = [
                partial(silent.start_or_resume, spec, path, watch=watch)
                for path, spec in specs.items()
            ]
            config = next(iter(specs.values())).config
            if config.engine == "ray":
                run_on_actors(runs, config, on_interrupt=self.interrupted.set)
            else:
                stacked = [_with_engine(run) for run in runs]
                run_together(stacked, on_interrupt=self.interrupted.set)

    def _run_apart(self, specs: Mapping[Path, RunSpec]) -> bool:
        done = sum(map(rounds_of, specs))
        total = sum(spec.config.rounds for spec in specs.values())
        title = f"{len(specs)} runs, {self.jobs} at once"
        with Progress(total, title, done, self.quiet) as progress:

            def watch(uploaded: int) -> None:
                nonlocal done
                done += 1
                progress.update({"round": done, "uplink_bytes": uploaded})
                self.check_time()

            try:
                run_apart(specs, self.jobs, _run_alone, watch)
            except TimeIsUp:
                return False
        return True

    def _fit(
        self,
        spec: RunSpec,
        out: Path,
        resume: bool,
        changed: Sequence[str] = (),
        title: str | None = None,
        watch: Callable[[Record], None] | None = None,
        engine: EngineMaker | None = None,
        kind: Callable[..., Federation] = Federation,
    ) -> Run:
        config = spec.config
        federation = config.federation(spec.method, engine, self.cache.load(config), kind)
        settings = spec.as_dict() | config.settled(federation)
        try:
            return federation.fit(
                config.rounds,
                out=out,
                resume=resume,
                config={key: settings[key] for key in changed} if resume else settings,
                eval_every=config.eval_every,
                checkpoint_every=config.checkpoint_every,
                client_state=config.client_state,
                quiet=self.quiet,
                title=title,
                watch=watch,
                track=self.track,
            )
        finally:
            federation.close()


@cache
def _own_session() -> Session:
    return Session(quiet=True)


def _run_alone(spec: RunSpec, path: Path, watch: Callable[[Record], None]) -> None:
    """A run in a process that does one after the other, and reads their data once."""
    _own_session().start_or_resume(spec, path, watch=watch)


def _can_share(config: Config) -> bool:
    """Whether a run is one for the batched engine, whose slots runs can share."""
    if config.engine == "auto":
        return device_of(config.device).type == "cuda"
    return config.engine == "batched"


def _spread_groups(configs: Mapping[Path, Config]) -> list[list[Path]]:
    """The runs on each Ray cluster; a single one has the whole cluster for its clients."""
    groups: dict[Any, list[Path]] = {}
    for path, config in configs.items():
        if config.engine == "ray":
            groups.setdefault((config.address, config.workers, config.device), []).append(path)
    return [group for group in groups.values() if len(group) > 1]


def _with_engine(run: Callable[..., None]) -> Callable[[EngineMaker], None]:
    return lambda engine: run(engine=engine)


def is_begun(path: Path) -> bool:
    """Whether there is a run to go on with."""
    return (path / "config.toml").exists()


def is_finished(path: Path) -> bool:
    """Whether a run has come to its end."""
    return is_begun(path) and RunFolder.open(path).summary is not None


def rounds_of(path: Path) -> int:
    """How many rounds of a run are there."""
    return RunFolder.open(path).rounds_saved if is_begun(path) else 0


def free_folder(stem: str, parent: Path = RUNS) -> Path:
    """A new folder: runs/STEM, runs/STEM-2, ...

    It is made here, so that no other process chooses the same one.
    """
    stem = stem.replace("/", "_")
    folder, number = parent / stem, 1
    while True:
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            folder = parent / f"{stem}-{number}"
        except OSError as problem:
            raise UserError(
                f"'{folder}' cannot be made ({problem.strerror}); choose another folder with --out."
            ) from None
        else:
            return folder
