import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedhelix import UserError
from fedhelix.engines.kernels import applied, compiled
from fedhelix.engines.kernels.compiled import Absorbed, compile_to, library

pytestmark = pytest.mark.skipif(not compiled.available(), reason="there is no C compiler")


def gradients(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    out = net(x)
    return [out, *torch.autograd.grad(out.sin().sum(), [x, *net.parameters()])]


def assert_equal_to_pytorchs(net: nn.Module, x: torch.Tensor) -> None:
    x = x.requires_grad_()
    expected = gradients(net, x)
    with applied("compiled", net):
        grads = gradients(net, x)
        with torch.no_grad():
            torch.testing.assert_close(net(x), expected[0], rtol=1e-4, atol=1e-4)
    for one, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


sizes = st.integers(1, 5)
FOLLOWERS = [
    (),
    ("relu",),
    ("pool",),
    ("relu", "pool"),
    ("pool", "relu"),
    ("tanh", "pool"),
    ("relu", "relu"),
]


@settings(max_examples=80, deadline=None)
@given(
    batch=st.integers(1, 19),
    channels=sizes,
    outputs=st.integers(1, 13),
    rows=sizes,
    columns=st.integers(1, 8),
    bias=st.booleans(),
    after=st.sampled_from(FOLLOWERS),
    window=st.integers(2, 3),
    data=st.data(),
)
def test_blocks_equal_pytorchs_layers(
    batch, channels, outputs, rows, columns, bias, after, window, data
):
    padding = data.draw(st.tuples(st.integers(0, rows - 1), st.integers(0, columns - 1)))
    height, width = data.draw(st.integers(rows + 2, 11)), data.draw(st.integers(columns + 2, 12))
    kinds = {"relu": nn.ReLU, "tanh": nn.Tanh, "pool": lambda: nn.MaxPool2d(window)}
    layer = nn.Conv2d(channels, outputs, (rows, columns), padding=padding, bias=bias)
    net = nn.Sequential(layer, *(kinds[kind]() for kind in after))
    assert_equal_to_pytorchs(net, torch.randn(batch, channels, height, width))


def test_the_first_of_equals_gets_the_gradient():
    net = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.MaxPool2d(2))
    nn.init.ones_(net[0].weight)
    assert_equal_to_pytorchs(net, torch.randint(0, 3, (9, 1, 6, 6)).float())


def test_what_is_not_a_number_is_not_hidden():
    net, x = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.MaxPool2d(2)), torch.zeros(1, 1, 2, 2)
    for place in range(4):
        with applied("compiled", net), torch.no_grad():
            bad = x.flatten().index_fill(0, torch.tensor(place), float("nan")).view_as(x)
            assert net(bad).isnan().all()


def kinds(net: nn.Module) -> list[type]:
    with applied("compiled", net):
        return [type(layer) for layer in net]


def test_a_block_absorbs_only_layers_that_are_neither_shared_nor_hooked():
    relu, hooked, free = nn.ReLU(), nn.ReLU(), nn.ReLU()
    hooked.register_forward_hook(lambda *_: None)
    shared = nn.Sequential(nn.Conv2d(1, 2, 3), relu, nn.Flatten(), nn.LazyLinear(2), relu)
    assert kinds(shared)[1] is nn.ReLU
    assert kinds(nn.Sequential(nn.Conv2d(1, 2, 3), hooked))[1] is nn.ReLU
    assert kinds(nn.Sequential(nn.Conv2d(1, 2, 3), free))[1] is Absorbed
    assert kinds(nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2, stride=1)))[1] is nn.MaxPool2d
    assert kinds(nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.ReLU())) == [nn.Conv2d, nn.ReLU]
    assert type(free) is nn.ReLU


def test_what_c_cannot_read_is_left_to_pytorch():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2))
    one, double = torch.randn(1, 6, 6), torch.randn(3, 1, 6, 6).double()
    expected = net(one)
    with applied("compiled", net):
        torch.testing.assert_close(net(one), expected)
        assert net.double()(double).dtype == torch.float64


def test_without_a_compiler_other_kernels_are_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    library.cache_clear()
    try:
        assert not compiled.available()
        with (
            pytest.raises(UserError, match="need a C compiler"),
            applied("compiled", nn.Conv2d(1, 1, 1)),
        ):
            pass
    finally:
        library.cache_clear()


def test_a_compiler_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "false")
    with pytest.raises(OSError, match="compiler failed"):
        compile_to(tmp_path / "block.so")
    assert not list(tmp_path.iterdir())


def test_the_c_file_agrees_on_how_many_samples_lie_side_by_side():
    assert f"#define LANES {compiled.LANES} " in compiled.SOURCE.read_text()
    assert ctypes.sizeof(compiled.Shape) == 11 * 8
