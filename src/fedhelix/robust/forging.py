"""What forged uploads hold: one function per attack, and the table of them.

Forged updates are those of the model's parameters; BatchNorm's statistics stay honest, except that
a mimic copies them too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from fedhelix.core.seeds import draw, numpy_draw
from fedhelix.core.tree import State, add, take


@dataclass(frozen=True, eq=False)
class Position:
    """What an attacker knows when it forges its upload."""

    honest: State  # what it would send
    origin: State  # what it received, with the same entries
    names: Sequence[str]  # the parameters among them
    benign: Mapping[int, State]  # the updates that the benign clients of the round will send
    malicious: int  # how many uploads of the round are forged
    scale: float | None  # what the user says; None: as usual
    target: int  # the benign client that mimics copy
    seed: int
    round: int
    client: int

    def values(self, name: str) -> Tensor:
        """The benign updates of one entry, one in a row; zeros if nobody sent it."""
        sent = [update[name] for update in self.benign.values() if name in update]
        return torch.stack(sent) if sent else torch.zeros_like(self.origin[name])[None]

    def mean(self, name: str) -> Tensor:
        """The benign mean of one entry."""
        return self.values(name).mean(0)

    def scaled(self, usual: float) -> float:
        """The scale, or what it usually is."""
        return usual if self.scale is None else self.scale


def mimic(at: Position) -> State:
    """The update of one benign client; if it has none in this round, of a random one."""
    random = numpy_draw(at.seed, "mimic", at.round).choice(sorted(at.benign))
    update = at.benign[at.target if at.target in at.benign else int(random)]
    moving = [n for n in update if n in at.origin and at.origin[n].is_floating_point()]
    return add(take(at.origin, moving), take(update, moving))


def ipm(at: Position) -> State:
    """Minus some times the benign mean."""
    return {name: at.origin[name] - at.scaled(1.0) * at.mean(name) for name in at.names}


def alie(at: Position) -> State:
    """The benign mean minus z standard deviations, coordinate by coordinate.

    The deviation is that of the benign updates themselves (divided by their number, not by one
    less), as in the code of the paper's authors.
    """
    z = at.scaled(usual_z(len(at.benign) + at.malicious, at.malicious))
    return {
        name: at.origin[name] + at.mean(name) - z * at.values(name).std(0, correction=0)
        for name in at.names
    }


def usual_z(uploads: int, malicious: int) -> float:
    """As far as ALIE may go: so many benign clients are farther off that they and the attackers
    are a majority.

    z = Φ⁻¹((n - m - s) / (n - m)) with s = ⌊n/2 + 1⌋ - m of n uploads, m of them malicious. With
    few attackers this is zero or less, and a majority of attackers needs nobody; z is then 1.
    """
    benign = uploads - malicious
    supporters = uploads // 2 + 1 - malicious
    nearer = (benign - supporters) / benign
    return NormalDist().inv_cdf(nearer) if 0.5 < nearer < 1 else 1.0


def min_max(at: Position) -> State:
    """The benign mean minus as many deviations as keep it within the spread of the benign updates.

    See `largest_step`. A benign client that did not send an entry counts as the mean there.
    """
    rows = torch.stack(
        [
            torch.cat([(update[n] if n in update else at.mean(n)).flatten() for n in at.names])
            for update in at.benign.values()
        ]
    )
    away = -rows.std(0, correction=0)
    update = rows.mean(0) + largest_step(rows, away) * away
    parts = update.split([at.origin[name].numel() for name in at.names])
    return {
        name: at.origin[name] + part.view_as(at.origin[name])
        for name, part in zip(at.names, parts, strict=True)
    }


def largest_step(rows: Tensor, away: Tensor) -> float:
    """The largest γ with which mean + γ · away is no farther from any row than two rows are from
    each other.

    The paper finds it by bisection. It is the smallest, over the rows, of the larger roots of
    |mean - row|² + 2 γ (mean - row) · away + γ² |away|² = D².
    """
    square = away.double().square().sum()
    if square == 0:
        return 0.0
    off = rows.mean(0) - rows
    widest = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").max().double()
    along = (off.double() * away).sum(1)
    room = (widest.square() - off.double().square().sum(1)).clamp(min=0)
    return float((((along.square() + square * room).sqrt() - along) / square).min())


def sign_flip(at: Position) -> State:
    """Minus some times its own update."""
    return _times_own(at, -at.scaled(4.0))


def backdoor(at: Position) -> State:
    """Some times its own update, so that it outweighs the others (model replacement)."""
    return _times_own(at, at.scaled(1.0))


def _times_own(at: Position, scale: float) -> State:
    return {n: at.origin[n] + scale * (at.honest[n] - at.origin[n]) for n in at.names}


def noise(at: Position) -> State:
    """What it would send, with Gaussian noise."""
    generator, deviation = draw(at.seed, "attack-noise", at.round, at.client), at.scaled(1.0)
    return {
        name: at.honest[name]
        + deviation
        * torch.randn(at.honest[name].shape, generator=generator).to(at.honest[name].device)
        for name in at.names
    }


def beyond_mean(at: Position) -> State:
    """From the benign mean some times its length towards its opposite."""
    return {name: at.origin[name] + (1 - at.scaled(10.0)) * at.mean(name) for name in at.names}


# The entries that an attacker replaces; who flips labels sends what it has trained.
FORGERIES: dict[str, Callable[[Position], State]] = {
    "backdoor": backdoor,
    "mimic": mimic,
    "ipm": ipm,
    "alie": alie,
    "min-max": min_max,
    "sign-flip": sign_flip,
    "noise": noise,
    "adaptive": beyond_mean,
    "adaptive-top": beyond_mean,
}
