"""What sites say of their privacy budgets, also when they refuse a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
