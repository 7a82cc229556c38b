"""The generative model on toy vectors: groups of clients, each around its own centre."""

import pytest
import torch

from fedhelix import UserError
from fedhelix.components.generative import SIZES, Generator, Recipe, size_for
from fedhelix.components.generative.diffusion import Diffusion
from fedhelix.components.generative.generator import Course, Size
from fedhelix.components.generative.networks import Autoencoder, Projection
from fedhelix.core.tree import load, save

TINY = Size(16, (), (32,), Course(0, 8, 1e-3), Course(400, 64, 3e-3), blocks=1, average=0.98)


def groups(seed=0, rows=15, values=300):
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(4, values, generator=draw)
    common = 5 * torch.randn(values, generator=draw)
    vectors = (
        common
        + centres.repeat_interleave(rows, 0)
        + 0.3 * torch.randn(4 * rows, values, generator=draw)
    )
    return vectors, common + centres


@pytest.fixture(scope="module")
def fitted():
    vectors, centres = groups()
    return Generator.fit(vectors, [100, 200], TINY), vectors, centres


def nearest(made, centres):
    return torch.cdist(made, centres).argmin(1).tolist()


def test_inversion_stays_in_the_group_and_tells_less_of_the_client(fitted):
    generator, vectors, centres = fitted
    client_state = vectors[::15]
    for mode in ("eq15", "fresh", "dpm_encoder"):
        made = generator.invert(client_state, 250, seed=0, mode=mode)
        assert nearest(made, centres) == [0, 1, 2, 3]
    assert (generator.invert(client_state, 250, 0) - centres).norm() < (
        client_state - centres
    ).norm()


def test_the_mean_of_several_regenerations_is_nearer_to_the_group(fitted):
    generator, vectors, centres = fitted
    one, many = (generator.invert(vectors[::15], 250, 0, "fresh", samples) for samples in (1, 16))
    assert (many - centres).norm() < (one - centres).norm()


def test_direct_generation_knows_no_client_but_looks_like_one(fitted):
    generator, vectors, centres = fitted
    made = generator.direct(40, seed=0)
    assert len(set(nearest(made, centres))) == 4
    apart = torch.cdist(made, centres).amin(1).mean() / torch.cdist(vectors, centres).amin(1).mean()
    assert apart < 2.5


def test_reconstruction_loses_little(fitted):
    generator, vectors, _ = fitted
    assert (generator.reconstruct(vectors) - vectors).norm() < 0.35 * (
        vectors - vectors.mean(0)
    ).norm()


def test_guidance_leads_on_along_the_way_of_local_training(fitted):
    generator, vectors, centres = fitted
    before = vectors.mean(0, keepdim=True)
    after = before + 0.6 * (centres[:1] - before)
    plain, guided = (
        generator.guide(before, after, 200, strength, seed=0) for strength in (-1.0, 0.0)
    )
    assert (guided - centres[0]).norm() < (plain - centres[0]).norm()


def test_guidance_shows_its_steps(fitted):
    generator, vectors, _ = fitted
    watched = []

    def watch(steps, title):
        watched.append((title, len(steps)))
        return steps

    made, same = (generator.guide(vectors[:1], vectors[1:2], 5, 0.0, 0, *w) for w in ([watch], []))
    assert watched == [("new model", 5)] and torch.equal(made, same)


def test_guidance_keeps_what_codes_cannot_express(fitted):
    generator, vectors, centres = fitted
    before = vectors.mean(0, keepdim=True)
    after = centres[:1] + 5 * torch.randn(1, 300, generator=torch.Generator().manual_seed(1))
    made = generator.guide(before, after, steps=200, strength=0.0, seed=0)
    foreign = after - generator.reconstruct(after)
    assert float(foreign.norm()) > 1
    assert torch.allclose(made - generator.reconstruct(made), foreign, atol=1e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda generator, x: generator.guide(x, x, 3, 0.0, 0),
        lambda generator, x: generator.invert(x, 3, 0),
        lambda generator, x: generator.direct(1, 0),
    ],
)
def test_a_small_denoiser_runs_in_one_thread(fitted, make, monkeypatch):
    """Threads that wait for a core made every one of its short steps ten times as long."""
    generator, vectors, _ = fitted
    monkeypatch.setattr(generator, "diffusion", Diffusion(4))
    used, before = set(), torch.get_num_threads()
    hook = generator.denoiser.register_forward_hook(lambda *_: used.add(torch.get_num_threads()))
    try:
        torch.set_num_threads(2)
        make(generator, vectors[:1])
        assert used == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
        hook.remove()


def test_a_generator_is_named_tensors(fitted, tmp_path):
    generator, vectors, _ = fitted
    save(generator.tree(), tmp_path / "generator.safetensors")
    before = torch.get_rng_state()
    again = Generator.of(load(tmp_path / "generator.safetensors"))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(again.invert(vectors[:3], 200, 1), generator.invert(vectors[:3], 200, 1))


def test_fitting_follows_the_seed_and_disturbs_nobody():
    vectors, _ = groups()
    short = TINY.shortened(3)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, other, third = (
        Generator.fit(vectors, [300], short, seed=seed).invert(vectors[:2], 5, 0)
        for seed in (0, 0, 1)
    )
    assert torch.equal(one, other) and not torch.equal(one, third)
    assert torch.equal(before, torch.get_rng_state())


def test_the_autoencoder_learns_what_it_is_shown():
    vectors, _ = groups(rows=8, values=100)
    size = Size(16, (8, 16), (32,), Course(80, 32, 1e-2), Course(5, 8, 1e-3), blocks=1)
    generator = Generator.fit(vectors, [100], size)
    assert (generator.reconstruct(vectors) - vectors).norm() < 0.5 * (
        vectors - vectors.mean(0)
    ).norm()


@pytest.mark.parametrize("name", ["default", "paper"])
def test_large_sizes_take_a_step(name):
    size = SIZES[name].shortened(1)
    size = Size(**{**vars(size), "autoencoder": Course(1, 4, 1e-3), "denoiser": Course(1, 4, 1e-3)})
    vectors, _ = groups(rows=2, values=90)
    generator = Generator.fit(vectors, [90], size)
    assert generator.reconstruct(vectors).shape == vectors.shape
    assert generator.invert(vectors[:2], 2, 0).isfinite().all()


@pytest.mark.parametrize("values", [64, 65, 95])
def test_the_autoencoder_takes_any_length(values):
    network = Autoencoder(values, 8, (4, 4, 2)).eval()
    assert network.decode(network.encode(torch.randn(3, values))).shape == (3, values)


def test_principal_components_are_those_of_the_svd():
    x = torch.randn(12, 40)
    x = x - x.mean(0)
    projection = Projection.fit(x, 5)
    wanted = torch.linalg.svd(x, full_matrices=False)[2][:5]
    assert torch.allclose((projection.basis @ wanted.T).abs(), torch.eye(5), atol=1e-4)
    assert Projection.fit(x, 100).basis.shape == (11, 40)  # twelve centred vectors span no more


def test_too_few_or_broken_uploads_cannot_be_learnt():
    with pytest.raises(UserError, match="to 2 uploads; it needs at least 3"):
        Generator.fit(torch.randn(2, 10), [10], TINY)
    with pytest.raises(UserError, match="not finite"):
        Generator.fit(torch.full((5, 10), torch.nan), [10], TINY)


def test_auto_is_fast_on_a_cpu():
    assert size_for("auto", torch.device("cpu")) is SIZES["fast"]
    assert size_for("auto", torch.device("cuda")) is SIZES["linear"]


def test_options_are_checked():
    with pytest.raises(UserError, match="inversion_start"):
        Recipe(inversion_start=1001)
    with pytest.raises(UserError, match="generate must be one of"):
        Recipe(generate="copy")
