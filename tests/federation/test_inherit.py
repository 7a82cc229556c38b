"""What a run has learnt, inherited by a network of another width."""

import functools

import pytest
import torch

from fedhelix import GeneFL, UserError, load
from fedhelix.models.cnn import digits_bn_cnn
from fedhelix.models.resnet import ResNet, resnet18
from helpers import small

SOME = load("digits").subsample(200, 60)
MINE = SOME.x[:40], SOME.y[:40]


@pytest.fixture(scope="module")
def run():
    return small("gene-fl", "digits-bn-cnn", data=SOME).fit(2, quiet=True)


def test_a_narrow_network_inherits_the_gene_and_nothing_else(run):
    half = digits_bn_cnn((1, 8, 8), 10, width=0.5)
    clients, samples = run.federation.clients, len(run.federation.engine.setup.data.y)
    heir = run.inherit(half, MINE)
    changed = {
        name
        for name, value in heir.state_dict().items()
        if not torch.equal(value, half.state_dict()[name])
    }
    gene = {name for units in run.records[-1]["metadata"]["units"].values() for name in units}
    assert changed and changed <= {f"{unit}.weight" for unit in gene} | {"conv1.weight"}
    assert run.federation.clients == clients  # nobody joined
    assert len(run.federation.engine.setup.data.y) == samples
    small("fedavg", heir, data=SOME).fit(1, quiet=True)  # and it trains


def test_a_network_of_the_same_width_is_the_newcomers(run):
    same = digits_bn_cnn((1, 8, 8), 10)
    heir, number = run.inherit(same, MINE), run.onboard(MINE)
    for name, value in run.state.client_states[number]["model"].items():
        assert torch.equal(heir.state_dict()[name], value)


def test_a_network_with_fewer_or_more_blocks_inherits_those_that_both_have():
    fed = small("fedavg", lambda: ResNet(1, 10, (4,), 2), data=SOME)
    run = fed.fit(1, quiet=True)
    learnt = run.model().state_dict()
    for blocks in (1, 3):
        heir = run.inherit(ResNet(1, 10, (4,), blocks), MINE).state_dict()
        both = heir.keys() & learnt.keys()
        assert len(both) == min(len(heir), len(learnt))
        assert all(torch.equal(heir[name], learnt[name]) for name in both)


def test_what_all_widths_have_learnt_is_inherited_whole():
    run = small("heterofl", "digits-bn-cnn", data=SOME).fit(1, quiet=True)
    heir = run.inherit(digits_bn_cnn((1, 8, 8), 10), MINE)
    torch.testing.assert_close(heir.state_dict(), run.model().state_dict())
    run.inherit(digits_bn_cnn((1, 8, 8), 10, width=0.5), MINE)


def test_a_network_of_another_kind_is_refused(run):
    with pytest.raises(UserError, match=r"inherit takes a network that is made already, .*not str"):
        run.inherit("digits-bn-cnn", MINE)
    with pytest.raises(UserError, match="only the widths of networks may differ"):
        run.inherit(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), MINE)


def test_a_resnet18_of_half_the_width_inherits():
    some = SOME.x[:40, :, ::2, ::2], SOME.y[:40]
    network = functools.partial(resnet18, (1, 4, 4), 10)
    fed = small(
        GeneFL(clusters=1),
        lambda: network(width=0.125),
        data=[some, some],
        partition=None,
        cohort=2,
        batch_size=20,
    )
    half = network(width=0.0625)
    heir = fed.fit(1, quiet=True).inherit(half, some)
    changed = [
        name
        for name, value in heir.state_dict().items()
        if not torch.equal(value, half.state_dict()[name])
    ]
    assert changed and all("conv" in name or "shortcut" in name for name in changed)
    assert heir.layer4[1].conv2.weight.shape == (32, 32, 3, 3)
    assert heir.eval()(torch.zeros(2, 1, 4, 4)).shape == (2, 10)
