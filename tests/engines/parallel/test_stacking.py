"""Uploads travel in stacks, and come out as they were."""

import torch

from fedhelix.engines.local import ClientResult
from fedhelix.engines.parallel.stacking import stack_uploads, unstack_uploads


def result(client, upload, client_state=None):
    return ClientResult(client, 1, upload, client_state or {}, 0.5)


def model(width=3):
    """Entries of an odd size, a scalar, a counter, half precision, and nothing."""
    return {
        "weight": torch.randn(width, 5),
        "scale": torch.randn(()),
        "count": torch.tensor([7, 8]),
        "half": torch.randn(3).bfloat16(),
        "none": torch.empty(0, 4),
    }


def assert_same(tree, other):
    assert list(tree) == list(other)
    for name, value in tree.items():
        if isinstance(value, dict):
            assert_same(value, other[name])
        else:
            assert value.dtype == other[name].dtype and torch.equal(value, other[name])


def test_uploads_of_one_shape_share_a_stack_for_each_entry():
    sent = [result(c, {"model": model(3 if c < 4 else 2)}) for c in (0, 5, 1, 2)]
    stacked = stack_uploads(sent)
    assert [group.places for group in stacked.groups] == [[0, 2, 3], [1]]
    assert len(stacked.tensors()) == 10 and not any(one.upload for one in stacked.results)
    received = unstack_uploads(stacked)
    for mine, theirs in zip(received, sent, strict=True):
        assert mine[:2] == theirs[:2]
        assert_same(mine.upload, theirs.upload)


def test_every_tensor_begins_where_the_allocator_would_begin_it():
    received = unstack_uploads(stack_uploads([result(c, {"model": model()}) for c in range(3)]))
    for one in received:
        for name, value in one.upload["model"].items():
            assert value.is_contiguous() and (name == "none" or value.data_ptr() % 64 == 0)


def test_what_cannot_be_stacked_stays_where_it_is():
    both, turned = torch.randn(4), torch.randn(3, 2).T
    sent = [
        result(0, {"model": {"a": both}}, {"own": both}),  # pickle keeps that they are one
        result(1, {"model": {"a": turned}}),
        result(2, {"model": {"a": torch.randn(2)}, "age": 3}),
        result(3, {"model": {"a": torch.randn(2)}, "extra": {}}),
        result(4, {}),
        "a failure",
    ]
    stacked = stack_uploads(sent)
    assert not stacked.groups and stacked.results == sent
    assert unstack_uploads(stacked) == sent
