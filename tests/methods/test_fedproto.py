"""FedProto: prototypes, their means and the distance to them by hand."""

import pytest
import torch
from torch import nn

from fedhelix import Batch, FedProto, Local, LocalOnly, Phase, Upload, UserError, load, partition
from fedhelix.data import Dataset
from fedhelix.engines.local import ClientTask, make_client
from helpers import same, small, two_quadratics

X = torch.tensor([[1.0, 0], [3, 0], [0, 2], [5, 6], [0, 4]])
Y = torch.tensor([0, 0, 1, 0, 1])
FEW = load("digits").subsample(150, 50)


def features_are_inputs(**more):
    """Three classes, of which nobody has the last; client 0 has three samples, client 1 has two.

    The layer below the head is the identity, and nobody trains.
    """
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 3))
    nn.init.eye_(model[0].weight)
    owners = torch.tensor([0, 0, 0, 1, 1]).numpy()
    data = Dataset("points", X, Y, X, Y, classes=3, owners=owners)
    return small(
        FedProto(),
        model,
        data=data,
        partition=partition.natural(valid=0),
        cohort=2,
        epochs=0,
        **more,
    )


def listed(prototypes) -> dict:
    return {label: value.tolist() for label, value in prototypes.items()}


def test_prototypes_and_their_weighted_mean():
    records, states = zip(*features_are_inputs().run_rounds(2), strict=True)
    # Class 0: client 0 has the mean (2, 0) of two samples, client 1 has (5, 6): (3, 2).
    # Class 1: (0, 2) and (0, 4), one sample each. Nobody has class 2.
    found = listed(states[0].server["prototypes"])
    assert found == {"0": pytest.approx([3, 2]), "1": pytest.approx([0, 3])}
    # Up: two prototypes of two numbers and three shares, from both. Down: nothing, then two
    # prototypes for both.
    assert [record["uplink_bytes"] for record in records] == [2 * 4 * (4 + 3)] * 2
    assert [record["downlink_bytes"] for record in records] == [0, 2 * 4 * 4]
    assert states[0].server["model"] == {} and "accuracy" not in records[0]


def upload(client, samples, shares, **prototypes):
    tree = {"prototypes": {label[1:]: torch.tensor(row) for label, row in prototypes.items()}}
    return Upload(client, samples, {**tree, "shares": torch.tensor(shares)})


def test_a_class_that_nobody_uploads_keeps_its_prototype():
    fed = features_are_inputs()
    server = {"model": {}, "prototypes": {"1": torch.tensor([1.0, 1]), "2": torch.tensor([9.0, 9])}}
    uploads = [
        upload(0, 8, [0.25, 0.75, 0.0], c0=[2.0, 0], c1=[4.0, 4]),
        upload(1, 2, [0.0, 1.0, 0.0], c1=[0.0, 0]),
    ]
    ctx = fed.context(0, 1)
    weights = fed.method.weights(server, uploads, ctx)
    # Class 1: six samples at 4, two at 0.
    means = fed.method.aggregate(server, uploads, weights, ctx)["prototypes"]
    assert listed(means) == {"0": [2, 0], "1": pytest.approx([3, 3]), "2": [9, 9]}


def test_an_upload_of_weight_zero_has_no_part():
    fed = features_are_inputs()
    uploads = [
        upload(0, 5, [1.0, 0.0, 0.0], c0=[2.0, 0]),
        upload(1, 5, [0.5, 0.5, 0.0], c0=[8.0, 8], c1=[7.0, 7]),
    ]
    means = fed.method.aggregate({"model": {}}, uploads, [1.0, 0.0], fed.context(0, 1))
    assert listed(means["prototypes"]) == {"0": [2, 0]}


@pytest.mark.parametrize(("mask", "expected"), [(None, 3.5), ([1.0, 0, 1], 3.0)])
def test_the_distance_by_hand(mask, expected):
    # Squared distances per feature: (1 + 4) / 2 to (0, 0), (0 + 4) / 2 to (3, 2); class 2 has no
    # prototype. Means: 4.5 / 3, and 2.5 / 2 without the second sample. Twice that, plus 0.5.
    prototypes = {"0": torch.zeros(2), "1": torch.tensor([3.0, 2])}
    fed = features_are_inputs()
    client = make_client(fed.engine.setup, ClientTask(0, 0, {}, {}))
    local = Local(
        context=fed.method.loss_context({"prototypes": prototypes}, {}, client),
        phase=Phase(),
        layers=fed.layers,
        base_loss=lambda params, batch: torch.tensor(0.5),
        outputs=None,
        features=lambda params, x: x,
    )
    x, y = torch.tensor([[1.0, 2], [3, 4], [5, 6]]), torch.tensor([0, 1, 2])
    batch = Batch(x, y, None if mask is None else torch.tensor(mask))
    assert FedProto(strength=2.0).loss(fed.initial, batch, local).item() == pytest.approx(expected)


@pytest.mark.parametrize("model", ["mlp", "digits-bn-cnn"])
def test_without_the_distance_it_is_local_training(model):
    """Also in BatchNorm's statistics, although features need a pass of their own."""
    methods = FedProto(strength=0), LocalOnly(follow_sampling=True)
    proto, alone = (small(method, model).fit(2, quiet=True) for method in methods)
    assert proto.state.client_states.keys() == alone.state.client_states.keys()
    for client, kept in proto.state.client_states.items():
        assert same(kept, alone.state.client_states[client])


def test_the_pull_brings_the_clients_features_together():
    spread = []
    for strength in (0.0, 3.0):
        run = small(FedProto(strength=strength), "mlp", cohort=6, epochs=3).fit(
            5, quiet=True, eval_every=5
        )
        setup = run.federation.engine.setup
        prototypes = run.state.server["prototypes"]
        gaps = []
        for client, kept in run.state.client_states.items():
            view = make_client(setup, ClientTask(client, 0, {}, {}))
            rows, y = view.features(kept["model"]), view.targets()
            gaps += [
                (row - prototypes[str(int(c))]).square().mean()
                for row, c in zip(rows, y, strict=True)
            ]
        spread.append(torch.stack(gaps).mean().item())
    assert spread[1] < spread[0] / 2


def test_prototypes_are_exact_in_half_precision_too():
    run = small(FedProto(), "mlp", data=FEW, precision="bfloat16").fit(2, quiet=True)
    assert {value.dtype for value in run.state.server["prototypes"].values()} == {torch.float32}


def test_models_without_features_and_targets_without_classes_are_refused():
    with pytest.raises(UserError, match="fedproto needs a model with a linear head and a layer"):
        small(FedProto(), "linear")
    deep = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1))
    with pytest.raises(UserError, match="fedproto needs classes"):
        data = two_quadratics(LocalOnly()).data
        natural = partition.natural(valid=0)
        small(FedProto(), deep, data=data, partition=natural, cohort=2).fit(1, quiet=True)
