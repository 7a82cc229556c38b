"""The report as one HTML file, with all figures in it, that opens without a network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedhelix.core import toml
from fedhelix.core.imports import from_extra
from fedhelix.report.figures import figures
from fedhelix.report.headline import facts, subtitle, tiles, title, warnings, winners
from fedhelix.report.locate import Selection
from fedhelix.report.results import Result, by_setting, grouped, read
from fedhelix.report.sections import chart, clients, costs
from fedhelix.report.spread import explanation
from fedhelix.report.tables import comparison, texts
from fedhelix.report.themed import inline, is_wide

STATIC = Path(__file__).parent / "static"
MOST_WARNINGS = 4  # that are shown at once; the others are folded away


def html(chosen: Selection) -> str:
    """The report as one self-contained page."""
    jinja2 = from_extra("jinja2", "report")
    mark_up = jinja2.utils.markupsafe.Markup
    results = [read(folder) for folder in chosen.folders]
    sections = [
        _section(words, part, place, mark_up)
        for place, (words, part) in enumerate(by_setting(results).items())
    ]
    environment = jinja2.Environment(autoescape=True)
    # A name such as genfed+ditto may go on in the next line after its plus sign.
    environment.filters["breakable"] = lambda name: mark_up("+<wbr>").join(name.split("+"))
    template = environment.from_string(_static("report.html"))
    script = _static("chart.js") + _static("report.js")
    return str(
        template.render(
            title=title(results),
            subtitle=subtitle(results),
            warnings=[*chosen.lacking, *warnings(results)],
            most_warnings=MOST_WARNINGS,
            sections=sections,
            commands=chosen.commands,
            facts=facts(results),
            runs=[{"name": result.name, "config": toml.dumps(result.config)} for result in results],
            style=mark_up(_static("tokens.css") + _static("style.css")),
            script=mark_up(script),
            script_hash=_hash(script),
            data=jinja2.utils.htmlsafe_json_dumps([section.pop("chart") for section in sections]),
        )
    )


def _section(words: str, results: Sequence[Result], place: int, mark_up: Any) -> dict[str, Any]:
    """The runs of one setting: highlights, table, curves, figures, clients and costs."""
    groups = grouped(results)
    return {
        "words": words,
        "tiles": tiles(groups),
        "table": _table(results),
        "chart": chart(groups),
        "bands": explanation([len(members) for members in groups.values()]),
        "figures": list(_embedded(results, place, mark_up)),
        "clients": clients(groups),
        "costs": costs(groups),
    }


def _table(results: Sequence[Result]) -> dict[str, Any]:
    """The comparison, the column that decides first, and who is best by it."""
    main, best = winners(grouped(results))
    headers, rows = texts(comparison(results), first=(main, "difference"))
    return {"headers": headers, "rows": rows, "best": best}


def _embedded(results: Sequence[Result], place: int, mark_up: Any) -> Iterator[dict[str, Any]]:
    """The figures as SVG in the page's own colours; the page forbids scripts in them."""
    for figure in figures(results, overview=False):
        yield {
            "title": figure.title,
            "caption": figure.caption,
            "wide": is_wide(figure.figure),
            "svg": mark_up(inline(figure.figure, f"{place}-{figure.name}", figure.title)),
        }


def _hash(script: str) -> str:
    """What the page's security policy calls its one script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")
