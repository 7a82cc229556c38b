"""Fisher values against a loop over single samples; normalisations and masks by hand."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from fedhelix.components.genes import elastic_mask, fisher, fisher_values, normalise


def network() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4)
    )
    net(torch.randn(8, 1, 4, 4))  # BatchNorm has seen something
    return net.eval()


def data(count: int = 11):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 1, 4, 4, generator=generator), torch.randint(
        0, 4, (count,), generator=generator
    )


def loss_of(net):
    return lambda state, x, y: nn.functional.cross_entropy(
        functional_call(net, state, (x[None],)), y[None]
    )


@pytest.mark.parametrize("at_once", [1, 120 * 4, 2**28])
def test_fisher_equals_a_loop_over_single_samples(at_once, monkeypatch):
    monkeypatch.setattr(fisher, "AT_ONCE", at_once)
    net, (x, y) = network(), data()
    names = [name for name, _ in net.named_parameters()]
    found = fisher_values(loss_of(net), dict(net.state_dict()), names, x, y)
    expected = {name: torch.zeros_like(value) for name, value in net.named_parameters()}
    for one, label in zip(x, y, strict=True):
        net.zero_grad()
        nn.functional.cross_entropy(net(one[None]), label[None]).backward()
        for name, value in net.named_parameters():
            expected[name] += value.grad.square() / len(x)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-8)


def test_fisher_of_a_line_is_the_input_squared_times_the_error_squared():
    """Loss (wx - y)^2 / 2 has the gradient x (wx - y): for w = 1 and (2, 1), (3, 5) that is 2 and
    -6.
    """

    def loss(state, x, y):
        return (state["w"] * x - y).square().sum() / 2

    found = fisher_values(
        loss, {"w": torch.ones(1)}, ["w"], torch.tensor([[2.0], [3.0]]), torch.tensor([1.0, 5.0])
    )
    assert found["w"].tolist() == [(4 + 36) / 2]


FISHER = {"a": torch.tensor([[0.0, 1.0], [3.0, 4.0]]), "b": torch.tensor([8.0, 2.0])}


def test_normalisations_by_hand():
    by_layer = normalise(FISHER, "layer_minmax")
    assert by_layer["a"].tolist() == [[0, 0.25], [0.75, 1]] and by_layer["b"].tolist() == [1, 0]
    by_all = normalise(FISHER, "global_minmax")
    assert by_all["a"].tolist() == [[0, 0.125], [0.375, 0.5]] and by_all["b"].tolist() == [1, 0.25]
    by_rank = normalise(FISHER, "layer_rank")
    assert by_rank["a"].tolist() == [[0.25, 0.5], [0.75, 1]] and by_rank["b"].tolist() == [1, 0.5]
    assert normalise({"a": torch.zeros(3)}, "layer_minmax")["a"].tolist() == [0, 0, 0]


def test_masks_by_hand():
    low = elastic_mask(normalise(FISHER, "layer_rank"), 0.5)
    assert low["a"].tolist() == [[1, 1], [0, 0]] and low["b"].tolist() == [0, 1]
    high = elastic_mask(normalise(FISHER, "layer_rank"), 0.5, "high")
    assert all(torch.equal(high[name], 1 - low[name]) for name in low)


def test_the_range_of_all_leaves_nearly_everything_elastic_and_ranks_leave_half():
    heavy = {"a": torch.rand(1000, generator=torch.Generator().manual_seed(2)) ** 30}
    assert elastic_mask(normalise(heavy, "global_minmax"), 0.5)["a"].mean() > 0.95
    assert elastic_mask(normalise(heavy, "layer_rank"), 0.5)["a"].mean() == 0.5
