"""What is said of rounds while a run goes on: that one had no effect and why, whose data are left
out, whose loss is far off; at its end, that none had an effect; and later, that it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedhelix.core.errors import EngineFailure
from fedhelix.deploy.hints import resumption
from fedhelix.deploy.policy import UNTAKEN, also
from fedhelix.deploy.remote_data import CHECK_DATA
from fedhelix.runs.spec import RunSpec
from fedhelix.store.folder import RunFolder
from fedhelix.store.mistakes import longer
from fedhelix.store.records import WEIGHTLESS, has_effect

MOST_REASONS = 3  # of a round, in one sentence

Names = Callable[[Iterable[int]], list[str]]  # of clients


def why_idle(
    record: Mapping[str, Any], names: Names, before: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Why a round had no effect: three of its sites' reasons, those first that were none in the
    last round before it that had one; empty where it had one itself.
    """
    if has_effect(record):
        return ""
    if record.get("weightless"):
        return WEIGHTLESS
    known = next((set(_reasons(one, names)) for one in reversed(before) if has_effect(one)), set())
    found = dict.fromkeys(sorted(_reasons(record, names), key=known.__contains__))
    named = [why for why in found if not why.startswith(UNTAKEN)] or [UNTAKEN]
    more = [f"and {len(named) - MOST_REASONS} more"] if len(named) > MOST_REASONS else []
    return "; ".join([*(why.rstrip(".") for why in named[:MOST_REASONS]), *more])


def odd_sites(record: Mapping[str, Any], names: Names) -> Iterator[tuple[str, str]]:
    """The sites that are left out for their data, and those whose losses are out of place; with
    what is said of them.
    """
    for site, why in record.get("troubles", {}).items():
        if CHECK_DATA in why:
            yield site, f"the run goes on without {site}, which {why.rstrip('.')}"
    for site in names(record.get("outlying_losses", ())):
        yield (
            site,
            f"the loss of {site} in round {record['round']} is far beyond those of the others, "
            "which may spoil the model for all; its samples may not be scaled as theirs are",
        )


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


def finished_already(folder: RunFolder, spec: RunSpec) -> str:
    """What is said of a run that is to go on and has all its rounds."""
    path, rounds = folder.path, folder.rounds_saved
    how = resumption(path, folder.where, "--set", f"rounds={2 * rounds}")
    clients = spec.config.client_count + spec.config.newcomers
    masks = spec.method.capabilities.masks  # nobody is hidden in a sum of one
    least = max(folder.config["deployment"].get("minimum", 1), 1 if masks is None else 2)
    return (
        f"'{path}' was finished already, with {rounds} round{'s' * (rounds != 1)}, so nothing was "
        f"trained; {longer(folder.records(), how, clients, least)}."
    )


def _reasons(record: Mapping[str, Any], names: Names) -> list[str]:
    """Why single sites did not count in a round."""
    refused = zip(names(map(int, record["refused"])), record["refused"].values(), strict=True)
    uploads = [f"the upload of {name} {why}" for name, why in refused]
    return [*record["missing"].values(), *uploads]


def _first(reasons: Iterable[str]) -> str:
    """The first reason; that nobody has taken a place only where there is no other."""
    taken = (reason for reason in reasons if not reason.startswith(UNTAKEN))
    return next(taken, UNTAKEN).rstrip(".")
