import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fedhelix import models
from fedhelix.core.errors import UserError
from fedhelix.core.layers import Layers

SHAPES = {
    "resnet18": (3, 8, 8),
    "genfed-cnn": (1, 28, 28),
    "fedpac-cnn": (3, 32, 32),
    "small-cnn": (1, 28, 28),
    "lenet": (3, 32, 32),
    "lenet-sigmoid": (3, 32, 32),
    "w1-cnn": (1, 28, 28),
    "digits-cnn": (1, 8, 8),
    "digits-bn-cnn": (1, 8, 8),
    "mlp": (13,),
    "linear": (13,),
}


def units_of(name, outputs=10, shape=None):
    shape = shape or SHAPES[name]
    return Layers.of(models.build(name, shape, outputs), torch.zeros(2, *shape))


@pytest.fixture(scope="module")
def resnet():
    return units_of("resnet18")


def elements(layers, entries):
    return sum(layers.sizes[entry] for entry in entries)


def mebibytes(layers, entries):
    return round(4 * elements(layers, entries) / 2**20, 3)


def entries(layers):
    return [entry for layer in layers for entry in layer.entries]


def test_payloads_of_the_gene_fl_paper(resnet):
    assert mebibytes(resnet, resnet.names) == 42.662
    assert mebibytes(resnet, [name for name in resnet.names if "bn" not in name]) == 42.602
    assert mebibytes(resnet, resnet.without(resnet.norm)) == 42.589
    assert mebibytes(resnet, entries(stage[-1] for stage in resnet.stages)) == 11.953
    assert mebibytes(resnet, entries(resnet.convs[-4:])) == 31.500
    assert mebibytes(resnet, entries([resnet.stages[1][0], *resnet.convs[-2:]])) == 18.281
    assert (
        mebibytes(
            resnet, max(resnet.split("conv").values(), key=lambda unit: elements(resnet, unit))
        )
        == 9.000
    )


def test_layers_of_the_gene_fl_paper(resnet):
    last = [stage[-1].name for stage in resnet.stages]
    assert last == ["layer1.1.conv2", "layer2.1.conv2", "layer3.1.conv2", "layer4.1.conv2"]
    assert [len(stage) for stage in resnet.stages] == [5, 4, 4, 4]
    assert resnet.stages[1][0].name == "layer2.0.conv1"
    assert [layer.name for layer in resnet.all if layer.pointwise] == [
        f"layer{n}.0.shortcut.0" for n in (2, 3, 4)
    ]
    smallest = sorted(
        elements(resnet, unit) for name, unit in resnet.split("conv").items() if name != "fc"
    )
    assert round(4 * sum(smallest[:15]) / 2**20, 3) == 8.819


def test_roles(resnet):
    assert resnet.head == ("fc.weight", "fc.bias")
    assert set(resnet.body) == set(resnet.names) - set(resnet.head)
    assert elements(resnet, resnet.norm) == 9_600 + 9_600 + 20
    assert elements(resnet, resnet.parameters) == 11_173_962
    assert set(resnet.parameters) | set(resnet.buffers) == set(resnet.names)
    assert len(resnet.split("conv")) == 20 + 1
    assert len(resnet.split("module")) == 20 + 1
    assert resnet.split("module")["layer2.0.shortcut.0"] == (
        "layer2.0.shortcut.0.weight",
        "layer2.0.shortcut.1.weight",
        "layer2.0.shortcut.1.bias",
        "layer2.0.shortcut.1.running_mean",
        "layer2.0.shortcut.1.running_var",
        "layer2.0.shortcut.1.num_batches_tracked",
    )


@pytest.mark.parametrize(
    ("shape", "outputs", "size"), [((3, 32, 32), 10, 75_146), ((1, 28, 28), 62, 110_526)]
)
def test_tail_gives_the_slices_of_pfedgpa(shape, outputs, size):
    layers = units_of("fedpac-cnn", outputs, shape)
    assert elements(layers, layers.tail(2)) == size
    assert layers.tail(1) == layers.head


@pytest.mark.parametrize("count", [0, 4])
def test_tail_longer_than_the_network(count):
    with pytest.raises(UserError, match=f"3 weighted layers, so its last {count}"):
        units_of("mlp").tail(count)


@pytest.mark.parametrize("name", SHAPES)
def test_splits_cover_every_entry_once(name):
    layers = units_of(name)
    for granularity in ("module", "tensor"):
        covered = [entry for unit in layers.split(granularity).values() for entry in unit]
        assert sorted(covered) == sorted(layers.names)
    convs = [entry for unit in layers.split("conv").values() for entry in unit]
    assert sorted(convs) == sorted(layers.without(layers.norm))
    assert sorted(layers.head + layers.body) == sorted(layers.names)
    assert sorted(entries(layers.all)) == sorted(layers.names)


def test_unknown_granularity():
    with pytest.raises(UserError, match="conv, module or tensor, not 'layer'"):
        units_of("linear").split("layer")


def test_without_convolutions_hidden_linear_layers_stand_for_them():
    assert [layer.name for layer in units_of("mlp").convs] == ["fc1", "fc2"]
    assert [len(stage) for stage in units_of("mlp").stages] == [1, 1]
    assert units_of("linear").convs == ()


def test_pointwise_convolutions_count_where_there_are_no_others():
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(8, 3))
    assert [layer.name for layer in Layers.of(net, torch.zeros(2, 1, 2, 2)).convs] == ["0"]


class Backwards(nn.Module):
    """Registers its head first, has a layer that is never called, and a parameter and buffers of
    its own.
    """

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(3)
        self.body = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("kept", torch.zeros(1))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.spare = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.norm(self.body(x))) * self.scale


def test_order_is_that_of_the_forward_pass():
    net = Backwards()
    before = copy.deepcopy(net.state_dict())
    layers = Layers.of(net, torch.rand(2, 4))
    assert [layer.name for layer in layers.all] == ["(model)", "body", "norm", "head", "spare"]
    assert layers.head == ("head.weight", "head.bias")
    assert layers.tail(2) == ("body.weight", "body.bias", "head.weight", "head.bias")
    assert layers.split("module")["(model)"] == ("scale", "kept")
    assert "scratch" not in layers.names and "kept" in layers.buffers
    assert net.training and all(
        torch.equal(before[name], value) for name, value in net.state_dict().items()
    )
    assert not any(part._forward_pre_hooks for part in net.modules())


def test_order_is_that_of_registration_without_an_example():
    assert [layer.name for layer in Layers.of(Backwards()).all] == [
        "(model)",
        "head",
        "norm",
        "body",
        "spare",
    ]


def test_hooks_are_removed_when_the_pass_fails():
    net = Backwards()
    with pytest.raises(UserError, match="does not fit the data"):
        Layers.of(net, torch.rand(2, 5))
    assert not any(part._forward_pre_hooks for part in net.modules())


def test_a_tied_tensor_is_listed_once_under_its_first_name():
    net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    net[1].weight = net[0].weight
    layers = Layers.of(net, torch.zeros(2, dtype=torch.long))
    assert layers.names == layers.parameters == ("0.weight",)
    assert layers.sizes == {"0.weight": 15} and layers.tied


@pytest.mark.parametrize("example", [torch.zeros(2, dtype=torch.long), None])
def test_a_tensor_that_layers_share_belongs_to_the_last_of_them(example):
    net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5))
    net[2].weight = net[0].weight
    layers = Layers.of(net, example)
    assert layers.head == ("0.weight", "2.bias") and layers.body == ("1.weight", "1.bias")
    assert [(one.name, one.kind, one.outputs) for one in layers.weighted] == [
        ("1", "linear", 3),
        ("2", "linear", 5),
    ]
    parts = layers.split("module").values()
    assert sorted(name for part in parts for name in part) == sorted(layers.names)


def test_a_module_used_twice_is_one_layer():
    shared = nn.Linear(4, 4, bias=False)
    layers = Layers.of(nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(4, 2)), torch.zeros(2, 4))
    assert layers.split("module") == {"0": ("0.weight",), "3": ("3.weight", "3.bias")}


def test_frozen_parameters_are_not_trained():
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    net[0].requires_grad_(False)
    layers = Layers.of(net)
    assert layers.names == layers.parameters == ("1.weight", "1.bias")
    assert layers.frozen == ("0.weight", "0.bias") and not layers.buffers


def test_a_parametrised_convolution_is_one_unit():
    net = nn.Sequential(
        parametrizations.weight_norm(nn.Conv2d(1, 2, 3)), nn.Flatten(), nn.Linear(2, 2)
    )
    layers = Layers.of(net, torch.zeros(2, 1, 3, 3))
    assert [layer.kind for layer in layers.all] == ["conv", "linear"]
    assert len(layers.split("module")["0"]) == 3


def test_a_bare_linear_layer_is_all_head():
    layers = Layers.of(nn.Linear(4, 2), torch.zeros(2, 4))
    assert layers.head == layers.names == ("weight", "bias")
    assert layers.body == ()


def test_a_last_layer_that_is_no_linear_is_the_head():
    net = nn.Sequential(
        nn.Linear(4, 4), nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.Flatten()
    )
    assert Layers.of(net, torch.zeros(2, 4)).head == ("2.weight", "2.bias")


def test_networks_without_weights_have_no_head():
    layers = Layers.of(nn.BatchNorm1d(4), torch.zeros(2, 4))
    assert layers.head == () and layers.body == layers.names


def test_attention_bypassing_its_submodules_is_covered():
    net = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    layers = Layers.of(net, torch.zeros(2, 3, 4))
    covered = [entry for unit in layers.split("module").values() for entry in unit]
    assert sorted(covered) == sorted(layers.names)
    assert layers.head == ("linear2.weight", "linear2.bias")


def test_a_linear_head_may_have_to_hold_its_weight_itself():
    plain = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    normed = nn.Sequential(
        nn.Linear(4, 3), nn.ReLU(), parametrizations.weight_norm(nn.Linear(3, 2))
    )
    example = torch.zeros(2, 4)
    for plainly in (True, False):
        Layers.of(plain, example).check_linear_head("x", plain=plainly)
    Layers.of(normed, example).check_linear_head("x", plain=False)
    for refused in (normed, nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 3), nn.PReLU(3))):
        with pytest.raises(UserError, match="x needs a model with a linear head and a layer below"):
            Layers.of(refused, example).check_linear_head("x")
