"""Records, which hold the numbers of one round, and summaries, which hold those of a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import takewhile
from statistics import fmean
from typing import Any, TypeGuard

from fedhelix.core.errors import Damaged
from fedhelix.store.json import loads

Record = dict[str, Any]

# The metrics that rank runs, best first: that of the clients' models, otherwise the server's.
MAIN_METRICS = ("personal_accuracy", "personal_score", "accuracy", "score")

HOUR = 3600  # seconds
LAST = 10  # rounds whose mean is the result of a phase
MOST_NAMES = 5  # clients that a sentence names
NEAR_PEAK = 0.95  # of its own peak: from there on a curve counts as converged

# A run has diverged after so many rounds with so many times the loss of the first round (which
# counts as SMALL where it is below), or after one with an absurd loss.
RISING, RISE, ABSURD, SMALL = 3, 1.25, 100, 1e-3
LOW = 0.3  # a loss below this may rise as it likes: after a warm start it begins near zero
# But not while a good accuracy is near its best.
ACCURACIES, GOOD, NEAR = ("accuracy", "personal_accuracy"), 0.6, 0.9
SCORES = (*ACCURACIES, "score", "personal_score")  # the server's model tells most about training
GENTLER = "lower lr, or take less momentum or fewer epochs"
WEIGHTLESS = (
    "all uploads had weight zero; check what the method's `weights` returns, and its options"
)
ADVICE = f"scale the inputs (standardize) and a regression's targets, {GENTLER}"

# Keys of version 0.1, and what they are called now.
RENAMED = {"notes": "metadata", "unjudged": "unevaluated", "judged": "evaluated"}


def current(table: Mapping[str, Any]) -> dict[str, Any]:
    """A record or the table of clients with the keys of this version."""
    return {RENAMED.get(key, key): value for key, value in table.items()}


def is_valid(key: str, value: Any) -> bool:
    """Whether an entry of a record has its type; somebody may have edited the file."""
    if key in ("refused", "missing", "valid"):
        return isinstance(value, dict)
    if key.endswith(("_bytes", "seconds", "clock")):
        return isinstance(value, int | float)
    scored = key.endswith(("accuracy", "score"))
    return not scored or value is None or isinstance(value, int | float)


def read_record(line: bytes, number: int, path: object) -> Record:
    """The record in a line of metrics.jsonl, which is that of the round with this number."""
    damaged = f"line {number} of '{path}' is damaged"
    try:
        record = loads(line)
    except ValueError as problem:
        raise Damaged(f"{damaged}: {problem}.", number) from None
    if not isinstance(record, dict) or type(record.get("round")) is not int:
        raise Damaged(f"{damaged}: it is not the record of a round.", number)
    if record["round"] != number:
        raise Damaged(f"{damaged}: it is the record of round {record['round']}.", number)
    for key, value in record.items():
        if not is_valid(key, value):
            raise Damaged(f"{damaged}: its {key} cannot be {value}.", number)
    return current(record)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of a record is a finite number; a diverged model's score is null in files."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # an integer may be larger than any float


def evaluated_records(records: Sequence[Record], metric: str = "accuracy") -> list[Record]:
    """The records of rounds with an evaluation."""
    return [record for record in records if metric in record or f"personal_{metric}" in record]


def best_record(records: Sequence[Record], metric: str = "accuracy") -> Record | None:
    """The evaluated round that is best on *validation* data; without such data, the last one.

    Of equal rounds the first counts.
    """
    evaluated = evaluated_records(records, metric)
    validated = [record for record in evaluated if is_number(record.get(f"valid_{metric}"))]
    if validated:
        values = _over_same_clients(validated, f"valid_{metric}")
        return validated[values.index(max(values))]
    return evaluated[-1] if evaluated else None


def _over_same_clients(records: Sequence[Record], key: str) -> list[float]:
    """The mean validation metric of each round.

    A site that was away counts with its score before, or where it has none yet with its first one:
    otherwise a round would gain by the absence of a site with low scores.
    """
    tables = [
        {client: score for client, score in (record.get("valid") or {}).items() if is_number(score)}
        for record in records
    ]
    known: dict[str, float] = {}
    for table in reversed(tables):
        known |= table
    values = []
    for record, table in zip(records, tables, strict=True):
        known |= table
        values.append(fmean(known.values()) if table else record[key])
    return values


def is_stalled(records: Sequence[Record], metric: str, patience: int) -> bool:
    """Whether so many evaluated rounds since the best one on validation data were no better."""
    best = best_record(records, metric)
    later = [r for r in evaluated_records(records, metric) if best and r["round"] > best["round"]]
    return len(later) >= patience


def summarise(
    records: Sequence[Record], facts: dict[str, Any], metric: str = "accuracy"
) -> dict[str, Any]:
    """The results of a run: final, and at the best round on validation (never on test) data."""
    arrived = next((at for at, record in enumerate(records) if "arrival_bytes" in record), 0)
    evaluated = evaluated_records(records, metric)
    last, best = (evaluated[-1] if evaluated else {}), best_record(records[arrived:], metric) or {}
    return {
        **facts,
        "rounds": records[-1]["round"] if records else 0,
        f"final_{metric}": last.get(metric),
        f"personal_{metric}": last.get(f"personal_{metric}"),
        "personal_p10": last.get("personal_p10"),
        f"trained_{metric}": last.get(f"trained_{metric}"),
        "best_round": best.get("round"),
        f"{metric}_at_best": best.get(metric),
        f"personal_{metric}_at_best": best.get(f"personal_{metric}"),
        **{
            key: sum(record[key] for record in records)
            for key in ("uplink_bytes", "downlink_bytes", "other_bytes")
        },
        **{
            key: sum(len(record.get(key) or {}) for record in records)
            for key in ("refused", "missing")
        },
        "seconds": sum(record["seconds"] for record in records),
        "diverged": (since := diverged_since(records)),
        "diverged_clients": diverged_clients(records) if since else [],
        "untrained": why_untrained(records),
        "idle_since": idle_since(records),
        **spent(records, facts.get("options", {})),
        **_timed(records, facts.get("target")),
        **(newcomers(records[:arrived], records[arrived:], metric) if arrived else {}),
        "complete": True,
    }


def with_losses(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The records of rounds in which a client finished its training."""
    return [
        record for record in records if "train_loss" in record and _remaining(record, "missing") > 0
    ]


def diverged_since(records: Sequence[Mapping[str, Any]]) -> int | None:
    """The round from which on losses are no numbers or above that of the first round by more than
    a quarter; None where training goes well at the end.
    """
    rounds = with_losses(records)
    start = rounds[0]["train_loss"] if rounds else None
    first = max(start, SMALL) if is_number(start) else SMALL
    most = max(RISE * first, LOW)
    tail = list(takewhile(lambda record: _loss_of(record) > most, reversed(rounds)))
    absurd = any(_loss_of(record) > ABSURD * first for record in tail)
    if not absurd and (len(tail) < RISING or _is_accurate(records)):
        return None
    return int(tail[-1]["round"])


def diverged_clients(records: Sequence[Mapping[str, Any]]) -> list[int]:
    """Whose losses are no numbers in the last round, where those of others are; otherwise nobody's:
    it is the training of all that has diverged.
    """
    last = (with_losses(records) or [{}])[-1]
    bad = last.get("nonfinite_losses") or []
    if not bad and (own := last.get("nonfinite_personal")):
        return list(own) if len(own) < len(last.get("personal", own)) else []
    return list(bad) if len(bad) < _remaining(last, "missing") else []


def at_clients(clients: Sequence[int]) -> str:
    """Where training has diverged, for a sentence; nothing where it is at all clients."""
    if not clients:
        return ""
    named = ", ".join(map(str, clients[:MOST_NAMES]))
    more = f" and {len(clients) - MOST_NAMES} more" if len(clients) > MOST_NAMES else ""
    return f" at client{'s' * (len(clients) > 1)} {named}{more}"


def risen(records: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """The clients' mean loss in the first rounds and in the last ones, where it has not fallen and
    no model of these last ones was better than one before; otherwise None.

    Single rounds tell nothing, since each has other clients.
    """
    losses = [_loss_of(record) for record in with_losses(records)]
    key = next((key for key in SCORES if any(key in record for record in records)), "")
    scores = [record[key] for record in records if is_number(record.get(key))]
    if len(losses) < 2 * RISING or len(scores) <= RISING or _is_accurate(records):
        return None
    first, last = sum(losses[:RISING]) / RISING, sum(losses[-RISING:]) / RISING
    fallen = last <= first or max(scores[-RISING:]) > max(scores[:-RISING])
    return None if fallen else (first, last)


def _is_accurate(records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether models are still about as accurate as at their best, and that is good.

    The loss of a first round may be low for a reason: a model that was trained before, or a first
    cohort with easy samples.
    """
    key = next((key for key in ACCURACIES if any(key in record for record in records)), "")
    found = [record[key] for record in records if is_number(record.get(key))]
    return bool(found) and found[-1] >= max(GOOD, NEAR * max(found))


def why_untrained(records: Sequence[Mapping[str, Any]]) -> str | None:
    """Why no round has changed a model: nobody trained, or no upload was usable; otherwise None."""
    refused: dict[str, Any] = {}
    missing: dict[str, Any] = {}
    for record in records:
        if has_effect(record):
            return None
        refused |= record.get("refused") or {}
        missing |= (record.get("missing") or {}) if record.get("uplink_bytes") else {}
    if any(record.get("weightless") for record in records):
        return WEIGHTLESS
    if refused:
        client, why = next(iter(refused.items()))
        return f"every upload was refused (that of client {client} {str(why).rstrip('.')})"
    if missing:
        last = str(list(missing.values())[-1]).rstrip(".")
        return f"no upload that arrived counted ({last})"
    return "no client has trained" if records else None


def idle_since(records: Sequence[Mapping[str, Any]]) -> int | None:
    """The first of the last rounds in which no upload counted; None where the last one had some."""
    idle = list(takewhile(lambda record: not has_effect(record), reversed(records)))
    return int(idle[-1]["round"]) if idle else None


def has_effect(record: Mapping[str, Any]) -> bool:
    """Whether an upload counted in a round, so that it may have changed models."""
    return not record.get("weightless") and _remaining(record, "missing", "refused") > 0


def _remaining(record: Mapping[str, Any], *tables: str) -> int:
    """How many participants of a round are in none of these tables; where a record names none, one
    is taken for granted.
    """
    lost = {str(client) for table in tables for client in record.get(table) or ()}
    return sum(str(client) not in lost for client in record.get("participants", "?"))


def _loss_of(record: Mapping[str, Any]) -> float:
    """The clients' mean loss; infinite where it or a loss on test samples is no number."""
    losses = [record[key] for key in ("train_loss", "loss") if key in record]
    sound = all(map(is_number, losses)) and not record.get("nonfinite_personal")
    return float(losses[0]) if sound else float("inf")


def spent(records: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
    """The largest epsilon that a client has spent, its delta and whom it protects (a `sample` or a
    `client`); nothing where the method counts none.
    """
    recorded = [record.get("metadata") for record in records]
    tables = [table for table in recorded if isinstance(table, Mapping)]
    last = next((table for table in reversed(tables) if table.get("epsilon")), {})
    by_client, delta = last.get("epsilon"), options.get("delta")
    values = filter(is_number, by_client.values() if isinstance(by_client, Mapping) else ())
    most = max(map(float, values), default=None)
    level = {"privacy_level": last.get("privacy_level")}
    return {} if most is None else {"epsilon": most, "delta": delta, **level}


def time_to(records: Sequence[Record], level: float) -> float | None:
    """The simulated seconds until the main metric reaches a level; None if it never does."""
    metric = next((name for name in MAIN_METRICS if any(name in one for one in records)), "")
    reached = (
        record["clock"]
        for record in records
        if is_number(record.get(metric)) and record[metric] >= level and "clock" in record
    )
    return next(reached, None)


def _timed(records: Sequence[Record], target: float | None) -> dict[str, Any]:
    """The simulated seconds of a run, if it has a clock."""
    if not records or "clock" not in records[-1]:
        return {}
    timed: dict[str, Any] = {
        "clock": records[-1]["clock"],
        "late": sum(len(record["late"]) for record in records),
    }
    return timed if target is None else {**timed, "time_to_target": time_to(records, target)}


def newcomers(
    before: Sequence[Record], after: Sequence[Record], metric: str = "accuracy"
) -> dict[str, Any]:
    """The results of the known clients, and how fast and how well the newcomers learn."""
    key, trained = f"personal_{metric}", f"trained_{metric}"
    validated = [
        (number, record[key])
        for number, record in enumerate(after, start=1)
        if is_number(record.get(key))
    ]
    peak = max((value for _, value in validated), default=None)
    near = [number for number, value in validated if peak is not None and value >= NEAR_PEAK * peak]
    values = [record.get("uplink_values") for record in before]  # unknown in runs of version 0.1
    return {
        f"known_{metric}": _last_mean(before, key),
        f"known_{trained}": _last_mean(before, trained),
        "known_uplink_bytes": sum(record["uplink_bytes"] for record in before),
        "known_uplink_values": sum(values) if all(map(is_number, values)) else None,
        "known_downlink_bytes": sum(record["downlink_bytes"] for record in before),
        "known_other_bytes": sum(record["other_bytes"] for record in before),
        f"arrival_{metric}": after[0].get(f"arrival_{metric}"),
        "arrival_bytes": after[0]["arrival_bytes"],
        f"newcomer_{metric}": _last_mean(after, key),
        f"newcomer_{trained}": _last_mean(after, trained),
        f"newcomer_peak_{metric}": peak,
        "newcomer_rounds_to_peak": near[0] if near else None,
    }


def _last_mean(records: Sequence[Record], key: str) -> float | None:
    """The mean over the evaluated rounds of the last ten; None if a model diverged in one."""
    values = [record[key] for record in records[-LAST:] if key in record]
    return sum(values) / len(values) if values and all(map(is_number, values)) else None
