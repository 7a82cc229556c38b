"""Slots that are computed apart keep kernels channel by channel, and give them back as usual."""

from dataclasses import dataclass

from fedhelix import FedAvg, Federation, Phase, load, partition
from fedhelix.core.tree import flatten
from fedhelix.engines.batched.scheduler import Scheduler


@dataclass(frozen=True)
class HeadAlone(FedAvg):
    """Clients train the head of a model whose body is fixed."""

    def phases(self, client):
        return [Phase(part="head")]


def test_frozen_kernels_come_back_contiguous(monkeypatch):
    monkeypatch.setattr(Scheduler, "_mode", lambda *_: "apart")
    cut = partition.iid(clients=3)
    fed = Federation(
        load("digits"), cut, method=HeadAlone(), model="digits-cnn", engine="batched", seed=0
    )
    uploads = []
    monkeypatch.setattr(
        HeadAlone, "upload", lambda self, local: uploads.append(local) or FedAvg.upload(self, local)
    )
    fed.fit(1, quiet=True)
    assert len(uploads) == 3
    for local in uploads:
        values = flatten(local.models).values()
        assert any(value.dim() == 4 for value in values)
        assert all(value.is_contiguous() for value in values)
