"""The GPU's kernels for the drift of a model, in Triton's interpreter."""

import os
import subprocess
import sys

import pytest

SQUARES = """
import torch
from fedhelix.components.genes.drift import _Squares
from fedhelix.components.genes.fused_squares import FusedSquares, can_fuse

torch.manual_seed(0)
shapes = [(7, 5, 3, 3), (150_000,), (1,), (40, 60)]
here, centre = ([torch.randn(shape) for shape in shapes] for _ in range(2))
masks = [torch.rand(shape).round() for shape in shapes]
here[0], centre[0], masks[0] = (
    part[0].contiguous(memory_format=torch.channels_last) for part in (here, centre, masks)
)
here = [value.requires_grad_() for value in here]
assert not can_fuse(4, (*here, *centre))  # not on a CPU
for tensors in ((*here, *centre), (*here, *centre, *masks)):
    found = []
    for kind in (_Squares, FusedSquares):
        sums = kind.apply(4, *tensors)
        slopes = torch.arange(1.0, 1 + sums.numel()).view_as(sums)
        found.append([sums, *torch.autograd.grad(sums, here, slopes)])
    for wanted, got in zip(*found):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert found[1][1].is_contiguous(memory_format=torch.channels_last)
print("as the plain form")
"""


def test_the_kernels_are_the_plain_form() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", SQUARES],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "as the plain form", done.stderr
