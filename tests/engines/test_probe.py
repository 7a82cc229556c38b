"""Parts of models: the rest is fitted to the samples that they are evaluated on."""

import pytest
import torch
from sklearn.linear_model import Ridge

from fedhelix import FedAvg, FedBN, FedPer, GenFed, LGFedAvg, LocalOnly
from fedhelix.core.errors import UserError
from fedhelix.core.registry import make
from fedhelix.core.tree import drop, take
from fedhelix.engines.probe import RIDGE, predicted_by_others, probe
from helpers import same, small, timeless


def test_every_row_is_predicted_by_a_regression_on_the_others():
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 4, generator=draw) + 3, torch.randn(30, 2, generator=draw)
    strength = float(RIDGE * (x - x.mean(0)).square().sum() / 4)
    predicted = predicted_by_others(x, y)
    for row in range(30):
        others = torch.arange(30) != row
        fitted = Ridge(alpha=strength).fit(x[others].double(), y[others].double())
        assert predicted[row].tolist() == pytest.approx(
            fitted.predict(x[[row]].double())[0].tolist(), abs=0.02
        )


def test_a_regression_on_noise_learns_nothing():
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 50, generator=draw), torch.randint(2, (60,), generator=draw)
    predicted = predicted_by_others(x, torch.nn.functional.one_hot(y, 2)).argmax(1)
    assert (
        0.3 < float((predicted == y).float().mean()) < 0.7
    )  # one that had seen the sample would be right nearly always


def test_features_without_any_difference_or_beyond_all_bounds():
    y = torch.eye(2).repeat(3, 1)
    # Only the others' mean is left: 2 of 5 for the own class, 3 of 5 for the other.
    assert predicted_by_others(torch.ones(6, 3), y)[0].tolist() == pytest.approx([0.4, 0.6])
    assert predicted_by_others(torch.full((6, 3), torch.inf), y).isnan().all()


def test_missing_statistics_are_those_of_the_samples():
    fed = small(model="digits-bn-cnn", validation_size=0.2)
    setup, indices = fed.engine.setup, torch.from_numpy(fed.reserve.scoring)
    part = drop(fed.initial, fed.layers.norm)
    before = {name: value.clone() for name, value in fed.initial.items()}
    setup.module.train()
    expected = torch.func.functional_call(
        setup.module,
        {name: value.clone() for name, value in fed.initial.items()},
        (fed.data.prepare(fed.data.x[indices]),),
    )
    # The biased variance of a training pass and the unbiased one that is kept differ by 1 /
    # samples.
    assert torch.allclose(probe(setup, part, "train", indices), expected, atol=0.01)
    assert same(fed.initial, before)


def test_a_trained_body_scores_higher_than_a_random_one():
    fed = small(
        FedAvg(), "digits-cnn", partition="iid", epochs=3, batch_size=16, validation_size=0.2
    )
    trained = fed.fit(3, quiet=True).state.server["model"]
    parts = [take(model, fed.layers.body) for model in (fed.initial, trained)]
    (untrained, _), (worth, _) = fed.context(0, 1).score(parts)
    (whole, _), *_ = fed.context(0, 1).score([trained])
    assert untrained < worth and worth > whole - 0.03


@pytest.mark.parametrize("inner", [FedPer(), FedBN()], ids=lambda method: method.name)
def test_engines_agree_on_parts(inner):
    method = GenFed(inner, schedule="constant", rho_max=2)
    runs = {
        engine: small(method, "digits-bn-cnn", engine=engine, validation_size=0.2).fit(
            2, quiet=True
        )
        for engine in ("serial", "parallel", "batched")
    }
    for run in runs.values():
        run.federation.close()
    serial, parallel, batched = (run.records for run in runs.values())
    assert timeless(serial) == timeless(parallel)
    for one, other in zip(serial, batched, strict=True):
        assert one["metadata"]["fitness"] == pytest.approx(other["metadata"]["fitness"], abs=0.03)


@pytest.mark.parametrize(
    "name", ["fedrep", "fedbabu", "partialfed", "fedfina", "fedlp", "fedlg", "ditto"]
)
def test_genfed_around_methods_whose_clients_keep_a_part(name):
    fed = small(make(f"genfed+{name}"), "digits-cnn", batch_size=8, validation_size=0.2)
    records = fed.fit(2, quiet=True).records
    assert len(set(records[1]["metadata"]["fitness"].values())) > 1
    assert len(records[1]["metadata"]["selected"]) == records[1]["metadata"]["rho"]


def test_what_cannot_be_scored_is_refused():
    for inner, label in ((LGFedAvg(), "lg-fedavg"), (LocalOnly(), "local")):
        with pytest.raises(
            UserError, match=f"genfed cannot score the models of {label}, which uploads no body"
        ):
            small(GenFed(inner), "digits-cnn", validation_size=0.2)
    last_is_a_convolution = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 10, 6), torch.nn.Flatten()
    )
    with pytest.raises(
        UserError, match="genfed around fedper needs a network whose last layer is linear"
    ):
        small(GenFed(FedPer()), last_is_a_convolution, validation_size=0.2)
