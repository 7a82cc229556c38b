"""The results of runs on the terminal: what a command prints when it is done."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedhelix.core.bounds import rounded_up
from fedhelix.core.files import remove_leftovers
from fedhelix.report.columns import screen, tabulate
from fedhelix.report.wording import budget, count, percent, reasons
from fedhelix.store import RunFolder
from fedhelix.store.progress import human_bytes, human_seconds
from fedhelix.store.records import Record, at_clients, has_effect, is_number, spent

console = Console()


def show_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of numbers."""
    wide = screen()
    wide.print(tabulate(headers, rows, wide.width))


def listing(*headers: str) -> Table:
    """A list with words about each name: first columns stay whole, the last one is wrapped."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for place, header in enumerate(headers, start=1):
        table.add_column(header, no_wrap=place < len(headers), overflow="fold")
    return table


def _show_losses(records: Sequence[Record], summary: dict[str, Any]) -> None:
    """How many uploads and answers did not count, and the most frequent reasons."""
    for key, what in (("refused", "upload"), ("missing", "answer")):
        if not (lost := summary.get(key)):
            continue
        given = [why for record in records for why in record.get(key, {}).values()]
        subject = "" if key == "missing" or len(set(given)) > 1 else "it " if lost == 1 else "each "
        more = f" ({subject}{reasons(given)})" if given else ""
        print(
            f"fedhelix: {count(lost, what)} {'was' if lost == 1 else 'were'} {key}{more}; "
            "metrics.jsonl says which and why.",
            file=sys.stderr,
        )


def _without_effect(records: Sequence[Record], since: int | None) -> str:
    """How many rounds had no effect; nothing where all had one."""
    idle = sum(not has_effect(record) for record in records)
    last = f"no round after round {since - 1} had an effect" if since else ""
    if since and idle == len(records) - since + 1:
        return last
    number = f"{idle} of {count(len(records), 'round')} had no effect" if idle else ""
    return "; ".join(filter(None, (number, last)))


def show_run(folder: Path, summary: dict[str, Any], as_json: bool, advised: bool = True) -> None:
    """The result of one run; `advised`: if it diverged, a warning has said what may help."""
    if as_json:
        stored = RunFolder.open(folder).summary or summary
        print(json.dumps({**stored, "folder": str(folder)}, indent=2))
        return
    records = RunFolder.open(folder).records()
    metrics = {
        key: value
        for key, value in summary.items()
        if ("accuracy" in key or "score" in key) and value is not None
    }
    attacked = [record["attack_success"] for record in records if "attack_success" in record]
    if attacked and is_number(attacked[-1]):
        metrics["attack_success"] = attacked[-1]
    _show_losses(records, summary)
    if why := summary.get("untrained"):
        print(f"fedhelix: nothing was learned: {why}.", file=sys.stderr)
    elif idle := _without_effect(records, summary.get("idle_since")):
        print(f"fedhelix: {idle}.", file=sys.stderr)
    if since := summary.get("diverged"):
        advice = "" if advised or not summary.get("advice") else f"; {summary['advice']}"
        where = at_clients(summary.get("diverged_clients") or ())
        sentence = f"the run has diverged{where} since round {since}{advice}"
        print(f"fedhelix: {sentence}.", file=sys.stderr)
    privacy = spent(records, RunFolder.open(folder).config.get("method", {}))
    if not console.is_terminal:
        words = {
            "method": summary["method"],
            "rounds": summary["rounds"],
            **{key: f"{value:.4f}" for key, value in metrics.items()},
            **{
                key: (rounded_up if key == "epsilon" else "{:.4g}".format)(value)
                if is_number(value)
                else value
                for key, value in privacy.items()
                if value is not None
            },
            "folder": folder,
        }
        print(" ".join(f"{key}={value}" for key, value in words.items()))
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in metrics.items():
        shown = f"{value:.4f}" if "score" in key else percent(value)
        table.add_row(key.replace("_at_best", " in the best round").replace("_", " "), shown)
    if privacy:
        table.add_row("epsilon", budget(**privacy))
    table.add_row("best round (on validation, else the last)", str(summary["best_round"]))
    table.add_row(
        "uploaded / downloaded",
        f"{human_bytes(summary['uplink_bytes'])} / {human_bytes(summary['downlink_bytes'])}",
    )
    if "clock" in summary:
        table.add_row("simulated time", human_seconds(summary["clock"]))
    if summary.get("time_to_target") is not None:
        table.add_row("time to target", human_seconds(summary["time_to_target"]))
    table.add_row("time", human_seconds(summary["seconds"]))
    table.add_row("engine", summary["engine"])
    console.print(table)
    print(f"folder: {folder}")  # plain, so that it is not wrapped


def show_comparison(folder: Path, folders: list[RunFolder], as_json: bool) -> None:
    """The result of a comparison: a table here, a figure in the folder."""
    from fedhelix.report.plots import comparison_plot  # slow to import, and of use only here
    from fedhelix.report.tables import comparison, render

    table = comparison(folders)
    figure = folder / "comparison.png"
    remove_leftovers(folder, figure.name)
    comparison_plot(folders, figure)
    if as_json:
        print(table.reset_index().to_json(orient="records", indent=2))
        return
    wide = screen()
    wide.print(render(table, wide.width))
    # Plain `print`, so that paths are neither wrapped nor read as markup.
    print(f"figure: {figure}\nruns:   {folder}")
