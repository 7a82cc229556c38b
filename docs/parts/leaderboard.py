"""The leaderboard: a table that browsers can sort, its figures, and what every method tried."""

from __future__ import annotations

import sys
from typing import Any

from fedhelix.papers.leaderboard import draw
from fedhelix.papers.leaderboard.settings import TRIALS, BoardScale, entrants
from fedhelix.papers.tables import grid
from fedhelix.report.style import save
from parts.files import ROOT, exists, result
from parts.files import table as markdown

CAPTIONS = {
    "ranks": "Mean ranks with 95 % intervals, and which methods cannot be told apart",
    "bytes": "Accuracy against traffic",
    "seconds": "Accuracy against seconds",
}


def table(scale: str) -> str:
    """Ranks and accuracies, best rank first."""
    name = f"leaderboard-{scale}"
    if not exists(name):
        return f"Not run at scale `{scale}` yet.\n"
    report = result(name)
    link = f"[`{name}.json`](../benchmarks/results/{name}.json)"
    headers, rows = grid(report, "accuracy")
    ranks = (report["ranking"] or {"rows": {}})["rows"]
    rows.sort(key=lambda row: ranks.get(row[0], {"rank": len(rows)})["rank"])
    body = [[row[0], _rank(ranks.get(row[0])), *row[1:]] for row in rows]
    shown = markdown([headers[0] or "method", "mean rank", *headers[1:]], body)
    head = f"`{report['command']}`, {report['device']}, {len(report['seeds'])} seeds"
    missing = "" if report["complete"] else "; not all settings have been run yet"
    sortable = f'<div class="sortable" markdown>\n\n{shown}\n</div>\n'
    return f"{head}{_verdict(report)}{missing} → {link}\n\n{sortable}"


def _rank(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    low, high = row["interval"]
    return f"{row['rank']:.2f} ({low:.2f} to {high:.2f})"


def _verdict(report: dict[str, Any]) -> str:
    ranking = report["ranking"]
    if ranking is None or ranking["critical_difference"] is None:
        return ""
    return (
        f"; {ranking['settings']} settings, Friedman's p = {ranking['friedman_p']:.1g}, "
        f"critical difference of mean ranks {ranking['critical_difference']:.2f}"
    )


def figures(scale: str) -> str:
    """Links to the figures, which are drawn if they are missing."""
    name = f"leaderboard-{scale}"
    if not exists(name):
        return "\n"
    drawings, lines = draw(result(name)), []
    for kind, drawing in drawings.items():
        place = f"figures/studies/{name}-{kind}.png"
        if "--check" not in sys.argv and not (ROOT / "docs" / place).exists():
            save(drawing, ROOT / "docs" / place)
        lines.append(f"![{CAPTIONS[kind]}]({place})\n")
    return "\n".join(lines)


def searched(scale: BoardScale) -> str:
    """What every method may try."""
    count = TRIALS[scale]
    rows = [
        [
            one.row,
            f"`{one.option}`: {', '.join(map(str, one.values))}" if one.option else "none",
            str(count // max(1, len(one.values))),
        ]
        for one in entrants(scale)
    ]
    return markdown(["method", "its option, default first ", "learning rates for each"], rows)


def pfllib() -> str:
    """Our best rounds beside those of PFLlib's leaderboard, the best first."""
    report = result("pfllib")
    names = {one.row.lower(): one.row for one in entrants("gpu")}
    rows = [
        [
            names.get(row["method"], row["method"]),
            f"{row['accuracy']:.2f}",
            "–" if row["pfllib"] is None else f"{row['pfllib']:.2f}",
            "–" if row["pfllib"] is None else f"{row['accuracy'] - row['pfllib']:+.2f}",
            f"{row['round']} of {row['rounds']}",
            str(row["seed"]),
        ]
        for row in sorted(report["rows"], key=lambda row: -row["accuracy"])
    ]
    heads = ["method", "ours", "PFLlib's", "difference", "best round", "seed"]
    commands = "\n".join(dict.fromkeys(row["command"] for row in report["rows"]))
    head = f"{report['device']} → [`pfllib.json`](../benchmarks/results/pfllib.json)"
    table = f'<div class="sortable" markdown>\n\n{markdown(heads, rows)}\n</div>\n'
    return f"```\n{commands}\n```\n\n{head}\n\n{table}"
