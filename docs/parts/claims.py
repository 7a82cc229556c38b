"""Which of a paper's claims reproduce, as a list for `python docs/make.py`."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from parts.paper_claims import CLAIMS, Claim, Place, at_least, at_most

Verdict = tuple[str, str]  # whether a claim holds, and by which numbers


def claims(paper: str, folder: Path) -> str:
    """A paper's claims with our verdicts, as far as the results of a folder go."""
    checked = [
        (claim, verdict) for claim in CLAIMS[paper] if (verdict := check(claim, folder)) is not None
    ]
    lines: list[str] = []
    for words, group in groupby(checked, key=lambda one: one[0].words):
        lines += _lines(words, list(group))
    return "".join(lines) or "Not measured yet.\n"


def _lines(words: str, group: Sequence[tuple[Claim, Verdict]]) -> Iterator[str]:
    """One line for a claim about one setting, or a list of settings by verdict."""
    if not group[0][0].where:
        for _, (verdict, numbers) in group:
            yield f"* {verdict}: {words} {numbers}.\n"
        return
    yield f"* {words[0].upper()}{words[1:].removesuffix('.')}:\n"
    for verdict in dict.fromkeys(verdict for _, (verdict, _) in group):
        places = [
            f"{claim.where} ({numbers})" for claim, (other, numbers) in group if other == verdict
        ]
        yield f"    * {verdict}: {'; '.join(places)}.\n"


def check(claim: Claim, folder: Path) -> Verdict | None:
    """Whether a claim holds, over the seeds that both sides have. None if there are none."""
    path = folder / f"{claim.study}-gpu.json"
    if not path.exists():
        return None
    cells = {(cell["row"], cell["column"]): cell for cell in json.loads(path.read_text())["cells"]}
    ours, other = _by_seed(cells, claim.ours), _by_seed(cells, claim.other)
    common = sorted(ours.keys() & other.keys())
    if not common:
        return None
    pairs = [[values[seed] for seed in common] for values in (ours, other)]
    one, two = map(statistics.fmean, pairs)
    verdict = claim.excuse(two) or ("Yes" if claim.holds(one, two) else "No")
    differences = [ours[seed] - other[seed] for seed in common]
    if claim.holds in (at_least, at_most) and _is_noise(differences):
        verdict += ", but within noise"
    numbers = " against ".join(map(_number, pairs))
    return verdict, f"{numbers}, {len(common)} seed{'s' if len(common) > 1 else ''}"


def _by_seed(cells: dict[tuple[str, str], dict[str, Any]], place: Place) -> dict[int, float]:
    """The values of one place by seed; a target that is never reached takes infinitely long."""
    row, column, measure = place
    cell = cells.get((row, column), {})
    if measure not in cell:
        return {}
    return {
        seed: math.inf if value is None else value
        for seed, value in zip(cell["seeds"], cell[measure]["by_seed"], strict=True)
        if value is not None or measure.startswith("rounds")
    }


def _number(values: list[float]) -> str:
    known = [value for value in values if math.isfinite(value)]
    if len(known) < len(values):
        return f"{len(known)} of {len(values)} seeds" if known else "never"
    return f"{statistics.fmean(values):.2f}"


def _is_noise(differences: list[float]) -> bool:
    """Whether two results differ, seed by seed, by at most two standard errors; with one seed, by
    less than a point.
    """
    if len(differences) == 1:
        return abs(differences[0]) < 1
    if not all(map(math.isfinite, differences)):
        return False
    error = statistics.stdev(differences) / len(differences) ** 0.5
    return abs(statistics.fmean(differences)) <= 2 * error
