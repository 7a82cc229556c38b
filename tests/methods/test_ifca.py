"""IFCA: choices and means by hand, and relabelled groups that it tells apart."""

import pytest
import torch

from fedhelix import IFCA, FedAvg, Upload
from fedhelix.engines.local import ClientTask, make_client
from helpers import same, small, two_quadratics


def server(*values):
    return {
        "parts": {str(k): {"model": {"weight": torch.tensor([[v]])}} for k, v in enumerate(values)}
    }


def test_clients_choose_the_least_loss():
    fed = two_quadratics(IFCA(models=2))
    payload = fed.method.download(server(1.4, 2.5), 0, fed.context(0, 1))
    # The losses are (w - 1)² and (w - 3)².
    for client, cluster, weight in ((0, 0, 1.4), (1, 1, 2.5)):
        view = make_client(fed.engine.setup, ClientTask(client, 0, {}, {}))
        models = fed.method.start(payload, {}, view)
        assert models["chosen"]["cluster"].item() == cluster
        assert models["model"]["weight"].item() == pytest.approx(weight)


def test_each_model_is_the_mean_of_its_trainers():
    fed = two_quadratics(IFCA(models=3))
    uploads = [
        Upload(i, 1, {"model": {"weight": torch.tensor([[w]])}, "cluster": torch.tensor(k)})
        for i, (w, k) in enumerate([(2.0, 0), (6.0, 1), (8.0, 0)])
    ]
    ctx = fed.context(0, 1)
    after = fed.method.aggregate(server(0.0, 0.0, 7.0), uploads, [0.25, 0.25, 0.5], ctx)
    # (2 · 1 + 8 · 2) / 3, the only one, and nobody's.
    found = [part["model"]["weight"].item() for part in after["parts"].values()]
    assert found == pytest.approx([6, 6, 7])
    assert ctx.metadata["clusters"] == {"0": 0, "1": 1, "2": 0}


def test_a_forged_choice_changes_nothing():
    fed = two_quadratics(IFCA(models=2))
    tree = {"model": {"weight": torch.tensor([[9.0]])}, "cluster": torch.tensor(5)}
    after = fed.method.aggregate(server(1.0, 2.0), [Upload(0, 1, tree)], [1.0], fed.context(0, 1))
    assert same(after, server(1.0, 2.0))


def test_the_models_start_as_different_draws():
    fed = small(IFCA(models=3), "digits-bn-cnn")
    parts = fed.initialize(1).server["parts"]
    assert same(parts["0"]["model"], fed.initial)
    weight = fed.layers.head[0]
    others = [parts[k]["model"][weight] for k in "012"]
    assert not torch.equal(others[0], others[1]) and not torch.equal(others[1], others[2])
    for other in others:
        assert torch.equal(other.flatten().sort().values, others[0].flatten().sort().values)


def test_one_model_is_fedavg():
    one, plain = (small(method, "mlp").fit(2, quiet=True) for method in (IFCA(models=1), FedAvg()))
    assert same(one.state.server["parts"]["0"]["model"], plain.state.server["model"])
    assert one.records[-1]["accuracy"] == plain.records[-1]["accuracy"]
    # Up: also the choice, eight bytes.
    sent = [record["uplink_bytes"] for record in (one.records[0], plain.records[0])]
    assert sent[0] == sent[1] + 3 * 8


def test_two_optima_are_found():
    fed = two_quadratics(IFCA(models=2))
    state = fed.initialize(30)
    first = {**state.server, **server(1.9, 2.1)}
    *_, (record, after) = fed.run_rounds(30, type(state)(**{**vars(state), "server": first}))
    found = [part["model"]["weight"].item() for part in after.server["parts"].values()]
    assert found == pytest.approx([1, 3], abs=1e-3)
    assert record["metadata"]["clusters"] == {"0": 0, "1": 1}
