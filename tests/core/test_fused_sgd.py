"""The GPU's kernel for SGD, in Triton's interpreter."""

from helpers import interpreted

STEP = """
import torch
from fedhelix.core import fused_sgd
from fedhelix.core.optimizers import SGD, StepSettings

torch.manual_seed(0)
rows, grads, velocity = torch.randn(3, 4, 2_000).unbind()
columns = torch.rand(4, 3).split(1, 1)
for moving in ([velocity], []):
    wanted, before = rows.clone(), [value.clone() for value in moving]
    step = StepSettings(*columns, torch.ones(4, 1))
    assert not fused_sgd.can_fuse([wanted], *columns)  # not on a CPU
    SGD().update([wanted], [grads], [[value] for value in before], step)
    fused_sgd.step(rows, grads, *(moving or [None]), *columns)
    torch.testing.assert_close(rows, wanted)
    for one, two in zip(moving, before):
        torch.testing.assert_close(one, two)
print("fine")
"""


def test_the_kernel_is_the_rule() -> None:
    interpreted(STEP)
