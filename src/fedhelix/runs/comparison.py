"""A comparison: several methods with several seeds on the same clients and cohorts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedhelix.core import toml
from fedhelix.core.errors import UserError
from fedhelix.core.files import remove_leftovers, write_atomically
from fedhelix.federation.description import located
from fedhelix.runs.config import PLACES
from fedhelix.runs.jobs import Session, is_begun
from fedhelix.runs.spec import RunSpec, absolute, make_specs
from fedhelix.store import COMPARISON, RunFolder
from fedhelix.store.trackers import check_tracker

MOST_SEEDS = 1000
LONGEST = 60  # characters of the methods' names in that of a folder


def name_of(labels: Sequence[str]) -> str:
    """What the folder of a comparison is called: its methods, or the first and how many more."""
    names = "-".join(labels)
    for more in range(1, len(labels)):
        if len(names) <= LONGEST:
            break
        names = f"{'-'.join(labels[:-more])}-and-{more}-more"
    return f"compare-{names}"


def check_seeds(count: int) -> None:
    """Refuse a number of seeds that nobody can mean."""
    if not 1 <= count <= MOST_SEEDS:
        raise UserError(f"seeds must lie between 1 and {MOST_SEEDS}, not {count}.")


def compare(
    methods: Sequence[str],
    values: Mapping[str, Any],
    seeds: int,
    out: Path,
    session: Session | None = None,
) -> list[RunFolder]:
    """Run every method with every seed into one folder; what is there already is continued.

    All methods meet the same partitions and cohorts, seed by seed, so that their differences are
    paired.
    """
    session = session or Session()
    check_seeds(seeds)
    variants = make_specs(methods, values)
    _check_different(variants)
    first = variants[0].config.seed
    specs = {
        out / f"{spec.label}-seed{seed}": replace(spec, config=replace(spec.config, seed=seed))
        for seed in range(first, first + seeds)
        for spec in variants
    }
    if any(_uses_server_data(spec) for spec in variants):
        # Then all methods leave the same samples to the server.
        for path, spec in specs.items():
            specs[path] = replace(spec, config=spec.config.resolved(needed=True))
    if session.track is not None:
        check_tracker(session.track)
    session.set_up(specs.values())
    note = {
        "methods": [absolute(spec) for spec in methods],
        "seeds": seeds,
        "settings": located(values),
    }
    _write_note(out, {**note, "labels": [spec.label for spec in variants]})
    session.run_all(specs)
    return [RunFolder.open(path) for path in specs if (path / "config.toml").exists()]


def _check_different(variants: Sequence[RunSpec]) -> None:
    for one, other in itertools.combinations(variants, 2):
        same = (one.method, one.config) == (other.method, other.config)
        if one.label == other.label or same:
            raise UserError(
                f"'{other.label}' is named twice; a comparison needs different methods."
            )


def _uses_server_data(spec: RunSpec) -> bool:
    needs = spec.method.capabilities.server_validation
    return needs or bool(spec.config.supplement_size)


def resume_comparison(
    path: Path, session: Session | None = None, places: Mapping[str, Any] | None = None
) -> list[RunFolder]:
    """Continue a comparison that was stopped, where it began or in other `places`."""
    note = toml.read(path / COMPARISON)
    for key, kind in (("methods", list), ("settings", dict), ("seeds", int)):
        if not isinstance(note.get(key), kind):
            raise UserError(f"'{path / COMPARISON}' is damaged: it lacks its {key}.")
    for config in sorted(path.glob("*/config.toml")):
        RunFolder.open(config.parent).verify()  # also of runs that are over
    settings = note["settings"] | dict(places or {})
    return compare(note["methods"], settings, note["seeds"], path, session)


def is_comparison(path: Path) -> bool:
    """Whether a folder holds a comparison."""
    try:
        return (path / COMPARISON).is_file()
    except OSError as problem:
        raise UserError(f"'{path}' cannot be read: {problem.strerror}.") from None


def _compared(note: Mapping[str, Any]) -> list[Any]:
    """What makes comparisons equal; where their runs are computed does not count."""
    settings = note.get("settings")
    if isinstance(settings, Mapping):
        settings = {key: value for key, value in settings.items() if key not in PLACES}
    return [note.get("methods"), note.get("seeds"), settings]


def _is_rest(note: Mapping[str, Any], whole: Mapping[str, Any], out: Path) -> bool:
    """Whether a comparison is another one without methods that have no run there, perhaps because
    they were refused, and nothing else changes by it.
    """
    methods = whole.get("methods")
    if not isinstance(methods, list) or not set(note["methods"]) < set(methods):
        return False
    if _compared({**whole, "methods": note["methods"]}) != _compared(note):
        return False
    before, now = (make_specs(names, note["settings"]) for names in (methods, note["methods"]))
    gone = {spec.label for spec in before} - {spec.label for spec in now}
    first, seeds = before[0].config.seed, note["seeds"]
    if any(is_begun(out / f"{label}-seed{first + n}") for label in gone for n in range(seeds)):
        return False
    return any(map(_uses_server_data, before)) == any(map(_uses_server_data, now))


def _write_note(out: Path, note: dict[str, Any]) -> None:
    """What makes a folder a comparison, and lets it be resumed."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if is_comparison(out):
            there = toml.read(out / COMPARISON)
            if _compared(there) == _compared(note):
                return
            if not _is_rest(note, there, out):
                raise UserError(
                    f"'{out}' holds another comparison; choose another folder with --out."
                )
        elif any(not path.match(f".{COMPARISON}.*") for path in out.iterdir()):
            raise UserError(
                f"'{out}' is not empty; choose an empty or a new folder for the comparison."
            )
        write_atomically(out / COMPARISON, toml.dumps(note).encode())
        remove_leftovers(out, COMPARISON)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"'{out}' is a file or lies below one; choose a folder.") from None
    except OSError as problem:
        raise UserError(
            f"'{out}' cannot be written ({problem.strerror}); choose another folder."
        ) from None
