"""The diffusion's maths, with exact scores, hand-derived numbers and another library as oracle."""

import pytest
import torch

from fedhelix.components.generative import Diffusion

DIFFUSION = Diffusion()


def draws(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda x: torch.randn(x.shape, generator=generator)


def normal(x, t):
    """The exact predictor for data from N(0, 1): the noise that one would expect in x."""
    return (1 - float(DIFFUSION.alpha_bar[t])) ** 0.5 * x


@pytest.mark.parametrize(("t", "left"), [(0, 1.0), (100, 0.897), (250, 0.524), (500, 0.079)])
def test_what_is_left_of_a_vector_after_t_steps(t, left):
    assert float(DIFFUSION.alpha_bar[t]) == pytest.approx(left, abs=5e-4)


def test_the_last_reverse_step_adds_no_noise():
    assert DIFFUSION.sigma[1] == 0 and float(DIFFUSION.sigma[2]) == pytest.approx(
        (float(DIFFUSION.beta[2]) * 1e-4 / (1 - float(DIFFUSION.alpha_bar[2]))) ** 0.5
    )


@pytest.mark.parametrize("t", [1, 2, 250, 1000])
def test_steps_agree_with_diffusers(t):
    diffusers = pytest.importorskip("diffusers")
    oracle = diffusers.DDPMScheduler(
        1000, 1e-4, 0.02, "linear", variance_type="fixed_small", clip_sample=False
    )
    x, noise, fresh = (draws(seed)(torch.zeros(3, 5)) for seed in (1, 2, 3))
    there = oracle.add_noise(x, noise, torch.tensor([t - 1]))  # it counts from 0
    bar = DIFFUSION.alpha_bar.float()[[t, t, t]]
    assert torch.allclose(DIFFUSION.noised(x, bar, noise), there, atol=1e-5)
    its = oracle.step(noise, t - 1, x, generator=torch.Generator().manual_seed(3)).prev_sample
    ours = DIFFUSION.mean(x, t, noise) + float(DIFFUSION.sigma[t]) * fresh
    assert torch.allclose(ours, its, rtol=1e-4, atol=1e-5)


def test_the_loss_is_zero_for_the_true_noise_and_one_for_zeros():
    x, noise = (draws(seed)(torch.zeros(4000, 8)) for seed in (1, 2))
    t = torch.full((4000,), 300)
    bar = DIFFUSION.alpha_bar.float()[t]
    assert DIFFUSION.loss(lambda x, t: noise, x, t, bar, noise) == 0
    assert float(DIFFUSION.loss(lambda x, t: 0 * x, x, t, bar, noise)) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(("start", "error"), [(300, 1e-5), (1000, 1e-3)])
def test_the_code_leads_back_exactly(start, error):
    x = draws(1)(torch.zeros(20, 64))
    assert (DIFFUSION.decode(*DIFFUSION.code(x, start, draws())) - x).abs().max() < error


def gain(result, x):
    factor = float((result * x).sum() / x.square().sum())
    return factor, float((result - factor * x).square().mean().sqrt())


def test_inversion_shrinks_by_alpha_bar_with_the_exact_score():
    x = draws(1)(torch.zeros(400, 64))
    factor, rest = gain(DIFFUSION.invert(normal, x, 200, draws()), x)
    assert factor == pytest.approx(0.66, abs=0.02) and rest == pytest.approx(0.12, abs=0.02)


def test_from_the_last_step_on_inversion_forgets():
    x = draws(1)(torch.zeros(200, 64))
    assert abs(gain(DIFFUSION.invert(normal, x, 1000, draws()), x)[0]) < 0.05


def test_fresh_noise_leaves_more_of_a_residual_than_recorded_noise():
    x = draws(1)(torch.zeros(400, 64))
    factor, rest = gain(DIFFUSION.renew(normal, x, 200, draws()), x)
    assert factor == pytest.approx(0.66, abs=0.02) and rest == pytest.approx(0.74, abs=0.03)


def test_dpm_encoder_with_one_model_is_the_identity():
    x = 3 + 2 * draws(1)(torch.zeros(20, 64))
    assert (DIFFUSION.transfer(normal, normal, x, 1000, draws()) - x).abs().max() < 1e-3


def test_dpm_encoder_moves_between_gaussians():
    """Noises that explain x under N(0, 1) mean, under N(5, 4), about the vector at the same place
    of that one.
    """
    x = draws(1)(torch.zeros(200, 32))
    wide = DIFFUSION.gaussian(torch.full((32,), 5.0), torch.full((32,), 4.0))
    moved = DIFFUSION.transfer(wide, normal, x, 1000, draws())
    assert float(moved.mean()) == pytest.approx(5, abs=0.2)
    assert float(torch.corrcoef(torch.stack([moved.flatten(), x.flatten()]))[0, 1]) > 0.9


def test_samples_follow_the_data():
    wide = DIFFUSION.gaussian(torch.tensor([2.0]), torch.tensor([0.25]))
    samples = DIFFUSION.sample(wide, draws(1)(torch.zeros(4000, 1)), 1000, draws())
    assert float(samples.mean()) == pytest.approx(2, abs=0.05)
    assert float(samples.std()) == pytest.approx(0.5, abs=0.05)


def test_guidance_goes_where_training_went():
    """The printed sign of Algorithm 1, line 11, would go the other way."""
    x, towards = torch.zeros(1, 16), torch.ones(1, 16)
    still = lambda x: torch.zeros_like(x)  # noqa: E731
    plain = DIFFUSION.sample(normal, x, 50, still)
    guided = DIFFUSION.sample(DIFFUSION.guided(normal, 0.01 * towards, 0.0), x, 50, still)
    stronger = DIFFUSION.sample(DIFFUSION.guided(normal, 7 * towards, 1.0), x, 50, still)
    assert (guided > plain).all()
    assert torch.allclose(
        stronger, 2 * guided, atol=1e-5
    )  # the length of the direction does not count
