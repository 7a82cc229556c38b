"""The report: what was run, what came out, and every picture, in one file that opens without a
network.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedhelix.core import toml
from fedhelix.core.imports import from_extra
from fedhelix.report.figures import figures
from fedhelix.report.locate import Selection
from fedhelix.report.plots import Groups
from fedhelix.report.results import Result, grouped, read
from fedhelix.report.style import MIB, content
from fedhelix.report.tables import comparison, texts
from fedhelix.store.progress import human_bytes, human_seconds

STATIC = Path(__file__).parent / "static"
MOST_CLIENTS = 500  # of more, the worst ones are listed

AXES = [
    {"key": "round", "label": "round"},
    {"key": "mib", "label": "MiB uploaded"},
    {"key": "seconds", "label": "seconds"},
]
MEASURES = {
    "personal_accuracy": "personal accuracy",
    "personal_score": "personal score",
    "personal_p10": "worst tenth",
    "accuracy": "global accuracy",
    "score": "global score",
    "train_loss": "training loss",
}
# What records say of clients and sites with whom something went wrong: what was lost, whose it was,
# and how.
INCIDENT_WORDS = {
    "refused": ("upload", "client ", "refused"),
    "missing": ("answer", "client ", "missing"),
    "unevaluated": ("score", "client ", "missing"),
    "troubles": ("letter", "", "dropped"),
}


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


def title(results: Sequence[Result]) -> str:
    """Which methods on which data."""
    methods = list(dict.fromkeys(result.method for result in results))
    data = sorted({str(result.circumstances.get("data", "unknown data")) for result in results})
    shown = methods if len(methods) < 7 else [*methods[:6], f"{len(methods) - 6} more"]
    return f"{', '.join(shown)} on {', '.join(data)}"


def subtitle(results: Sequence[Result]) -> str:
    """How much was run."""
    seeds = len({result.seed for result in results})
    versions = sorted(
        {str(_table(result.config, "versions").get("fedhelix", "?")) for result in results}
    )
    return (
        f"{_count(len(results), 'run')}, {_count(seeds, 'seed')}, by fedhelix {', '.join(versions)}"
    )


def tiles(groups: Groups) -> list[dict[str, str]]:
    """Four figures to start from; each names its method, and none says more than the table."""
    table = comparison([result for results in groups.values() for result in results])
    found = []
    for what, column, largest, show in (
        ("highest personal accuracy", "personal_accuracy", True, _percent),
        ("highest personal score", "personal_score", True, _plain),
        ("highest global accuracy", "accuracy", True, _percent),
        (
            "best for the worst tenth of clients",
            "personal_p10",
            True,
            _percent if "score" not in table else _plain,
        ),
        ("fewest bytes uploaded", "uplink_bytes", False, lambda value, _: human_bytes(value)),
    ):
        values = table[column].dropna() if column in table else pd.Series(dtype=float)
        if column == "uplink_bytes":
            values = values[values > 0]  # a method that never sends is no news
        if len(values) > 0 and len(groups) > 1:
            who = str(values.idxmax() if largest else values.idxmin())
            error = table.get(f"{column}_se", pd.Series(dtype=float)).get(who, np.nan)
            found.append(
                {"what": what, "value": show(float(values[who]), float(error)), "who": who}
            )
    return found[:4]


def warnings(results: Sequence[Result]) -> list[str]:
    """What a reader must not overlook."""
    found = []
    for result in results:
        if not result.complete:
            found.append(
                f"{result.name} is unfinished: {len(result.metrics)} of {result.config.get('rounds', '?')} rounds."
            )
        if result.damage:
            found.append(result.damage)
        main_metric = result.main_metric()
        if main_metric and np.isnan(result.final(main_metric)):
            found.append(
                f"{result.name} has diverged: its {MEASURES[main_metric]} is not a number any more."
            )
        for kind, (thing, whose, fate) in INCIDENT_WORDS.items():
            if incidents := result.incidents(kind):
                reasons = pd.Series([reason for *_, reason in incidents]).value_counts()
                what = "; ".join(f"{count} × {reason}" for reason, count in reasons.head(3).items())
                who = sorted({name for _, name, _ in incidents})
                named = ", ".join(who[:8]) + (" and others" if len(who) > 8 else "")
                found.append(
                    f"{result.name}: {_count(len(incidents), thing)} of {whose}{named} {fate} ({what})."
                )
        if "train_loss" in result.metrics and result.metrics["train_loss"].isna().any():
            found.append(f"{result.name}: the training loss was not a number in some rounds.")
    attacks = {
        str(result.circumstances.get("attack", "unknown attack"))
        for result in results
        if result.attackers
    }
    if attacks:
        most = max(len(result.attackers) for result in results)
        attacked = sum(bool(result.attackers) for result in results)
        found.append(
            f"Up to {_count(most, 'client')} attacked in {attacked} of {_count(len(results), 'run')} "
            f"({', '.join(sorted(attacks))}); the pictures mark them with ×."
        )
    return found


def clients(groups: Groups) -> dict[str, Any]:
    """A row per client of every seed: its samples and its final metric by method, the worst off
    first.
    """
    finals = {
        label: {
            (result.seed, client): value
            for result in results
            for client, value in result.client_finals().items()
        }
        for label, results in groups.items()
    }
    labels = [label for label, values in finals.items() if values]
    everybody = {who for values in finals.values() for who in values}
    worst_first = sorted(
        everybody, key=lambda who: (min(values.get(who, np.inf) for values in finals.values()), who)
    )
    of_seed = {result.seed: result for results in groups.values() for result in results}
    columns = {
        result.main_metric() or "accuracy" for results in groups.values() for result in results
    }
    show = _percent if all(column.endswith("accuracy") for column in columns) else _plain
    rows = []
    for seed, client in worst_first[:MOST_CLIENTS]:
        mark = " ×" if client in of_seed[seed].attackers else ""
        listed = of_seed[seed].census.get("samples")
        samples = listed[client] if isinstance(listed, list) and client < len(listed) else None
        values = [finals[label].get((seed, client)) for label in labels]
        row = [
            _sortable(f"{client}{mark}", client),
            _sortable(str(seed), seed),
            _sortable(str(samples or "–"), samples),
        ]
        rows.append(
            row
            + [_sortable("–" if value is None else show(value, np.nan), value) for value in values]
        )
    note = (
        f" The worst {MOST_CLIENTS} of {len(everybody)} are listed."
        if len(everybody) > MOST_CLIENTS
        else ""
    )
    crosses = " × marks attackers." if any(result.attackers for result in of_seed.values()) else ""
    return {"headers": ["client", "seed", "samples", *labels], "rows": rows, "note": note + crosses}


def _sortable(text: str, value: Any) -> dict[str, Any]:
    return {"text": text, "value": "" if value is None else value}


def costs(groups: Groups) -> list[list[str]]:
    """Bytes and seconds of each method's runs."""
    rows = []
    for label, results in groups.items():
        mean = {
            column: float(np.mean([result.total(column) for result in results]))
            for column in ("uplink_bytes", "downlink_bytes", "other_bytes", "seconds")
        }
        rounds = max(float(np.mean([len(result.metrics) for result in results])), 1.0)
        sizes = [
            human_bytes(mean[column])
            for column in ("uplink_bytes", "downlink_bytes", "other_bytes")
        ]
        per_round = [human_bytes(mean["uplink_bytes"] / rounds), human_seconds(mean["seconds"])]
        rows.append([label, *sizes, *per_round, human_seconds(mean["seconds"] / rounds)])
    return rows


def facts(results: Sequence[Result]) -> list[tuple[str, str]]:
    """Settings and versions that all runs share."""
    found: list[tuple[str, str]] = []
    for key, value in results[0].circumstances.items():
        if all(result.circumstances.get(key) == value for result in results):
            found.append((key, str(value)))
    engines = sorted(
        {str(result.summary.get("engine", "")).partition(" (")[0] for result in results} - {""}
    )
    found += [("engine", ", ".join(engines))] if engines else []
    for key in ("python", "torch", "numpy", "machine", "commit"):
        values = sorted(
            {str(_table(result.config, "versions").get(key, "")) for result in results} - {""}
        )
        found += [(key, ", ".join(values))] if values else []
    return found


def measures(results: Sequence[Result]) -> list[dict[str, Any]]:
    """What the vertical axis can show."""
    known = [key for key in MEASURES if any(len(result.series(key)) for result in results)]
    scores = any("score" in key for key in known)
    return [
        {
            "key": key,
            "label": MEASURES[key],
            "percent": key.endswith("accuracy") or (key == "personal_p10" and not scores),
        }
        for key in known or ["train_loss"]
    ]


def series(groups: Groups) -> list[dict[str, Any]]:
    """The lines of the interactive chart: means, lowest and highest over seeds, by round, bytes and
    time.
    """
    lines = []
    for place, (label, results) in enumerate(groups.items()):
        rounds = (
            pd.concat([result.metrics["round"] for result in results])
            .drop_duplicates()
            .sort_values()
        )
        x = {"round": rounds.tolist()}
        for key, column, unit in (("mib", "uplink_bytes", MIB), ("seconds", "seconds", 1)):
            spent = pd.DataFrame(
                {result.seed: result.series(column).cumsum() for result in results}
            ).reindex(rounds)
            x[key] = _numbers(spent.ffill().mean(axis="columns") / unit)
        y = {}
        for key in MEASURES:
            values = (
                pd.DataFrame({result.seed: result.series(key) for result in results})
                .dropna()
                .reindex(rounds)
            )
            if values.notna().any(axis=None):
                sides = {"mid": values.mean(axis="columns"), "low": values.min(axis="columns")}
                y[key] = {
                    side: _numbers(column)
                    for side, column in (sides | {"high": values.max(axis="columns")}).items()
                }
        lines.append({"label": label, "place": place, "x": x, "y": y})
    return lines


def _embedded(figure: Any) -> dict[str, Any]:
    """As an image with the data in it: inside an image no script runs and no link leads out."""
    wide = figure.figure.get_figwidth() > 7
    data = base64.b64encode(content(figure.figure, "svg")).decode()
    return {"title": figure.title, "caption": figure.caption, "data": data, "wide": wide}


def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _numbers(values: pd.Series) -> list[float | None]:
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]


def _table(config: dict[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _percent(value: float, error: float) -> str:
    return f"{100 * value:.1f} %" if np.isnan(error) else f"{100 * value:.1f} ± {100 * error:.1f} %"


def _plain(value: float, error: float) -> str:
    return f"{value:.4g}" if np.isnan(error) else f"{value:.4g} ± {error:.2g}"
