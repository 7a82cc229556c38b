"""Opacus as an oracle: epsilon, clipped gradients and noise of `dp-sgd` are those of its parts."""

import pytest
import torch
from scipy import stats

from fedhelix.components.accounting import Accounting
from fedhelix.components.sample_gradients import clipped_mean, with_noise

pytest.importorskip("dp_accounting")
accountants = pytest.importorskip("opacus.accountants", reason="no Opacus here")
optimizers = pytest.importorskip("opacus.optimizers")


@pytest.mark.parametrize(
    ("cohorts", "noise", "rate", "steps"),
    [("poisson", 1.1, 0.01, 500), ("poisson", 0.8, 0.05, 40), ("public", 6.0, 1.0, 20)],
)
def test_epsilon_is_that_of_its_accountant(cohorts, noise, rate, steps):
    theirs = accountants.RDPAccountant()
    theirs.history = [(noise, rate, steps)]
    ours = Accounting("rdp", cohorts, 1e-5).epsilon(noise, {rate: steps})
    assert ours == pytest.approx(theirs.get_epsilon(1e-5), rel=0.01)


def step(noise, seed=0, clip=0.7):
    """What its optimiser makes of the gradients of 16 samples, and what ours are clipped to."""
    torch.manual_seed(seed)
    network = torch.nn.Linear(40, 50)
    x, y = 3 * torch.randn(16, 40), torch.randn(16, 50)

    def loss(params, x, y):
        outputs = torch.func.functional_call(network, params, (x[None],))
        return (outputs - y[None]).square().mean()

    params = {name: value.detach() for name, value in network.named_parameters()}
    samples = [torch.func.grad(loss)(params, x[i], y[i]) for i in range(16)]
    for name, value in network.named_parameters():
        value.grad_sample = torch.stack([sample[name] for sample in samples])
    optimizer = optimizers.DPOptimizer(
        torch.optim.SGD(network.parameters(), 1.0),
        noise_multiplier=noise,
        max_grad_norm=clip,
        expected_batch_size=16,
        loss_reduction="mean",
    )
    optimizer.pre_step()
    ours, _, count = clipped_mean(loss, params, x, y, None, torch.tensor(clip))
    return {name: value.grad for name, value in network.named_parameters()}, ours, count


def test_gradients_are_clipped_as_its_optimizer_clips_them():
    theirs, ours, _ = step(noise=0.0)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in theirs)
    assert 0 < sum(float(value.square().sum()) for value in ours.values()) ** 0.5 < 0.7


def test_noise_is_distributed_as_that_of_its_optimizer():
    clean, _, _ = step(noise=0.0)
    theirs, ours, count = step(noise=1.3)
    noisy = with_noise(ours, 1.3 * torch.tensor(0.7) / count, secret=False)
    drawn = [(grads["weight"] - clean["weight"]).flatten() for grads in (theirs, noisy)]
    assert stats.ks_2samp(*(values.numpy() for values in drawn)).pvalue > 1e-3
    assert all(float(values.std()) == pytest.approx(1.3 * 0.7 / 16, rel=0.05) for values in drawn)
