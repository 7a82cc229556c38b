"""The report as one HTML file, with all figures in it, that opens without a network."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from fedhelix.core import toml
from fedhelix.core.imports import from_extra
from fedhelix.report.figures import ReportFigure, figures
from fedhelix.report.headline import facts, subtitle, tiles, title, warnings
from fedhelix.report.locate import Selection
from fedhelix.report.results import grouped, read
from fedhelix.report.sections import AXES, clients, costs, measures, series
from fedhelix.report.style import content
from fedhelix.report.tables import comparison, texts

STATIC = Path(__file__).parent / "static"
WIDE = 7  # inches; a wider figure spans the page


def html(chosen: Selection) -> str:
    """The report as one self-contained page."""
    jinja2 = from_extra("jinja2", "report")
    results = [read(folder) for folder in chosen.folders]
    groups = grouped(results)
    template = jinja2.Environment(autoescape=True).from_string(_static("report.html"))
    script = _static("chart.js") + _static("report.js")
    data = {"axes": AXES, "measures": measures(results), "series": series(groups)}
    headers, rows = texts(comparison(results))
    return template.render(
        title=title(results),
        subtitle=subtitle(results),
        tiles=tiles(groups),
        warnings=warnings(results),
        table={"headers": headers, "rows": rows},
        figures=[_embedded(figure) for figure in figures(results, overview=False)],
        clients=clients(groups),
        costs=costs(groups),
        commands=chosen.commands,
        facts=facts(results),
        runs=[{"name": result.name, "config": toml.dumps(result.config)} for result in results],
        style=jinja2.utils.markupsafe.Markup(_static("style.css")),
        script=jinja2.utils.markupsafe.Markup(script),
        script_hash=f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
        data=jinja2.utils.htmlsafe_json_dumps(data),
    )


def _embedded(figure: ReportFigure) -> dict[str, Any]:
    """As an image with the data in it: inside an image no script runs and no link leads out."""
    return {
        "title": figure.title,
        "caption": figure.caption,
        "data": base64.b64encode(content(figure.figure, "svg")).decode(),
        "wide": figure.figure.get_figwidth() > WIDE,
    }


def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")
