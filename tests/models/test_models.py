import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

from fedhelix import models
from fedhelix.core.errors import UserError
from fedhelix.runs.spec import make_spec

GREY, COLOUR, TINY, ROW = (1, 28, 28), (3, 32, 32), (1, 8, 8), (13,)


def parameters(module):
    return sum(value.numel() for value in module.parameters())


def values(module):
    return sum(value.numel() for value in module.state_dict().values())


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "count"),
    [
        ("resnet18", COLOUR, 10, 11_173_962),
        ("resnet8", COLOUR, 10, 78_042),
        ("resnet18", COLOUR, 100, 11_220_132),
        ("genfed-cnn", GREY, 10, 211_690),
        ("genfed-cnn", COLOUR, 10, 551_786),
        ("fedpac-cnn", COLOUR, 10, 107_690),
        ("fedpac-cnn", GREY, 62, 123_774),
        ("fedpac-cnn", GREY, 10, 117_066),
        ("small-cnn", GREY, 10, 20_522),
        ("lenet", COLOUR, 10, 62_006),
        ("lenet-sigmoid", COLOUR, 100, 85_036),
        ("w1-cnn", GREY, 10, 21_840),
        ("digits-cnn", TINY, 10, 6_058),
        ("digits-bn-cnn", TINY, 10, 6_082),
        ("mlp", ROW, 3, 10_243),
        ("linear", ROW, 3, 42),
    ],
)
def test_parameter_counts(name, shape, outputs, count):
    module = models.build(name, shape, outputs)
    assert parameters(module) == count
    models.check_fits(module, torch.zeros(2, *shape), outputs)


@pytest.mark.parametrize(("outputs", "count"), [(10, 11_183_582), (100, 11_229_752)])
def test_resnet_state(outputs, count):
    assert values(models.build("resnet18", COLOUR, outputs)) == count


def test_resnet_names():
    names = models.build("resnet18", COLOUR, 10).state_dict()
    expected = (
        "conv1.weight",
        "bn1.running_mean",
        "layer1.0.conv1.weight",
        "layer1.0.bn1.weight",
        "fc.bias",
    )
    assert {*expected, "layer2.0.shortcut.0.weight", "layer2.0.shortcut.1.running_var"} <= set(
        names
    )


@pytest.mark.parametrize(
    ("data_name", "shape", "same_as"),
    [
        ("digits", TINY, "digits-cnn"),
        ("mnist", GREY, "small-cnn"),
        ("fashion-mnist", GREY, "small-cnn"),
        ("fashion_mnist", GREY, "small-cnn"),
        ("emnist", GREY, "fedpac-cnn"),
        ("svhn", COLOUR, "fedpac-cnn"),
        ("cifar10", COLOUR, "fedpac-cnn"),
        ("cifar100", COLOUR, "resnet18"),
        ("digits", (64,), "mlp"),
        ("synthetic-text", (16,), "transformer"),
        (None, (7, 5), "mlp"),
        (None, (1, 2, 2), "mlp"),
        (None, (3, 40, 1), "mlp"),  # a series of three channels
        (None, (3, 6, 4), "digits-cnn"),
        (None, (3, 12, 12), "digits-cnn"),
        (None, (3, 64, 48), "fedpac-cnn"),
        (None, GREY, "small-cnn"),
    ],
)
def test_auto(data_name, shape, same_as):
    chosen = models.build("auto", shape, 5, data_name)
    assert [*chosen.state_dict()] == [*models.build(same_as, shape, 5).state_dict()]
    assert parameters(chosen) == parameters(models.build(same_as, shape, 5))


def test_cnn_suits_the_size():
    for shape, same_as in ((TINY, "digits-cnn"), (GREY, "small-cnn"), (COLOUR, "fedpac-cnn")):
        assert parameters(models.build("cnn", shape, 10)) == parameters(
            models.build(same_as, shape, 10)
        )


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(1)
    first = models.build("small-cnn", GREY, 10, seed=3).state_dict()
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(1)), "building must not touch the global generator"
    again = models.build("small_cnn", GREY, 10, seed=3).state_dict()
    other = models.build("small-cnn", GREY, 10, seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc1.weight"], other["fc1.weight"])


def test_a_module_is_copied_with_its_weights():
    mine = nn.Linear(4, 2)
    before = copy.deepcopy(mine.state_dict())
    used = models.build(mine, (4,), 2)
    assert torch.equal(used.weight, mine.weight)
    nn.init.zeros_(used.weight)
    assert torch.equal(mine.weight, before["weight"])


def test_callables_get_what_they_ask_for_and_are_seeded():
    def by_shape(outputs, shape, bias=False):
        return nn.Linear(*shape, outputs, bias)

    assert models.build(by_shape, (4,), 2).weight.shape == (2, 4)
    first, again = (models.build(lambda: nn.Linear(4, 2), (4,), 2, seed=5) for _ in range(2))
    assert torch.equal(first.weight, again.weight)


@pytest.mark.parametrize(
    ("model", "shape", "sentence"),
    [
        (
            "fedpac-cnn",
            TINY,
            r"model 'fedpac-cnn' does not fit samples of shape \(1, 8, 8\): nothing is left",
        ),
        ("cnn", ROW, "needs images"),
        *(
            (model, (16, 16, channels), r"channels last\. Channels come first: give .* N×C×H×W")
            for model in ("auto", "cnn")
            for channels in (1, 3, 4)
        ),
        ("lenet", (16, 16, 3), "Channels come first: give images as N×C×H×W"),
        ("resnet18", ROW, "needs images"),
        ("resnet19", COLOUR, "did you mean 'resnet18'"),
        ("mlp", (), "at least one input"),
        (7, TINY, "a name, a torch.nn.Module or a function"),
        (lambda: 7, TINY, "must return a torch.nn.Module, not int"),
        (nn.Linear, TINY, "Linear cannot be called with shape and outputs alone"),
        (nn.LazyLinear(2), TINY, "lazy"),
        (nn.Flatten(), TINY, "no trainable parameters"),
    ],
)
def test_bad_models_get_a_sentence(model, shape, sentence):
    with pytest.raises(UserError, match=sentence):
        models.build(model, shape, 10)


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (nn.Linear(4, 3), r"output does not fit the targets: .* \(2, 3\), and \(2, 5\) is needed"),
        (
            nn.Linear(9, 5),
            "the model does not fit the data: a batch of shape \\(2, 4\\) fails with",
        ),
        (nn.LSTM(4, 5), "must return one tensor, or an object with .* not tuple"),
    ],
)
def test_check_fits_refuses(module, sentence):
    with pytest.raises(UserError, match=sentence):
        models.check_fits(module, torch.zeros(2, 4), 5)


def test_check_fits_leaves_the_module_as_it_was():
    module = models.build("digits-bn-cnn", TINY, 10).train()
    module.bn2.eval()
    before = copy.deepcopy(module.state_dict())
    models.check_fits(module, torch.rand(2, *TINY))
    assert module.training and module.bn1.training and not module.bn2.training
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_every_name_is_described():
    assert tuple(models.describe()) == models.names()
    assert all(text.endswith(".") for text in models.describe().values())


IMAGE_SHAPES = [
    ("digits-cnn", TINY),
    ("digits-bn-cnn", TINY),
    ("small-cnn", GREY),
    ("fedpac-cnn", GREY),
    ("fedpac-cnn", COLOUR),
    ("genfed-cnn", GREY),
    ("w1-cnn", GREY),
    ("lenet", COLOUR),
    ("lenet-sigmoid", COLOUR),
    ("resnet18", (3, 8, 8)),
]


@pytest.mark.parametrize(("name", "shape"), IMAGE_SHAPES)
def test_stacked_networks_equal_single_ones(name, shape):
    nets = [models.build(name, shape, 4, seed=seed).eval() for seed in range(2)]
    batches = torch.randn(2, 3, *shape, generator=torch.Generator().manual_seed(0))
    stacked = vmap(lambda weights, buffers, x: functional_call(nets[0], (weights, buffers), (x,)))
    with torch.no_grad():
        together = stacked(*stack_module_state(nets), batches)
        alone = torch.stack([net(batch) for net, batch in zip(nets, batches, strict=True)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["digits-cnn", "digits-bn-cnn"])
def test_stacked_training_updates_gradients_and_statistics_per_client(name):
    nets = [models.build(name, TINY, 4, seed=seed).train() for seed in range(2)]
    batches = torch.randn(2, 5, *TINY, generator=torch.Generator().manual_seed(0))
    weights, buffers = stack_module_state(nets)

    def loss(weights, buffers, x):
        return functional_call(nets[0], (weights, buffers), (x,)).square().mean()

    gradients = vmap(grad(loss))(weights, buffers, batches)
    for client, net in enumerate(nets):
        net(batches[client]).square().mean().backward()
        for key, parameter in net.named_parameters():
            torch.testing.assert_close(gradients[key][client], parameter.grad, rtol=1e-4, atol=1e-5)
        for key, value in net.named_buffers():
            torch.testing.assert_close(buffers[key][client], value)


def test_a_network_of_a_file_is_named_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mynet.py").write_text(
        "from torch import nn\n\n\ndef net(shape, outputs):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1], outputs))\n"
    )
    module = models.build("mynet.py:net", (3, 4), 5)
    assert [tuple(p.shape) for p in module.parameters()] == [(5, 12), (5,)]
    spec = make_spec("fedavg", {"model": "mynet.py:net"})
    monkeypatch.chdir("/")  # a run goes on from any folder
    assert Path(spec.config.model.partition(":")[0]).is_file()
    for text, sentence in (
        ("mynet.py", "name the network"),
        ("mynet.py:Net", "has no network 'Net'; did you mean 'net'?"),
        ("mynet.py:Other", "has no network 'Other'; there are: net"),
        ("mynet.py:nn", "is no class or function"),
        ("absent.py:net", "there is no file"),
    ):
        with pytest.raises(UserError, match=sentence):
            models.build(str(tmp_path / text), (3, 4), 5)
