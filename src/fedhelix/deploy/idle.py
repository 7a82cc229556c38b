"""Rounds that had no effect: what is said of them while a run goes on, and at its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedhelix.core.errors import EngineFailure
from fedhelix.deploy.hints import resumption
from fedhelix.deploy.policy import UNTAKEN, also
from fedhelix.store.records import has_effect


def why_idle(record: Mapping[str, Any]) -> str:
    """Why a round had no effect, by the first of its sites; empty where it had one."""
    if has_effect(record):
        return ""
    return _first([*record["missing"].values(), *record["refused"].values()])


def check_any_work(records: Sequence[Mapping[str, Any]], path: Path, where: str = "") -> None:
    """Refuse a run in which no site did any work in any round; say also who was left out, and how
    to go on.
    """
    reasons = [{**record["missing"], **record["refused"]} for record in records]
    idle = [
        set(map(str, record["participants"])) <= why.keys()
        for record, why in zip(records, reasons, strict=True)
    ]
    if any(reasons) and all(idle):
        first = _first(reason for why in reasons for reason in why.values())
        troubles = {
            who: why for record in records for who, why in record.get("troubles", {}).items()
        }
        rounds = f"rounds={2 * len(records)}"  # as many as were in vain
        how = resumption(path, where, "--set", rounds)
        what = (
            "no upload counted"
            if any(one.get("uplink_bytes") for one in records)
            else ("no site did any work")
        )
        raise EngineFailure(
            f"{what} in this run: {first}{also(troubles.items())}; go on "
            f"with {how} when that is fixed."
        )


def _first(reasons: Iterable[str]) -> str:
    """The first reason; that nobody has taken a place only where there is no other."""
    taken = (reason for reason in reasons if not reason.startswith(UNTAKEN))
    return next(taken, UNTAKEN).rstrip(".")
