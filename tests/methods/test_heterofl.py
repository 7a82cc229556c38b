"""Clients of different widths: what they train, what travels, and what is averaged, by hand."""

import pytest
import torch
from torch import nn

from fedhelix import FedAvg, FedRolex, HeteroFL, Upload, UserError, load
from fedhelix.components.subnetworks import cut, mask
from fedhelix.core.tree import payload_bytes
from fedhelix.engines.local import make_client
from fedhelix.methods.heterofl import places
from fedhelix.models.cnn import DIGITS, plain_cnn
from fedhelix.models.resnet import ResNet
from helpers import small, two_quadratics

SOME = load("digits").subsample(300, 100)
HALF = HeteroFL(widths="0.5")


def narrowing(width, activation=nn.ReLU, batch_norm=True):
    """The digits network at a width."""
    return plain_cnn((1, 8, 8), 10, DIGITS, [64], activation, batch_norm, width)


class RootConv(nn.Conv2d):
    """Its weight is √2 times its parameter: SGD moves the weight twice as far."""

    def forward(self, x):
        return self._conv_forward(x, self.weight * 2**0.5, self.bias)


class RootLinear(nn.Linear):
    """The same for a linear layer."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight * 2**0.5, self.bias)


CUT = {"conv2": RootConv, "fc1": RootLinear, "fc2": RootLinear}  # layers with half their inputs


def narrow_model(fed, state):
    """What a client computes with, without the zeros around it."""
    task = fed.tasks(state, [0], fed.context(state.round, 2))[0]
    model = HALF.start(task.payload, {}, make_client(fed.engine.setup, task))["model"]
    inside = places(fed.layers, task.payload["part"])
    assert all(model[name].abs().sum() > 0 for name in inside if "weight" in name)
    for name, axes in inside.items():
        assert (model[name] * (1 - mask(axes, model[name]))).abs().sum() == 0
    return cut(model, inside)


@pytest.mark.parametrize(
    ("settings", "activation"),
    [
        ({"weight_decay": 0.1}, nn.ReLU),
        ({"optimizer": "adam", "lr": 0.01}, nn.ReLU),  # its steps do not grow with the gradient
        ({"lr": 0.5}, nn.Sigmoid),  # of zero it makes a half, which must not count
    ],
)
def test_all_narrow_is_fedavg_of_the_narrow_network(settings, activation):
    norm, root = activation is nn.ReLU, 1 if "optimizer" in settings else 2**0.5
    wide = small(HALF, lambda: narrowing(1.0, activation, norm), data=SOME, **settings)
    net = narrowing(0.5, activation, norm)
    first = narrow_model(wide, wide.initialize(2))
    roots = {f"{layer}.weight": root for layer in CUT}
    net.load_state_dict({name: value / roots.get(name, 1) for name, value in first.items()})
    for layer, kind in CUT.items() if root > 1 else ():
        getattr(net, layer).__class__ = kind
    narrow = small(FedAvg(), net, data=SOME, **settings)
    one, other = wide.fit(2, quiet=True), narrow.fit(2, quiet=True)
    part = narrow_model(wide, one.state)
    for name, value in other.state.server["model"].items():
        off = (part[name] - value * roots.get(name, 1)).abs().float()
        assert off.mean() < 1e-5 and off.max() < (1e-5 if root > 1 else 1e-3), name
    assert not torch.equal(part["conv2.weight"], first["conv2.weight"])
    for key in ("uplink_bytes", "downlink_bytes", "personal_accuracy"):
        assert one.records[-1][key] == pytest.approx(other.records[-1][key])
    outside = one.model().state_dict()["conv2.weight"][8:]
    assert torch.equal(outside, wide.initial["conv2.weight"][8:])  # as it was drawn


def test_all_shallow_is_fedavg_of_the_shallow_network():
    networks = [ResNet(1, 10, (3, 6), blocks) for blocks in (2, 1)]
    names = networks[1].state_dict().keys()
    networks[1].load_state_dict({name: networks[0].state_dict()[name] for name in names})
    whole, shallow = (
        small(method, network, data=SOME.subsample(120, 40))
        for method, network in zip(
            (HeteroFL(widths="1", depths="0.5"), FedAvg()), networks, strict=True
        )
    )
    one, other = whole.fit(2, quiet=True), shallow.fit(2, quiet=True)
    for name, value in other.state.server["model"].items():
        assert torch.allclose(one.state.server["model"][name], value, atol=1e-4), name
    left = one.model().state_dict()["layer1.1.conv1.weight"]
    assert torch.equal(left, whole.initial["layer1.1.conv1.weight"])  # as it was drawn
    counters = 2 * 2 * 8 * 3  # BatchNorms of the blocks, which count batches; for three clients
    assert one.records[0]["uplink_bytes"] == other.records[0]["uplink_bytes"] + counters


def test_widths_and_depths_are_taken_in_turn():
    method = HeteroFL(widths="1/0.5", depths="1/0.5/0.5")
    fed = small(method, lambda: ResNet(1, 10, (4,), 2), data=SOME)
    server = fed.initialize(1).server
    parts = [method.download(server, client, fed.context(0, 1))["part"] for client in range(6)]
    sizes = [(part["width"], part["depth"]) for part in parts]
    assert sizes == [(1, 1), (0.5, 0.5), (1, 0.5), (0.5, 1), (1, 0.5), (0.5, 0.5)]
    assert set(server["statistics"]) == {"1", "0.5", "1x0.5", "0.5x0.5"}


def uploads_of(fed, method, values, ctx):
    """Uploads whose parts are constant."""
    server, _ = method.server_init({}, ctx)
    uploads = []
    for client, value in enumerate(values):
        payload = method.download(server, client, ctx)
        sent = {name: torch.full_like(old, value) for name, old in payload["model"].items()}
        tree = method.decode({"model": sent}, payload, ctx)
        uploads.append(Upload(client, 1 + 2 * client, tree, payload))
    return server, uploads


def test_every_value_is_averaged_over_those_who_have_it():
    method = HeteroFL(widths="1/0.5")
    fed = small(method, "digits-cnn", clients=2, cohort=2)
    ctx = fed.context(0, 1)
    server, uploads = uploads_of(fed, method, (4, 8), ctx)
    after = method.aggregate(server, uploads, method.weights(server, uploads, ctx), ctx)["model"]
    weight = after["conv2.weight"]  # 16 x 8 channels; clients have 1 and 3 samples
    assert torch.allclose(weight[:8, :4], torch.tensor(7.0))
    assert torch.allclose(weight[8:], torch.tensor(4.0))
    assert torch.allclose(weight[:, 4:], torch.tensor(4.0))
    assert torch.allclose(after["fc2.bias"], torch.tensor(7.0))
    server, uploads = uploads_of(fed, method, (4, 8), ctx)
    alone = method.aggregate(server, uploads[1:], [1.0], ctx)["model"]["conv2.weight"]
    assert torch.equal(alone[8:], fed.initial["conv2.weight"][8:])  # nobody had it


def test_fewer_inputs_count_more():
    fed = small(HALF, "digits-cnn", data=SOME)
    first = fed.initialize(1)
    part = narrow_model(fed, first)
    initial = fed.initial
    assert torch.equal(part["conv1.weight"], initial["conv1.weight"][:4])  # of the pixels
    assert torch.equal(part["conv2.weight"], 2 * initial["conv2.weight"][:8, :4])
    assert torch.equal(part["fc2.weight"], 2 * initial["fc2.weight"][:, :32])
    assert torch.equal(part["fc2.bias"], initial["fc2.bias"])
    still = small(HALF, "digits-cnn", data=SOME, epochs=0).fit(1, quiet=True)
    for name, value in still.state.server["model"].items():
        assert torch.allclose(value, initial[name], atol=1e-7), name


@pytest.mark.parametrize(("masked", "kept"), [(True, 5), (False, 0)])
def test_a_masked_loss_leaves_absent_classes_alone(masked, kept):
    low = SOME.y < 5
    halves = [(SOME.x[own], SOME.y[own]) for own in (low, ~low)]
    method = HeteroFL(widths="0.5", masked_loss=masked)
    fed = small(method, "digits-cnn", data=halves, partition=None, cohort=1)
    head = fed.fit(1, quiet=True).model().state_dict()["fc2.bias"]
    assert int((head == fed.initial["fc2.bias"]).sum()) == kept
    if masked:
        with pytest.raises(UserError, match=r"heterofl needs classes.*masked_loss = false"):
            two_quadratics(method)


def test_statistics_are_averaged_among_clients_of_one_width():
    method = HeteroFL(widths="1/0.5")
    fed = small(method, "digits-bn-cnn", clients=4, cohort=4)
    ctx = fed.context(0, 1)
    server, uploads = uploads_of(fed, method, (4, 8, 6, 10), ctx)  # 1, 3, 5 and 7 samples
    after = method.aggregate(server, uploads, method.weights(server, uploads, ctx), ctx)
    whole, half = (after["statistics"][width]["bn1.running_mean"] for width in ("1", "0.5"))
    assert torch.allclose(whole, torch.tensor((4 + 5 * 6) / 6))
    assert torch.allclose(half[:4], torch.tensor((3 * 8 + 7 * 10) / 10))
    assert torch.equal(half[4:], torch.zeros(4))
    assert torch.equal(method.model(after, ctx)["bn1.running_mean"], whole)


def test_fedrolex_rolls_over_all_channels():
    method = FedRolex(widths="0.5")
    fed = small(method, "digits-cnn")
    for round, channels in [(0, [0, 1, 2, 3]), (6, [6, 7, 0, 1])]:
        server = {"model": fed.initial, "statistics": {"0.5": {}}}
        payload = method.download(server, 0, fed.context(round, 9))
        assert torch.equal(payload["model"]["conv1.bias"], fed.initial["conv1.bias"][channels])
    trained = small(method, "digits-cnn", data=SOME, lr=0.5).fit(8, quiet=True)
    moved = trained.model().state_dict()["conv1.bias"] != trained.federation.initial["conv1.bias"]
    assert moved.all()  # eight channels, four at a time


def test_each_width_costs_its_own_bytes_and_newcomers_have_one():
    method = HeteroFL(widths="1/0.5/0.25")
    fed = small(method, "digits-cnn", clients=3, data=SOME)
    run = fed.fit(1, quiet=True)
    sizes = [
        payload_bytes(method.download(run.state.server, client, fed.context(1, 1)))
        for client in range(3)
    ]
    assert run.records[0]["uplink_bytes"] == run.records[0]["downlink_bytes"] == sum(sizes)
    assert sizes[0] == 4 * sum(fed.layers.sizes.values()) > 3 * sizes[1] > 6 * sizes[2]
    number = run.onboard((SOME.x[:50], SOME.y[:50]))
    assert number == 3 and run.personal(3).fc2.out_features == 10
    assert run.personal(1).conv2.weight[8:].abs().sum() == 0


@pytest.mark.parametrize(
    ("method", "model", "sentence"),
    [
        (HeteroFL(widths="1/2"), "digits-cnn", "above 0 and up to 1, .* not '1/2'"),
        (HeteroFL(widths="half"), "digits-cnn", "widths of heterofl are numbers"),
        (FedRolex(widths=""), "digits-cnn", "widths of fedrolex are numbers"),
        (HeteroFL(depths="0"), "digits-cnn", "depths of heterofl are numbers above 0"),
        (HeteroFL(depths="1/0.5"), "digits-cnn", "this network has none to spare; use depths = 1"),
        (HeteroFL(), "lora-mlp", "frozen parameters cannot be cut"),
        ("genfed+heterofl", "digits-cnn", "heterofl"),
    ],
)
def test_what_cannot_work_gets_one_sentence(method, model, sentence):
    with pytest.raises(UserError, match=sentence):
        small(method, model, validation_size=0.1)
