"""FedBuff and FedAsync: what an upload counts that was trained from an older model."""

import pytest
import torch

from fedhelix import METHODS, Compact, FedAsync, FedAvg, FedBuff, FedProx, Scaffold, Upload
from fedhelix.components.staleness import discount
from fedhelix.core.errors import UserError
from fedhelix.core.registry import make
from fedhelix.core.tree import add
from helpers import close, small


@pytest.mark.parametrize(
    ("kind", "slope", "grace", "expected"),
    [
        ("constant", 0.5, 0, [1, 1, 1, 1]),
        ("polynomial", 0.5, 0, [1, 2**-0.5, 3**-0.5, 0.5]),
        ("polynomial", 1.0, 0, [1, 1 / 2, 1 / 3, 1 / 4]),
        ("hinge", 10.0, 1, [1, 1, 1 / 11, 1 / 21]),
        ("hinge", 0.5, 4, [1, 1, 1, 1]),
    ],
)
def test_the_discounts_of_the_papers(kind, slope, grace, expected):
    assert [discount(age, kind, slope, grace) for age in range(4)] == pytest.approx(expected)


def scene(method, ages, samples=(10, 30)):
    """A server at model 2, and uploads whose clients began at 1 and went to 1.5, 2.5, ..."""
    fed = small(method)
    at = {
        step: {name: torch.full_like(value, step) for name, value in fed.initial.items()}
        for step in (1.0, 2.0)
    }
    uploads = [
        Upload(
            client,
            count,
            {
                "model": add(
                    at[1.0],
                    {name: torch.ones_like(value) for name, value in at[1.0].items()},
                    0.5 + client,
                )
            },
            {"model": at[2.0 if age == 0 else 1.0]},
            age,
        )
        for client, (age, count) in enumerate(zip(ages, samples, strict=False))
    ]
    server, ctx = {"model": at[2.0]}, fed.context(5, 10)
    weights = method.weights(server, uploads, ctx)
    return method.aggregate(server, uploads, weights, ctx)["model"]


def all_are(model, value):
    return all(torch.allclose(entry, torch.tensor(value)) for entry in model.values())


def test_fedbuff_adds_discounted_updates_to_the_present_model():
    # Updates of 0.5 and 1.5, the discounts of ages 3 and 8, and the clients' shares of samples.
    mean = 0.25 * 0.5 / 2 + 0.75 * 1.5 / 3
    assert all_are(scene(FedBuff(), [3, 8]), 2 + mean)
    assert all_are(scene(FedBuff(step=0.1), [3, 8]), 2 + 0.1 * mean)
    assert all_are(scene(FedBuff(exponent=0.0), [3, 8]), 2 + 0.25 * 0.5 + 0.75 * 1.5)


def test_fedbuff_takes_a_fresh_upload_as_it_is():
    assert all_are(scene(FedBuff(), [0, 0]), 0.25 * 1.5 + 0.75 * 2.5)


@pytest.mark.parametrize(
    ("method", "age", "part"),
    [
        (FedAsync(), 0, 0.6),
        (FedAsync(), 3, 0.3),
        (FedAsync(mixing=0.9, discount="constant"), 7, 0.9),
        (FedAsync(discount="hinge", slope=10.0), 4, 0.6),
        (FedAsync(discount="hinge", slope=10.0), 5, 0.6 / 11),
        (FedAsync(mixing=1.0), 0, 1.0),
    ],
)
def test_fedasync_goes_a_part_of_the_way(method, age, part):
    assert all_are(scene(method, [age], [10]), 2 + part * (1.5 - 2))


def test_integers_and_statistics_of_batchnorm_are_not_extrapolated():
    fed = small("fedbuff", "digits-bn-cnn", clients=4, cohort=4, devices="lognormal:1")
    state = fed.fit(4, quiet=True, eval_every=4).state.server["model"]
    for name in fed.layers.buffers:
        assert state[name].isfinite().all() and (
            not name.endswith("var") or (state[name] > 0).all()
        )


def test_other_methods_run_inside():
    for spec in ("fedbuff+scaffold", "fedasync+fedprox", "fedbuff+helix", "genfed+fedbuff"):
        fed = small(make(spec), devices="slow:0.3:5", validation_size=50)
        run = fed.fit(4, quiet=True, eval_every=4)
        assert any(max(record["staleness"]) for record in run.records)
        assert not close(run.state.server["model"], fed.initial)


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (lambda: FedBuff(METHODS["local"]()), "fedbuff sees no updates of a common model around"),
        (lambda: FedBuff(METHODS["pfedhn"]()), "fedbuff sees no updates of a common model around"),
        (lambda: FedAsync(FedBuff()), "fedasync cannot be put around fedbuff: both buffer"),
        (lambda: FedBuff(METHODS["clustered"]()), "fedbuff must stand inside of clustered"),
        (lambda: FedBuff(Compact(FedAvg(), download_bits=8)), "what its clients receive is packed"),
        (lambda: FedBuff(buffer=0), "buffer must be at least 1, not 0"),
        (lambda: FedAsync(mixing=1.5), "mixing must be at most 1, not 1.5"),
    ],
)
def test_what_cannot_be_asynchronous_is_refused(method, sentence):
    with pytest.raises(UserError, match=sentence):
        small(method())


def test_their_labels_name_what_is_inside():
    assert FedBuff().label == "fedbuff" and FedAsync(FedProx()).label == "fedasync+fedprox"
    assert FedBuff(Scaffold()).capabilities.buffer == 5 and FedAsync().capabilities.buffer == 1
