"""Results of `fedhelix bench`: the papers' tables with ours, and figures."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

from fedhelix.papers.figures import figure
from fedhelix.papers.tables import NONE, grid, has_paper
from fedhelix.report.style import save
from parts.files import ROOT, exists, result, table


def study(name: str, scale: str) -> str:
    """A table for each measure, or one for all of them if the study has a single column."""
    if not exists(f"{name}-{scale}"):
        return f"Not run at scale `{scale}` yet.\n"
    measured = result(f"{name}-{scale}")
    everything = measured["cells"]
    run = {cell[key] for cell in everything if cell["runs"] for key in ("row", "column")}
    named = [cell[key] for key in ("column", "row") for cell in everything]
    missing = list(dict.fromkeys(name for name in named if name not in run))
    measured["cells"] = [cell for cell in everything if {cell["row"], cell["column"]} <= run]
    link = f"[`{name}-{scale}.json`](../../benchmarks/results/{name}-{scale}.json)"
    grids = {measure: grid(measured, measure) for measure in measured["measures"]}
    lacking = any(
        text.startswith(NONE) for _, rows in grids.values() for row in rows for text in row
    )
    head = f"{_circumstances(measured, missing, lacking)} → {link}\n"
    headers, rows = next(iter(grids.values()))
    if len(headers) > 2:
        shown = (f"*{measure}*\n\n{table(*content)}" for measure, content in grids.items())
        return "\n".join([head, *shown])
    lines = [
        [row[0], *(texts[place][1] for _, texts in grids.values())]
        for place, row in enumerate(rows)
    ]
    return f"{head}\n{table([headers[1], *grids], lines)}"


def _circumstances(measured: dict[str, Any], missing: Sequence[str], lacking: bool) -> str:
    """Command, device, seeds and samples of a study, what is still missing, and whether cells are
    `lacking` a number.
    """
    cells = measured["cells"]
    words = [f"`{measured['command']}`, {measured['device']}, {seeds_of(cells)}"]
    samples: dict[str, int | None] = {}
    for cell in cells:
        samples.setdefault(cell["column"], cell.get("train_samples"))
    if any(samples.values()):
        sizes = {f"{size:,}" if size else "all" for size in samples.values()}
        each = "; ".join(f"{column}: {size or 'all'}" for column, size in samples.items())
        words.append(f"training samples: {sizes.pop() if len(sizes) == 1 else each}")
    if missing:
        words.append(f"not run yet: {'; '.join(missing)}")
    if lacking:
        words.append("– means not run yet, or not measured")
    if has_paper(measured, measured["measures"]):
        words.append("the paper's values in brackets")
    return "; ".join(words)


def seeds_of(cells: Sequence[dict[str, Any]]) -> str:
    """How many seeds most columns have, and which columns have another number."""
    most: dict[str, int] = {}
    for cell in cells:
        most[cell["column"]] = max(cell["runs"], most.get(cell["column"], 0))
    usual = statistics.mode(most.values())
    others = [f"{column}: {count}" for column, count in most.items() if count != usual]
    fewer = sum(0 < cell["runs"] < most[cell["column"]] for cell in cells)
    others += [f"{fewer} cells have fewer" if fewer > 1 else "one cell has fewer"] if fewer else []
    return f"{usual} seed{'s' if usual > 1 else ''}" + (f" ({', '.join(others)})" if others else "")


def drawn(name: str, scale: str) -> str:
    """A link to a study's figure, which is drawn if it is missing."""
    if not exists(f"{name}-{scale}"):
        return "\n"
    measured, place = result(f"{name}-{scale}"), f"figures/studies/{name}-{scale}.png"
    image = figure(measured)
    if image is None:
        return "\n"
    if "--check" not in sys.argv and not (ROOT / "docs" / place).exists():
        save(image, ROOT / "docs" / place)
    return f"![{measured['title']}](../{place})\n"
