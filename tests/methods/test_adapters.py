"""Methods for adapters: what is averaged, what travels, what stays, by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from fedhelix import FedIT, FedSALoRA, FFALoRA, FlexLoRA, Upload, UserError, add_lora
from fedhelix.core.tree import flatten, payload_bytes
from fedhelix.methods.flexlora import factors
from fedhelix.models.lora import LoRALinear
from helpers import small

A, B = "fc.lora_A", "fc.lora_B"


class One(nn.Module):
    """One linear layer, from 64 pixels to 10 classes, with an adapter."""

    def __init__(self, rank=2):
        super().__init__()
        self.fc = LoRALinear(nn.Linear(64, 10), rank)

    def forward(self, x):
        return self.fc(x.flatten(1))


def aggregated(method, models, samples=(1, 3), rank=2):
    """What the server makes of uploads."""
    fed = small(method, lambda: One(rank), clients=len(models), cohort=1)
    ctx = fed.context(0, 1)
    server, _ = method.server_init({}, ctx)
    uploads = [
        Upload(place, size, {"model": model})
        for place, (model, size) in enumerate(zip(models, samples, strict=True))
    ]
    return method.aggregate(server, uploads, method.weights(server, uploads, ctx), ctx)["model"]


def drawn(rank=2, seed=0):
    draw = torch.Generator().manual_seed(seed)
    sizes = {A: (rank, 64), B: (10, rank)}
    return {name: torch.randn(size, generator=draw) for name, size in sizes.items()}


def test_lora_starts_as_the_layer_and_adds_a_scaled_product():
    base = nn.Linear(3, 2)
    layer = LoRALinear(base, rank=2, alpha=6.0)
    x = torch.randn(4, 3)
    assert torch.equal(layer(x), base(x))
    layer.lora_B.data = torch.tensor([[1.0, 0], [2, 0]])
    layer.lora_A.data = torch.tensor([[1.0, 1, 1], [5, 5, 5]])
    added = 6 / 2 * x.sum(1, keepdim=True) * torch.tensor([[1.0, 2]])
    assert torch.allclose(layer(x), base(x) + added, atol=1e-6)


def test_fedit_averages_each_matrix():
    one, other = drawn(seed=1), drawn(seed=2)
    mean = aggregated(FedIT(), [one, other])
    for name in (A, B):
        assert torch.allclose(mean[name], 0.25 * one[name] + 0.75 * other[name], atol=1e-6)


def test_ffa_lora_trains_and_sends_b_alone():
    run = small(FFALoRA(), One, weight_decay=0.1).fit(2, quiet=True)
    assert run.records[0]["uplink_bytes"] == 3 * 4 * 10 * 2  # three clients, B is 10 x 2
    assert not run.state.client_states or not any(run.state.client_states.values())
    assert torch.equal(run.model().fc.lora_A, run.federation.initial[A])
    assert run.model().fc.lora_B.abs().sum() > 0
    # With a common A, the mean of the products is the product of the means.
    one, other = ({**drawn(seed=seed), A: drawn()[A]} for seed in (1, 2))
    mean = aggregated(FFALoRA(), [{B: one[B]}, {B: other[B]}])
    products = 0.25 * one[B] @ one[A] + 0.75 * other[B] @ other[A]
    assert torch.allclose(mean[B] @ one[A], products, atol=1e-5)


def test_fedsa_lora_sends_a_and_keeps_b():
    run = small(FedSALoRA(), One).fit(2, quiet=True)
    assert set(run.state.server["model"]) == {A}
    assert run.records[0]["uplink_bytes"] == 3 * 4 * 2 * 64
    assert run.model() is None
    client, kept = next((i, s) for i, s in run.state.client_states.items() if s)
    assert set(kept["model"]) == {B}
    personal = run.personal(client)
    assert torch.equal(personal.fc.lora_B, kept["model"][B])
    assert torch.equal(personal.fc.lora_A, run.state.server["model"][A])


def test_flexlora_averages_products_and_cuts_them():
    one, other = drawn(seed=1), drawn(seed=2)
    product = 0.25 * one[B] @ one[A] + 0.75 * other[B] @ other[A]
    merged = aggregated(FlexLoRA(), [one, other])
    u, s, v = np.linalg.svd(product.double().numpy())
    best = torch.from_numpy(u[:, :2] * s[:2] @ v[:2]).float()  # Eckart and Young
    assert torch.allclose(merged[B] @ merged[A], best, atol=1e-4)
    rank_two = {B: product @ torch.linalg.pinv(one[A]), A: one[A]}
    exact = aggregated(FlexLoRA(), [rank_two, rank_two])
    assert torch.allclose(exact[B] @ exact[A], rank_two[B] @ one[A], atol=1e-4)
    zero = factors(torch.zeros(10, 4), torch.randn(4, 64), 2)
    assert zero[1].abs().sum() == 0 and zero[0].norm() > 1  # A can still learn


def test_a_client_of_lower_rank_sends_less_and_keeps_its_rank():
    method = FlexLoRA(ranks="1/2")
    fed = small(method, One, clients=2, cohort=2, weight_decay=0.1)
    run = fed.fit(2, quiet=True)
    both = [4 * rank * (64 + 10) for rank in (1, 2)]
    for record in run.records:
        assert record["uplink_bytes"] == record["downlink_bytes"] == sum(both)
    ctx = fed.context(2, 2)
    for client, size in enumerate(both):
        assert payload_bytes(method.download(run.state.server, client, ctx)) == size
    mine = run.personal(0)
    assert mine.fc.lora_A[1].abs().sum() == 0 and mine.fc.lora_B[:, 1].abs().sum() == 0
    trained = fed.engine.run_clients(fed.tasks(run.state, [0], ctx))[0].upload["model"]
    assert trained[A].shape == (1, 64) and trained[B].shape == (10, 1)
    assert run.records[-1]["refused"] == {}


@pytest.mark.parametrize(
    "method", [FedIT(), FFALoRA(), FedSALoRA(), FlexLoRA(), FlexLoRA(ranks="1/2")], ids=str
)
def test_adapters_are_equal_on_the_batched_engine(method):
    one, other = (
        small(method, One, engine=engine).fit(2, quiet=True) for engine in ("serial", "batched")
    )
    for name, value in flatten(one.state.server).items():
        assert torch.allclose(value, flatten(other.state.server)[name], atol=1e-4), name


@pytest.mark.parametrize("method", ["genfed+fedit", "helix", "gene-fl", "finish+fedsa-lora"])
def test_other_methods_work_on_adapters(method):
    run = small(method, "lora-mlp", validation_size=0.1).fit(2, quiet=True)
    frozen = set(run.federation.layers.frozen)
    assert frozen and not frozen & {name.split("/")[-1] for name in flatten(run.state.server)}


@pytest.mark.parametrize(
    ("method", "model", "sentence"),
    [
        (FedIT(), "mlp", "fedit needs a model with LoRA adapters"),
        (FlexLoRA(ranks="1/8"), One, "whole numbers from 1 to 2, .* not '1/8'"),
        (FlexLoRA(ranks="two"), One, "whole numbers from 1 to 2"),
        (FedIT(), lambda: One(20), "rank 20 does not fit a layer of 64 inputs and 10 outputs"),
        (FedIT(), lambda: add_lora(One(), layers=["query"]), "no linear layer of these names"),
    ],
)
def test_what_does_not_fit_gets_one_sentence(method, model, sentence):
    with pytest.raises(UserError, match=sentence):
        small(method, model)
