"""A message carries a header and tensors, and nothing in it is ever executed."""

import json
import pickle
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhelix.core.errors import UserError
from fedhelix.core.tree import encode
from fedhelix.deploy import messages
from helpers import same

INITIAL = {"weight": torch.zeros(3, 2), "count": torch.zeros((), dtype=torch.int64)}


def test_a_message_arrives_as_it_was_sent():
    body = {
        "model": {"b": torch.arange(6.0).reshape(2, 3), "a": torch.tensor(3)},
        "rho": 0.5,
        "none": {},
    }
    header, received = messages.read(
        messages.write({"kind": "train", "round": 3, "loss": float("nan")}, body)
    )
    assert header["kind"] == "train" and header["round"] == 3 and header["loss"] != header["loss"]
    assert same(received, body) and list(received["model"]) == ["b", "a"]


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('executed')",)


def header_only(entries):
    """A safetensors file without tensors, whose header says what one likes."""
    text = json.dumps({"__metadata__": {"entries": json.dumps(entries)}}).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        pickle.dumps(Bomb()),
        header_only([1, 2]),
        header_only({"header": "{}", "body": 3}),
        header_only({"header": "[]"}),
        header_only({"header": 3}),
        header_only({"a": 1, "a/b": 2, "header": "{}"}),
        header_only({"header": "{}", "body/" + "x/" * 5000 + "y": 1}),
        struct.pack("<Q", 1 << 60) + b"{}",
    ],
)
def test_what_is_no_message_is_refused_in_one_sentence(content):
    with pytest.raises(UserError, match="is no message"):
        messages.read(content)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 400))
def test_damaged_messages_never_do_anything_else(noise, place):
    content = bytearray(messages.write({"kind": "train"}, {"model": {"weight": torch.ones(3, 2)}}))
    content[place : place + len(noise)] = noise
    try:
        message = messages.read(bytes(content))
        messages.check_tree(message.body, INITIAL)
    except UserError:
        pass


def test_size_is_checked_before_anything_is_read():
    limit = messages.max_message_bytes({"weight": torch.zeros(1000)})
    assert limit == 10 * 4000 + messages.HEADER_BYTES
    with pytest.raises(UserError, match=r"has 7 bytes, and 6 are allowed"):
        messages.read(b"garbage", 6)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"model": {"weight": "text"}}, "holds a str at 'model/weight'"),
        ({"model": 1.0}, "something else than a model"),
        ({"model": {"weight": 1.0}}, "holds no tensor for 'weight'"),
        (
            {"model": {"weight": torch.zeros(3, 2).half()}},
            "has torch.float16 for 'weight' instead of torch.float32",
        ),
    ],
)
def test_trees_that_no_method_sends_are_refused(body, said):
    with pytest.raises(UserError, match=said):
        messages.check_tree(messages.read(encode({"header": "{}", "body": body})).body, INITIAL)


def test_numbers_and_expectations():
    header = {"round": 2, "samples": 10, "flag": True, "loss": float("nan")}
    messages.expect(header, round=2)
    with pytest.raises(UserError, match="is about round 2 instead of 3"):
        messages.expect(header, round=3)
    assert messages.number(header, "samples", low=1) == 10
    assert messages.number(header, "loss") != messages.number(header, "loss")
    for key, low in (("flag", 0), ("nothing", 0), ("samples", 11)):
        with pytest.raises(UserError, match=f"for {key}, which must be a number"):
            messages.number(header, key, low)


def test_names():
    assert messages.name({"used": "archive-tuned"}, "used") == "archive-tuned"
    for bad in (None, 3, True, "", "two words", "../up", "-x", "x" * 64, ["tuned"]):
        with pytest.raises(UserError, match="for used, which must be a name"):
            messages.name({"used": bad}, "used")
    with pytest.raises(UserError, match="has None for used"):
        messages.name({}, "used")
