"""Whom a run waits for before a round, and when it asks nobody at all.

A round that spends a privacy budget begins only where enough of its sites can answer: they are
connected, have budget left, and their policies have not refused the run. Else some would train,
and spend, for a round without effect.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from fedhelix.core.errors import NoMoreRounds
from fedhelix.deploy.policy import UNTAKEN, also
from fedhelix.deploy.registry import SiteRegistry
from fedhelix.deploy.transport import Transport


def wait_for_count(transport: Transport, count: int) -> None:
    """Before the first round: wait until so many sites are connected.

    One that was left out is not waited for, if enough others are there.
    """
    least = min(transport.policy.minimum, count)

    def complete() -> bool:
        here = len(transport.connected)
        return here >= least and here + len(transport.left_out) >= count

    transport.require(complete, f"{count} sites")


def wait_for_return(transport: Transport, sites: Iterable[str]) -> None:
    """After a restart: wait for all these sites, but no longer than the grace period."""
    wanted = set(sites)
    transport.wait(
        lambda: wanted <= transport.connected,
        transport.policy.grace,
        lambda: ", ".join(sorted(wanted - transport.connected)),
    )


def wait_for_minimum(transport: Transport, sites: Iterable[str]) -> None:
    """Before a round: wait until the policy's minimum of these sites is connected."""
    wanted = set(sites)
    least = min(transport.policy.minimum, len(wanted))
    who = f"{least} of {', '.join(sorted(wanted))}"
    transport.require(lambda: len(transport.connected & wanted) >= least, who)


def wait_for_budget(
    transport: Transport, registry: SiteRegistry, able: Collection[int] | None, least: int
) -> None:
    """Before a round that spends budget: wait until so many sites can answer.

    `able` are the clients with budget left; None: nobody's is spent. Once it is some clients' and
    too few others are left whose policies admit the run, no round is to come.
    """
    transport.refresh()
    if able is not None:
        refusing = transport.refusals.lasting()
        barred = [i for i, site in enumerate(registry.sites) if i in able and site in refusing]
        if (left := len(able) - len(barred)) < least:
            admitted = " and policies that admit the run" * bool(barred)
            named = also((registry.sites[i], refusing[registry.sites[i]]) for i in barred)
            raise NoMoreRounds(
                f"{left} of {registry.capacity} sites have privacy budget left{admitted}, and a "
                f"round needs {least}{named}; run fewer rounds, or raise noise or epsilon."
            )
    clients = range(registry.capacity) if able is None else able
    named = ", ".join(site for i, site in enumerate(registry.sites) if i in clients)
    budget = " of those with privacy budget left:" * (able is not None)

    def complete() -> bool:
        registry.enrol(transport.descriptions, transport.connected)
        return len(_ready(transport, registry, clients)) >= least

    if not complete():
        who = f"{least}{budget or ' of'} {named or 'sites that have not joined yet'}"
        transport.require(complete, who)


def why_not_asked(
    transport: Transport, registry: SiteRegistry, clients: Sequence[int]
) -> dict[int, str]:
    """Why a cohort is not asked to spend budget, by client: fewer of it than the minimum can
    answer, also once sites that were there within the grace period had time to return.
    """
    least, joined = transport.policy.minimum, len(registry.sites)
    sites = {client: registry.sites[client] for client in clients if client < joined}

    def settled() -> bool:
        ready = len(_ready(transport, registry, clients))
        away = [site for site in sites.values() if site not in transport.connected]
        returning = sum(map(transport.may_return, away))
        return ready >= least or ready + returning < least

    who = f"{least} of {', '.join(sites.values())}"
    transport.wait(settled, transport.policy.grace, lambda: who)
    if len(_ready(transport, registry, clients)) >= least:
        return {}
    reasons = dict(transport.left_out.values()) | transport.refusals.now()
    missing = {client: UNTAKEN for client in clients if client >= joined}
    for client, site in sites.items():
        why = reasons.get(site) or (
            f"was not asked, since {least} answers are needed"
            if site in transport.connected
            else "is not connected"
        )
        missing[client] = f"{site} {why}"
    return missing


def _ready(transport: Transport, registry: SiteRegistry, clients: Iterable[int]) -> list[int]:
    """The clients whose sites are connected and do not refuse the run."""
    here = transport.connected - transport.refusals.now().keys()
    joined = dict(enumerate(registry.sites))
    return [client for client in clients if joined.get(client) in here]
