"""GPFL: valve, guidance and gradients against PyTorch's own layers; what travels."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedhelix import GPFL, Batch, UserError
from fedhelix.engines.local import ClientTask, start_round
from fedhelix.methods.companion import COMPANION
from fedhelix.methods.gpfl import EMBEDDINGS, OWN
from helpers import small


def started(method):
    fed = small(method, "mlp")
    payload = fed.method.download(fed.initialize(1).server, 0, None)
    return fed, start_round(fed.engine.setup, ClientTask(0, 0, payload, {}))


def test_loss_and_gradients_are_those_of_a_network_with_a_valve():
    fed, local = started(GPFL(magnitude=0.3, decay=0.2))
    model, received = local.models["model"], local.payload[COMPANION][EMBEDDINGS]
    x, y = local.client.inputs()[:20], local.client.targets()[:20]
    companion = list(local.payload[COMPANION])
    draw = torch.Generator().manual_seed(1)
    moved = {name: torch.randn(model[name].shape, generator=draw) / 5 for name in companion}
    trained = {name: model[name] for name in fed.layers.parameters} | moved
    leaves = {name: value.clone().requires_grad_() for name, value in trained.items()}
    mask = torch.tensor([1.0] * 15 + [0] * 5)
    loss = fed.method.loss({**model, **leaves}, Batch(x, y, mask), local)
    grads = torch.autograd.grad(loss, list(leaves.values()))

    again = {name: value.detach().clone().requires_grad_() for name, value in leaves.items()}
    features, y = local.features(again, x[:15]), y[:15]
    size = features.shape[1]

    def layer(name, condition):
        weight, bias, scale, offset = (
            again[f"({name} {part})"] for part in ("weight", "bias", "norm weight", "norm bias")
        )
        return F.layer_norm((weight @ condition + bias).relu(), (size,), scale, offset)

    def valve(condition):
        return ((layer("scale", condition) + 1) * features + layer("offset", condition)).relu()

    shares = torch.bincount(local.client.targets(), minlength=10) / local.client.samples
    own, shared = valve((shares[:, None] * received).sum(0)), valve(received.mean(0))
    outputs = F.linear(own, *(again[name] for name in fed.layers.head))
    cosines = nn.CosineSimilarity(dim=-1)(shared[:, None], again[EMBEDDINGS][None])
    expected = F.cross_entropy(outputs, y) + F.cross_entropy(cosines, y)
    expected = expected + 0.3 * (shared - received[y]).norm(dim=1).mean()
    expected = expected + 0.1 * sum(again[name].square().sum() for name in companion)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    others = torch.autograd.grad(expected, list(again.values()))
    for one, other in zip(grads, others, strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    used = fed.method.predict({**model, **leaves}, x[:15], local)
    assert torch.allclose(used, outputs, atol=1e-4)


def test_body_embeddings_and_valve_travel_and_the_head_stays():
    fed = small(GPFL(), "mlp")
    ((record, state),) = fed.run_rounds(1)
    body = sum(fed.initial[name].numel() for name in fed.layers.body)
    outputs, size = fed.initial[fed.layers.head[0]].shape
    companion = outputs * size + 2 * (size * size + 3 * size)
    assert record["uplink_bytes"] == record["downlink_bytes"] == 3 * 4 * (body + companion)
    for kept in state.client_states.values():
        assert set(kept["model"]) == set(fed.layers.head)
    assert OWN not in state.server["model"]


def test_a_network_without_a_linear_head_on_features_is_refused():
    with pytest.raises(UserError, match="gpfl would share no layer of this model"):
        small(GPFL(), "linear")
