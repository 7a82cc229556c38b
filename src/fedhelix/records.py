"""A record is what one round leaves behind; a summary is what a run leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]


def evaluated_records(records: Sequence[Record], metric: str = "accuracy") -> list[Record]:
    """The records of rounds after which models were judged."""
    return [record for record in records if metric in record or f"personal_{metric}" in record]


def best_record(records: Sequence[Record], metric: str = "accuracy") -> Record | None:
    """The evaluated round that was best on *validation* data (the first of equals); without any, the last one."""
    evaluated = evaluated_records(records, metric)
    judged = [record for record in evaluated if record.get(f"valid_{metric}") is not None]
    if judged:
        return max(judged, key=lambda record: (record[f"valid_{metric}"], -record["round"]))
    return evaluated[-1] if evaluated else None


def summarise(records: Sequence[Record], facts: dict[str, Any], metric: str = "accuracy") -> dict[str, Any]:
    """The figures of a run: final and at the round chosen on validation, never the best on test."""
    evaluated = evaluated_records(records, metric)
    last, best = (evaluated[-1] if evaluated else {}), best_record(records, metric) or {}
    return {
        **facts,
        "rounds": records[-1]["round"] if records else 0,
        f"final_{metric}": last.get(metric),
        f"personal_{metric}": last.get(f"personal_{metric}"),
        "personal_p10": last.get("personal_p10"),
        "best_round": best.get("round"),
        f"{metric}_at_best": best.get(metric),
        f"personal_{metric}_at_best": best.get(f"personal_{metric}"),
        **{key: sum(record[key] for record in records) for key in ("uplink_bytes", "downlink_bytes", "other_bytes")},
        **{key: sum(len(record.get(key) or {}) for record in records) for key in ("refused", "missing")},
        "seconds": sum(record["seconds"] for record in records),
        "complete": True,
    }
