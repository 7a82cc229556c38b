"""Epsilon is dp-accounting's, whatever we put around it."""

import pytest

from fedhelix import UserError
from fedhelix.components.accounting import LOSS_GRID, ORDERS, Accounting, Ledger

dp = pytest.importorskip("dp_accounting")
RELATION = dp.NeighboringRelation


def rdp(relation, event, rounds, delta=1e-5):
    accountant = dp.rdp.RdpAccountant(ORDERS, relation).compose(event, rounds)
    return accountant.get_epsilon(delta)


def test_public_cohorts_are_plain_gaussian_mechanisms():
    spent = Accounting("rdp", "public", 1e-5).epsilon(2.0, {1.0: 30})
    assert spent == rdp(RELATION.ADD_OR_REMOVE_ONE, dp.GaussianDpEvent(2.0), 30)
    # Thirty sums with noise 2 are one with noise 2 / sqrt(30), whose exact epsilon is known.
    exact = dp.get_epsilon_gaussian(2.0 / 30**0.5, 1e-5)
    assert exact < spent < 1.1 * exact
    assert Accounting("pld", "public", 1e-5).epsilon(2.0, {1.0: 30}) == pytest.approx(exact, 1e-3)


def test_poisson_cohorts_are_sampled_gaussian_mechanisms():
    event = dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(1.5))
    spent = Accounting("rdp", "poisson", 1e-6).epsilon(1.5, {0.1: 20})
    assert spent == rdp(RELATION.ADD_OR_REMOVE_ONE, event, 20, 1e-6)
    loss = dp.pld.PLDAccountant(RELATION.ADD_OR_REMOVE_ONE, LOSS_GRID).compose(event, 20)
    tighter = Accounting("pld", "poisson", 1e-6).epsilon(1.5, {0.1: 20})
    assert tighter == pytest.approx(loss.get_epsilon(1e-6)) and tighter < spent


def test_opacus_agrees_on_poisson_cohorts():
    opacus = pytest.importorskip("opacus.accountants")
    accountant = opacus.RDPAccountant()
    accountant.history = [(1.5, 0.1, 20), (1.5, 0.25, 5)]
    theirs = accountant.get_epsilon(1e-5, alphas=ORDERS)
    ours = Accounting("rdp", "poisson", 1e-5).epsilon(1.5, {0.1: 20, 0.25: 5})
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_fixed_cohorts_are_drawn_without_replacement_and_a_client_is_replaced():
    """Who replaces a client moves the sum by two clips, so the noise counts half."""
    event = dp.SampledWithoutReplacementDpEvent(20, 1, dp.GaussianDpEvent(2.0 / 2))
    spent = Accounting("rdp", "fixed", 1e-5).epsilon(2.0, {0.05: 3})
    assert spent == pytest.approx(rdp(RELATION.REPLACE_ONE, event, 3))
    everybody = Accounting("rdp", "fixed", 1e-5).epsilon(2.0, {1.0: 3})
    assert everybody == pytest.approx(rdp(RELATION.REPLACE_ONE, dp.GaussianDpEvent(1.0), 3))


def test_a_count_beside_the_sum_costs_a_little():
    plain = Accounting("rdp", "poisson", 1e-5)
    counted = Accounting("rdp", "poisson", 1e-5, (1.0, 10.0))
    less = (1 + 1 / 100) ** -0.5  # both together are one sum with so much less noise
    spent = counted.epsilon(1.0, {0.2: 10})
    assert spent == pytest.approx(plain.epsilon(less, {0.2: 10}))
    assert spent > plain.epsilon(1.0, {0.2: 10})


@pytest.mark.parametrize(
    ("accountant", "cohorts", "budget"),
    [
        ("rdp", "public", 0.5),
        ("rdp", "poisson", 8.0),
        ("pld", "public", 8.0),
        ("pld", "poisson", 0.5),
    ],
)
def test_the_noise_that_is_found_keeps_the_budget_and_less_does_not(accountant, cohorts, budget):
    accounting, exposure = Accounting(accountant, cohorts, 1e-5), {0.2: 10}
    noise = accounting.noise(budget, exposure)
    assert accounting.epsilon(noise, exposure) <= budget
    assert accounting.epsilon(noise - 0.01, exposure) > budget


def test_a_budget_without_end_needs_hardly_any_noise():
    assert Accounting("rdp", "public", 1e-5).noise(1e6, {1.0: 1}) <= 0.05


@pytest.mark.parametrize(
    ("cohorts", "queries"), [("fixed", (1.0,)), ("poisson", (1.0, 10.0))], ids=["fixed", "count"]
)
def test_what_an_accountant_does_not_know_is_refused(cohorts, queries):
    accounting = Accounting("pld", cohorts, 1e-5, queries)
    for ask in (lambda: accounting.noise(8, {0.1: 3}), lambda: accounting.epsilon(1.0, {0.1: 3})):
        with pytest.raises(UserError, match="use accountant = rdp"):
            ask()


def test_a_clients_own_count_raises_the_ledger_and_never_lowers_it():
    books = Ledger(Accounting("rdp", "public", 1e-5), 1.0, 8.0, {"0": {"1.0": 2}})
    assert books.at_least(0, 1.0, 5).spent == {"0": {"1.0": 5}}
    assert books.at_least(0, 0.5, 5).spent == {"0": {"1.0": 2, "0.5": 3}}
    assert books.at_least(0, 1.0, 2) is books and books.at_least(0, 1.0, 1) is books
    assert books.at_least(1, 1.0, 3).spent == {"0": {"1.0": 2}, "1": {"1.0": 3}}
