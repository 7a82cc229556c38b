import json
import typing

import pytest
import torch
from torch import nn

from fedhelix.engines.kernels import Kernels, applied
from fedhelix.engines.kernels import choice as kernels
from fedhelix.engines.kernels.choice import choose, signature
from helpers import small


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fedhelix" / "kernels.json"


def pretend(monkeypatch, **seconds):
    """Replace the timing of steps by these seconds."""
    monkeypatch.setattr(kernels, "step_seconds", lambda setup, choice: seconds.get(choice, 9.0))


def test_applied_switches_and_restores():
    before, layer = torch.backends.mkldnn.enabled, nn.Conv2d(1, 2, 3)
    with pytest.raises(RuntimeError), applied("native", layer):
        assert not torch.backends.mkldnn.enabled
        with applied("onednn", layer):
            assert torch.backends.mkldnn.enabled
        raise RuntimeError
    assert torch.backends.mkldnn.enabled == before


def test_other_kernels_must_be_clearly_faster(cache, monkeypatch):
    setup = small(model="digits-cnn").engine.setup
    cases = {
        (0.5, 9): "native",
        (0.95, 9): "onednn",
        (2.0, 9): "onednn",
        (0.5, 0.4): "tuned",
        (0.5, 0.48): "native",
    }
    for (native, tuned), expected in cases.items():
        pretend(monkeypatch, onednn=1.0, native=native, tuned=tuned)
        assert choose(setup) == expected
        cache.unlink()


def test_a_choice_is_kept(cache, monkeypatch):
    setup = small(model="digits-cnn").engine.setup
    pretend(monkeypatch, onednn=1.0, native=0.5)
    assert choose(setup) == "native"
    pretend(monkeypatch, onednn=0.5, native=1.0)
    assert choose(setup) == "native"  # remembered
    other = small(model="digits-cnn", batch_size=8).engine.setup
    assert choose(other) == "onednn"  # another batch size, timed
    assert len(json.loads(cache.read_text())) == 2


@pytest.mark.parametrize("content", ["", "[1]", '{"a": 3}', "\xff{"])
def test_an_unreadable_cache_means_time_again(cache, monkeypatch, content):
    cache.parent.mkdir()
    cache.write_text(content, encoding="latin-1")
    pretend(monkeypatch, onednn=1.0, native=0.5)
    setup = small(model="digits-cnn").engine.setup
    assert choose(setup) == "native" and signature(setup) in json.loads(cache.read_text())


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    pretend(monkeypatch, onednn=1.0, native=0.5)
    assert choose(small(model="digits-cnn").engine.setup) == "native"


def test_networks_without_convolutions_are_not_timed(cache, monkeypatch):
    monkeypatch.setattr(kernels, "fastest", lambda setup: pytest.fail("timed"))
    assert choose(small(model="mlp").engine.setup) == "onednn"


def test_timing_leaves_no_trace(cache):
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(144, 10)
    ).eval()
    setup = small(model=model).engine.setup
    threads, mode, state = torch.get_num_threads(), setup.module.training, torch.get_rng_state()
    initial = {name: value.clone() for name, value in setup.initial.items()}
    assert choose(setup) in typing.get_args(Kernels)
    assert (torch.get_num_threads(), setup.module.training) == (threads, mode)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(setup.initial[name], value) for name, value in initial.items())


class Merging(nn.Module):
    """Relies on images that are contiguous in memory."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(144, 10)

    def forward(self, x):
        maps = self.conv(x)
        return self.fc(maps.view(len(x) * 4, 36).view(len(x), 144))


def test_networks_that_tuned_layers_do_not_suit_take_others(cache):
    setup = small(model=Merging(), kernels="native").engine.setup
    with pytest.raises(RuntimeError, match="view"):
        kernels.step_seconds(setup, "tuned")
    assert choose(setup) != "tuned"
