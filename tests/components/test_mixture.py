"""The exact denoiser of a mixture: against Bayes by hand, without the own vector, by age."""

import math

import pytest
import torch

from fedhelix.components.generative.mixture import (
    Known,
    denoised,
    fitted_width,
    likelihood,
    log_weights,
    own_noise,
)
from fedhelix.papers import STUDIES


def known(vectors, clients, ages=None):
    ages = [0.0] * len(clients) if ages is None else ages
    return Known(torch.tensor(vectors), torch.tensor(clients), torch.tensor(ages))


def test_the_posterior_mean_by_hand():
    all_of_them = known([[0.0], [4.0], [1.0]], [0, 1, 2])
    observed = Known(*(column[2:] for column in all_of_them))
    noise = torch.tensor([2.0])
    # Variance 1 + 4 = 5: gaps of 1 and 9; the observation keeps 1/5 of its way from each.
    near, far = math.exp(-1 / 10), math.exp(-9 / 10)
    expected = (near * (0 + 0.2 * (1 - 0)) + far * (4 + 0.2 * (1 - 4))) / (near + far)
    (found,) = denoised(all_of_them, observed, 1.0, noise, 0.0)
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_a_clients_own_vectors_explain_nothing():
    several = known([[0.0], [0.1], [5.0]], [7, 7, 8])
    scores = log_weights(several, several, 1.0, torch.zeros(3), 0.0)
    assert scores.isinf().tolist() == [[True, True, False]] * 2 + [[False, False, True]]
    # Without noise and width a client would be what the only other one sent.
    assert denoised(several, several, 1e-6, torch.ones(3), 0.0)[0].item() == pytest.approx(5.0)


def test_what_explains_an_old_vector_is_replaced_by_what_it_is_today():
    rows = known([[0.0], [3.0], [0.2], [9.0]], [0, 0, 1, 2], [1.0, 0.0, 1.0, 0.0])
    observed = Known(*(column[2:3] for column in rows))
    noise = torch.tensor([1000.0])  # nothing of the observation itself is kept
    old = denoised(rows, observed, 0.01, noise, 50.0, today=False)
    new = denoised(rows, observed, 0.01, noise, 50.0)
    assert old.item() == pytest.approx(0.0, abs=1e-3)
    assert new.item() == pytest.approx(3.0, abs=1e-3)


def test_noise_is_the_scatter_of_a_clients_vectors():
    rows = known([[0.0, 0.0], [2.0, 0.0], [5.0, 5.0]], [0, 0, 1])
    # Around the mean (1, 0): squares of 1 and 0 in both, their mean 0.5 each, summed over 2 - 1.
    assert own_noise(rows).tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert own_noise(known([[1.0], [2.0]], [0, 1])).tolist() == [0, 0]


def test_the_width_is_that_of_the_groups():
    draw = torch.Generator().manual_seed(0)
    centres = torch.tensor([[-8.0, 0.0, 0.0], [8.0, 0.0, 0.0]]).repeat(20, 1)
    rows = Known(
        centres + 0.5 * torch.randn(40, 3, generator=draw), torch.arange(40), torch.zeros(40)
    )
    width = fitted_width(rows, torch.zeros(40), 0.0)
    assert 0.2 < width < 1.3
    assert likelihood(rows, width, torch.zeros(40), 0.0) >= max(
        likelihood(rows, other * width, torch.zeros(40), 0.0) for other in (0.5, 2.0)
    )
    # So groups do not mix, and noisy members move to their group's mean.
    made = denoised(rows, rows, width, torch.full((40,), 2.0), 0.0)
    assert (made - centres).norm(dim=1).mean() < 0.5 * (rows.vectors - centres).norm(dim=1).mean()


@pytest.mark.parametrize("scale", ["quick", "gpu"])
def test_the_study_compares_within_one_kind_of_client(scale, tmp_path):
    cells = STUDIES["concept"].cells(scale)
    by_name = {(cell.row, cell.column): cell.settings for cell in cells}
    for share in ("10 % take part", "30 % take part"):
        usual, oracle = by_name["FedAvg-FT", share], by_name["oracle groups", share]
        assert usual["shift"] == "concept:4" and oracle["shift"] == "none"
        assert usual["clients"] == 4 * oracle["clients"]
    assert len(STUDIES["concept"].specs(scale, tmp_path, {})) == 28
