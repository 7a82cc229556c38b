import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from fedhelix import FedAvgFT, FedLG, FedLP
from fedhelix.core import seeds
from helpers import small

places = st.tuples(
    st.integers(0, 2**40), st.sampled_from(["cohort", "batches", "tune"]), st.integers(-1, 999)
)


@given(places, places)
def test_keys_are_equal_exactly_where_the_places_are(one, other):
    assert (seeds.key(*one) == seeds.key(*other)) == (one == other)
    assert 0 <= seeds.key(*one) < 2**63


def test_every_argument_counts():
    place = (1, "batches", 2, 3)
    others = [
        (0, "batches", 2, 3),
        (1, "tune", 2, 3),
        (1, "batches", 3, 2),
        (1, "batches", 23),
        (1, "batches", 2, 3, 0),
    ]
    assert len({seeds.key(*where) for where in (place, *others)}) == 6


def test_the_draws_of_a_place_never_change():
    # Written down once: these numbers decide the cohorts and batches of every run that anybody has
    # kept.
    assert seeds.key(1, "cohort", 2) == 1398392424343466075
    again = [torch.rand(3, generator=seeds.draw(7, "x", 1, 2)) for _ in range(2)]
    assert torch.equal(*again)
    assert np.array_equal(*[seeds.numpy_draw(7, "x", 1, 2).random(3) for _ in range(2)])


def noisy() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10)
    )


@pytest.mark.parametrize(
    "method",
    [FedAvgFT(), FedLP(), pytest.param(FedLG(select="gradient"))],
    ids=lambda method: method.name,
)
def test_a_run_leaves_the_global_generators_alone(method):
    torch.manual_seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    small(method, noisy, augment=True).fit(2, quiet=True)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
    assert random.getstate() == before[2]


def test_the_global_generators_do_not_matter():
    runs = []
    for number in (1, 2):
        torch.manual_seed(number)
        np.random.seed(number)  # noqa: NPY002
        runs.append(small(model=noisy).fit(2, quiet=True).records[-1]["loss"])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
def test_secret_numbers_are_finite_and_of_all_their_bits(byte, monkeypatch):
    """The largest and smallest words, and the two in the middle, by the quantiles of SciPy."""
    end = b"\xff" if byte == 0x7F else b"\x00"
    monkeypatch.setattr(seeds.os, "urandom", lambda count: end * 7 + bytes([byte]))
    word = int.from_bytes(end * 7 + bytes([byte]), "little", signed=True)
    expected = stats.norm.ppf((word // 2**12 + 2**51 + 0.5) / 2**52)
    found = seeds.secret_normal(1)
    assert found.isfinite().all() and found.item() == pytest.approx(expected, rel=1e-5, abs=1e-12)
