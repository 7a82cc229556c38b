"""The C files with the vectors of other processors: as wide as AVX2's and AVX-512's."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedhelix import models
from fedhelix.core.compiler import compile_to
from fedhelix.engines.kernels import applied, compiled, library

pytestmark = pytest.mark.skipif(not compiled.available(), reason="there is no C compiler")


def networks():
    strided = nn.Sequential(nn.Conv2d(3, 7, 3, 2, 1), nn.ReLU(), nn.Conv2d(7, 5, 5, padding=2))
    yield nn.Sequential(*strided, nn.Flatten(), nn.LazyLinear(10))
    yield models.build("bn-cnn", (3, 32, 32), 10)


def gradients(net, x, y):
    return torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))


@pytest.mark.parametrize("width", [4, 8, 16])
def test_all_widths_give_the_same_gradients(tmp_path_factory, monkeypatch, width):
    # Not `tmp_path`: a library whose file is gone may be taken for the next one.
    path = tmp_path_factory.mktemp("kernels") / f"{width}.so"
    compile_to(path, f"-DWIDTH={width}", "-O1")
    wide = library.load(path)
    monkeypatch.setattr(library, "library", lambda: wide)
    monkeypatch.setattr(compiled, "lanes", wide.lanes)
    assert wide.lanes() == max(8, width)
    torch.manual_seed(0)
    for net in networks():
        for batch in (5, 19):
            x, y = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
            net(x)
            expected = gradients(copy.deepcopy(net).double(), x.double(), y)
            with applied("compiled", net):
                found = gradients(net, x, y)
            for one, other in zip(found, expected, strict=True):
                assert (one - other).norm() / other.norm() < 3e-2  # a sign or two may change
