"""FedCP: policy, loss and gradients against a network of PyTorch's own layers; heads by hand."""

import math

import pytest
import torch
from torch import nn

from fedhelix import Batch, FedCP, UserError
from fedhelix.engines.local import ClientTask, start_round
from fedhelix.methods.companion import COMPANION
from fedhelix.methods.fedcp import BANDWIDTHS, CONTEXT, discrepancy
from helpers import close, small


def started(method, kept=None):
    fed = small(method, "mlp")
    server = fed.initialize(1).server
    payload = fed.method.download(server, 0, None)
    return fed, start_round(fed.engine.setup, ClientTask(0, 0, payload, kept or {}))


def test_the_discrepancy_by_hand():
    one, other = torch.tensor([[0.0], [0.0], [9.0]]), torch.tensor([[2.0], [2.0], [7.0]])
    mask = torch.tensor([1.0, 1.0, 0.0])  # the last row only fills the batch up
    expected = sum(2 - 2 * math.exp(-4 / (2 * width)) for width in BANDWIDTHS)
    assert discrepancy(one, other, mask).item() == pytest.approx(expected, rel=1e-5)
    assert discrepancy(one, one, None).item() == pytest.approx(0, abs=1e-6)


def test_loss_and_gradients_are_those_of_a_network_with_two_heads():
    head = {"weight": torch.randn(10, 64), "bias": torch.randn(10)}
    fed, local = started(FedCP(strength=0.0))
    names = fed.layers.head
    kept = {"head": {n: v[:, : fed.initial[n].shape[1]] if v.dim() == 2 else v
                     for n, v in zip(names, head.values(), strict=True)}}  # fmt: skip
    fed, local = started(FedCP(strength=0.0), kept)
    model = local.models["model"]
    x, y = local.client.inputs()[:20], local.client.targets()[:20]
    trained = [*fed.layers.parameters, *local.payload[COMPANION]]
    leaves = {name: model[name].detach().clone().requires_grad_() for name in trained}
    mask = torch.tensor([1.0] * 15 + [0] * 5)
    loss = fed.method.loss({**model, **leaves}, Batch(x, y, mask), local)
    grads = torch.autograd.grad(loss, list(leaves.values()))

    again = {name: value.detach().clone().requires_grad_() for name, value in leaves.items()}
    features = local.features(again, x[:15])
    size = features.shape[1]
    context = kept["head"][names[0]].sum(0)
    inputs = features * (context / context.norm())
    weight, bias, scale, offset = (again[name] for name in local.payload[COMPANION])
    hidden = nn.functional.layer_norm(inputs @ weight.T + bias, (2 * size,), scale, offset).relu()
    personal = hidden.view(-1, 2, size).softmax(1)[:, 0]
    own, bias_own = (again[name] for name in names)
    shared, bias_shared = (fed.initial[name] for name in names)
    outputs = (personal * features) @ own.T + bias_own
    outputs = outputs + ((1 - personal) * features) @ shared.T + bias_shared
    expected = nn.functional.cross_entropy(outputs, y[:15])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    others = torch.autograd.grad(expected, list(again.values()))
    for one, other in zip(grads, others, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    with torch.no_grad():
        used = fed.method.predict(model, x[:15], local)
        assert torch.allclose(used, outputs, atol=1e-4)
    assert model[CONTEXT].norm().item() == pytest.approx(1, rel=1e-5)


def test_features_are_drawn_to_the_received_ones():
    fed, local = started(FedCP(strength=2.0))
    first = fed.layers.body[0]
    batch = Batch(local.client.inputs()[:10], local.client.targets()[:10])
    model = local.models["model"]
    moved = {**model, first: model[first] + 0.1}
    gap = discrepancy(local.features(moved, batch.x), local.features(model, batch.x), None)
    with_pull, without = (
        FedCP(strength=strength).loss(moved, batch, local).item() for strength in (2.0, 0.0)
    )
    assert with_pull - without == pytest.approx(2 * gap.item(), rel=1e-4)


def test_of_the_heads_a_client_sends_the_mean():
    fed = small(FedCP(), "mlp", clients=1, cohort=1)
    before = fed.initial
    ((record, state),) = fed.run_rounds(1)
    names = fed.layers.head
    kept = state.client_states[0]["head"]
    sent = {name: state.server["model"][name] for name in names}
    assert close(sent, {name: (kept[name] + before[name]) / 2 for name in names})
    values = sum(value.numel() for value in before.values())
    policy = sum(value.numel() for value in state.server[COMPANION].values())
    assert record["uplink_bytes"] == 4 * (values + policy)
    assert not close(kept, {name: before[name] for name in names})


def test_a_network_without_a_linear_head_on_features_is_refused():
    with pytest.raises(UserError, match="fedcp needs a model with a linear head and a layer"):
        small(FedCP(), "linear")
