"""Defences and attacks where weights are in half precision: as in float32, then rounded once."""

import pytest
import torch
from torch import nn

from fedhelix import Upload
from fedhelix.core.registry import make
from fedhelix.robust.forging import FORGERIES
from helpers import small

DEFENCES = [
    "median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "centred-clipping",
    "norm-bound", "nnm+krum", "bucketing+median",
]  # fmt: skip
HALF = [torch.bfloat16, torch.float16]


class Net(nn.Linear):
    """Rows of pixels in the type of its weights."""

    def __init__(self, dtype: torch.dtype):
        super().__init__(64, 10, dtype=dtype)

    def forward(self, x):
        return super().forward(x.flatten(1).to(self.weight.dtype))


def aggregated(method, dtype, rows, origin=0.0):
    """What a defence makes of models in a type, if all values were `origin`."""
    fed = small(make(method), Net(dtype), cohort=6)
    first = {name: torch.full_like(value, origin) for name, value in fed.initial.items()}
    ctx = fed.context(0, 3)
    server, _ = fed.method.server_init({}, ctx)
    server = {**server, "model": first}
    uploads = [
        Upload(client, 10, {"model": {name: part.to(dtype) for name, part in row.items()}})
        for client, row in enumerate(rows)
    ]
    weights = fed.method.weights(server, uploads, ctx)
    return fed.method.aggregate(server, uploads, weights, ctx)["model"]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("method", DEFENCES)
def test_defences_compute_in_float32_and_give_back_the_type(method, dtype):
    draw = torch.Generator().manual_seed(0)
    shapes = {name: value.shape for name, value in Net(dtype).state_dict().items()}
    rows = [
        {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}
        for _ in range(6)
    ]
    exact = aggregated(
        method, torch.float32, [{n: part.float() for n, part in row.items()} for row in rows]
    )
    ours = aggregated(method, dtype, rows)
    within = torch.finfo(dtype).eps  # halves are rounded up or down
    for name, value in ours.items():
        assert value.dtype == dtype
        torch.testing.assert_close(value, exact[name].to(dtype), rtol=within, atol=within)


@pytest.mark.parametrize("method", DEFENCES)
def test_updates_are_not_rounded(method):
    """From 1 to 2^-9 is a step of 511/512, for which bfloat16 has a bit too few: it would be 1."""
    rows = [{"weight": torch.full((10, 64), 2**-9), "bias": torch.full((10,), 2**-9)}] * 6
    model = aggregated(method, torch.bfloat16, rows, origin=1.0)
    assert model["bias"].tolist() == pytest.approx([2**-9] * 10, rel=0.01)


@pytest.mark.parametrize("attack", FORGERIES)
@pytest.mark.parametrize("method", ["fedavg", "krum"])
def test_attackers_send_the_types_of_the_network(method, attack):
    run = small(method, Net(torch.bfloat16), cohort=6, attack=attack, attack_share=0.4).fit(
        1, quiet=True
    )
    assert run.state.server["model"]["weight"].dtype == torch.bfloat16
