"""What a list of runs does not show: one run's clients and incidents, and a client's history."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from fedhelix.report.live.files import INCIDENTS
from fedhelix.report.live.result import whole_result
from fedhelix.report.live.run import WatchedRun
from fedhelix.report.live.values import as_list, as_text, as_whole, flattened
from fedhelix.report.results import Result

MOST_INCIDENTS = 50
FEW = 5  # numbers that are listed


def run_details(run: WatchedRun) -> dict[str, Any]:
    """Everything about one run but its clients' histories."""
    from fedhelix.report.headline import warnings_of_page  # slow to import
    from fedhelix.report.live.drawing import drawable

    recorded: dict[str, Any] = {}  # the latest entry under each key of the metadata
    incidents: deque[list[Any]] = deque(maxlen=MOST_INCIDENTS)
    result = whole_result(run)
    for record in result.records:
        recorded |= record.get("metadata", {})
        incidents.extend(_incidents(record))
    samples = dict(enumerate(map(as_whole, as_list(result.census.get("samples")))))
    clients = [
        {
            "client": client,
            "name": _name(result, client),
            "value": value,
            "attacker": client in result.attackers,
            "samples": samples.get(client),
        }
        for client, value in sorted(result.client_finals().items())
    ]
    return {
        **run.overview(),
        "line": run.line(),
        "clients": clients,
        "warnings": list(map(as_text, warnings_of_page(result))),
        "incidents": list(incidents),
        "figures": drawable(recorded),
        "recorded": [[as_text(key), _in_short(value)] for key, value in recorded.items()],
        "config": [[key, as_text(value)] for key, value in flattened(run.config)],
    }


def _in_short(value: object) -> str:
    """One entry of the metadata in a few words: figures show more."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict | list):
        numbers = value if isinstance(value, list) else list(value.values())
        if len(numbers) <= FEW and all(isinstance(one, int | float) for one in numbers):
            return ", ".join(_in_short(one) for one in numbers)
        return f"{len(value)} {'entry' if len(value) == 1 else 'entries'}"
    return as_text(value)


def client_history(run: WatchedRun, client: int) -> dict[str, Any]:
    """One client's metric by round, and the rounds in which it took part."""
    result = whole_result(run)
    history = result.clients().get(client, [])
    return {
        "client": client,
        "name": _name(result, client),
        "rounds": [number for number, _ in history],
        "values": [value for _, value in history],
        "worked": [one["round"] for one in result.records if client in one.get("participants", ())],
    }


def _name(result: Result, client: int) -> str:
    """What a client is called, or its number."""
    (name,) = result.names[client : client + 1] or [str(client)]
    return as_text(name)


def _incidents(record: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Round, kind, client or site, and reason of what went wrong in one round."""
    for kind in INCIDENTS:
        for who, reason in record.get(kind, {}).items():
            yield [record["round"], kind, as_text(who), as_text(reason)]
