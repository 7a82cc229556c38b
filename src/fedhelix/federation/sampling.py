"""Who is there in a round: a function of seed and round, the same for every method."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np

from fedhelix.core.errors import UserError
from fedhelix.core.options import Checked, option
from fedhelix.core.seeds import numpy_draw
from fedhelix.core.views import Sampling
from fedhelix.data import Dataset, Split

LEAST_RATE = 0.02  # everybody comes now and then


@dataclass(frozen=True)
class Participation(Checked):
    """Equal chances for all, or rates that differ from client to client; and what each counts."""

    participation: Literal["uniform", "bernoulli", "classes"] = option(
        "uniform",
        "who takes part: a cohort drawn from all alike, each client by its own rate, or by a rate "
        "that follows from its classes",
    )
    participation_alpha: float = option(
        0.3,
        "concentration of the Dirichlet distribution of the rates; small: very unequal",
        above=0,
        high=1e6,
        needs="participation",
    )
    client_weights: Literal["samples", "equal"] = option(
        "samples", "what a client counts in a mean: its number of samples, or as much as any other"
    )


@dataclass(frozen=True)
class Newcomers(Checked):
    """Clients that nobody has seen before they arrive; from then on only they take part."""

    newcomers: int = option(0, "how many unseen clients arrive later", low=0)
    newcomers_after: int | None = option(
        None,
        "after how many rounds they arrive (none: only without newcomers)",
        low=1,
        needs="newcomers",
    )
    newcomers_classes: float = option(
        0.5,
        "share of the classes that only newcomers hold; 0: they hold the same as the others",
        low=0,
        below=1,
        needs="newcomers",
    )
    newcomers_samples: int | None = option(
        None, "training samples that a newcomer has at most (auto: its whole part)", low=2
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.newcomers_samples is not None and not self.newcomers:
            raise UserError(
                f"newcomers_samples = {self.newcomers_samples} needs newcomers; set how many "
                "arrive."
            )
        if self.newcomers and self.newcomers_after is None:
            raise UserError(
                f"newcomers = {self.newcomers} needs newcomers_after, the rounds before they "
                "arrive."
            )

    def cut(self, split: Split) -> Split:
        """A newcomer's split with as many training samples as it may have, and validation samples
        in proportion.
        """
        most, size = self.newcomers_samples, len(split.train)
        if most is None or size <= most:
            return split
        valid = math.ceil(len(split.valid) * most / size)
        return dataclasses.replace(split, train=split.train[:most], valid=split.valid[:valid])

    def arrived(self, t: int) -> bool:
        """Whether they have arrived in round t."""
        return (
            bool(self.newcomers) and self.newcomers_after is not None and t >= self.newcomers_after
        )


@dataclass(frozen=True, eq=False)
class Sampler:
    """Draws the cohorts of a federation."""

    participation: Participation
    members: tuple[int, ...]
    size: int  # of a cohort; with rates: on average
    seed: int
    class_shares: np.ndarray | None = None  # of each member, for rates that follow from classes

    @cached_property
    def rates(self) -> np.ndarray:
        """How likely each client takes part in a round; their sum is the size, but
        for the limits.

        Rates that follow from classes are those of FedAU's experiments: every class has a rate, and
        a client the mean of its samples' rates.
        """
        if self.participation.participation == "uniform":
            return np.full(len(self.members), self.size / len(self.members))
        kinds = len(self.members) if self.class_shares is None else self.class_shares.shape[1]
        alpha = np.full(kinds, self.participation.participation_alpha)
        rates = self.size * numpy_draw(self.seed, "participation").dirichlet(alpha)
        if self.class_shares is not None:
            rates = self.class_shares @ rates * kinds / len(self.members)
        return np.clip(rates, LEAST_RATE, 1)

    def sampling(self, clocked: bool) -> Sampling:
        """What an accountant of privacy may build on; a clock decides by more than chance, and
        rates that follow from classes are not public.
        """
        schemes = {"uniform": "fixed", "bernoulli": "poisson"}
        scheme = "other" if clocked else schemes.get(self.participation.participation, "other")
        rates = dict(zip(self.members, self.rates.tolist(), strict=True))
        return Sampling(cast(Any, scheme), float(sum(rates.values())), rates)

    def cohort(self, t: int, ready: Sequence[int] | None = None) -> list[int]:
        """The clients of round t, of those who are ready if not all are: none if nobody is.

        By rates of their own, it may happen that nobody takes part. A stand-in would take part more
        often than its rate, which is what an accountant of privacy builds on.
        """
        among = self.members if ready is None else ready
        if self.participation.participation == "uniform":
            return sorted(self.some(t, self.size, among))
        draw, there = numpy_draw(self.seed, "cohort", t), set(among)
        takes_part = draw.random(len(self.members)) < self.rates
        chosen = [self.members[place] for place in np.flatnonzero(takes_part)]
        return [client for client in chosen if client in there]

    def some(self, t: int, count: int, among: Sequence[int], purpose: str = "cohort") -> list[int]:
        """So many of some clients, or all if there are fewer, in the order of the draw."""
        count = min(count, len(among))
        if count < 1:
            return []
        uniform = self.participation.participation == "uniform"
        chances = None if uniform else self._chances(among)
        draw = numpy_draw(self.seed, purpose, t)
        return [among[place] for place in draw.choice(len(among), count, replace=False, p=chances)]

    def _chances(self, among: Sequence[int]) -> np.ndarray:
        """The rates of some clients, scaled to a sum of one."""
        rates = dict(zip(self.members, self.rates, strict=True))
        chosen = np.array([rates[client] for client in among])
        return chosen / chosen.sum()


def class_shares(data: Dataset, splits: Sequence[Split], clients: Sequence[int]) -> np.ndarray:
    """The class shares of clients' training samples, one row each."""
    if data.classes is None:
        raise UserError(f"participation = classes needs classes, and '{data.name}' has none.")
    labels = data.codes(data.y)
    counts = [np.bincount(labels[splits[i].train], minlength=data.classes) for i in clients]
    return np.array([count / count.sum() for count in counts])
