"""Networks whose weights, and often outputs, are not float32: what methods make of them."""

import numpy as np
import pytest
import torch
from torch import nn

from fedhelix import METHODS, load, load_run
from fedhelix.core.shift import Shifted
from helpers import cheap, small

DIGITS = load("digits").subsample(240, 60)
TYPES = [torch.bfloat16, torch.float16, torch.float64]
# Methods that do something to the outputs, the features or the entries of a network themselves.
METHODS_OF_THEIR_OWN = [
    "helix", "calibrated", "denoised-heads", "fedavg-ft", "ditto", "knn-per", "fedcp", "gpfl",
    "feddbe", "pfedhn", "pfedgpa",
]  # fmt: skip


class Net(nn.Module):
    """Weights of one type, which samples take on."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.hidden, self.head = nn.Linear(64, 16), nn.Linear(16, 10)
        self.to(dtype)

    def forward(self, x):
        hidden = torch.relu(self.hidden(x.flatten(1).to(self.head.weight.dtype)))
        return self.head(hidden)


class Conv(nn.Module):
    """Two convolutions, for methods that prune one of them."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
        self.head = nn.Linear(128, 10)
        self.to(dtype)

    def forward(self, x):
        hidden = torch.relu(self.first(x.to(self.head.weight.dtype)))
        return self.head(torch.relu(self.second(hidden)).flatten(1))


class Mixed(Net):
    """Only the head is in half precision."""

    def __init__(self, dtype: torch.dtype):
        super().__init__(torch.float32)
        self.head.to(dtype)

    def forward(self, x):
        return self.head(torch.relu(self.hidden(x.flatten(1))).to(self.head.weight.dtype))


def used(method, model, folder=None, **more):
    """A short run, and the predictions of its models."""
    settings = {"data": DIGITS, "partition": "dirichlet:1", "epochs": 2} | more
    fed = small(method, model, **settings)
    return fed.fit(2, quiet=True, **({} if folder is None else {"out": folder}))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", METHODS_OF_THEIR_OWN)
def test_every_model_of_a_run_can_be_used(name, dtype, tmp_path):
    run = used(cheap(name), Net(dtype), tmp_path / "run")
    x = DIGITS.x_test[:5]
    outputs = run.predict(x, client=1, raw=True)
    alone = run.personal(1)(run.prepare(x)).detach()
    assert outputs.dtype == np.float32
    assert outputs.tolist() == alone.float().tolist()
    run.export(tmp_path / "model", client=1)
    again = load_run(tmp_path / "run", run.federation)
    assert again.predict(x, client=1, raw=True).tolist() == outputs.tolist()
    kept = [value for model in [run.state.server.get("model", {})] for value in model.values()]
    assert {value.dtype for value in kept} <= {dtype}


@pytest.mark.parametrize("name", ["fedlps", "heterofl", "gene-fl"])
def test_methods_that_cut_networks_keep_their_types(name):
    run = used(cheap(name), Conv(torch.bfloat16))
    assert np.isfinite(run.predict(DIGITS.x_test[:5], client=0, raw=True)).all()
    assert {value.dtype for value in run.personal(0).state_dict().values()} == {torch.bfloat16}


def test_half_precision_in_the_head_alone(tmp_path):
    run = used("helix", Mixed(torch.bfloat16))
    assert run.predict(DIGITS.x_test[:5], client=0).shape == (5,)
    run.export(tmp_path / "model", client=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_shares_of_classes_are_not_rounded(dtype):
    """The personal model gives the network's outputs plus the float32 logarithms of (n + 1) over
    (N + 10), of a client's class counts n.
    """
    run = used(METHODS["calibrated"](), Net(dtype))
    module, split = run.personal(2), run.federation.splits[2]
    counts = np.bincount(DIGITS.y[split.train].numpy(), minlength=10)
    shares = torch.from_numpy(np.log((counts + 1) / (counts.sum() + 10))).float()
    assert isinstance(module, Shifted)
    x = run.prepare(DIGITS.x_test[:5])
    with torch.no_grad():
        plain = module.network(x)
        assert plain.dtype == dtype
        torch.testing.assert_close(module(x), plain.float() + shares, rtol=0, atol=1e-5)


@pytest.mark.parametrize("engine", ["batched", "parallel"])
@pytest.mark.parametrize("name", ["helix", "knn-per", "fedcp"])
def test_engines_take_them_too(engine, name):
    run = used(cheap(name), Net(torch.bfloat16), engine=engine, workers=2)
    assert np.isfinite(run.predict(DIGITS.x_test[:5], client=0, raw=True)).all()


def test_metrics_get_float32():
    seen = set()

    def metric(outputs, targets):
        seen.add(outputs.dtype)
        return float((outputs.numpy().argmax(1) == targets.numpy()).mean())

    run = used("fedavg", Net(torch.bfloat16), metric=metric)
    run.evaluate({"right": metric})
    assert seen == {torch.float32}


def test_the_first_step_has_no_direction_in_half_precision_either():
    """The momentum goes by the angle to the last step, which is zero in the first round."""
    run = used(METHODS["fedavgm"](0.9, adaptive=True), Net(torch.float16), cohort=6)
    model = run.state.server["model"]
    assert all(bool(value.isfinite().all()) for value in model.values())
    assert any(not torch.equal(value, run.federation.initial[n]) for n, value in model.items())
