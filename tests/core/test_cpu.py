"""A round is computed in one thread with subnormal numbers as zeros; the caller's mode stays."""

import warnings
from dataclasses import dataclass

import pytest
import torch

from fedhelix import FedAvg, Federation
from fedhelix.core import cpu
from fedhelix.core.cpu import all_threads, flushes_subnormals, one_thread
from fedhelix.engines.kernels import applied
from fedhelix.engines.local import ClientTask
from helpers import same, small

SUPPORTED = torch.set_flush_denormal(True)  # whether the processor can
torch.set_flush_denormal(False)
INSIDE, OUTSIDE = (1, SUPPORTED), (2, False)

SEEN: dict[str, set[tuple[int, bool]]] = {}


def mode():
    return torch.get_num_threads(), flushes_subnormals()


@dataclass(frozen=True)
class Observed(FedAvg):
    """FedAvg that notes how its hooks are computed."""

    fails: bool = False

    def loss(self, params, batch, local):
        SEEN.setdefault("loss", set()).add(mode())
        return super().loss(params, batch, local)

    def upload(self, local):
        SEEN.setdefault("upload", set()).add(mode())
        return super().upload(local)

    def aggregate(self, server, uploads, weights, ctx):
        SEEN.setdefault("aggregate", set()).add(mode())
        if self.fails:
            raise RuntimeError("on purpose")
        return super().aggregate(server, uploads, weights, ctx)


class Watched(torch.nn.Linear):
    """A network that notes how it is computed when it is evaluated."""

    def forward(self, x):
        if not self.training:
            SEEN.setdefault("evaluation", set()).add(mode())
        return super().forward(x.flatten(1))


@pytest.fixture(autouse=True)
def two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    SEEN.clear()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_everything_in_a_round_is_computed_so(engine):
    fed: Federation = small(Observed(), Watched(64, 10), engine=engine)
    SEEN.clear()
    rounds = fed.run_rounds(2)
    for _ in range(2):
        next(rounds)
        assert mode() == OUTSIDE
    assert SEEN.keys() == {"loss", "upload", "aggregate", "evaluation"}
    assert set().union(*SEEN.values()) == {INSIDE}


def test_an_error_leaves_the_mode_as_it_was():
    with pytest.raises(RuntimeError, match="on purpose"):
        small(Observed(fails=True)).fit(1, quiet=True)
    assert SEEN["aggregate"] == {INSIDE} and mode() == OUTSIDE


def test_who_takes_subnormal_numbers_as_zeros_still_does():
    torch.set_flush_denormal(True)
    try:
        with one_thread():
            assert mode() == INSIDE
        assert mode() == (2, SUPPORTED)
    finally:
        torch.set_flush_denormal(False)


def test_large_products_take_the_threads_of_the_caller():
    with one_thread(), one_thread():
        with all_threads():
            assert mode() == OUTSIDE
        assert mode() == INSIDE
    with all_threads():
        assert mode() == OUTSIDE


@pytest.mark.parametrize("engine", ["serial", "batched"])
@pytest.mark.parametrize("able", [True, False])
def test_bfloat16_leaves_onednn_as_it_was(engine, able, monkeypatch):
    if not (able and cpu.multiplies_bfloat16()):
        able = False
        monkeypatch.setattr(cpu, "multiplies_bfloat16", lambda: False)
    seen = set()

    class Noting(torch.nn.Linear):
        def forward(self, x):
            if torch.is_autocast_enabled("cpu"):
                seen.add(torch.backends.mkldnn.enabled)
            return super().forward(x.flatten(1))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fed = small(FedAvg(), Noting(64, 10), engine=engine, precision="bfloat16")
        assert torch.backends.mkldnn.enabled
        fed.fit(1, quiet=True)
    assert torch.backends.mkldnn.enabled and seen == {able}


@pytest.mark.parametrize("kernels", ["onednn", "native"])
def test_an_engine_puts_onednn_back_after_pytorch_has_switched_it_off(kernels):
    with applied(kernels, torch.nn.Identity()):
        assert torch.backends.mkldnn.enabled == (kernels == "onednn")
        torch.backends.mkldnn.enabled = False
    assert torch.backends.mkldnn.enabled
    with one_thread():
        torch.backends.mkldnn.enabled = False
        with all_threads():
            assert torch.backends.mkldnn.enabled
        assert not torch.backends.mkldnn.enabled
    assert torch.backends.mkldnn.enabled


@pytest.mark.skipif(not SUPPORTED, reason="this processor computes with subnormal numbers")
def test_workers_take_them_as_zeros_too():
    serial, parallel = (
        small(model="mlp", engine=name, workers=1) for name in ("serial", "parallel")
    )
    tiny = {name: torch.full_like(value, 1e-40) for name, value in serial.initial.items()}
    task = ClientTask(0, 0, {"model": tiny}, {})
    (one,), (other,) = (fed.engine.run_clients([task]) for fed in (serial, parallel))
    parallel.close()
    assert same(one.upload, other.upload)
    # No gradient reaches the first layer, where a step leaves plain zeros.
    assert not one.upload["model"][serial.layers.parameters[0]].any()
