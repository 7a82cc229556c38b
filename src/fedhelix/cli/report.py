"""The commands that show runs: plot, report, export, serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedhelix.core.errors import UserError
from fedhelix.core.files import writable_file
from fedhelix.store import RUNS

Runs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[RUN]...",
        help="Folders of runs or comparisons (default: the last comparison in runs/).",
    ),
]


def plot(
    runs: Runs = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for the figures.")] = Path(
        "figures"
    ),
    form: Annotated[str, typer.Option("--format", help="png, svg or pdf.")] = "png",
) -> None:
    """Draw every figure that the runs allow.

    Accuracy by rounds, bytes and seconds; every client; who has what; and what a method notes about
    itself: GenFed's fitness and choice, GENE-FL's units and clusters, pFedGPA's distances.
    Attackers are marked.
    """
    from fedhelix.report.figures import write_all
    from fedhelix.report.locate import select

    for path in write_all(select(runs or []).folders, out, form):
        print(path)


def report(
    runs: Runs = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The file (default: report.html, .md or .tex)."),
    ] = None,
    form: Annotated[
        str | None, typer.Option("--format", help="html, md or latex (default: by the file's end).")
    ] = None,
) -> None:
    """Write a report: one HTML file that opens without a network, or Markdown or a LaTeX table for
    papers.
    """
    from fedhelix.report.locate import select
    from fedhelix.report.style import write

    suffixes = {"html": ".html", "md": ".md", "latex": ".tex"}
    if form is not None and form not in suffixes:
        raise UserError(f"--format must be html, md or latex, not '{form}'.")
    forms = {suffix: name for name, suffix in suffixes.items()}
    if out is not None and out.suffix not in forms:
        raise UserError(f"a report ends in .html, .md or .tex, and '{out}' does not.")
    if form is not None and out is not None and forms[out.suffix] != form:
        raise UserError(
            f"--format {form} writes a file that ends in {suffixes[form]}, and '{out}' does not."
        )
    form = form or forms[(out or Path("report.html")).suffix]
    out = out or Path(f"report{suffixes[form]}")
    chosen = select(runs or [])
    for run in chosen.folders:
        run.verify()
    writable_file(out)
    if form == "html":
        from fedhelix.report.page import html

        text = html(chosen)
    else:
        from fedhelix.report.documents import latex_report, markdown_report

        text = markdown_report(chosen, out) if form == "md" else latex_report(chosen)
    write(out, text.encode())
    print(out)


def export(
    runs: Runs = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="FILE.csv or FILE.parquet.")] = Path(
        "rounds.csv"
    ),
    clients: Annotated[
        bool, typer.Option("--clients", help="A row per client and evaluated round.")
    ] = False,
) -> None:
    """Write the records of runs as one flat table, a row per round, for other programs."""
    from fedhelix.report.export import export as write_table
    from fedhelix.report.locate import select
    from fedhelix.report.wording import count

    table = write_table(select(runs or []).folders, out, clients)
    print(f"{out}: {count(len(table), 'row')}")


def serve(
    folder: Annotated[
        Path, typer.Argument(metavar="[RUNS]", help="The folder with the runs.")
    ] = RUNS,
    host: Annotated[
        str, typer.Option(help="The address to listen on; other than loopback needs the token.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="The port; 0 takes a free one.", min=0, max=65535)
    ] = 8643,
    token: Annotated[
        str | None, typer.Option(help="The secret of the address (default: drawn anew).")
    ] = None,
) -> None:
    """Show runs in the browser and follow those that are going on."""
    from fedhelix.report.server import serve as start

    start(folder, host, port, token)
