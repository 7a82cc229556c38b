"""Result files are extended: the folders of earlier runs may be gone, and their numbers stay.

Seeds that a file has and the runs at hand lack are kept. A newer run of the same seed replaces the
older one. Runs with other settings than today's are left out, and a warning says so.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fedhelix.core.errors import UserError
from fedhelix.papers.measures import spread

Place = tuple[str, str]  # row and column of a cell

CHANGED = "their settings are not today's"
UNLIKE = "they were not measured like the new runs"
GONE = "the table does not have their row or column any more"


class Names(NamedTuple):
    """What a study records of every run."""

    measures: Sequence[str]
    vectors: Sequence[str] = ()
    curves: Sequence[str] = ()


@dataclass(frozen=True)
class SeedResult:
    """What one run gave, and where it comes from: None where an older file does not say."""

    values: Mapping[str, float | None]
    vectors: Mapping[str, Any] = field(default_factory=dict)
    curves: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: str | None = None  # a digest
    commit: str | None = None
    device: str | None = None

    def is_like(self, other: SeedResult) -> bool:
        """Whether both have the same measures, and curves over the same rounds."""
        return _shape(self) == _shape(other)


def _shape(result: SeedResult) -> Any:
    rounds = {name: curve["rounds"] for name, curve in result.curves.items()}
    return set(result.values), set(result.vectors), rounds


ORIGIN = ("settings", "commit", "device")


def cell_values(
    results: Mapping[int, SeedResult], names: Names, paper: Mapping[str, float | None]
) -> dict[str, Any]:
    """The results of a cell by seed, with means; a measure that no run has is left empty."""
    seeds = sorted(results)
    done = [results[seed] for seed in seeds]
    values: dict[str, Any] = {"runs": len(done), "seeds": seeds}
    values["origin"] = {name: [getattr(one, name) for one in done] for name in ORIGIN}
    for name in names.measures:
        by_seed = [one.values[name] for one in done if name in one.values]
        values[name] = {"by_seed": by_seed, **spread(by_seed), "paper": paper.get(name)}
    for name in names.vectors:
        values[name] = [one.vectors.get(name) for one in done]
    for name in names.curves if done else ():
        curves = [one.curves[name] for one in done if name in one.curves]
        if curves:
            values[f"{name}_curve"] = _joined_curves(curves)
    return values


def _joined_curves(curves: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    joined = {"rounds": curves[0]["rounds"], "by_seed": [curve["values"] for curve in curves]}
    if all("hours" in curve for curve in curves):
        joined["hours"] = [curve["hours"] for curve in curves]
    return joined


def by_seed(cell: Mapping[str, Any], names: Names) -> dict[int, SeedResult]:
    """The runs of a cell of a file."""
    return {seed: _result(cell, names, at) for at, seed in enumerate(cell["seeds"])}


def _result(cell: Mapping[str, Any], names: Names, at: int) -> SeedResult:
    curves = {}
    for name in names.curves:
        if curve := cell.get(f"{name}_curve"):
            hours = {"hours": curve["hours"][at]} if "hours" in curve else {}
            curves[name] = {"rounds": curve["rounds"], "values": curve["by_seed"][at], **hours}
    return SeedResult(
        {
            name: cell[name]["by_seed"][at]
            for name in names.measures
            if name in cell and cell[name]["by_seed"]
        },
        {name: cell[name][at] for name in names.vectors if name in cell},
        curves,
        **{name: known[at] for name, known in cell.get("origin", {}).items()},
    )


def read_result(path: Path | None) -> dict[str, Any] | None:
    """An earlier result; None where there is no file."""
    if path is None or not path.exists():
        return None
    try:
        result: dict[str, Any] = json.loads(path.read_bytes())
        numbers = Names(result["measures"])
        for cell in result["cells"]:
            _ = cell["row"], cell["column"], cell["method"], by_seed(cell, numbers)
        _ = result["versions"].keys(), result["device"], result["seeds"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise UserError(
            f"'{path}' is not a result that can be extended; move it away or choose another folder."
        ) from None
    return result


def extend(
    report: dict[str, Any],
    earlier: Mapping[str, Any],
    names: Names,
    today: Mapping[Place, Collection[str]],
) -> None:
    """Add the runs of an earlier result that a report lacks.

    `today` has all places of the table in their order, with digests of the settings that they may
    have.
    """
    cells = {(cell["row"], cell["column"]): cell for cell in report["cells"]}
    left_out: dict[str, list[str]] = {}
    has_kept = False
    for old in earlier["cells"]:
        place = old["row"], old["column"]
        results = by_seed(old, names)
        new = cells.get(place) or {**old, "runs": 0, "seeds": []}
        kept, why = _kept(old, new, results, names, today.get(place))
        if why and results.keys() - set(new["seeds"]):
            left_out.setdefault(why, []).append(f"{old['row']} ({old['column']})")
        if not kept:
            continue
        has_kept = True
        paper = {name: (new.get(name) or {}).get("paper") for name in names.measures}
        joined = cell_values(kept | by_seed(new, names), names, paper)
        cells[place] = {**new, **joined}
    for why, where in left_out.items():
        words = f"earlier runs are left out, because {why}: {', '.join(where)}"
        warnings.warn(f"{earlier.get('bench', 'the result')}: {words}.", stacklevel=3)
    report["cells"] = [cells[place] for place in today if place in cells]
    if has_kept:
        _join_origin(report, earlier)
        report["seconds"] = None  # that of several machines is not known
        report["seeds"] = sorted({*report["seeds"], *earlier["seeds"]})
    report["complete"] = is_complete(report, len(today))


def _kept(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    results: Mapping[int, SeedResult],
    names: Names,
    today: Collection[str] | None,
) -> tuple[dict[int, SeedResult], str]:
    """The older runs that stay in a cell; and why others do not."""
    if today is None:
        return {}, GONE
    if old["method"] != new["method"] or old.get("chosen") != new.get("chosen"):
        return {}, CHANGED
    here = by_seed(new, names)
    digests = {one.settings for one in here.values()} or set(today)
    kept = {
        seed: one
        for seed, one in results.items()
        if seed not in here and one.settings in {None, *digests}
    }
    if any(not one.is_like(run) for one in kept.values() for run in here.values()):
        return {}, UNLIKE
    return kept, CHANGED if len(kept) < len(results.keys() - here.keys()) else ""


def is_complete(report: Mapping[str, Any], places: int) -> bool:
    """Whether every place of a table has every seed."""
    seeds = set(report["seeds"])
    return len(report["cells"]) == places and all(
        seeds <= set(cell["seeds"]) for cell in report["cells"]
    )


def _join_origin(report: dict[str, Any], earlier: Mapping[str, Any]) -> None:
    """The devices and versions of both."""
    if not report["versions"]:  # there are no runs at hand
        report |= {"device": earlier["device"], "versions": earlier["versions"]}
        return
    new, old = report["versions"], earlier["versions"]
    report["versions"] = {
        key: joined(one[key] for one in (new, old) if key in one) for key in {**new, **old}
    }
    report["device"] = joined([report["device"], earlier["device"]])


def joined(names: Iterable[str]) -> str:
    """All that differ, in order; each name may be several already."""
    return ", ".join(sorted({one for name in names for one in name.split(", ")}))
