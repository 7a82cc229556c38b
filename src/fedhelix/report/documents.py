"""The report for papers: Markdown with figures beside it, or a LaTeX table."""

from __future__ import annotations

from pathlib import Path

from fedhelix.report.figures import figures
from fedhelix.report.headline import facts, subtitle, title, warnings
from fedhelix.report.locate import Selection
from fedhelix.report.results import read
from fedhelix.report.style import save
from fedhelix.report.tables import comparison, latex, markdown

# Characters with a meaning in Markdown or HTML.
SPECIAL = str.maketrans({char: f"\\{char}" for char in r"\`*_{}[]<>#|!"})


def markdown_report(chosen: Selection, out: Path) -> str:
    """The report as Markdown; its figures are written into a folder beside it."""
    results = [read(folder) for folder in chosen.folders]
    folder = out.with_name(f"{out.stem}-figures")
    lines = [f"# {_plain(title(results))}", "", _plain(subtitle(results)), ""]
    if chosen.commands:
        lines += ["```bash", *(command.replace("`", "'") for command in chosen.commands), "```", ""]
    lines += [markdown(comparison(results))]
    lines += [f"> {_plain(warning)}\n" for warning in warnings(results)]
    for figure in figures(results):
        save(figure.figure, folder / f"{figure.name}.png")
        lines += [
            f"![{_plain(figure.title)}]({folder.name}/{figure.name}.png)",
            "",
            _plain(figure.caption),
            "",
        ]
    lines += ["| setting | value |", "| --- | --- |"]
    lines += [f"| {_plain(key)} | {_plain(value)} |" for key, value in facts(results)]
    return "\n".join(lines) + "\n"


def latex_report(chosen: Selection) -> str:
    """The table of the report for LaTeX, with the commands that made it as comments."""
    made_by = "".join(f"% {' '.join(command.split())}\n" for command in chosen.commands)
    return made_by + latex(comparison(chosen.folders))


def _plain(text: str) -> str:
    return " ".join(text.split()).translate(SPECIAL)
