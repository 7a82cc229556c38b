"""Which of a paper's claims reproduce: a table and a list for `python docs/make.py`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from fedhelix.papers.verdicts import Verdict, interval, together, verdict
from parts.files import table
from parts.headlines import HEADLINES as PAPERS
from parts.headlines import Headline
from parts.paper_claims import CLAIMS, Claim, Place
from parts.targets import TARGETS

HEADLINES = {**PAPERS, "helix": TARGETS}
MET = {"reproduced": "met", "not reproduced": "not met"}  # the words for targets of our own
Cells = dict[tuple[str, str], dict[str, Any]]


@dataclass(frozen=True)
class Checked:
    """A claim, and the values of both sides for the seeds that both have."""

    claim: Claim
    ours: list[float]
    other: list[float]
    never: int = 0  # values of a target that was not reached; they count as the last round

    @property
    def verdict(self) -> str:
        """Whether it holds, or why it does not apply."""
        return self.claim.excuse(statistics.fmean(self.other)) or self.decided

    @property
    def decided(self) -> Verdict:
        """Whether it holds."""
        return verdict(
            [self.claim.margin(*pair) for pair in zip(self.ours, self.other, strict=True)]
        )

    @property
    def short(self) -> str:
        """The setting, the difference with its interval, and how many rounds both took."""
        gaps = [ours - other for ours, other in zip(self.ours, self.other, strict=True)]
        bounds = interval(gaps)
        reach = f" [{_signed(bounds[0])}, {_signed(bounds[1])}]" if bounds else ""
        means = f"{statistics.fmean(self.ours):.3g} against {statistics.fmean(self.other):.3g}"
        rounds = f" ({means})" if self.claim.ours[2].startswith("rounds") else ""
        gap = f"{_signed(statistics.fmean(gaps))}{reach}"
        return f"{self.claim.where}: {gap}, n = {len(gaps)}{rounds}"

    @property
    def numbers(self) -> str:
        """The difference with its interval, and the two means."""
        gaps = [ours - other for ours, other in zip(self.ours, self.other, strict=True)]
        bounds = interval(gaps)
        reach = f" [{bounds[0]:+.2f}, {bounds[1]:+.2f}]" if bounds else ""
        means = f"{statistics.fmean(self.ours):.2f} against {statistics.fmean(self.other):.2f}"
        never = f"; {self.never} times never" if self.never else ""
        return f"{statistics.fmean(gaps):+.2f}{reach}, n = {len(gaps)} ({means}{never})"


def verdicts(paper: str, folder: Path) -> str:
    """A paper's main claims: verdict, numbers of one setting, and where the rest is.

    It is the first setting with the same verdict, if there is one.
    """
    rows = []
    for headline, checked in _checked(paper, folder):
        decided = overall(headline, checked)
        shown = next((one for one in checked if one.decided == decided), checked[0])
        rows.append(
            [
                headline.words,
                f"**{_word(paper, decided)}**",
                shown.short + _others(len(checked) - 1),
                _printed(headline, shown.claim, folder),
                f"[{headline.more}](#{headline.anchor})",
            ]
        )
    first, printed = _headers(paper)
    return table([first, "verdict ", "ours ", printed, "more "], rows)


def settings(paper: str, folder: Path) -> str:
    """The same claims setting by setting."""
    rows = [
        [
            headline.words,
            one.claim.where,
            _word(paper, one.decided),
            one.numbers,
            _printed(headline, one.claim, folder),
        ]
        for headline, checked in _checked(paper, folder)
        for one in checked
    ]
    first, printed = _headers(paper)
    return table([first, "setting ", "verdict ", "ours ", printed], rows)


def overall(headline: Headline, checked: Sequence[Checked]) -> Verdict:
    """The verdict on all settings, or on as many columns as are enough."""
    whole = together(one.decided for one in checked)
    if not headline.enough:
        return whole
    columns: dict[str, list[Verdict]] = {}
    for one in checked:
        columns.setdefault(one.claim.ours[1], []).append(one.decided)
    kinds = [together(verdicts) for verdicts in columns.values()]
    if kinds.count("reproduced") >= headline.enough:
        return "reproduced"
    lost = sum("not reproduced" in verdicts for verdicts in columns.values())
    all_columns = len({claim.ours[1] for claim in headline.claims})
    return "not reproduced" if lost > all_columns - headline.enough else whole


def _word(paper: str, verdict: Verdict) -> str:
    return verdict if paper in PAPERS else MET.get(verdict, verdict)


def _headers(paper: str) -> tuple[str, str]:
    return ("claim", "paper ") if paper in PAPERS else ("target", "wanted ")


def _checked(paper: str, folder: Path) -> Iterator[tuple[Headline, list[Checked]]]:
    """A paper's main claims with the settings that have been measured."""
    for headline in HEADLINES[paper]:
        found = [check(claim, folder) for claim in headline.claims]
        if checked := [one for one in found if one is not None]:
            yield headline, checked


def _signed(value: float) -> str:
    """Two digits, or all that stand before the point."""
    places = 0 if abs(value) >= 10 else 1 if abs(value) >= 1 else 2
    return f"{value:+.{places}f}"


def _others(count: int) -> str:
    return f" and {count} more" if count else ""


def _printed(headline: Headline, claim: Claim, folder: Path) -> str:
    """The paper's numbers of both sides, as far as it prints them."""
    cells, measure = _cells(claim, folder), headline.measure or claim.ours[2]
    rows = claim.ours[0], headline.rival or claim.other[0]
    cell_values = [cells.get((row, claim.ours[1]), {}).get(measure, {}) for row in rows]
    values = [value.get("paper") for value in cell_values]
    return (
        headline.printed if None in values else " against ".join(f"{value:.4g}" for value in values)
    )


def claims(paper: str, folder: Path) -> str:
    """Further comparisons and targets of our own, as far as the results of a folder go."""
    checked = [one for claim in CLAIMS[paper] if (one := check(claim, folder)) is not None]
    lines: list[str] = []
    for words, group in groupby(checked, key=lambda one: one.claim.words):
        lines += _lines(words, list(group))
    return "".join(lines) or "Not measured yet.\n"


def _lines(words: str, group: Sequence[Checked]) -> Iterator[str]:
    """One line for a claim about one setting, or a list of settings by verdict."""
    if not group[0].claim.where:
        for one in group:
            yield f"* {one.verdict.capitalize()}: {words} {one.numbers}.\n"
        return
    yield f"* {words[0].upper()}{words[1:].removesuffix('.')}:\n"
    for kind in dict.fromkeys(one.verdict for one in group):
        places = [f"{one.claim.where}: {one.numbers}" for one in group if one.verdict == kind]
        yield f"    * {kind.capitalize()}: {'; '.join(places)}.\n"


def check(claim: Claim, folder: Path) -> Checked | None:
    """A claim with both sides' values, over the seeds that both have. None if there are none."""
    cells = _cells(claim, folder)
    ours, other = _by_seed(cells, claim.ours), _by_seed(cells, claim.other)
    common = [
        seed
        for seed in sorted(ours.keys() & other.keys())
        if (ours[seed], other[seed]) != (None, None)  # neither ever reached the target
    ]
    if not common:
        return None
    last = max(_rounds(cells, claim.ours), _rounds(cells, claim.other))
    sides = [[side[seed] for seed in common] for side in (ours, other)]
    known = [[last if value is None else value for value in side] for side in sides]
    return Checked(claim, *known, never=sum(side.count(None) for side in sides))


def _cells(claim: Claim, folder: Path) -> Cells:
    path = folder / f"{claim.study}-gpu.json"
    if not path.exists():
        return {}
    return {(cell["row"], cell["column"]): cell for cell in json.loads(path.read_text())["cells"]}


def _by_seed(cells: Cells, place: Place) -> dict[int, float | None]:
    """The values of one place by seed; None for a target that is never reached."""
    row, column, measure = place
    cell = cells.get((row, column), {})
    if measure not in cell or not cell[measure]["by_seed"]:
        return {}
    return {
        seed: value
        for seed, value in zip(cell["seeds"], cell[measure]["by_seed"], strict=True)
        if value is not None or measure.startswith("rounds")
    }


def _rounds(cells: Cells, place: Place) -> int:
    """How many rounds a place's runs have: a target that is never reached takes at least these."""
    curve = cells[place[0], place[1]].get("accuracy_curve")
    return int(curve["rounds"][-1]) if curve else 0
