import re

import pytest
import torch

from fedhelix.engines.local import ClientResult
from fedhelix.federation.uploads import (
    LARGEST,
    Expected,
    finite,
    keep_states,
    validate_uploads,
)

INITIAL = {"w": torch.zeros(3, 2), "n": torch.tensor(0)}


def result(client: int, upload: dict) -> ClientResult:
    return ClientResult(client, 10 * client, upload, {}, 0.5)


def whole(value: float = 1.0) -> dict:
    return {"model": {"w": torch.full((3, 2), value), "n": torch.tensor(4)}}


@pytest.mark.parametrize(
    ("upload", "reason"),
    [
        (whole(float("nan")), "not finite"),
        (whole(float("inf")), "not finite"),
        (
            {"model": {"w": torch.tensor([[float("inf"), -float("inf")], [0, 0], [0, 0]])}},
            "not finite",
        ),
        ({**whole(), "control": {"w": torch.tensor([float("nan")])}}, "not finite"),
        ({"model": {"w": torch.zeros(2, 3)}}, r"has shape \(2, 3\) for 'w' instead of \(3, 2\)"),
        ({"model": {"w": torch.zeros(3, 1)}}, r"has shape \(3, 1\)"),
        ({"model": {"spy": torch.zeros(1)}}, "has an unknown entry 'spy'"),
        ({**whole(), "junk": torch.zeros(8 * LARGEST)}, f"weighs more than {LARGEST} models"),
    ],
)
def test_a_bad_upload_is_refused_with_its_reason(upload, reason):
    uploads, refused = validate_uploads([result(3, whole()), result(1, upload)], INITIAL)
    assert [upload.client for upload in uploads] == [3]
    assert list(refused) == ["1"]
    assert re.search(reason, refused["1"])


def test_an_upload_that_lacks_what_the_method_needs_is_refused():
    part = {"model": {"w": torch.ones(3, 2)}}
    assert validate_uploads([result(1, part)], INITIAL)[1] == {}
    assert validate_uploads([result(1, part), result(2, {})], INITIAL, ["w", "n"])[1] == {
        "1": "lacks the entry 'n'"
    }


def test_good_uploads_arrive_in_the_order_of_the_clients():
    uploads, refused = validate_uploads([result(5, whole(5.0)), result(2, whole(2.0))], INITIAL)
    assert refused == {}
    assert [
        (upload.client, upload.samples, upload.tree["model"]["w"][0, 0].item())
        for upload in uploads
    ] == [
        (2, 20, 2.0),
        (5, 50, 5.0),
    ]


def test_large_numbers_are_numbers():
    assert (
        validate_uploads([result(1, {**whole(3e38), "more": torch.tensor([3e38])})], INITIAL)[1]
        == {}
    )
    exact = {"more": torch.tensor([1e300], dtype=torch.float64)}
    half = {"more": torch.tensor([6e4], dtype=torch.float16)}
    assert finite([whole() | exact, whole() | half, whole() | {"more": exact["more"] * 1e300}]) == [
        True,
        True,
        False,
    ]
    assert validate_uploads([], INITIAL) == ([], {})


def test_a_part_of_the_model_and_nothing_at_all_are_fine():
    expected = Expected(INITIAL)
    assert expected.refusal({"model": {"n": torch.tensor(1)}}) is None
    assert expected.refusal({"model": {}}) is None
    assert expected.refusal({}) is None


def test_sums_that_overflow_or_cancel_do_not_mislead():
    huge = torch.full((8,), 3e38)
    both = torch.tensor([float("inf"), float("-inf")])
    trees = [{"a": huge}, {"a": both}, {"a": -huge}, {"a": huge, "b": both[:1]}, {"a": huge[:1]}]
    assert not huge.sum().isfinite()
    assert finite(trees) == [True, False, True, False, True]


def test_valid_uploads_are_not_looked_at_again():
    fine, spoilt = {"model": {"w": torch.ones(2)}}, {"w": torch.tensor([float("nan")])}
    results = [
        ClientResult(0, 1, fine, {"own": torch.zeros(1)}, 0.0),
        ClientResult(1, 1, fine, spoilt, 0.0),
        ClientResult(2, 1, {"model": spoilt}, {"own": torch.zeros(1)}, 0.0),
    ]
    valid, _ = validate_uploads(results, {"w": torch.zeros(2)})
    assert [upload.client for upload in valid] == [0, 1]
    before = {1: {"own": torch.ones(1)}}
    kept = keep_states(results, before, valid)
    assert kept[0] == results[0].client_state and kept[1] is before[1] and kept[2] == {}
