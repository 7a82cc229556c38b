"""Epsilon of Gaussian noise over many rounds; every figure is one of Google's dp-accounting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any, Literal

from fedhelix.core.errors import UserError
from fedhelix.core.imports import from_extra

# Of Rényi divergences; below 2, dp-accounting's series for sampled cohorts may not converge.
ORDERS = (*(order / 2 for order in range(4, 12)), *range(6, 33), *range(36, 65, 4), 128, 256, 512)
LOSS_GRID = 1e-3  # of the privacy loss distributions
PRECISION = 1e-3  # of the noise that a budget needs
LEAST_NOISE = 0.05

Exposure = Mapping[float, int]  # sampling rate -> rounds in which a client had it


@dataclass(frozen=True)
class Accounting:
    """How rounds are counted.

    `public` cohorts: who took part is known, and only these rounds count. `poisson`: every client
    takes part by its own rate, independently. `fixed`: so many of all, without replacement.
    """

    accountant: Literal["rdp", "pld"]
    cohorts: Literal["public", "poisson", "fixed"]
    delta: float
    queries: tuple[float, ...] = (1.0,)  # one round's Gaussian sums, by their noise in that of one

    def epsilon(self, noise: float, exposure: Exposure) -> float:
        """What a client has spent after some rounds with that noise, in clips."""
        return _epsilon(self, noise, tuple(sorted(exposure.items())))

    def noise(self, epsilon: float, exposure: Exposure) -> float:
        """The least noise with which that many rounds stay within a budget."""
        dp = from_extra("dp_accounting", "privacy")
        self._event(1.0, exposure)  # refuses what this accountant does not know
        if self.accountant == "pld":  # it is slow where there is little noise, and never needs more
            most = replace(self, accountant="rdp").noise(epsilon, exposure)
            bracket = dp.ExplicitBracketInterval(most / 2, most)
        elif self.epsilon(LEAST_NOISE, exposure) <= epsilon:
            return LEAST_NOISE
        else:
            bracket = dp.LowerEndpointAndGuess(LEAST_NOISE, 1)
        try:
            found = dp.calibrate_dp_mechanism(
                self._fresh, lambda noise: self._event(noise, exposure),
                epsilon, self.delta, bracket, tol=PRECISION,
            )  # fmt: skip
        except dp.mechanism_calibration.NoBracketIntervalFoundError:
            raise UserError(
                f"no noise gives epsilon = {epsilon:g} with delta = {self.delta:g}."
            ) from None
        return float(found)

    def _fresh(self) -> Any:
        dp = from_extra("dp_accounting", "privacy")
        relation = dp.NeighboringRelation
        meant = relation.REPLACE_ONE if self.cohorts == "fixed" else relation.REPLACE_SPECIAL
        if self.accountant == "rdp":
            return dp.rdp.RdpAccountant(ORDERS, meant)
        return dp.pld.PLDAccountant(meant, LOSS_GRID)

    def _event(self, noise: float, exposure: Exposure) -> Any:
        dp = from_extra("dp_accounting", "privacy")
        rounds = [
            dp.SelfComposedDpEvent(self._round(float(noise), rate), count)
            for rate, count in exposure.items()
        ]
        return dp.ComposedDpEvent(rounds)

    def _round(self, noise: float, rate: float) -> Any:
        dp = from_extra("dp_accounting", "privacy")
        # Who replaces a client moves a sum by up to two clips, who leaves it out by one.
        clips = 2 if self.cohorts == "fixed" else 1
        sums = [dp.GaussianDpEvent(noise * factor / clips) for factor in self.queries]
        event = sums[0] if len(sums) == 1 else dp.ComposedDpEvent(sums)
        if self.cohorts == "poisson":
            event = dp.PoissonSampledDpEvent(rate, event)
        elif self.cohorts == "fixed":
            share = Fraction(rate).limit_denominator(1_000_000)
            event = dp.SampledWithoutReplacementDpEvent(share.denominator, share.numerator, event)
        if not self._fresh().supports(event):
            raise UserError(
                f"accountant = {self.accountant} cannot account for these cohorts or for adaptive "
                "clipping in them; use accountant = rdp or cohorts = public."
            )
        return event


@cache
def _epsilon(
    accounting: Accounting, noise: float, exposure: tuple[tuple[float, int], ...]
) -> float:
    accountant = accounting._fresh()
    accountant.compose(accounting._event(noise, dict(exposure)))
    return float(accountant.get_epsilon(accounting.delta))


@dataclass(frozen=True)
class Ledger:
    """What clients have spent of a budget: for every client its rounds by its rate, as a tree."""

    accounting: Accounting
    noise: float
    budget: float
    spent: Mapping[str, Mapping[str, int]]

    def after(self, client: int, rate: float, more: int = 1) -> dict[str, int]:
        """A client's rounds with some more."""
        before = dict(self.spent.get(str(client), {}))
        return {**before, repr(rate): before.get(repr(rate), 0) + more}

    def at_least(self, client: int, rate: float, rounds: int) -> Ledger:
        """The same where a client has answered so many rounds by its own count."""
        missing = rounds - sum(self.spent.get(str(client), {}).values())
        return replace(self, spent=self.charged({client: rate}, missing)) if missing > 0 else self

    def allows(self, client: int, rate: float, more: int = 1) -> bool:
        """Whether a client's budget lasts for more rounds."""
        return self.epsilon_after(client, rate, more) <= self.budget

    def epsilon_after(self, client: int, rate: float, more: int = 1) -> float:
        """What a client would have spent after more rounds."""
        return self._epsilon(self.after(client, rate, more))

    def charged(self, rates: Mapping[int, float], more: int = 1) -> dict[str, Mapping[str, int]]:
        """The tree after more rounds of some clients."""
        return {**self.spent, **{str(i): self.after(i, rate, more) for i, rate in rates.items()}}

    def epsilons(self) -> dict[str, float]:
        """What every client has spent."""
        return {client: self._epsilon(rounds) for client, rounds in self.spent.items()}

    def _epsilon(self, rounds: Mapping[str, int]) -> float:
        exposure = {float(rate): count for rate, count in rounds.items()}
        return self.accounting.epsilon(self.noise, exposure)
