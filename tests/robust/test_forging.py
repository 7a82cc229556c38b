"""Forged updates against numbers by hand, and against the search of their paper."""

import typing
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhelix.robust.attacks import LEVELS, AttackName
from fedhelix.robust.forging import FORGERIES, Position, alie, largest_step, min_max, usual_z


def position(*rows, malicious=1, scale=None):
    """An attacker that received [10, 10] where benign clients send these updates."""
    origin = {"w": torch.full((len(rows[0]),), 10.0)}
    benign = {client: {"w": torch.tensor(row)} for client, row in enumerate(rows)}
    return Position(origin, origin, ["w"], benign, malicious, scale, 0, 0, 0, 99)


def test_every_attack_is_in_the_table():
    names = typing.get_args(AttackName)
    assert [name for name in names if name not in ("none", "label-flip")] == list(FORGERIES)
    assert LEVELS.keys() <= FORGERIES.keys()


def test_alie_by_hand():
    # Mean [2, 4], deviations [1, 2] (those of a sample would be larger by the root of two).
    at = position([1.0, 2.0], [3.0, 6.0], scale=0.5)
    assert alie(at)["w"].tolist() == [11.5, 13.0]
    # Three uploads, one of them malicious: one supporter of two, and half of them are z = 0.
    assert alie(replace(at, scale=None))["w"].tolist() == [11.0, 12.0]
    # ALittleIsEnough(0.5) of byzfl 0.0.11 adds half of the sample's deviation to the mean of these
    # rows and gives [43.5163, 2.4728]; the root of 4/5 makes ours of it, and the sign is the other.
    rows = [[1.0, 0.0], [2.0, 1.0], [3.0, 1.0], [100.0, -50.0], [2.0, 3.0]]
    mean, theirs = torch.tensor([21.6, -9.0]), torch.tensor([43.5163, 2.4728])
    ours = alie(position(*rows, scale=0.5))["w"] - 10
    assert ours.tolist() == pytest.approx((mean - 0.8**0.5 * (theirs - mean)).tolist(), abs=1e-3)


@pytest.mark.parametrize(
    ("uploads", "malicious", "z"),
    [
        (50, 24, 1.4261),  # 2 supporters of 26: 24/26 (the paper's example, 1.43)
        (20, 4, 0.1573),  # 7 supporters of 16: 9/16
        (10, 2, 1.0),  # 4 supporters of 8: one half, whose z is 0
        (9, 1, 1.0),  # 4 supporters of 8
        (5, 3, 1.0),  # attackers are the majority
        (2, 1, 1.0),  # 1 supporter of 1
    ],
)
def test_how_far_alie_goes(uploads, malicious, z):
    assert usual_z(uploads, malicious) == pytest.approx(z, abs=1e-4)


def test_min_max_by_hand():
    # Mean 1, deviation 1, two apart: at 1 - γ the farther one is 1 + γ away, so γ = 1.
    assert min_max(position([0.0], [2.0]))["w"].tolist() == pytest.approx([10.0])
    # Mean 1, deviation √2, three apart: 2 + γ√2 = 3.
    assert min_max(position([0.0], [0.0], [3.0]))["w"].tolist() == pytest.approx([10.0], abs=1e-6)
    rows = torch.tensor([[0.0], [0.0], [3.0]])
    assert largest_step(rows, torch.tensor([-(2**0.5)])) == pytest.approx(0.5**0.5)
    # Across: mean [0, 0], two apart along x; γ steps along y are at √(1 + γ²) = 2.
    across = torch.tensor([[-1.0, 0.0], [1.0, 0.0]])
    assert largest_step(across, torch.tensor([0.0, -1.0])) == pytest.approx(3**0.5)
    # All agree: nothing can be forged.
    assert min_max(position([1.0, 2.0], [1.0, 2.0]))["w"].tolist() == [11.0, 12.0]
    assert min_max(position([1.0, 2.0]))["w"].tolist() == [11.0, 12.0]


def by_bisection(rows, away):
    """Algorithm 1 of Shejwalkar and Houmansadr, NDSS 2021."""
    widest = max(float((one - other).norm()) for one in rows for other in rows)
    gamma, step, good = 10.0, 10.0, 0.0
    while abs(good - gamma) > 1e-6:
        if float((rows - rows.mean(0) - gamma * away).norm(dim=1).max()) <= widest:
            good, gamma = gamma, gamma + step / 2
        else:
            gamma = gamma - step / 2
        step /= 2
    return good


@given(
    st.integers(2, 9), st.integers(1, 6), st.integers(0, 10_000), st.sampled_from(["std", "sign"])
)
@settings(max_examples=60, deadline=None)
def test_min_max_finds_what_the_papers_bisection_does(count, width, seed, kind):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, width, generator=generator, dtype=torch.float64)
    away = -rows.std(0) if kind == "std" else -rows.mean(0).sign()
    assert largest_step(rows, away) == pytest.approx(by_bisection(rows, away), abs=1e-4)


def test_who_did_not_send_an_entry_counts_as_the_mean():
    at = position([0.0], [2.0])
    more = replace(
        at,
        honest={**at.honest, "v": torch.zeros(1)},
        origin={**at.origin, "v": torch.zeros(1)},
        names=["w", "v"],
        benign={**at.benign, 2: {"v": torch.ones(1)}},  # sends v alone
    )
    # w: 0, 2 and 1 for the third; v: 1 for all.
    forged = min_max(more)
    assert forged["w"].tolist() == pytest.approx([10.0]) and forged["v"].tolist() == [1.0]
    assert alie(replace(more, scale=1.0))["w"].tolist() == [10.0]
    nobody = replace(more, benign={2: {"v": torch.ones(1)}})
    assert min_max(nobody)["w"].tolist() == alie(nobody)["w"].tolist() == [10.0]
