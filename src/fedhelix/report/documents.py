"""The report for papers: Markdown with figures beside it, or a LaTeX table."""

from __future__ import annotations

from pathlib import Path

from fedhelix.report.figures import figures
from fedhelix.report.headline import facts, subtitle, title, warnings, winners
from fedhelix.report.locate import Selection
from fedhelix.report.results import by_setting, grouped, read
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
    lines += [f"> {_plain(warning)}\n" for warning in (*chosen.lacking, *warnings(results))]
    for place, (words, part) in enumerate(by_setting(results).items()):
        lines += [f"## {_plain(words)}", ""] if words else []
        lines += [markdown(comparison(part), *winners(grouped(part)))]
        for figure in figures(part):
            name = f"{figure.name}-{place + 1}.png" if words else f"{figure.name}.png"
            save(figure.figure, folder / name)
            lines += [f"![{_plain(figure.title)}]({folder.name}/{name})", ""]
            lines += [_plain(figure.caption), ""]
    lines += ["| setting | value |", "| --- | --- |"]
    lines += [f"| {_plain(key)} | {_plain(value)} |" for key, value in facts(results)]
    return "\n".join(lines) + "\n"


def latex_report(chosen: Selection) -> str:
    """The tables of the report for LaTeX, with the commands that made them as comments."""
    made_by = "".join(f"% {' '.join(command.split())}\n" for command in chosen.commands)
    sections = by_setting([read(folder) for folder in chosen.folders])
    tables = (
        (f"% {words}\n" if words else "") + latex(comparison(part), *winners(grouped(part)))
        for words, part in sections.items()
    )
    return made_by + "\n".join(tables)


def _plain(text: str) -> str:
    return " ".join(text.split()).translate(SPECIAL)
