import os
import stat

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedhelix.core import tree
from fedhelix.core.errors import UserError
from helpers import same


def scalars(*values: float) -> list[dict]:
    return [{"w": torch.tensor([value])} for value in values]


# Averages


def test_masked_mean_by_hand():
    uploads = [
        {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[4.0]])},
        {"a": torch.tensor([3.0, 6.0])},
        {"a": torch.tensor([5.0, 1.0]), "b": torch.tensor([[8.0]])},
    ]
    previous = {"a": torch.zeros(2), "b": torch.zeros(1, 1)}
    mean = tree.masked_mean(uploads, [1, 2, 1], previous)
    assert mean["a"].tolist() == [(1 + 2 * 3 + 5) / 4, (2 + 2 * 6 + 1) / 4]
    assert mean["b"].tolist() == [[(4 + 8) / 2]]  # over those two that sent it


def test_what_nobody_uploaded_keeps_its_value():
    previous = {"a": torch.tensor([7.0]), "b": torch.tensor([8.0])}
    mean = tree.masked_mean([{"a": torch.tensor([1.0])}, {}], [0.5, 0.5], previous)
    assert mean == {"a": torch.tensor([1.0]), "b": torch.tensor([8.0])}
    assert tree.masked_mean([], [], previous) == previous


def test_a_weight_of_zero_leaves_a_client_out_even_if_it_sends_nonsense():
    assert tree.masked_mean(scalars(1.0, float("nan")), [2, 0], scalars(0.0)[0])["w"].item() == 1
    assert tree.masked_mean(scalars(float("nan")), [0], scalars(9.0)[0])["w"].item() == 9


def test_counters_take_the_maximum():
    counts = [{"n": torch.tensor(count)} for count in (3, 11, 5)]
    mean = tree.masked_mean(counts, [5, 1, 9], {"n": torch.tensor(0)})["n"]
    assert mean.item() == 11 and mean.dtype == torch.int64


def test_entries_that_are_not_asked_for_are_left_out():
    assert tree.masked_mean(
        [{"a": torch.ones(1), "spy": torch.ones(1)}], [1], {"a": torch.zeros(1)}
    ).keys() == {"a"}


clients = st.lists(
    st.tuples(st.floats(-100, 100, width=32), st.floats(0.01, 100)), min_size=1, max_size=8
)


@given(clients, st.randoms(use_true_random=False), st.floats(0.01, 100))
def test_the_mean_depends_neither_on_the_order_nor_on_the_sum_of_the_weights(pairs, random, scale):
    shuffled = random.sample(pairs, len(pairs))
    mean, other = (
        tree.masked_mean(
            scalars(*(value for value, _ in some)),
            [weight * by for _, weight in some],
            scalars(0.0)[0],
        )
        for some, by in ((pairs, 1.0), (shuffled, scale))
    )
    by_hand = sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
    assert mean["w"].item() == pytest.approx(by_hand, rel=1e-4, abs=1e-4)
    assert mean["w"].item() == pytest.approx(other["w"].item(), rel=1e-4, abs=1e-4)


@given(st.floats(-1e6, 1e6, width=32), st.lists(st.floats(0.01, 1), min_size=1, max_size=8))
def test_equal_uploads_have_themselves_as_mean(value, weights):
    mean = tree.masked_mean(scalars(*[value] * len(weights)), weights, scalars(0.0)[0])
    assert mean["w"].item() == pytest.approx(value, rel=1e-6)


# Entry by entry


def test_arithmetic_and_choice():
    state = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}
    other = {"a": torch.tensor([10.0]), "b": torch.tensor([20.0])}
    assert tree.add(state, other, 0.5) == {"a": torch.tensor([6.0]), "b": torch.tensor([12.0])}
    assert tree.subtract(other, state) == {"a": torch.tensor([9.0]), "b": torch.tensor([18.0])}
    assert list(tree.take(state, ["b", "a", "z"])) == ["a", "b"]
    assert list(tree.drop(state, ["a", "z"])) == ["b"]
    copy = tree.clone(state)
    copy["a"] += 1
    assert state["a"].item() == 1 and tree.zeros(state)["b"].item() == 0


def copies_of(models, origin):
    return tree.copies_of(tree.updates_of([{"w": model} for model in models], origin), origin)


def test_copies_are_told_by_their_updates():
    origin = {"w": torch.tensor([0.3, -0.7])}
    update = torch.tensor([1e-3, 2e-3])
    moved = [
        update,
        2 * update,
        -update,
        update * torch.tensor([1.0, 1.01]),
        torch.zeros(2),
        torch.zeros(2),
    ]
    models = [origin["w"] + move for move in moved] + [torch.full((2,), float("nan"))]
    assert copies_of(models, origin) == [0, 1, 2, 3, 4, 4, 6]
    for size in (1.0, 1e-3):  # of the second update a rounding of the weights is a large part
        model = origin["w"] + size * update
        rounded = torch.nextafter(model, torch.zeros(2))
        assert copies_of([model, rounded], origin) == [0, 0]


def test_every_value_weighs_what_its_type_does_and_four_bytes_in_papers():
    nested = {
        "model": {"w": torch.zeros(3, 5), "n": torch.tensor(1)},
        "flags": torch.zeros(7, dtype=torch.bool),
        "scales": torch.zeros(2, dtype=torch.bfloat16),
    }
    assert tree.payload_bytes({**nested, "round": 3}) == 4 * 15 + 8 + 7 + 2 * 2
    assert tree.paper_bytes({**nested, "round": 3}) == 4 * (15 + 1 + 7 + 2)
    assert tree.payload_bytes({"model": {}}) == tree.paper_bytes({"model": {}}) == 0


# On the wire and on disk

names = st.text(
    st.characters(blacklist_characters="/", blacklist_categories=["Cs"]), min_size=1, max_size=5
)
leaves = st.one_of(
    st.integers(-(2**40), 2**40),
    st.booleans(),
    st.floats(allow_nan=False),
    st.lists(st.floats(-10, 10, width=32), max_size=4).map(torch.tensor),
    st.lists(st.integers(-9, 9), min_size=1, max_size=4).map(torch.tensor),
)
trees = st.recursive(
    st.dictionaries(names, leaves, max_size=3),
    lambda below: st.dictionaries(names, st.one_of(leaves, below), max_size=3),
    max_leaves=6,
)


@given(trees)
def test_a_tree_survives_flattening_and_the_disk(tmp_path_factory, some):
    assert same(tree.unflatten(tree.flatten(some)), some)
    path = tmp_path_factory.getbasetemp() / "tree.safetensors"
    tree.save(some, path)
    assert same(tree.load(path), some)


def test_the_order_of_entries_survives(tmp_path):
    """A sum over entries would otherwise be rounded differently in a resumed run."""
    some = {
        "z": {"b": torch.ones(1), "a": torch.ones(2)},
        "step": 3,
        "a": torch.ones(1),
        "empty": {},
    }
    tree.save(some, tmp_path / "tree")
    assert list(tree.flatten(tree.load(tmp_path / "tree"))) == list(tree.flatten(some))


def test_equal_trees_have_equal_bytes():
    """A checkpoint leaves out what has not changed, and knows that by its bytes."""
    some = {"model": {name: torch.ones(3) for name in "zyxabc"}, "step": 3, "rate": 0.5}
    assert len({tree.encode(some) for _ in range(10)}) == 1


def test_empty_levels_survive(tmp_path):
    some = {"model": {}, "own": {"deep": {}}, "round": 0}
    tree.save(some, tmp_path / "tree")
    assert tree.load(tmp_path / "tree") == some


def test_views_and_shared_tensors_are_saved_whole(tmp_path):
    base = torch.arange(6.0).view(2, 3)
    tree.save({"turned": base.T, "again": base, "row": base[1]}, tmp_path / "tree")
    back = tree.load(tmp_path / "tree")
    assert torch.equal(back["turned"], base.T) and back["row"].tolist() == [3, 4, 5]


def test_a_name_with_a_slash_is_refused():
    with pytest.raises(UserError, match="'a/b' holds a '/'"):
        tree.flatten({"model": {"a/b": torch.zeros(1)}})


def test_nobody_touches_the_mask_of_the_whole_process(tmp_path, monkeypatch):
    monkeypatch.setattr(
        os, "umask", None
    )  # threads that set and reset it would take it from each other
    tree.write_atomically(tmp_path / "file", b"x")
    assert (tmp_path / "file").read_bytes() == b"x"


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_files_get_the_usual_rights(tmp_path, mask):
    old = os.umask(mask)
    try:
        tree.write_atomically(tmp_path / "new" / "file", b"x")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "new" / "file").stat().st_mode) == 0o666 & ~mask


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    tree.write_atomically(tmp_path / "file", b"old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        tree.write_atomically(tmp_path / "file", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


def test_missing_and_damaged_files_are_named(tmp_path):
    path = tmp_path / "tree.safetensors"
    with pytest.raises(UserError, match=r"tree\.safetensors' is missing"):
        tree.load(path)
    tree.save({"w": torch.ones(100)}, path)
    content = path.read_bytes()
    for damaged in (content[:-10], content[:4], b"", b"\xff" * 50):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"tree\.safetensors' is damaged"):
            tree.load(path)


@pytest.mark.parametrize("at_once", [1, 20, 2**28])
def test_the_mean_of_joined_entries_is_that_of_each(at_once, monkeypatch):
    """What a GPU computes, with entries that not all have sent, of other types, and counters."""
    monkeypatch.setattr(tree, "JOINED", at_once)
    torch.manual_seed(0)

    def state():
        return {
            "a": torch.randn(2, 3),
            "count": torch.randint(9, ()),
            "b": torch.randn(4),
            "half": torch.randn(3).bfloat16(),
            "nobody": torch.randn(2),
        }

    previous = state()
    uploads = [tree.drop(state(), ["nobody", *lacking]) for lacking in ([], ["a"], ["b", "half"])]
    uploads[0]["more"] = {"that": "is not averaged"}
    weights = [1.0, 2.0, 5.0]
    found = tree._mean_of_joined(uploads, weights, previous)
    expected = tree.masked_mean(uploads, weights, previous)
    assert list(found) == list(expected) == list(previous)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)
    by_hand = (uploads[0]["a"] + 5 * uploads[2]["a"]) / 6
    torch.testing.assert_close(found["a"], by_hand)
