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
from fedhelix.deploy import messages, schema
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


def test_expectations():
    header = {"round": 2, "flag": True}
    messages.expect(header, round=2)
    for wanted in ({"round": 3}, {"flag": 1}, {"client": 0}):
        with pytest.raises(UserError, match=f"is about {next(iter(wanted))}"):
            messages.expect(header, **wanted)


GOOD = {"site": "a", "seconds": 0.5, "samples": 10, "loss": float("nan")}
SCORES = {"site": "a", "seconds": 1, "test": 0.5, "test_loss": 2, "valid": 0.1, "used": "model"}
HUGE = 10**400


@pytest.mark.parametrize(
    ("kind", "key", "bad"),
    [
        *(("train", "samples", bad) for bad in (0, -3, 2.0, True, None, "many", HUGE, [1])),
        *(("train", "loss", bad) for bad in (HUGE, -HUGE, 1.7e308, True, "1", {})),
        *(("train", "seconds", bad) for bad in (-1.0, HUGE, None, "1", float("-inf"))),
        *(("train", "site", bad) for bad in ("", None, "a/b", "x" * 64, 3)),
        *(("evaluate", key, HUGE) for key in ("test", "test_loss", "valid")),
        *(
            ("evaluate", "used", bad)
            for bad in (None, 3, True, "", "two words", "../up", "-x", "x" * 64, ["tuned"])
        ),
    ],
)
def test_a_field_that_breaks_the_schema_is_named(kind, key, bad):
    good = GOOD if kind == "train" else SCORES
    assert messages.read_answer(messages.write(good), kind).header["site"] == "a"
    with pytest.raises(UserError, match=f"for {key}, which must be") as refused:
        messages.read_answer(messages.write({**good, key: bad}), kind)
    assert len(str(refused.value)) < 500


REQUEST = {
    "kind": "train",
    "experiment": "0123456789abcdef" * 2,
    "client": 0,
    "round": 0,
    "spec": "{}",
}


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        *(("client", bad) for bad in (-1, 10**9, HUGE, None, "0", 0.0, False)),
        *(("round", bad) for bad in (-1, 10**18, HUGE, None)),
        *(("experiment", bad) for bad in ("1e400", "None", "NaN", None, "..", "A" * 32)),
        *(("classes", bad) for bad in (0, -1, 10**9, "3")),
        ("spec", None),
        ("trained", "yes"),
    ],
)
def test_a_site_refuses_requests_that_break_the_schema(key, bad):
    assert messages.read_request(messages.write(REQUEST)).header["kind"] == "train"
    with pytest.raises(UserError, match=f"for {key}, which must be"):
        messages.read_request(messages.write({**REQUEST, key: bad}))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.uint16])
def test_tensors_that_no_method_computes_with_are_refused(dtype):
    body = {"control": {"w": torch.zeros(2).to(dtype)}}
    with pytest.raises(UserError, match=f"holds a tensor of {dtype} at 'control/w'"):
        messages.read(messages.write(GOOD, body))


def test_an_index_of_entries_that_contradicts_itself_is_refused():
    good = encode({"header": "{}", "body": {"model": {"w": torch.ones(2)}}})
    size = int.from_bytes(good[:8], "little")
    table = json.loads(good[8 : 8 + size])
    for name in ("body/model/w/x", "body/model/w/0", "body/model/w"):
        entries = {"header": "{}", "body/model/w": None, "body/model/w/": None, name: 1}
        text = json.dumps({**table, "__metadata__": {"entries": json.dumps(entries)}}).encode()
        with pytest.raises(UserError, match="is no message"):
            messages.read(struct.pack("<Q", len(text)) + text + good[8 + size :])


DATA = {
    "site": "a", "seconds": 0.0, "data": "own", "train": 5, "test": 1, "shape": [3],
    "target": [], "dtype": "torch.float32", "classes": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("train", 10**12),
        ("shape", [10**6, 10**6]),
        ("shape", [0]),
        ("shape", "3"),
        ("target", [-1]),
        ("dtype", "torch.load"),
        ("classes", 10**9),
    ],
)
def test_an_odd_description_is_refused(key, bad):
    assert messages.read_answer(messages.write(DATA), "describe").header["train"] == 5
    with pytest.raises(UserError, match=f"for {key}, which must be"):
        messages.read_answer(messages.write({**DATA, key: bad}), "describe")


def test_a_strangers_words_stay_short_and_printable():
    said = schema.clipped("\ud800\x1b[2J" + "x" * 10**6)
    assert len(said) <= 303 and said.isprintable()
