"""Secure: the mean up to rounding, in simulation and across sites, and what is refused."""

import importlib.util

import pytest
import torch

from fedhelix import (
    METHODS,
    Compact,
    FedAvg,
    FedAvgM,
    FedPer,
    FedProx,
    Helix,
    Private,
    Secure,
    UserError,
)
from fedhelix.components.secure_sum import protocol_bytes, units
from helpers import small


def flat(run):
    model = run.state.server["model"]
    return torch.cat([model[name].flatten() for name in sorted(model)])


def most_apart(method, plain, rounds=2, **settings):
    runs = [small(one, **settings).fit(rounds, quiet=True) for one in (method, plain)]
    return (flat(runs[0]) - flat(runs[1])).abs().max()


@pytest.mark.parametrize("inner", [FedAvg(), FedProx(), FedAvgM(), FedPer()], ids=lambda m: m.name)
def test_it_is_the_inner_method_up_to_rounding(inner):
    assert most_apart(Secure(inner), inner, model="mlp") < 1e-5


@pytest.mark.parametrize("engine", ["batched"])
def test_engines_sum_alike(engine):
    runs = [small(Secure(), engine=name).fit(2, quiet=True) for name in ("serial", engine)]
    assert (flat(runs[0]) - flat(runs[1])).abs().max() < 1e-5


@pytest.mark.parametrize(
    "inner", [Compact(), Compact(code="top-k"), Helix(cull=False)], ids=["bits", "top-k", "helix"]
)
def test_compact_updates_go_through_it(inner):
    """One round: in the next, a sign of one bit may turn with the last digit of a value."""
    assert most_apart(Secure(inner), inner, rounds=1, model="mlp") < 1e-5


def test_packed_downloads_are_refused():
    with pytest.raises(UserError, match="compact: its downloads are packed"):
        small(Secure(Compact(download_bits=8)))


def test_equal_weights_and_batchnorm():
    assert most_apart(Secure(), FedAvg(), client_weights="equal") < 1e-5
    runs = [small(one, "digits-bn-cnn").fit(1, quiet=True) for one in (Secure(), FedAvg())]
    left, right = (run.state.server["model"] for run in runs)
    floats = [name for name, value in right.items() if value.is_floating_point()]
    assert len(floats) < len(right)
    assert all(torch.allclose(left[name], right[name], atol=1e-4) for name in floats)


def test_a_rough_grid_shows_in_the_model():
    """With a bound of a million a step of the grid is 1e6 / 2^30, about a thousandth."""
    apart = most_apart(Secure(bound=1e6), FedAvg(), rounds=1)
    assert 1e-5 < apart < 3 * 1e6 / units(32)


def test_uploads_are_words_and_the_protocol_counts():
    fed = small(Secure())
    (record, _), *_ = fed.run_rounds(1)
    size = sum(value.numel() for value in fed.initial.values())
    assert record["uplink_bytes"] == 3 * 4 * size
    assert record["other_bytes"] == protocol_bytes(3, None, 3)


@pytest.mark.parametrize("inner", [FedAvg(), Compact()], ids=["fedavg", "compact"])
@pytest.mark.parametrize("bits", [8, 16])
def test_short_words_make_uploads_smaller_and_the_mean_rougher(inner, bits):
    """Every client of three rounds by less than a step of the grid."""
    method = Secure(inner, word_bits=bits, bound=0.5)
    assert 0 < most_apart(method, inner, rounds=1) < 3 * 0.5 / units(bits)
    fed = small(method)
    (record, _), *_ = fed.run_rounds(1)
    size = sum(value.numel() for value in fed.initial.values())
    assert record["uplink_bytes"] == 3 * bits // 8 * size


@pytest.mark.skipif(not importlib.util.find_spec("dp_accounting"), reason="an extra")
@pytest.mark.parametrize("noise_by", ["server", "clients"])
def test_differential_privacy_goes_through_it(noise_by):
    inner = Private(noise=1.0, epsilon=1e5, noise_by=noise_by, quantile=0.5)
    assert most_apart(Secure(inner), inner) < 1e-5


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_a_client_that_diverges_is_left_out_and_named(engine):
    fed = small(Secure(), lr=3e38, epochs=2, engine=engine)
    (record, state), *_ = fed.run_rounds(1)
    reasons = {str(client): "holds values that are not finite" for client in fed.cohort(0)}
    assert record["refused"] == reasons
    assert record["other_bytes"] == protocol_bytes(3, None, 0) > 0
    assert all(bool(value.isfinite().all()) for value in state.server["model"].values())


REFUSED = {
    "genfed": "its server looks at single uploads",
    "pfedgpa": "its server",
    "median": "its server looks at single uploads",
    "krum": "its server looks at single uploads",
    "scaffold": "its server looks at single uploads",
    "fedlps": "its uploads are packed",
    "cull": "its server looks at single uploads",
    "helix": "its server looks at single uploads",
    "gene-fl": "before the first round",
    "fedproto": "no updates of a common model",
    "ifca": "no updates of a common model",
    "fedbuff": "",
}


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_need_single_uploads_are_refused(name):
    with pytest.raises(UserError, match=f"secure cannot aggregate the uploads of {name}.*"):
        small(Secure(METHODS[name]()), validation_size=50)


@pytest.mark.parametrize("options", [(), ("--set", "helix.heads=denoised")])
def test_the_refusal_of_helix_says_what_to_set_and_that_works(options, cli):
    command = ("run", "secure+helix", "--rounds=1", "--clients=6", "--epochs=1", *options)
    refused = cli(*command)
    assert refused.code == 2 and "of helix: its server looks at single uploads (it w" in refused.err
    told = refused.err.split("`")[1].split()
    assert cli(*command, *told, "--quiet").code == 0
    assert (told[-1] == "helix.heads=common") == bool(options)
    with pytest.raises(UserError, match=r"genfed: its server looks at single uploads\.$"):
        small(Secure(METHODS["genfed"]()), validation_size=50)


def test_nothing_stands_around_it_and_bad_options_are_refused():
    with pytest.raises(UserError, match="must be the outermost"):
        small(METHODS["genfed"](Secure()), validation_size=50)
    with pytest.raises(UserError, match="degree must be even"):
        Secure(degree=5)
    with pytest.raises(UserError, match=r"threshold must be greater than 0.5"):
        Secure(threshold=0.5)
    with pytest.raises(UserError, match="cohorts need two clients"):
        small(Secure(), cohort=1).fit(1, quiet=True)
    with pytest.raises(UserError, match="degree = 6 needs more than 6 clients"):
        small(Secure(degree=6)).fit(1, quiet=True)
    with pytest.raises(UserError, match="words of 16 bits would make its clipped updates longer"):
        small(Secure(Private(noise=1.0), word_bits=16))
    with pytest.raises(UserError, match="words of 8 bits hold sums over 63 clients"):
        small(Secure(word_bits=8), clients=64, cohort=64).fit(1, quiet=True)
    with pytest.raises(UserError, match="late = drop"):
        small(Secure(), devices="slow:0.5:100", deadline=1.0, late="keep")
    with pytest.raises(UserError, match=r"fedlp left '.*' out"):
        small(Secure(METHODS["fedlp"]())).fit(3, quiet=True)
