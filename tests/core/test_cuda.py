"""Functions that a GPU does as recorded programs."""

import pytest
import torch

from fedhelix.core.cuda import WARM_UP, Recorded

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def program(x, y):
    return (x + y).square(), x.sum()[None]


def test_a_cpu_calls_the_function_itself():
    calls = []
    recorded = Recorded(lambda *values: calls.append(values) or program(*values))
    for _ in range(WARM_UP + 2):
        squares, total = recorded(torch.ones(3), torch.full((3,), 2.0))
        assert squares.tolist() == [9, 9, 9] and total.item() == 3
    assert len(calls) == WARM_UP + 2 and not recorded.recordings


@needs_gpu
def test_a_recording_says_what_the_function_says():
    recorded = Recorded(program)
    found = []
    for step in range(WARM_UP + 3):
        for size in (3, 5):  # shapes have recordings of their own
            x, y = torch.arange(size, device="cuda") + step, torch.ones(size, device="cuda")
            found.append((recorded(x, y), program(x, y)))
    assert len(recorded.recordings) == 2
    for values, right in found:  # later calls have not overwritten earlier results
        assert all(torch.equal(a, b) for a, b in zip(values, right, strict=True))
