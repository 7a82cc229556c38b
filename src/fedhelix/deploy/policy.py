"""The round policy: how long the server waits, and for how many answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fedhelix.core.options import Checked, option
from fedhelix.runs.config import Config

GO_ON = "continue the run"  # where the command follows that goes on with it
UNTAKEN = "no site has taken this place yet"  # why a client is missing


@dataclass(frozen=True)
class RoundPolicy(Checked):
    """The rules of every round in a deployment; the [deployment] table of config.toml."""

    deadline: float = option(600.0, "seconds that sites have to answer", above=0)
    minimum: int = option(1, "answers without which a round changes nothing", low=1)
    extra: int = option(
        0,
        "clients sampled beyond the cohort; the round ends when as many as the cohort answered",
        low=0,
    )
    patience: float = option(
        600.0, "seconds to wait for sites to connect, before the run stops to be resumed", low=0
    )
    grace: float = option(
        60.0,
        "seconds that a site may be away before a round goes on without it; a server that was "
        "started again waits as long for all its sites",
        low=0,
    )
    begin: int | None = option(
        None, "sites that must be there for the first round (auto: all)", low=1
    )
    server_data: str | None = option(
        None, "FILE.npz with samples of the server's, where sites have their own"
    )


def also(left_out: Iterable[tuple[str, str]]) -> str:
    """Who was left out and why, as further parts of a sentence; three by name."""
    words = [f"; {who} {why.rstrip('.')}" for who, why in left_out]
    more = f"; and {len(words) - 3} more" if len(words) > 3 else ""
    return "".join(words[:3]) + more


def cohort_size(config: Config) -> int:
    """How many answers a round needs; `extra` clients come on top."""
    return min(config.cohort or 10, config.client_count)


def sampled(config: Config, extra: int) -> int:
    """How many clients a round asks."""
    return min(cohort_size(config) + extra, config.client_count)
