"""Start, resume and compare runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedhelix import toml
from fedhelix.errors import BadInput
from fedhelix.federation import Run
from fedhelix.registry import make
from fedhelix.runs.config import Plan, make_plan, read_plan
from fedhelix.store import COMPARISON, RunFolder
from fedhelix.track import check_tracker
from fedhelix.tree import write_atomically


def start(plan: Plan, out: Path, quiet: bool | None = None, title: str | None = None, track: str | None = None) -> Run:
    """Run a plan into a new folder."""
    return _fit(plan, out, resume=False, quiet=quiet, title=title, track=track)


def resume(path: Path, quiet: bool | None = None, title: str | None = None, track: str | None = None) -> Run:
    """Continue a run that was stopped at any moment."""
    plan = read_plan(RunFolder.open(path).config, path)
    return _fit(plan, path, resume=True, quiet=quiet, title=title, track=track)


def _fit(plan: Plan, out: Path, resume: bool, quiet: bool | None, title: str | None, track: str | None) -> Run:
    federation = plan.config.federation(plan.method)
    try:
        return federation.fit(
            plan.config.rounds,
            out=out,
            resume=resume,
            # What was chosen by timing is written down, so that a resumed run computes as it began.
            config=plan.as_dict() | {"kernels": federation.engine.setup.kernels},
            eval_every=plan.config.eval_every,
            checkpoint_every=plan.config.checkpoint_every,
            quiet=quiet,
            title=title,
            track=track,
        )
    finally:
        federation.close()


def compare(
    methods: Sequence[str],
    values: Mapping[str, Any],
    seeds: int,
    out: Path,
    quiet: bool | None = None,
    track: str | None = None,
) -> list[RunFolder]:
    """Run every method with every seed into one folder; what is there already is continued or left as it is.

    All methods meet the same partitions and cohorts, seed by seed, so that their differences are paired.
    """
    if seeds < 1:
        raise BadInput(f"seeds must be at least 1, not {seeds}.")
    names = [make(spec).label for spec in methods]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise BadInput(f"'{repeated[0]}' is named twice; a comparison needs different methods.")
    first = int(make_plan(methods[0], values).config.seed)
    plans = {
        out / f"{name}-seed{seed}": make_plan(spec, {**values, "seed": seed})
        for seed in range(first, first + seeds)
        for name, spec in zip(names, methods, strict=True)
    }
    if any(plan.method.scores for plan in plans.values()):  # then all methods leave the same samples to the server
        plans = {path: replace(plan, config=plan.config.resolved(needed=True)) for path, plan in plans.items()}
    if track is not None:
        check_tracker(track)
    for plan in plans.values():
        plan.config.federation(plan.method).close()  # every mistake shows before the first round
    _note(out, {"methods": list(methods), "seeds": seeds, "settings": dict(values)})
    for number, (path, plan) in enumerate(plans.items(), start=1):
        title = f"{plan.method.label} seed {plan.config.seed} ({number}/{len(plans)})"
        if not (path / "config.toml").exists():
            start(plan, path, quiet, title, track)
        elif RunFolder.open(path).summary is None:
            resume(path, quiet, title, track)
    return [RunFolder.open(path) for path in plans]


def resume_comparison(path: Path, quiet: bool | None = None, track: str | None = None) -> list[RunFolder]:
    """Continue a comparison that was stopped."""
    note = toml.read(path / COMPARISON)
    for key, kind in (("methods", list), ("settings", dict), ("seeds", int)):
        if not isinstance(note.get(key), kind):
            raise BadInput(f"'{path / COMPARISON}' is damaged: it lacks its {key}.")
    return compare(note["methods"], note["settings"], note["seeds"], path, quiet, track)


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
            if toml.read(out / COMPARISON) != note:
                raise BadInput(f"'{out}' holds another comparison; choose another folder.")
        elif any(out.iterdir()):
            raise BadInput(f"'{out}' is not empty; choose an empty or a new folder for the comparison.")
        else:
            write_atomically(out / COMPARISON, toml.dumps(note).encode())
    except (FileExistsError, NotADirectoryError):
        raise BadInput(f"'{out}' is a file or lies below one; choose a folder.") from None
    except OSError as problem:
        raise BadInput(f"'{out}' cannot be written ({problem.strerror}); choose another folder.") from None


def free_folder(stem: str, parent: Path = Path("runs")) -> Path:
    """A folder that does not exist yet: runs/STEM, runs/STEM-2, ..."""
    found, number = parent / stem, 1
    while found.exists():
        number += 1
        found = parent / f"{stem}-{number}"
    return found
