import pytest
import torch

from fedhelix.engines.parallel import shared
from fedhelix.engines.parallel.shared import (
    SMALL,
    Unsendable,
    dumps,
    is_plain,
    loads,
    mapped,
    pack,
    share,
    unpack,
)

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


NOT_PLAIN = {
    "of a class of its own": torch.nn.Parameter(torch.rand(2), requires_grad=False),
    "with a gradient": torch.rand(2, requires_grad=True),
    "conjugated": torch.tensor([1 + 2j]).conj(),
    "elsewhere": torch.empty(2, device="meta"),
    **{name: TENSORS[name] for name in ("turned", "expanded", "channels last", "sparse")},
}
if torch.backends.mkldnn.is_available():
    NOT_PLAIN["in a layout of oneDNN"] = torch.rand(2, 2).to_mkldnn()


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_is_more_than_an_array_of_values_is_not_plain(name):
    assert not is_plain(NOT_PLAIN[name])


@pytest.mark.parametrize("name", ["float", "flag", "count", "half", "empty"])
def test_an_array_of_values_is_plain(name):
    assert is_plain(TENSORS[name])


def as_bytes(sent, folder):
    return loads(dumps({"a": [sent]}))["a"][0]


def as_places(sent, folder):
    return loads(dumps({"a": [sent]}, share([sent], folder / "file")))["a"][0]


def as_answer(sent, folder):
    return unpack(pack({"a": [torch.ones(3), sent]}, folder / "file"))["a"][1]


def as_long_answer(sent, folder):
    more = torch.zeros(SMALL)
    return unpack(pack({"a": [more[:1], sent, more]}, folder / "file", [sent]))["a"][1]


@pytest.mark.parametrize("way", [as_bytes, as_places, as_answer, as_long_answer])
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_arrive_as_they_were(name, way, tmp_path):
    sent = TENSORS[name]
    received = way(sent, tmp_path)
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


def test_brief_tensors_of_an_answer_are_views_of_one_block(tmp_path):
    one, two, kept = (torch.rand(SMALL) for _ in range(3))
    message = pack([one, two, kept], tmp_path / "file", [one, two])
    assert len(message) < 2000
    received = unpack(message)
    assert not list(tmp_path.iterdir())
    assert all(map(torch.equal, received, [one, two, kept]))
    first, size = received[0].data_ptr(), one.nbytes
    assert received[1].data_ptr() == first + size
    assert received[2].data_ptr() != first + 2 * size


def test_an_answer_that_no_file_can_hold_travels_in_the_message(tmp_path):
    sent = [torch.rand(SMALL)]
    message = pack(sent, tmp_path / "missing" / "file")
    assert len(message) > sent[0].nbytes
    assert torch.equal(unpack(message)[0], sent[0])


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
