"""FedDBE: memory, consensus and pull by hand, and their limits."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from fedhelix import (
    Batch,
    Calibrated,
    FedAvg,
    FedDBE,
    Federation,
    Phase,
    UserError,
    from_arrays,
    partition,
)
from fedhelix.core.shift import SHIFT
from fedhelix.data import Dataset
from fedhelix.engines.local import ClientTask, start_round
from fedhelix.methods.calibrated import log_shares
from fedhelix.methods.feddbe import MEMORY
from helpers import close, small


def chain(method, **more):
    """Two weights in a row: the feature is 1 · x, the output 2 · feature. Client 0 has the sample
    x = 1 with target 3 twice, client 1 has x = 2 with target 0 once.
    """
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    nn.init.constant_(model[0].weight, 1.0)
    nn.init.constant_(model[1].weight, 2.0)
    x, y = torch.tensor([[1.0], [1], [2]]), torch.tensor([3.0, 3, 0])
    data = Dataset("chain", x, y, x, y, classes=None, owners=torch.tensor([0, 0, 1]).numpy())
    usual = {"cohort": 2, "epochs": 1, "batch_size": 10, "lr": 0.1, "momentum": 0}
    return small(method, model, data=data, partition=partition.natural(valid=0), **usual | more)


def test_the_consensus_is_the_mean_over_samples_after_a_local_training():
    server = chain(FedDBE()).initialize(1).server
    # Client 0: error 2 - 3; feature weight 1 + 0.1 · 2 · 2 = 1.4, so the feature of 1 is 1.4.
    # Client 1: error 4 - 0; feature weight 1 - 0.1 · 8 · 2 · 2 = -2.2, so the feature of 2 is -4.4.
    assert server["consensus"]["mean"].tolist() == pytest.approx([(2 * 1.4 - 4.4) / 3])


def test_a_round_by_hand():
    fed = chain(FedDBE(kappa=0.5))
    ((record, state),) = fed.run_rounds(1)
    consensus = -1.6 / 3
    # Client 0, memory 0: the output has the error -1, twice that is its gradient -2. Gradients: of
    # the memory -2 · 2 = -4, of the head -2 · 1, of the body -4 + 0.5 (1 - consensus).
    memory = {i: kept["memory"].item() for i, kept in state.client_states.items()}
    assert memory[0] == pytest.approx(0.4)
    body = [1 - 0.1 * (-4 + 0.5 * (1 - consensus))]
    head = [2 + 0.2]
    # Client 1: error 4, gradient 8; memory 16, head 8 · 2, body 16 · 2 + 0.5 (2 - consensus) · 2.
    assert memory[1] == pytest.approx(-1.6)
    body.append(1 - 0.1 * (32 + (2 - consensus)))
    head.append(2 - 1.6)
    model = state.server["model"]
    assert model["0.weight"].item() == pytest.approx((2 * body[0] + body[1]) / 3)
    assert model["1.weight"].item() == pytest.approx((2 * head[0] + head[1]) / 3)
    assert set(model) == {"0.weight", "1.weight"}
    # Down: the model and one number of consensus; up: the model.
    assert (record["downlink_bytes"], record["uplink_bytes"]) == (2 * 12, 2 * 8)


def test_a_client_uses_its_memory_with_the_new_model():
    run = chain(FedDBE()).fit(1, quiet=True)
    body, head = (run.state.server["model"][name].item() for name in ("0.weight", "1.weight"))
    x = torch.tensor([[1.5]])
    for client, kept in run.state.client_states.items():
        expected = head * (body * 1.5 + kept["memory"].item())
        assert run.personal(client)(x).item() == pytest.approx(expected, rel=1e-5)


def test_the_loss_is_that_of_a_network_with_the_memory_in_it():
    """Against PyTorch's own gradients of head(body(x) + memory), with all entries."""
    fed = small(FedDBE(kappa=3.0), "mlp")
    size = fed.initial[fed.layers.head[0]].shape[1]
    payload = {"model": fed.initial, "consensus": {"mean": torch.linspace(-1, 1, size)}}
    local = start_round(fed.engine.setup, ClientTask(0, 0, payload, {}))
    x, y = local.client.inputs()[:20], local.client.targets()[:20]
    memory = torch.randn(size, generator=torch.Generator().manual_seed(0))
    names = [*fed.layers.parameters, MEMORY]
    model = {**fed.initial, MEMORY: memory}
    leaves = {name: model[name].detach().clone().requires_grad_() for name in names}
    fixed = {SHIFT: local.models["model"][SHIFT]}
    mask = torch.tensor([1.0] * 15 + [0] * 5)
    loss = fed.method.loss({**leaves, **fixed}, Batch(x, y, mask), local)
    grads = torch.autograd.grad(loss, list(leaves.values()))

    again = {name: value.detach().clone().requires_grad_() for name, value in leaves.items()}
    features = local.features(again, x[:15])
    weight, bias = (again[name] for name in fed.layers.head)
    outputs = nn.functional.linear(features + again[MEMORY], weight, bias)
    pull = (features.mean(0) - payload["consensus"]["mean"]).square().mean()
    expected = nn.functional.cross_entropy(outputs, y[:15]) + 3.0 / 2 * pull
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    others = torch.autograd.grad(expected, list(again.values()))
    for one, other in zip(grads, others, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_without_pull_and_memory_it_is_fedavg():
    """The memory cannot train where no phase says so."""

    class Forgetful(FedDBE):
        def phases(self, client):
            return (Phase(),)

    dbe, plain = (
        small(method, "digits-bn-cnn").fit(2, quiet=True)
        for method in (Forgetful(kappa=0.0), FedAvg())
    )
    assert close(dbe.state.server["model"], plain.state.server["model"])


def test_class_shares_around_it_are_added():
    method = Calibrated(FedDBE(kappa=0.0))
    fed = small(method, "mlp")
    memory = torch.linspace(-1, 1, fed.initial[fed.layers.head[0]].shape[1])
    consensus = {"mean": torch.zeros_like(memory)}
    task = ClientTask(0, 0, {"model": fed.initial, "consensus": consensus}, {"memory": memory})
    local = start_round(fed.engine.setup, task)
    x, y = local.client.inputs(), local.client.targets()
    weight, bias = (fed.initial[name] for name in fed.layers.head)
    outputs = nn.functional.linear(local.features(fed.initial, x) + memory, weight, bias)
    outputs = outputs + log_shares(y, 10, smooth=1.0)
    model = local.models["model"]
    assert torch.allclose(local.outputs(model, x), outputs, atol=1e-5)
    loss = method.loss(model, Batch(x, y), local).item()
    assert loss == pytest.approx(nn.functional.cross_entropy(outputs, y).item(), rel=1e-5)
    kept = fed.fit(1, quiet=True).state.client_states
    assert all(set(state) == {"memory"} for state in kept.values())


def test_an_entry_that_no_model_has_cannot_train():
    class Wrong(FedDBE):
        def phases(self, client):
            return (Phase(extra=("(other)",)),)

    with pytest.raises(UserError, match=r"unknown entry in Wrong.phases '\(other\)'"):
        small(Wrong(), "mlp").fit(1, quiet=True)


def test_networks_without_a_linear_head_on_features_are_refused():
    for model in (
        "linear",
        nn.Sequential(nn.Flatten(), nn.Linear(64, 8), weight_norm(nn.Linear(8, 10))),
    ):
        with pytest.raises(UserError, match="feddbe needs a model with a linear head and a layer"):
            small(FedDBE(), model)


@pytest.mark.parametrize("method", ["feddbe", "fedcp", "compact+feddbe"])
def test_features_of_tokens_are_refused(method):
    tagger = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3))
    x = torch.arange(240).view(40, 6) % 9
    with pytest.raises(UserError, match=r"as a whole, and this model scores tokens or pixels"):
        Federation(from_arrays(x, x % 3), "iid", clients=2, model=tagger, method=method)
