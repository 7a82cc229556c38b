"""Who is there in a round: a function of seed and round, the same for every method."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from fedhelix.options import Checked, option
from fedhelix.seeds import numpy_draw

LEAST_RATE = 0.02  # everybody comes now and then


@dataclass(frozen=True)
class Participation(Checked):
    """Equal chances for all, or rates that differ from client to client."""

    participation: Literal["uniform", "bernoulli"] = option(
        "uniform", "who takes part: a cohort drawn from all alike, or each client by its own rate"
    )
    participation_alpha: float = option(
        0.3, "concentration of the Dirichlet distribution of the rates; small: very unequal", above=0, high=1e6
    )


@dataclass(frozen=True, eq=False)
class Sampler:
    """Draws the cohorts of a federation."""

    asked: Participation
    clients: int
    size: int  # of a cohort; with rates: on average
    seed: int

    @cached_property
    def rates(self) -> np.ndarray:
        """How likely each client takes part in a round; their sum is the size, but for the limits."""
        if self.asked.participation == "uniform":
            return np.full(self.clients, self.size / self.clients)
        alpha = np.full(self.clients, self.asked.participation_alpha)
        return np.clip(self.size * numpy_draw(self.seed, "participation").dirichlet(alpha), LEAST_RATE, 1)

    def cohort(self, t: int) -> list[int]:
        """The clients of round t, never none."""
        draw = numpy_draw(self.seed, "cohort", t)
        if self.asked.participation == "uniform":
            chosen = draw.choice(self.clients, self.size, replace=False)
        else:
            chosen = np.flatnonzero(draw.random(self.clients) < self.rates)
            if not len(chosen):
                chosen = draw.choice(self.clients, 1, p=self.rates / self.rates.sum())
        return sorted(int(client) for client in chosen)
