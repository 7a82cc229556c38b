"""The start of a report: what was run, the highlights, and what a reader must not overlook."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedhelix.report.results import Groups, Result, unequal
from fedhelix.report.spread import finals, tied
from fedhelix.report.tables import comparison
from fedhelix.report.wording import INCIDENT_WORDS, MEASURES, count, percent, plain, reasons
from fedhelix.store.progress import human_bytes, human_seconds, time_left
from fedhelix.store.records import (
    MAIN_METRICS,
    at_clients,
    diverged_clients,
    diverged_since,
    is_number,
    why_untrained,
    with_losses,
)

BEFORE = "has the other clients' before."
MOST_TILES = 4
MOST_TIED = 3  # named in a tile
MOST_METHODS = 6  # named in a title
MOST_NAMES = 8  # of clients in a warning
MOST_UNEQUAL = 4  # settings in a warning


def title(results: Sequence[Result]) -> str:
    """Which methods on which data."""
    methods = list(dict.fromkeys(result.method for result in results))
    data = sorted({str(result.circumstances.get("data", "unknown data")) for result in results})
    if len(methods) > MOST_METHODS:
        methods = [*methods[:MOST_METHODS], f"{len(methods) - MOST_METHODS} more"]
    return f"{', '.join(methods)} on {', '.join(data)}"


def subtitle(results: Sequence[Result]) -> str:
    """How much was run."""
    seeds = len({result.seed for result in results})
    versions = sorted({str(_versions(result).get("fedhelix", "?")) for result in results})
    return (
        f"{count(len(results), 'run')}, {count(seeds, 'seed')}, by fedhelix {', '.join(versions)}"
    )


def tiles(groups: Groups) -> list[dict[str, str]]:
    """Up to four highlights, each with its method; none says more than the table."""
    everything = [result for results in groups.values() for result in results]
    groups = _finished(groups)
    if len(groups) < 2:
        return []
    table = comparison(everything).loc[list(groups)]  # labels depend on who else is there
    tenth = plain if "score" in table else percent
    highlights = []
    for what, column, largest, show in (
        ("highest personal accuracy", "personal_accuracy", True, percent),
        ("highest personal score", "personal_score", True, plain),
        ("highest global accuracy", "accuracy", True, percent),
        ("highest 10th percentile of clients", "personal_p10", True, tenth),
        ("fewest bytes uploaded", "uplink_bytes", False, lambda value, _: human_bytes(value)),
    ):
        values = table[column].dropna() if column in table else pd.Series(dtype=float)
        if column == "uplink_bytes":
            what += " by those that upload" * bool((values == 0).any())
            values = values[values > 0]  # that a method without uploads sends least is no news
        if len(values) > 0:
            best = str(values.idxmax() if largest else values.idxmin())
            error = table.get(f"{column}_se", pd.Series(dtype=float)).get(best, np.nan)
            value = show(float(values[best]), float(error))
            equals = ties({label: groups[label] for label in values.index}, column, best, show)
            highlights.append({"what": what, "value": value, "who": _winners([best, *equals])})
    return highlights[:MOST_TILES]


def ties(
    groups: Groups, column: str, best: str, show: Callable[[float, float], str] = percent
) -> list[str]:
    """The methods that cannot be told from the best one by this column."""
    finals_of = {label: finals(results, column) for label, results in groups.items()}

    def shown(label: str) -> str:
        return show(float(np.mean(list(finals_of[label].values()))), np.nan)

    others = [label for label, values in finals_of.items() if label != best and values]
    if not finals_of[best]:
        return []
    return [
        label
        for label in others
        if tied(
            finals_of[best],
            finals_of[label],
            alike=shown(best) == shown(label),
            by_ratio=column.endswith("_bytes"),
        )
    ]


def winners(groups: Groups) -> tuple[str, list[str]]:
    """The column that decides, and the best method with those that tie with it."""
    table = comparison([result for results in groups.values() for result in results])
    column = next((metric for metric in MAIN_METRICS if metric in table), "")
    groups = _finished(groups)
    values = table[column][list(groups)].dropna() if column else pd.Series(dtype=float)
    if len(groups) < 2 or not len(values):
        return column, []
    best = str(values.idxmax())
    show = percent if column.endswith("accuracy") else plain
    return column, [
        best,
        *ties({label: groups[label] for label in values.index}, column, best, show),
    ]


def _finished(groups: Groups) -> Groups:
    """Those whose runs are complete: after other numbers of rounds nothing can be best."""
    return {label: runs for label, runs in groups.items() if all(one.complete for one in runs)}


def _winners(labels: Sequence[str]) -> str:
    """One name, or those that tie."""
    if len(labels) == 1:
        return labels[0]
    if len(labels) > MOST_TIED:
        labels = [*labels[: MOST_TIED - 1], f"{len(labels) - MOST_TIED + 1} others"]
    return f"{', '.join(labels[:-1])} and {labels[-1]} tie"


def warnings(results: Sequence[Result]) -> list[str]:
    """What a reader must not overlook."""
    sentences = [sentence for result in results for sentence in _warnings_of(result)]
    attacked = [result for result in results if result.attackers]
    if attacked:
        attacks = {str(result.circumstances.get("attack", "unknown attack")) for result in attacked}
        most = max(len(result.attackers) for result in attacked)
        sentences.append(
            f"Up to {count(most, 'client')} attacked in {len(attacked)} of "
            f"{count(len(results), 'run')} ({', '.join(sorted(attacks))}); "
            "the figures mark them with ×, and personal metrics and the 10th percentile count them "
            "too."
        )
    return [*_unequal_warning(results), *_newcomers_warning(results), *sentences]


def _unequal_warning(results: Sequence[Result]) -> Iterator[str]:
    """Says that methods were not trained alike, so that a difference may not be the method's."""
    found = [
        f"{key} is {', '.join(f'{value} with {method}' for method, value in values.items())}"
        for key, values in unequal(results).items()
    ]
    if found:
        more = (
            f"; {count(len(found) - MOST_UNEQUAL, 'setting')} more" if found[MOST_UNEQUAL:] else ""
        )
        yield f"The methods have different settings: {'; '.join(found[:MOST_UNEQUAL])}{more}."


def _newcomers_warning(results: Sequence[Result]) -> Iterator[str]:
    """Says whose metrics those of the last round are, where newcomers have come."""
    rounds = sorted({int(one.arrival) for one in results if math.isfinite(one.arrival)})
    if rounds:
        having = sum(math.isfinite(one.arrival) for one in results)
        runs = f"{having} of {count(len(results), 'run')}" if having < len(results) else "all runs"
        since = ", ".join(map(str, rounds))
        yield f"{_newcomers(f'{since} of {runs}')} the column 'known clients' {BEFORE}"


def _newcomers(since: str) -> str:
    return (
        f"Newcomers arrive before round {since}, and from then on the personal metrics are "
        "theirs alone;"
    )


def warnings_of_page(result: Result) -> Iterator[str]:
    """What a page with one run, its state and its incidents must still say."""
    if math.isfinite(result.arrival):
        yield f"{_newcomers(f'{result.arrival:.0f}')} the list of clients {BEFORE}"
    yield from _failures(result)


def _warnings_of(result: Result) -> Iterator[str]:
    """What is wrong with one run."""
    if not result.complete:
        rounds, done = result.config.get("rounds", "?"), len(result.metrics)
        left = time_left(rounds, done, result.total("seconds"))
        more = "" if left is None else f", about {human_seconds(left)} of work left"
        if result.config.get("pruned"):
            yield f"{result.name} was pruned by `fedhelix tune` after {done} of {rounds} rounds."
        else:
            yield f"{result.name} is unfinished: {done} of {rounds} rounds{more}."
    yield from _failures(result)
    for kind in INCIDENT_WORDS:
        yield from _incident_warning(result, kind)


def _failures(result: Result) -> Iterator[str]:
    """What one run has lost, and that it has learned nothing or has diverged."""
    if result.damage:
        yield result.damage
    if why := why_untrained(result.records):
        yield f"{result.name} has learned nothing: {why}."
    metric = result.main_metric()
    if since := diverged_since(result.records):
        advice = str(result.summary.get("advice") or "")  # of a finished run
        more = f" {advice[0].upper()}{advice[1:]}." if advice else ""
        where = at_clients(diverged_clients(result.records))
        yield f"{result.name} has diverged{where} since round {since}.{more}"
    elif metric and "train_loss" in result.metrics and np.isnan(result.final(metric)):
        yield f"{result.name} has diverged: its {MEASURES[metric]} is not a number any more."
    worked = with_losses(result.records)
    idle = [one for one in result.records if "train_loss" in one and not with_losses([one])]
    lost = [one for one in idle if one.get("uplink_bytes")]
    if len(idle) > len(lost) and not why:
        yield f"{result.name}: no upload arrived in {count(len(idle) - len(lost), 'round')}."
    if lost and not why:
        said = reasons(one for record in lost for one in (record.get("missing") or {}).values())
        rounds = count(len(lost), "round")
        yield f"{result.name}: no upload that arrived counted in {rounds} ({said})."
    if not all(is_number(record["train_loss"]) for record in worked):
        yield f"{result.name}: the training loss was not a number in some rounds."


def _incident_warning(result: Result, kind: str) -> Iterator[str]:
    """One sentence about all incidents of a kind, if there are any."""
    if incidents := result.incidents(kind):
        lost, whose, how = INCIDENT_WORDS[kind]
        why = reasons(reason for *_, reason in incidents)
        called = {str(number): name for number, name in enumerate(result.names)}
        who = sorted({called.get(name, name) for _, name, _ in incidents})
        names = ", ".join(who[:MOST_NAMES]) + (" and others" if len(who) > MOST_NAMES else "")
        yield f"{result.name}: {count(len(incidents), lost)} of {whose}{names} {how} ({why})."


def facts(results: Sequence[Result]) -> list[tuple[str, str]]:
    """Settings and versions that all runs share, and the methods' options."""
    shared = [
        (key, str(value))
        for key, value in results[0].circumstances.items()
        if all(result.circumstances.get(key) == value for result in results)
    ]
    engines = [str(result.summary.get("engine", "")).partition(" (")[0] for result in results]
    used = {"engine": engines}
    for key in ("python", "torch", "numpy", "machine", "commit"):
        used[key] = [str(_versions(result).get(key, "")) for result in results]
    distinct = {key: sorted(set(values) - {""}) for key, values in used.items()}
    versions = [(key, ", ".join(values)) for key, values in distinct.items() if values]
    return shared + _options(results) + versions


def _options(results: Sequence[Result]) -> list[tuple[str, str]]:
    """The options of each method; several sets where its runs differ."""
    found: dict[str, dict[str, None]] = {}
    for result in results:
        options = result.options.items()
        words = [f"{key} = {'auto' if value is None else value}" for key, value in options]
        if words:
            found.setdefault(result.method, {})[", ".join(words)] = None
    return [(f"options of {method}", "; or ".join(sets)) for method, sets in found.items()]


def _versions(result: Result) -> dict[str, Any]:
    versions = result.config.get("versions")
    return versions if isinstance(versions, dict) else {}
