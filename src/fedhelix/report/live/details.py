"""What a list of runs does not show: one run's clients and incidents, and a client's history."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from fedhelix.report.live.run import WatchedRun
from fedhelix.report.live.values import as_list, as_number, as_text, as_whole, flattened

# Entries of a record that map clients or sites to reasons.
INCIDENTS = ("refused", "missing", "unevaluated", "troubles")
MOST_INCIDENTS = 50
FEW = 5  # numbers that are listed


class Census(NamedTuple):
    """What clients.json says: who is evaluated, who attacks, what each has and is called."""

    evaluated: list[int]
    attackers: set[int]
    samples: dict[int, int]
    names: dict[int, str]

    @classmethod
    def read(cls, run: WatchedRun) -> Census:
        """The census of a run; empty where the file is missing or damaged."""
        table = run.census()
        evaluated, attackers, samples = (
            [value for value in as_list(table.get(key)) if type(value) is int]
            for key in ("evaluated", "attackers", "samples")
        )
        names = dict(enumerate(map(as_text, as_list(table.get("names")))))
        return cls(evaluated, set(attackers), dict(enumerate(samples)), names)


def run_details(run: WatchedRun) -> dict[str, Any]:
    """Everything about one run but its clients' histories."""
    from fedhelix.report.live.drawing import drawable  # slow to import

    finals: dict[int, float] = {}
    recorded: dict[str, Any] = {}  # the latest entry under each key of the metadata
    incidents: deque[list[Any]] = deque(maxlen=MOST_INCIDENTS)
    census = Census.read(run)
    for record in run.records():
        if isinstance(metadata := record.get("metadata"), dict):
            recorded |= metadata
        if as_list(record.get("personal")):
            finals = dict(_personal(record, census.evaluated))
        incidents.extend(_incidents(record))
    clients = [
        {
            "client": client,
            "name": census.names.get(client, str(client)),
            "value": value,
            "attacker": client in census.attackers,
            "samples": census.samples.get(client),
        }
        for client, value in sorted(finals.items())
    ]
    return {
        **run.overview(),
        "line": run.line(),
        "clients": clients,
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
    census = Census.read(run)
    rounds, values, worked = [], [], []
    for record in run.records():
        number = record.get("round")
        if type(number) is not int:
            continue
        value = dict(_personal(record, census.evaluated)).get(client)
        if value is not None:
            rounds.append(number)
            values.append(value)
        if client in as_list(record.get("participants")):
            worked.append(number)
    name = census.names.get(client, str(client))
    return {"client": client, "name": name, "rounds": rounds, "values": values, "worked": worked}


def _personal(record: Mapping[str, Any], evaluated: list[int]) -> Iterator[tuple[int, float]]:
    """Each evaluated client with its metric, where that is a number."""
    values = as_list(record.get("personal"))
    clients = evaluated if len(evaluated) == len(values) else range(len(values))
    for client, value in zip(clients, map(as_number, values), strict=True):
        if not math.isnan(value):
            yield client, value


def _incidents(record: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Round, kind, client or site, and reason of what went wrong in one round."""
    for kind in INCIDENTS:
        reasons = record.get(kind)
        if isinstance(reasons, dict):
            number = as_whole(record.get("round"))
            for who, reason in reasons.items():
                yield [number, kind, as_text(who), as_text(reason)]
