"""Predictions of new samples: none of them, parts in any order, and what a network cannot take."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from fedhelix import Federation, UserError, from_arrays, from_clients

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(40, 4)).astype("float32")
Y = (X[:, 0] > 0).astype(int)
PARTS = {"a": X[:, :3], "b": X[:, 3:]}


class Both(nn.Module):
    """A sample of two parts."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(1, 2)

    def forward(self, a, b):
        return self.a(a) + self.b(b)


class Words(nn.Module):
    """The mean of embedded tokens; it fails for no samples, as networks with a reshape do."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(12, 4), nn.Linear(4, 2)

    def forward(self, x, mask=None):
        return self.head(self.embedding(x).reshape(len(x), -1, 4).mean(1))


def trained(x, y, model="linear"):
    data = x if y is None else from_arrays(x, y)
    usual = {"engine": "serial", "kernels": "onednn", "epochs": 1}
    return Federation(data, "iid", clients=2, model=model, **usual).fit(1, quiet=True)


@pytest.fixture(scope="module")
def table():
    return trained(X, Y)


@pytest.fixture(scope="module")
def tokens():
    return trained(DRAW.integers(0, 10, (40, 5)), Y, Words)


@pytest.fixture(scope="module")
def sequences():
    x = [DRAW.integers(0, 10, length).tolist() for length in DRAW.integers(2, 7, 40)]
    return trained(x, Y, Words)


@pytest.fixture(scope="module")
def several():
    return trained(PARTS, Y, Both)


def test_no_samples_have_no_predictions(table, tokens, sequences, several):
    none = {name: part[:0] for name, part in PARTS.items()}
    for run, x in ((table, X[:0]), (tokens, np.zeros((0, 5), int)), (several, none)):
        for empty in (x, []):
            assert run.predict(empty).shape == (0,) and run.predict(empty).dtype == np.int64
            assert run.predict(empty, raw=True).shape == (0, 2)
    assert sequences.predict([]).shape == (0,)
    frame = pd.DataFrame(X, columns=list("abcd")).assign(label=np.where(Y, "ill", "well"))
    assert trained(frame, None).predict(frame[:0]).tolist() == []
    assert trained(X, (X > 0).astype(int)).predict(X[:0]).shape == (0, 4)
    images = X.reshape(40, 1, 2, 2)
    pixels = trained(images, (images[:, 0] > 0).astype(int), nn.Conv2d(1, 2, 1))
    assert pixels.predict(images[:0]).shape == (0, 2, 2)


def test_parts_may_come_in_any_order(several):
    other = {name: PARTS[name] for name in ("b", "a")}
    assert np.array_equal(several.predict(other, raw=True), several.predict(PARTS, raw=True))
    data = from_clients([(PARTS, Y), (other, Y)], test=(other, Y))
    assert data.fields.names == ("a", "b")
    assert torch.equal(data.prepare(data.x[:40])["a"], data.prepare(data.x[40:])["a"])


def test_tokens_may_be_whole_floats(tokens):
    x = DRAW.integers(0, 10, (6, 5))
    assert np.array_equal(tokens.predict(x.astype(float), raw=True), tokens.predict(x, raw=True))


@pytest.mark.parametrize(
    ("kind", "x", "sentence"),
    [
        ("table", None, "x must be an array, not NoneType"),
        ("table", X[:0, :2], r"x has the shape \(0, 2\), but a sample of 'data' has"),
        ("table", PARTS, "x has the parts a 3 float32, b 1 float32, but a sample of 'data' has"),
        ("table", {}, "x has no parts; give an array for each argument"),
        ("tokens", np.full((1, 5), 99), "'index out of range .* has the token 99, .* go up to 9"),
        ("tokens", np.full((1, 5), -1), "x has the token -1, and those of the training samples"),
        ("tokens", np.full((1, 5), 3.9), "x has 3.9, but the training samples are whole numbers"),
        ("sequences", [[1, 2, 99], [3]], "x has the token 99"),
        ("sequences", [1, 2, 3], r"x has the shape \(3,\), .*; give a list of sequences"),
        ("several", {"a": X[:3, :3], "b": X[:2, 3:]}, r"numbers of samples \('a' 3, 'b' 2\)"),
        ("several", {"a": 1.0, "b": 2.0}, "the parts of x have different numbers of samples"),
        ("several", {"a": X, "b": X}, r"fails for samples of shape a \(40, 4\), b \(40, 4\) with"),
        ("several", X, "but samples have the parts a 3 float32, b 1 float32; give N of each"),
    ],
)
def test_what_a_network_cannot_take_gets_one_sentence(kind, x, sentence, request):
    with pytest.raises(UserError, match=sentence):
        request.getfixturevalue(kind).predict(x)


@pytest.mark.parametrize("lacking", [{"a": X[:, :3]}, (X,)])
def test_a_part_that_is_no_mask_is_not_made_up(lacking):
    whole = PARTS if isinstance(lacking, dict) else (X, X)
    with pytest.raises(UserError, match="give every client the same ones"):
        from_clients([(whole, Y), (lacking, Y)])


def test_objects_that_are_numbers_are_taken_and_other_containers_refused():
    sparse = pytest.importorskip("scipy.sparse")
    mixed = pd.DataFrame({"a": X[:, 0], "b": X[:, 1] > 0}).to_numpy()
    assert mixed.dtype == object
    data = from_arrays(mixed, Y.astype(object), mixed, Y)
    assert data.x.dtype == torch.float32 and data.classes == 2
    assert np.array_equal(data.x[:, 0], X[:, 0])
    for x, y in ((sparse.csr_matrix(X), Y), (X, sparse.csr_array(Y))):
        with pytest.raises(UserError, match=r"must be an array, not csr_.*toarray\(\) makes one"):
            from_arrays(x, y)
    with pytest.raises(UserError, match="x of 'data' has a missing value in sample 1"):
        from_arrays(np.where(X[1, 2] == X, None, X), Y)


class Tags(nn.Module):
    """A class for every token."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(12, 4), nn.Linear(4, 3)

    def forward(self, x, mask):
        return self.head(self.embedding(x))


def test_the_padding_of_tokens_has_no_class():
    x = [DRAW.integers(0, 10, length) for length in DRAW.integers(2, 7, 40)]
    run = trained(x, [one % 3 for one in x], Tags)
    new = [[1, 2, 3, 4], [5], [6, 7]]
    found, raw = run.predict(new), run.predict(new, raw=True)
    assert (found[1:] == -100).tolist() == [[False, True, True, True], [False, False, True, True]]
    real = [raw[place, : len(one)].argmax(-1).tolist() for place, one in enumerate(new)]
    assert [found[place, : len(one)].tolist() for place, one in enumerate(new)] == real
    assert (run.predict(np.ones((2, 5), int)) >= 0).all() and raw.shape == (3, 4, 3)


def test_the_padding_of_named_tokens_is_empty_and_other_masks_mean_none():
    x = {"x": DRAW.integers(0, 9, (40, 5)), "mask": np.ones((40, 5), bool)}
    run = trained(x, np.array(["noun", "other", "verb"])[x["x"] % 3], Tags)
    new = {"x": np.ones((2, 5), int), "mask": np.arange(5) < np.array([[5], [2]])}
    found = run.predict(new)
    assert set(found[0]) <= {"noun", "other", "verb"}
    assert found[1, :2].tolist() == found[0, :2].tolist() and found[1, 2:].tolist() == [""] * 3
    odd = run.predict({**new, "mask": np.arange(5) % 2 == np.zeros((2, 1))})
    assert odd.tolist() == [found[0].tolist()] * 2, "such a mask does not mark padding"


def test_prepared_samples_suit_the_networks(table):
    def same(run, outputs, x):
        expected = run.predict(x, client=0, raw=True)
        np.testing.assert_allclose(outputs.detach().numpy(), expected, atol=1e-6)

    same(table, table.personal(0)(table.prepare(X[:5])), X[:5])
    images = trained(DRAW.integers(0, 256, (40, 1, 4, 4), dtype=np.uint8), Y)
    pixels = DRAW.integers(0, 256, (5, 1, 4, 4), dtype=np.uint8)
    same(images, images.personal(0)(images.prepare(pixels)), pixels)
    named = trained(PARTS, Y, Both)
    some = {name: part[:5] for name, part in PARTS.items()}
    same(named, named.personal(0)(**named.prepare(some)), some)
    positional = trained((X[:, :3], X[:, 3:]), Y, Both)
    some = (X[:5, :3], X[:5, 3:])
    same(positional, positional.personal(0)(*positional.prepare(some)), some)


def test_a_network_that_fails_for_a_sequence_says_so():
    class Strict(Words):
        def forward(self, x, mask=None):
            return self.head(self.embedding(x).unflatten(1, (1, 3)).mean((1, 2)))

    strict = trained([[1, 2, 3], [4, 5]] * 20, Y, Strict)
    with pytest.raises(UserError, match="the network fails for samples of shape"):
        strict.predict([[1, 2, 3, 4]], client=0)


def test_an_empty_sequence_is_refused_alone_and_among_others(sequences):
    for several in ([[]], [[], []], [[], [3]]):
        with pytest.raises(UserError, match="sample 0 of x is empty"):
            sequences.predict(several)


class Mean(Words):
    """It looks at the padding: the mean is over all places."""


class Whole(Words):
    """A network for sequences of one length."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6 * 4, 2)

    def forward(self, x, mask):
        return self.head((self.embedding(x) * mask[..., None]).flatten(1))


class Masked(Words):
    def forward(self, x, mask):
        return self.head((self.embedding(x) * mask[..., None]).sum(1))


SEQUENCES = [DRAW.integers(1, 10, 2 + place % 5).tolist() for place in range(40)]


@pytest.mark.parametrize("network", [Mean, Whole, Masked])
def test_what_is_said_about_a_sequence_does_not_depend_on_the_others(network, tmp_path):
    run = trained(SEQUENCES, Y, network)
    together = run.predict(SEQUENCES[:10], raw=True)
    alone = np.concatenate([run.predict([one], raw=True) for one in SEQUENCES[:10]])
    np.testing.assert_allclose(alone, together, atol=1e-6)
    words, mask = run.prepare([[5, 3]])
    width = 2 if network is Masked else 6
    assert words.tolist() == [[5, 3] + [0] * (width - 2)]
    assert mask.tolist() == [[True, True] + [False] * (width - 2)]
    given = run.model()(words, mask).detach().numpy()
    np.testing.assert_allclose(given, run.predict([[5, 3]], raw=True), atol=1e-6)
    card = (run.export(tmp_path) / "README.md").read_text()
    assert ("padded at the end to length 6, as in training" in card) is (network is not Masked)


def test_longer_sequences_than_in_training_are_padded_to_their_longest():
    run = trained(SEQUENCES, Y, Mean)
    assert run.prepare([[1] * 8, [2]])[0].shape == (2, 8)
    assert run.prepare([[1, 2], [3]])[0].shape == (2, 6)


def test_tags_are_as_many_as_the_places_of_the_call():
    class Smoothed(Tags):
        def forward(self, x, mask):
            x = self.embedding(x)
            return self.head(x + x.mean(1, keepdim=True))

    run = trained(SEQUENCES, [[token % 3 for token in one] for one in SEQUENCES], Smoothed)
    assert run.predict(np.ones((2, 4), int)).shape == (2, 4)
    assert run.predict([[1, 2, 4], [5]]).tolist()[1][1:] == [-100, -100]
