"""What travels is what was sent."""

import numpy as np
import torch

from fedhelix.data import Split
from fedhelix.engines.local import ClientTask
from fedhelix.engines.ray.parcel import Unpacker, pack, pack_shared
from fedhelix.engines.splits import PackedSplits

CPU = torch.device("cpu")


def test_a_tree_comes_out_as_it_went_in():
    tensors = [
        torch.rand(3, 4).t(),
        torch.tensor(7),
        torch.rand(5).bfloat16(),
        torch.zeros(0, 2),
        torch.tensor([True, False]),
    ]
    task = ClientTask(3, 1, {"a": tensors[0], "b": {"c": tensors[1], "n": 4}}, {"d": tensors[2:]})
    parcel, _ = pack([task, {"empty": {}}, None])
    parcel.content.flags.writeable = False  # as Ray gives it
    [found, empty, none] = Unpacker(CPU).unpack(parcel)
    assert isinstance(found, ClientTask) and found.client == 3 and found.payload["b"]["n"] == 4
    received = [found.payload["a"], found.payload["b"]["c"], *found.client_state["d"]]
    for one, other in zip(received, tensors, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert empty == {"empty": {}} and none is None
    received[0] += 1  # it is its own


def test_shared_tensors_travel_once_and_stay_the_same_object():
    model, own = torch.rand(1000), torch.rand(2)
    content, slices = pack_shared([model, model])
    parcel, _ = pack([{"model": model, "own": own}, {"model": model}], slices)
    assert content.nbytes < 4100 and parcel.content.nbytes < 100
    first, second = Unpacker(CPU, content).unpack(parcel)
    assert first["model"] is second["model"] and torch.equal(first["model"], model)
    assert torch.equal(first["own"], own)


def test_a_packed_split_is_a_view():
    parts = [Split(*(np.arange(k, 2 * k + j) for j in range(3))) for k in range(4)]
    packed = PackedSplits.of(parts)
    assert len(packed) == 4
    for one, other in zip(packed, parts, strict=True):
        assert np.array_equal(one.train, other.train) and np.array_equal(one.test, other.test)
        assert np.array_equal(one.valid, other.valid)
    assert np.shares_memory(packed[3].train, packed.samples)
