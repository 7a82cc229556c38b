"""Comparison tables: a row per method with means, standard errors and differences over seeds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Group

from fedhelix.report.columns import tabulate
from fedhelix.report.results import Result, grouped
from fedhelix.report.wording import budget
from fedhelix.store import RunFolder
from fedhelix.store.progress import human_bytes, human_seconds
from fedhelix.store.records import MAIN_METRICS

METRICS = ("accuracy", "score", "personal_accuracy", "personal_score", "personal_p10")
AT_BEST = ("personal_accuracy_at_best", "personal_score_at_best")
WITH_NEWCOMERS = ("known_accuracy", "known_score", "arrival_accuracy", "arrival_score")


def comparison(folders: Sequence[RunFolder | Result]) -> pd.DataFrame:
    """One row per method, in the order of the folders; the index is the method.

    Metrics are those of the last evaluated round (`personal_accuracy_at_best`: of the round that
    the validation set chose, if there is one). Once newcomers are there, only they are evaluated;
    `known_accuracy` is that of the other clients before, and `arrival_accuracy` that of newcomers
    on their arrival. A mean over seeds is missing when one of them has diverged. `clock` is the
    simulated seconds of a run, and `time_to_target` those until it reached its target, missing when
    a seed never did. `attack_success` is how often a backdoor succeeds. `epsilon` is the largest
    that a client has spent, where the method counts it, `delta` the probability with which it may
    not hold, and `privacy_level` whom it protects: a `sample` or a `client`.
    `*_se` is the standard error over seeds, and missing for a single seed. `difference` is the mean
    difference to the first row over the seeds that both have, because paired differences vary
    less than differences of means.
    """
    groups = grouped(folders)
    first = next(iter(groups.values()))
    main_metric = next((column for column in MAIN_METRICS if _has(first, column)), None)
    metrics = [
        column for column in METRICS if any(_has(results, column) for results in groups.values())
    ]
    rows = {}
    for label, results in groups.items():
        row: dict[str, Any] = {
            "seeds": len(results),
            "rounds": min(
                int(result.metrics["round"].max()) if len(result.metrics) else 0
                for result in results
            ),
        }
        for column in metrics:
            _add(row, column, [result.final(column) for result in results if result.has(column)])
        for column in AT_BEST:
            _add(row, column, [result.chosen(column) for result in results if result.summary])
        for column in WITH_NEWCOMERS:
            _add(row, column, [result.summarized(column) for result in results if result.summary])
        _add(row, "attack_success", [result.final("attack_success") for result in results])
        row["epsilon"] = float(np.max([result.epsilon() for result in results]))
        row["delta"] = float(np.max([result.delta() for result in results]))
        levels = [level for one in results for _, level in one.metadata("privacy_level")]
        row["privacy_level"] = str(levels[0]) if levels else None
        row["uplink_bytes"] = _mean([result.total("uplink_bytes") for result in results])
        if _has(results, "clock"):
            row["clock"] = _mean([result.final("clock") for result in results])
            _add(row, "time_to_target", [result.summarized("time_to_target") for result in results])
        row["seconds"] = _mean([result.total("seconds") for result in results])
        if main_metric and results is not first:
            pairs = _paired_differences(results, first, main_metric)
            row["pairs"] = len(pairs)
            _add(row, "difference", pairs)
        rows[label] = row
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("method")
    # A metric that every run lost by diverging stays in sight.
    return table.drop(
        columns=[column for column in table if column not in metrics and table[column].isna().all()]
    )


def render(table: pd.DataFrame, width: int = 160) -> Group:
    """The comparison for a terminal of that width."""
    return tabulate(*texts(table), width)


def markdown(table: pd.DataFrame, column: str = "", best: Collection[str] = ()) -> str:
    """The comparison as a Markdown table, with the best methods and their values of a column in
    bold.
    """
    headers, *rows = _marked(table, column, best, _for_markdown, "**{}**")
    lines = (headers, ["---", *["---:"] * (len(headers) - 1)], *rows)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def latex(table: pd.DataFrame, column: str = "", best: Collection[str] = ()) -> str:
    """The same as a LaTeX table; it needs the package booktabs."""
    cells = _marked(table, column, best, _for_latex, r"\textbf{{{}}}")
    head, *rows = [rf"{' & '.join(line)} \\" for line in cells]
    columns, body = "l" + "r" * (len(cells[0]) - 1), "\n".join(rows)
    return (
        f"\\begin{{tabular}}{{{columns}}}\n\\toprule\n{head}\n\\midrule\n{body}\n"
        "\\bottomrule\n\\end{tabular}\n"
    )


def _marked(
    table: pd.DataFrame, column: str, best: Collection[str], escape: Callable[[str], str], bold: str
) -> list[list[str]]:
    """Headers and cells, escaped; of the best rows the label and the column are in bold."""
    headers, rows = texts(table)
    places = [0, *(at for at, (name, *_) in enumerate(_columns(table), 1) if name == column)]
    lines = [[escape(cell) for cell in cells] for cells in (headers, *rows)]
    for label, cells in zip(table.index, lines[1:], strict=True):
        for place in places if label in best else ():
            cells[place] = bold.format(cells[place])
    return lines


def _for_markdown(text: str) -> str:
    return text.replace("|", r"\|").replace("<", r"\<")


def _for_latex(text: str) -> str:
    meant = {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
        "δ": r"$\delta$",
        "–": "--",
    }
    escaped = (meant.get(char, f"\\{char}" if char in "&%$#_{}" else char) for char in text)
    return re.sub(r"(?<![\w.])-(?=\d)", "$-$", "".join(escaped))


def _has(results: Sequence[Result], column: str) -> bool:
    return any(result.has(column) for result in results)


def _paired_differences(
    results: Sequence[Result], base: Sequence[Result], column: str
) -> list[float]:
    base_of_seed = {result.seed: result.final(column) for result in base if result.has(column)}
    both = [result for result in results if result.seed in base_of_seed and result.has(column)]
    return [result.final(column) - base_of_seed[result.seed] for result in both]


def _add(row: dict[str, Any], name: str, values: Sequence[float]) -> None:
    row[name], row[f"{name}_se"] = _mean(values), _standard_error(values)


def _mean(values: Sequence[float]) -> float:
    """NaN when one of the values is: the mean of the runs that went well would flatter a method."""
    return float(np.mean(values)) if values else math.nan


def _standard_error(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def _percent(value: float) -> str:
    return f"{100 * value:z.1f}"  # never -0.0


def _plain(value: float) -> str:
    return f"{value:.4g}"


def _columns(table: pd.DataFrame) -> list[tuple[str, str, Callable[[float], str]]]:
    """Name, header and format of the columns that this table has."""
    is_share = "personal_accuracy" in table or "accuracy" in table
    metric, unit = (_percent, " %") if is_share else (_plain, "")
    columns: list[tuple[str, str, Callable[[float], str]]] = [
        ("seeds", "seeds", str),
        ("rounds", "rounds", str),
        ("accuracy", "global %", _percent),
        ("score", "global score", _plain),
        ("personal_accuracy", "personal %", _percent),
        ("personal_score", "personal score", _plain),
        ("personal_p10", f"10th percentile{unit}", metric),
        ("personal_accuracy_at_best", "chosen on validation %", _percent),
        ("personal_score_at_best", "chosen on validation", _plain),
        ("known_accuracy", "known clients %", _percent),
        ("known_score", "known clients", _plain),
        ("arrival_accuracy", "newcomers on arrival %", _percent),
        ("arrival_score", "newcomers on arrival", _plain),
        ("difference", f"vs {table.index[0]}", metric),
        ("attack_success", "attack succeeds %", _percent),
        ("epsilon", "epsilon", _plain),
        ("uplink_bytes", "uploaded", human_bytes),
        ("time_to_target", "time to target", human_seconds),
        ("clock", "simulated time", human_seconds),
        ("seconds", "time", human_seconds),
    ]
    return [column for column in columns if column[0] in table]


def texts(table: pd.DataFrame, first: Sequence[str] = ()) -> tuple[list[str], list[list[str]]]:
    """Headers and cells as text; some columns can come first."""
    columns = sorted(_columns(table), key=lambda column: column[0] not in first)
    headers = ["method", *(header for _, header, _ in columns)]
    rows = [
        [str(label), *(_cell(row, name, show) for name, _, show in columns)]
        for label, row in table.to_dict(orient="index").items()
    ]
    return headers, rows


def _cell(row: Mapping[Hashable, Any], name: str, show: Callable[[float], str]) -> str:
    value, error = row[name], row.get(f"{name}_se", math.nan)
    if pd.isna(value):
        return "–"
    if name == "epsilon":
        return budget(value, row.get("delta", math.nan), row.get("privacy_level"))
    sign = "+" if name == "difference" and value > 0 else ""
    return f"{sign}{show(value)}" if pd.isna(error) else f"{sign}{show(value)} ± {show(error)}"
