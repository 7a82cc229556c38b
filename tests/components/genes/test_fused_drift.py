"""The GPU's kernels for squares of what has moved, in Triton's interpreter."""

from helpers import interpreted

KERNELS = """
import torch
from fedhelix.components.genes import fused

torch.manual_seed(0)
shapes = ((3,), (40, 5, 3, 3), (300, 1100))
params, centres = ([torch.randn(shape) for shape in shapes] for _ in range(2))
masks = [(torch.rand(shape) < 0.5).float() for shape in shapes]
for held in (masks, []):
    leaves = [value.double().requires_grad_() for value in params]
    moved = [a - b for a, b in zip(leaves, centres)]
    rows = [moved, [a * b for a, b in zip(moved, held)]] if held else [moved]
    wanted = torch.stack([torch.stack([value.square().sum() for value in row]) for row in rows])
    torch.testing.assert_close(fused.sums(params, centres, held).double(), wanted)
    slopes = torch.randn(len(rows), len(shapes))
    grads = torch.autograd.grad(wanted, leaves, slopes.double())
    for one, two in zip(fused.slopes(params, centres, held, slopes), grads):
        torch.testing.assert_close(one.double(), two, rtol=1e-5, atol=1e-5)
assert not fused.can_fuse(params, centres)  # which are on no GPU
print("fine")
"""


def test_the_kernels_agree_with_pytorch() -> None:
    interpreted(KERNELS)
