"""Fill in the generated parts of the documentation: `python docs/make.py`.

With `--check` it only lists the pages that are out of date. A part is between
`<!-- made: NAME -->` and `<!-- end -->`, on lines of its own or within a sentence. Numbers come
from benchmarks/results/*.json and options from the methods themselves, so that nobody has to type
them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from parts import claims, inline, leaderboard, measurements, methods, studies, targets
from parts.files import RESULTS, ROOT

PART = re.compile(r"(<!-- made: ([^>]+?) -->\n?)(.*?)(<!-- end -->)", re.DOTALL)
PARTS: dict[str, Callable[..., str]] = {
    "audit": measurements.audit,
    "characters": measurements.characters,
    "helix": lambda: targets.found(RESULTS),
    "helix-cost": measurements.helix_cost,
    "choosing": measurements.choosing,
    "claims": lambda paper: claims.claims(paper, RESULTS),
    "cluster": measurements.cluster,
    "dashboard": measurements.dashboard,
    "deep": measurements.deep,
    "fresh": measurements.fresh,
    "deployment": measurements.deployment,
    "drawn": studies.drawn,
    "faults": measurements.faults,
    "fewer-bytes": inline.fewer_bytes,
    "gap": inline.gap,
    "gpu": measurements.gpu,
    "heirs": measurements.heirs,
    "hooks": methods.hooks,
    "inversion": measurements.inversion,
    "leaderboard": leaderboard.table,
    "leaderboard-figures": leaderboard.figures,
    "leaderboard-methods": leaderboard.searched,
    "masked-words": measurements.masked_words,
    "masking": measurements.masking,
    "lengths": measurements.lengths,
    "membership": measurements.membership,
    "options": methods.options,
    "participation": measurements.participation,
    "race": measurements.race,
    "results": methods.results,
    "scaffold": measurements.scaffold,
    "study": studies.study,
    "settings": lambda paper: claims.settings(paper, RESULTS),
    "one-seed": inline.one_seed,
    "personal": inline.personal,
    "pfllib": leaderboard.pfllib,
    "privacy": measurements.privacy,
    "seeds": inline.seeds,
    "slower": inline.slower,
    "public": methods.public,
    "table1": measurements.table1,
    "use": methods.use,
    "whole": measurements.whole,
    "widths": measurements.widths,
    "verdicts": lambda paper: claims.verdicts(paper, RESULTS),
}


def made(text: str) -> str:
    """A page with its parts generated anew."""

    def fill(part: re.Match[str]) -> str:
        name, *arguments = part[2].split()
        return f"{part[1]}{PARTS[name](*arguments)}{part[4]}"

    return PART.sub(fill, text)


def stale() -> Iterator[tuple[Path, str]]:
    """Pages that are out of date, with their new text."""
    for page in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]):
        text = page.read_text(encoding="utf-8")
        if (new := made(text)) != text:
            yield page, new


if __name__ == "__main__":
    pages = list(stale())
    for page, new in pages:
        print(page.relative_to(ROOT))
        if "--check" not in sys.argv:
            page.write_text(new, encoding="utf-8")
    sys.exit(bool(pages) and "--check" in sys.argv)
