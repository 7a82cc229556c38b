import pytest
import torch

from fedhelix.engines.parallel import shared
from fedhelix.engines.parallel.shared import Unsendable, dumps, loads, mapped, share

TENSORS = {
    "float": torch.tensor([0.0, -0.0, float("inf"), 1e-42]),
    "flag": torch.tensor([[True, False]]),
    "count": torch.tensor(2**60),
    "half": torch.rand(2, 3).bfloat16(),
    "empty": torch.empty(0, 4),
    "turned": torch.rand(3, 2).T,
    "expanded": torch.ones(1).expand(4),
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "parameter": torch.nn.Parameter(torch.rand(2)),
    "sparse": torch.eye(2).to_sparse(),
}


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_arrive_as_they_were(name, placed, tmp_path):
    sent = TENSORS[name]
    places = share([sent], tmp_path / "file") if placed else None
    received = loads(dumps({"a": [sent]}, places))["a"][0]
    assert (
        type(received) is type(sent)
        and received.dtype == sent.dtype
        and received.shape == sent.shape
    )
    assert received.requires_grad == sent.requires_grad
    assert torch.equal(received.to_dense(), sent.to_dense())
    if sent.layout is torch.strided and name != "empty":
        assert received.stride() == sent.stride() and received.data_ptr() % 64 == 0


def test_a_shared_tensor_is_written_once_and_nobody_can_spoil_it(tmp_path):
    one, two = torch.rand(1000), torch.rand(3)
    path = tmp_path / "file"
    places = share([two, one, one, two], path)
    assert path.stat().st_size == 64 + 4000
    message = dumps([one, two], places)
    assert len(message) < 1000
    received = loads(message)
    assert torch.equal(received[0], one) and torch.equal(received[1], two)
    received[0].zero_()
    shared.open_map.cache_clear()
    assert torch.equal(mapped(*places[id(one)]), one)


def test_things_of_the_main_script_are_refused(monkeypatch):
    def loss():
        pass

    monkeypatch.setattr(loss, "__module__", "__main__")
    with pytest.raises(Unsendable, match="loss' is defined in the main script"):
        dumps({"loss": loss})


def test_shared_files_lie_in_memory_only_if_they_fit():
    for size in (0, 10**18):
        with shared.folder_for(size) as folder:
            assert size == 0 or not folder.startswith("/dev/shm")
