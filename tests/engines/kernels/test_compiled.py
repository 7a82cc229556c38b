import copy
import ctypes
import time

import click
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from typer.main import get_command

from fedhelix import UserError
from fedhelix.cli.app import app
from fedhelix.core import compiler
from fedhelix.core.compiler import compile_to
from fedhelix.engines.kernels import applied, compiled
from fedhelix.engines.kernels.compiled import Absorbed, Block
from fedhelix.engines.kernels.library import library
from fedhelix.engines.kernels.normalised import Maps, Norm

pytestmark = pytest.mark.skipif(not compiled.available(), reason="there is no C compiler")


def gradients(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    out = net(x)
    return [out, *torch.autograd.grad(out.sin().sum(), [x, *net.parameters()])]


def assert_equal_to_pytorchs(net: nn.Module, x: torch.Tensor) -> None:
    """Outputs, gradients and buffers agree with float64; ReLU and ties make no jump in `x`."""
    oracle = copy.deepcopy(net).double()
    expected = [*gradients(oracle, x.double()), *oracle.buffers()]
    with applied("compiled", net):
        found = [*gradients(net, x), *net.buffers()]
        with torch.no_grad():
            torch.testing.assert_close(net(x), expected[0].float(), rtol=1e-4, atol=1e-4)
    for one, other in zip(found, expected, strict=True):
        # Errors of a sum go by its largest terms, even where they cancel.
        atol = max(1e-4, 5e-5 * float(other.detach().abs().max())) if other.numel() else 0.0
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=atol)


def is_clear(maps: torch.Tensor, window: int) -> bool:
    """Whether rounding can neither change a sign nor which value of a window is the largest."""
    squares = maps.unfold(2, window, window).unfold(3, window, window).flatten(4)
    best = squares.topk(2).values if squares.shape[-1] > 1 else None
    gap = 1.0 if best is None or not best.numel() else (best[..., 0] - best[..., 1]).min()
    return min(gap, maps.abs().min()) > 1e-5


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
    square=st.booleans(),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    bias=st.booleans(),
    after=st.sampled_from(FOLLOWERS),
    window=st.integers(2, 3),
    seed=st.integers(0, 999),
    data=st.data(),
)
def test_blocks_equal_pytorchs_layers(
    batch, channels, outputs, rows, columns, square, stride, bias, after, window, seed, data
):
    torch.manual_seed(seed)
    columns = rows if square else columns
    padding = data.draw(st.tuples(st.integers(0, rows - 1), st.integers(0, columns - 1)))
    height, width = (
        data.draw(st.integers(size + 2 * step, 14))
        for size, step in zip((rows, columns), stride, strict=True)
    )
    kinds = {"relu": nn.ReLU, "tanh": nn.Tanh, "pool": lambda: nn.MaxPool2d(window)}
    layer = nn.Conv2d(channels, outputs, (rows, columns), stride, padding, bias=bias)
    net = nn.Sequential(layer, *(kinds[kind]() for kind in after))
    x = torch.randn(batch, channels, height, width)
    maps = layer(x)
    assume(not after or is_clear(maps.tanh() if "tanh" in after else maps, window))
    assert_equal_to_pytorchs(net, x)


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(2, 19),
    channels=st.integers(1, 9),
    height=st.integers(3, 11),
    width=st.integers(3, 20),
    momentum=st.sampled_from([0.0, 0.1, 1.0]),
    after=st.sampled_from(FOLLOWERS),
    window=st.integers(2, 3),
    seed=st.integers(0, 999),
)
def test_normalisation_equals_pytorchs(
    batch, channels, height, width, momentum, after, window, seed
):
    torch.manual_seed(seed)
    kinds = {"relu": nn.ReLU, "tanh": nn.Tanh, "pool": lambda: nn.MaxPool2d(window)}
    layer = nn.BatchNorm2d(channels, eps=1e-3, momentum=momentum)
    nn.init.normal_(layer.weight), nn.init.normal_(layer.bias)
    net = nn.Sequential(layer, *(kinds[kind]() for kind in after))
    x = 2 * torch.randn(batch, channels, height, width) + 3
    maps = copy.deepcopy(layer)(x)
    assume(not after or is_clear(maps.tanh() if "tanh" in after else maps, window))
    oracle = copy.deepcopy(net).double()
    expected = gradients(oracle, x.double())
    with applied("compiled", net):
        found = gradients(net, x)
    for one, other in zip([*found, *net.buffers()], [*expected, *oracle.buffers()], strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-4)
    with applied("compiled", net.eval()), torch.no_grad():
        torch.testing.assert_close(net(x).double(), oracle.eval()(x.double()), rtol=1e-4, atol=1e-4)


def test_a_mean_far_from_zero_does_not_blur_the_variance():
    x = (torch.randn(64, 3, 16, 16) + 1000).double()
    layer, oracle = nn.BatchNorm2d(3), nn.BatchNorm2d(3).double()
    expected = oracle(x.float().double())
    with applied("compiled", layer):
        torch.testing.assert_close(layer(x.float()).double(), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(layer.running_var.double(), oracle.running_var, rtol=1e-5, atol=0)


def test_normalisation_that_differs_is_left_to_pytorch():
    for layer in (
        nn.BatchNorm2d(2, affine=False),
        nn.BatchNorm2d(2, track_running_stats=False),
        nn.BatchNorm2d(2, momentum=None),
    ):
        assert kinds(nn.Sequential(layer))[0] is nn.BatchNorm2d
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2))
    block, norm, *rest = kinds(net)
    assert issubclass(block, Block) and not block.relu and issubclass(norm, Norm)
    assert (norm.relu, norm.pool, rest) == (True, 2, [Absorbed, Absorbed])
    with applied("compiled", net):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            net[1](torch.randn(1, 2, 1, 1))
        x = torch.randn(3, 2, 4, 4, requires_grad=True)
        net.eval()[1](x).sum().backward()  # gradients in evaluation mode are PyTorch's
        assert x.grad is not None and net[1].num_batches_tracked == 1  # PyTorch counted the refused


def test_winograds_method_is_about_as_exact_as_a_plain_sum():
    """Errors against float64 in units of the largest value; those of a plain sum are about 1e-6."""
    for kernel in (2, 3, 4, 5):
        layer = nn.Conv2d(64, 64, kernel, padding=1, bias=False)
        x = torch.randn(16, 64, 12, 12)
        expected = gradients(copy.deepcopy(layer).double(), x.double())
        with applied("compiled", layer):
            found = gradients(layer, x)
        for one, other in zip(found, expected, strict=True):
            assert (one - other).abs().max() / other.abs().max() < 1e-4


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
    assert kinds(nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.ReLU()))[1] is Absorbed
    assert kinds(nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.ReLU())) == [nn.Conv2d, nn.ReLU]
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


def test_the_command_line_compiles_while_it_imports(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    begun = []
    monkeypatch.setattr(compiler, "compile_to", lambda path: begun.append(path) or path.touch())
    (tmp_path / "fedhelix").mkdir()
    for arguments in (["run", "--help"], ["methods", "fedavg"], ["run", "fedavg"]):
        assert not begun
        group = get_command(app)
        group.resolve_command(click.Context(group), arguments)
    deadline = time.monotonic() + 10
    while not begun and time.monotonic() < deadline:
        time.sleep(0.01)
    assert begun == [compiler.compiled_path()]
    assert compiler.compiled() == begun[0] and len(begun) == 1  # it is not compiled again


def test_the_c_files_agree_on_the_sizes_of_their_arguments():
    assert library().lanes() in (8, 16)
    assert ctypes.sizeof(compiled.Shape) == 13 * 8 and ctypes.sizeof(Maps) == 6 * 8
