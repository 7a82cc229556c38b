"""pFedHN: one step of SGD on the server for every upload, checked against
PyTorch's own optimiser.
"""

import pytest
import torch

from fedhelix import PFedHN, load
from fedhelix.components.generative import Hyper, Hypernetwork, Layout
from helpers import small

DIGITS = load("digits").subsample(300, 100)
LAYOUT = Layout({"weight": torch.Size([2, 3]), "bias": torch.Size([2])})
CPU = torch.device("cpu")


def test_one_linear_output_for_each_tensor():
    """4 + 4 biased inputs, three hidden layers of 10, and 11 values for each of the 8 outputs."""
    network = Hypernetwork(4, 10, 3, LAYOUT.sizes)
    assert sum(value.numel() for value in network.parameters()) == (4 * 10 + 10) + 3 * 110 + 8 * 11
    assert network(torch.zeros(4)).shape == (8,)


def test_the_embedding_has_a_quarter_of_the_clients_and_one():
    weights = Hyper().first(20, LAYOUT, 0, CPU)["weights"]
    assert weights["embeddings"].shape == (20, 6)
    assert Hyper(embedding=3).first(20, LAYOUT, 0, CPU)["weights"]["embeddings"].shape == (20, 3)


@pytest.mark.parametrize("clip", [50.0, 0.1])
def test_a_step_is_that_of_torch(clip):
    hyper = Hyper(hidden=5, depth=1, clip=clip, server_lr=0.01)
    state = hyper.first(4, LAYOUT, 0, CPU)
    network = Hypernetwork(2, 5, 1, LAYOUT.sizes)
    network.load_state_dict(
        {name: value for name, value in state["weights"].items() if name != "embeddings"}
    )
    table = torch.nn.Parameter(state["weights"]["embeddings"].clone())
    parameters = [table, *network.parameters()]
    oracle = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-3)
    for client in (1, 3, 1):
        moved = torch.randn(8, generator=torch.Generator().manual_seed(client))
        oracle.zero_grad()
        network(table[client]).backward(moved)
        torch.nn.utils.clip_grad_norm_(parameters, clip)
        oracle.step()
        state = hyper.step(state, client, moved, LAYOUT)
    assert torch.allclose(state["weights"]["embeddings"], table, atol=1e-6)
    for name, value in network.state_dict().items():
        assert torch.allclose(state["weights"][name], value, atol=1e-6)


def test_a_share_of_a_step_moves_the_hypernetwork_less_and_the_embedding_as_far():
    hyper = Hyper(hidden=5, depth=1)
    state = hyper.first(4, LAYOUT, 0, CPU)
    whole, part = (
        hyper.step(state, 1, torch.ones(8), LAYOUT, share=share)["weights"] for share in (1.0, 0.25)
    )
    for name, start in state["weights"].items():
        share = 1.0 if name == "embeddings" else 0.25
        assert torch.allclose(part[name] - start, share * (whole[name] - start), atol=1e-6)


def test_a_frozen_step_changes_one_embedding_and_nothing_else():
    hyper = Hyper(hidden=5, depth=1)
    before = hyper.join(hyper.first(4, LAYOUT, 0, CPU), 5)
    before["velocity"]["embeddings"] = torch.ones_like(before["velocity"]["embeddings"])
    after = hyper.step(before, 4, torch.ones(8), LAYOUT, frozen=True)
    old, new = before["weights"], after["weights"]
    assert torch.allclose(old["embeddings"][4], old["embeddings"][:4].mean(0))
    assert torch.equal(old["embeddings"][:4], new["embeddings"][:4])
    assert not torch.equal(old["embeddings"][4], new["embeddings"][4])
    assert torch.equal(before["velocity"]["embeddings"][:4], after["velocity"]["embeddings"][:4])
    assert all(torch.equal(old[name], new[name]) for name in old if name != "embeddings")


def test_it_learns():
    settings = {"partition": "shard:3", "epochs": 5, "batch_size": 16}
    fed = small(PFedHN(), data=DIGITS, clients=4, cohort=4, **settings)
    records = fed.fit(20, quiet=True, eval_every=20).records
    assert records[-1]["personal_accuracy"] > 0.6
    assert "accuracy" not in records[-1]


def test_a_newcomers_embedding_is_learnt_in_turns():
    late = {"newcomers": 1, "newcomers_after": 1, "newcomers_classes": 0.0}
    run = small(PFedHN(newcomer_turns=3), data=DIGITS, clients=4, cohort=4, **late).fit(
        2, quiet=True
    )
    assert len(run.state.server["weights"]["embeddings"]) == 5
    assert run.summary["arrival_bytes"] == 4 * 4 * sum(run.federation.layers.sizes.values())
