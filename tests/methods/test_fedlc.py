"""FedLC: margins by hand, and where they vanish."""

import math

import pytest
import torch
from torch import nn

from fedhelix import Batch, FedAvg, FedLC, Local, Phase, UserError, partition
from fedhelix.core.shift import SHIFT
from fedhelix.data import Dataset
from fedhelix.engines.local import ClientTask, make_client, start_round
from helpers import same, small, two_quadratics


def sixteen_and_one(method):
    """One client with 16 samples of class 0, one of class 1 and none of class 2."""
    x, y = torch.zeros(17, 2), torch.tensor([0] * 16 + [1])
    data = Dataset("points", x, y, x, y, classes=3, owners=torch.zeros(17).long().numpy())
    model = nn.Linear(2, 3)
    return small(method, model, data=data, partition=partition.natural(valid=0), cohort=1)


def test_margins_by_hand():
    fed = sixteen_and_one(FedLC(tau=0.5))
    client = make_client(fed.engine.setup, ClientTask(0, 0, {}, {}))
    margins = fed.method.loss_context({}, {}, client)["margins"]
    # 16^(-1/4) = 1/2, 1, and 100 for the class that nobody has; half of each.
    assert margins.tolist() == pytest.approx([-0.25, -0.5, -50])


def test_the_loss_by_hand():
    fed = sixteen_and_one(FedLC(tau=0.5))
    local = start_round(fed.engine.setup, ClientTask(0, 0, {"model": fed.initial}, {}))
    params = {"weight": torch.zeros(3, 2), "bias": torch.tensor([1.0, 2, 3])}
    batch = Batch(torch.zeros(2, 2), torch.tensor([0, 1]))
    # Outputs 0.75, 1.5 and -47: log(1 + e^0.75) and log(1 + e^-0.75).
    expected = (math.log1p(math.exp(0.75)) + math.log1p(math.exp(-0.75))) / 2
    assert fed.method.loss(params, batch, local).item() == pytest.approx(expected)


def test_an_absent_class_is_left_alone():
    run = sixteen_and_one(FedLC()).fit(1, quiet=True)
    initial, model = run.federation.initial, run.state.server["model"]
    assert torch.equal(model["bias"][2], initial["bias"][2])
    assert not torch.equal(model["bias"][:2], initial["bias"][:2])


def test_the_margins_are_added_to_the_outputs():
    """Whatever the network: the loss of shifted outputs is asked for."""
    asked = []
    local = Local(
        context={"margins": torch.tensor([-1.0, -2])},
        phase=Phase(),
        layers=small("fedavg", "mlp").layers,
        base_loss=lambda params, batch: asked.append(params) or torch.tensor(0.5),
        outputs=None,
        features=None,
    )
    FedLC().loss({"w": torch.ones(1)}, None, local)
    assert asked[0][SHIFT].tolist() == [-1, -2] and list(asked[0]) == ["w", SHIFT]


def test_without_margins_it_is_fedavg():
    lc, plain = (small(method, "mlp").fit(2, quiet=True) for method in (FedLC(tau=0), FedAvg()))
    assert same(lc.state.server, plain.state.server)


def test_the_model_is_used_without_margins():
    run = small(FedLC(), "mlp").fit(1, quiet=True)
    assert set(run.state.server["model"]) == set(run.federation.layers.names)
    assert same(dict(run.personal(0).state_dict()), run.state.server["model"])


def test_targets_without_classes_are_refused():
    with pytest.raises(UserError, match="fedlc"):
        two_quadratics(FedLC())
