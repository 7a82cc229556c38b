"""The parts of the report page that are tables or charts: clients, costs, and curves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedhelix.report.results import Groups, Result
from fedhelix.report.spread import band
from fedhelix.report.wording import MEASURES, MIB, percent, plain
from fedhelix.store.progress import human_bytes, human_seconds
from fedhelix.store.records import HOUR

MOST_CLIENTS = 500  # of more, the worst ones are listed
TRAFFIC = ("uplink_bytes", "downlink_bytes", "other_bytes")
AXES = [
    {"key": "round", "label": "round"},
    {"key": "mib", "label": "MiB uploaded"},
    {"key": "seconds", "label": "seconds"},
    {"key": "hours", "label": "simulated hours"},  # or the unit that fits
]


def clients(groups: Groups) -> dict[str, Any]:
    """A row per client of every seed, worst first: its samples and its final metric by method."""
    finals = {label: _finals_by_seed(results) for label, results in groups.items()}
    earlier = {label: _earlier_by_seed(results) for label, results in groups.items()}
    labels = [label for label, values in finals.items() if values]
    runs = [result for results in groups.values() for result in results]
    everybody = {  # those of one name are one client, whatever its number is in other runs
        (result.seed, _name(result, client)): (result, client)
        for result in reversed(runs)
        for client in result.client_finals()
    }
    worst_first = sorted(
        everybody,
        key=lambda who: (
            min(values.get(who, np.inf) for values in finals.values()),
            who[0],
            everybody[who][1],
        ),
    )
    of_seed = {result.seed: result for result in runs}
    metrics = {result.main_metric() or "accuracy" for result in runs}
    show = percent if all(metric.endswith("accuracy") for metric in metrics) else plain
    rows = []
    for who in worst_first[:MOST_CLIENTS]:
        values = [finals[label].get(who) for label in labels]
        cells = [
            _cell(
                "–" if value is None else show(value, np.nan) + earlier[label].get(who, ""), value
            )
            for label, value in zip(labels, values, strict=True)
        ]
        rows.append([*_client_cells(*everybody[who]), *cells])
    note = " Each seed deals the data anew." if len(of_seed) > 1 else ""
    if len(everybody) > MOST_CLIENTS:
        note += f" The worst {MOST_CLIENTS} of {len(everybody)} are listed."
    if any(result.attackers for result in of_seed.values()):
        note += " × marks attackers."
    if any(earlier.values()):
        note += " (round N): not in the last evaluation, but in that of round N."
    return {"headers": ["client", "seed", "samples", *labels], "rows": rows, "note": note}


def _finals_by_seed(results: Sequence[Result]) -> dict[tuple[int, str], float]:
    """The final metric of every seed's clients, by their names."""
    return {
        (result.seed, _name(result, client)): value
        for result in results
        for client, value in result.client_finals().items()
    }


def _earlier_by_seed(results: Sequence[Result]) -> dict[tuple[int, str], str]:
    """The round of the final metric, in words, of clients whom the last evaluation left out."""
    return {
        (result.seed, _name(result, client)): f" (round {round})"
        for result in results
        for client, (round, _) in result.last_values().items()
        if round < result.last_evaluation
    }


def _name(result: Result, client: int) -> str:
    """A client's name, or its number."""
    return result.names[client] if client < len(result.names) else str(client)


def _client_cells(result: Result, client: int) -> list[dict[str, Any]]:
    """A client's name or number, seed and samples."""
    mark = " ×" if client in result.attackers else ""
    sizes = result.census.get("samples")
    samples = sizes[client] if isinstance(sizes, list) and client < len(sizes) else None
    return [
        _cell(f"{_name(result, client)}{mark}", client),
        _cell(str(result.seed), result.seed),
        _cell(str(samples or "–"), samples),
    ]


def _cell(text: str, value: Any) -> dict[str, Any]:
    """A cell with the value by which its column is sorted."""
    return {"text": text, "value": "" if value is None else value}


def costs(groups: Groups) -> list[list[str]]:
    """Bytes and seconds of each method's runs."""
    rows = []
    for label, results in groups.items():
        mean = {
            column: float(np.mean([result.total(column) for result in results]))
            for column in (*TRAFFIC, "seconds")
        }
        rounds = max(float(np.mean([len(result.metrics) for result in results])), 1.0)
        rows.append(
            [
                label,
                *(human_bytes(mean[column]) for column in TRAFFIC),
                human_bytes(mean["uplink_bytes"] / rounds),
                human_seconds(mean["seconds"]),
                human_seconds(mean["seconds"] / rounds),
            ]
        )
    return rows


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


def chart(groups: Groups) -> dict[str, Any]:
    """The interactive chart."""
    results = [result for members in groups.values() for result in members]
    return {"axes": AXES, "measures": measures(results), "series": series(groups)}


def series(groups: Groups) -> list[dict[str, Any]]:
    """The lines of the interactive chart: mean and band over seeds.

    Each has the rounds, the bytes, the seconds and, with a clock, the simulated hours as its
    horizontal axes.
    """
    return [_line(label, results, place) for place, (label, results) in enumerate(groups.items())]


def _line(label: str, results: Sequence[Result], place: int) -> dict[str, Any]:
    numbers = pd.concat([result.metrics["round"] for result in results])
    rounds = numbers.drop_duplicates().sort_values()
    x = {"round": rounds.tolist()}
    for key, column, unit in (("mib", "uplink_bytes", MIB), ("seconds", "seconds", 1)):
        sums = {result.seed: result.series(column).cumsum() for result in results}
        spent = pd.DataFrame(sums).reindex(rounds).ffill()
        x[key] = _numbers(spent.mean(axis="columns") / unit)
    if any(result.has("clock") for result in results):
        clocks = pd.DataFrame({result.seed: result.series("clock") for result in results})
        x["hours"] = _numbers(clocks.reindex(rounds).mean(axis="columns") / HOUR)
    y = {}
    for key in MEASURES:
        by_seed = pd.DataFrame({result.seed: result.series(key) for result in results})
        values = by_seed.dropna().reindex(rounds)
        if values.notna().any(axis=None):
            parts = zip(("mid", "low", "high"), band(values, key.endswith("accuracy")), strict=True)
            y[key] = {part: _numbers(numbers) for part, numbers in parts}
    first = min(result.arrival for result in results)
    return {"label": label, "place": place, "x": x, "y": y, "arrival": _numbers([first])[0]}


def _numbers(values: Iterable[float]) -> list[float | None]:
    """Numbers for JSON: six digits, and None for what is not finite."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]
