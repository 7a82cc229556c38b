"""What sites say of their privacy budgets, also when they refuse a round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

ROUNDING = 1e-6  # of numbers that payloads carry in single precision


@dataclass
class Spending:
    """By site, the largest numbers that it has said."""

    epsilon: dict[str, float] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)  # with noise, that it has answered
    exhausted: set[str] = field(default_factory=set)  # who has nothing left

    def read(self, site: str, header: Mapping[str, Any]) -> None:
        """Take over what an answer says."""
        for known, name in ((self.epsilon, "epsilon"), (self.rounds, "noisy_rounds")):
            if (said := header.get(name)) is not None:
                known[site] = max(said, known.get(site, 0))
        if header.get("spent"):
            self.exhausted.add(site)

    def raised(
        self, ledger: Mapping[str, float], client_of: Callable[[str], int]
    ) -> dict[str, float]:
        """The epsilon of every client by the method's ledger, or by its site where that is larger.

        Whatever the server has seen costs a site, also what came too late, stayed under masks, or
        was seen before a backup was restored; the ledger has the uploads that were aggregated.
        """
        spent = dict(ledger)
        for site, epsilon in self.epsilon.items():
            client = str(client_of(site))
            if epsilon > spent.get(client, 0.0) * (1 + ROUNDING):
                spent[client] = epsilon
        return spent
