"""kNN-Per: votes against scikit-learn, the mixture by hand, and the choice of its weight."""

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from fedhelix import FedAvg, KNNPer, Method, UserError, partition
from fedhelix.engines.local import ClientTask, start_round
from fedhelix.methods.knn_per import KEYS, WEIGHT
from helpers import close, small


def started(method, **more):
    fed = small(method, "mlp", **more)
    task = ClientTask(0, 0, {"model": fed.initial}, {})
    return fed, start_round(fed.engine.setup, task)


def test_neighbours_vote_as_in_scikit_learn():
    fed, local = started(KNNPer(neighbours=7, scale=2.0))
    x = fed.data.prepare(fed.data.x_test[:40])
    outputs = fed.method.predict(local.models["1.0"], x, local)
    keys, targets = local.models["1.0"][KEYS], local.client.targets()
    rival = KNeighborsClassifier(7, weights=lambda gaps: np.exp(-gaps / 2.0))
    rival.fit(keys.numpy(), targets.numpy())
    expected = rival.predict_proba(local.features(fed.initial, x).numpy())
    found = outputs.exp()[:, torch.from_numpy(rival.classes_)]
    assert torch.allclose(found.double(), torch.from_numpy(expected), atol=1e-4)


def test_the_mixture_is_one_of_probabilities():
    fed, local = started(KNNPer())
    x = fed.data.prepare(fed.data.x_test[:20])
    one, none, part = (
        fed.method.predict(local.models[w], x, local) for w in ("1.0", "0.0", "0.25")
    )
    plain = local.outputs(fed.initial, x).softmax(1)
    assert torch.allclose(none.exp(), plain, atol=1e-5)
    assert torch.allclose(part.exp(), 0.25 * one.exp() + 0.75 * plain, atol=1e-5)


def test_a_client_with_fewer_samples_than_neighbours_asks_all():
    fed, local = started(KNNPer(neighbours=10_000))
    x = fed.data.prepare(fed.data.x_test[:5])
    assert fed.method.predict(local.models["1.0"], x, local).shape == (5, 10)


def test_the_weight_is_chosen_on_validation_samples():
    fed, local = started(KNNPer())
    losses = {
        name: local.client.valid_losses(model).mean().item()
        for name, model in local.models.items()
        if WEIGHT in model
    }
    assert fed.method.choose(local.models, local.client) == min(
        losses, key=lambda name: losses[name]
    )
    # Without validation samples it takes both alike.
    fed, local = started(KNNPer(), partition=partition.dirichlet(6, 0.3, valid=0.0))
    assert fed.method.choose(local.models, local.client) == "0.5"


def test_the_global_model_is_fedavgs_and_clients_use_their_samples():
    fed, plain = (small(method, "mlp") for method in (KNNPer(), FedAvg()))
    run, other = fed.fit(2, quiet=True), plain.fit(2, quiet=True)
    assert close(run.state.server["model"], other.state.server["model"])
    assert not any(run.state.client_states.values())
    assert run.summary["personal_accuracy"] > other.summary["personal_accuracy"] + 0.2
    assert run.summary["final_accuracy"] == pytest.approx(other.summary["final_accuracy"])
    # What `personal` returns is what was evaluated.
    for client in range(2):
        test = torch.from_numpy(fed.splits[client].test)
        outputs = run.personal(client)(fed.data.prepare(fed.data.x_test[test]))
        right = (outputs.argmax(1) == fed.data.y_test[test]).float().mean().item()
        assert right == pytest.approx(run.records[-1]["personal"][client], abs=1e-6)


def test_one_row_for_every_sample_is_asked_for():
    class Wrong(KNNPer):
        def predict(self, params, x, local):
            return Method.predict(self, params, x, local)[:1]

    with pytest.raises(UserError, match="predict must return a tensor with one row for every"):
        small(Wrong(), "mlp").fit(1, quiet=True)


def test_a_network_without_features_is_refused():
    with pytest.raises(UserError, match="knn-per needs a model with a layer below its head"):
        small(KNNPer(), "linear")
