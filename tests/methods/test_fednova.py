"""FedNova: work and steps by hand, and the bias of FedAvg that it removes."""

import pytest
import torch
from torch import nn

from fedhelix import FedAvg, FedNova, Upload, UserError, partition
from fedhelix.data import Dataset
from helpers import close, small


def unequal(method, **more):
    """The losses (w - 1)² and (w - 3)². Client 0 has one sample and client 1 has three, in batches
    of one: one step against three.
    """
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    x, y = torch.ones(4, 1), torch.tensor([1.0, 3, 3, 3])
    owners = torch.tensor([0, 1, 1, 1]).numpy()
    data = Dataset("unequal", x, y, x, y, classes=None, owners=owners)
    usual = {"cohort": 2, "epochs": 1, "batch_size": 1, "lr": 0.1, "momentum": 0}
    return small(method, model, data=data, partition=partition.natural(valid=0), **usual | more)


def test_a_round_by_hand():
    ((record, state),) = unequal(FedNova()).run_rounds(1)
    # Client 0: 0 → 0.2 with work 0.1; client 1: 3 (1 - 0.8³) = 1.464 with work 0.3.
    # Mean work 0.1 / 4 + 0.3 · 3/4 = 0.25; mean update per work 2 / 4 + 4.88 · 3/4 = 4.16.
    assert state.server["model"]["weight"].item() == pytest.approx(1.04)
    assert record["uplink_bytes"] == 2 * (4 + 4)


def test_momentum_counts_in_the_work():
    ((_, state),) = unequal(FedNova(), momentum=0.5).run_rounds(1)
    # Client 1 steps along v = g + v / 2: 0.6; then g = 2 (0.6 - 3) = -4.8, v = -7.8, w = 1.38; then
    # g = -3.24, v = -7.14, w = 2.094. Its coefficients are 1.75, 1.5 and 1: work 0.425.
    # Mean work 0.34375; mean update per work 0.5 + 0.75 · 2.094 / 0.425 = 4.195294.
    assert state.server["model"]["weight"].item() == pytest.approx(0.34375 * 4.195294)


def test_weights_need_not_sum_to_one_and_zero_leaves_out():
    fed = unequal(FedNova())
    ctx, server = fed.context(0, 1), {"model": {"weight": torch.zeros(1, 1)}}
    uploads = [
        Upload(i, 1, {"model": {"weight": torch.full((1, 1), w)}, "work": torch.tensor(far)})
        for i, (w, far) in enumerate([(0.2, 0.1), (1.464, 0.3), (99.0, 1.0)])
    ]
    after = fed.method.aggregate(server, uploads, [1.0, 3.0, 0.0], ctx)
    assert after["model"]["weight"].item() == pytest.approx(1.04)
    after = fed.method.aggregate(server, uploads, [0.0, 0.0, 0.0], ctx)
    assert after["model"]["weight"].item() == 0


def test_with_small_steps_it_ends_at_the_optimum_where_fedavg_does_not():
    # Equal weights, so the optimum is 2; FedAvg's client 1 steps three times as often: 2.5.
    ends = []
    for method in (FedNova(), FedAvg()):
        fed = unequal(method, lr=0.02, client_weights="equal")
        ends.append(fed.fit(80, eval_every=80, quiet=True).state.server["model"]["weight"].item())
    assert ends == pytest.approx([2.0, 2.5], abs=0.03)


def test_with_equal_work_it_is_fedavg():
    nova, plain = (
        small(method, "digits-bn-cnn", partition="iid", batch_size=5000).fit(2, quiet=True)
        for method in (FedNova(), FedAvg())
    )
    assert close(nova.state.server["model"], plain.state.server["model"], tolerance=1e-5)


def test_other_optimisers_are_refused():
    with pytest.raises(UserError, match="needs optimizer = sgd"):
        small(FedNova(), "linear", optimizer="adam").fit(1, quiet=True)
