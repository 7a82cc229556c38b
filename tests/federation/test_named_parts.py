"""Samples of several parts and sequences: what clients, test pools, newcomers and new samples may
differ in, and what is refused.
"""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from fedhelix import Federation, UserError, from_arrays, from_clients, from_table, partition

DRAW = np.random.default_rng(0)
A = DRAW.normal(size=(40, 4)).astype("float32")
B = DRAW.normal(size=(40, 4)).astype("float32") + 3
WIDE = np.concatenate([B, B[:, :1]], 1)
WORDS = DRAW.integers(1, 9, (40, 5))
Y = np.arange(40) % 2
SEQUENCES = [[1 + number % 8] * (2 + number % 7) for number in range(40)]
TARGETS = [[token % 3 for token in one] for one in SEQUENCES]


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 2)

    def forward(self, a, b):
        return self.head(torch.cat([a, b], 1))


class Reader(nn.Module):
    def __init__(self, outputs=2):
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, outputs)

    def forward(self, x, mask):
        kept = mask[..., None].float()
        return self.head((self.words(x) * kept).sum(1) / kept.sum(1))


class Named(Reader):
    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids, attention_mask)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, x, mask):
        return self.head(self.words(x)).transpose(1, 2)


def fit(data, model, split=None, **more):
    usual = {"engine": "serial", "kernels": "onednn", "epochs": 1, "seed": 0}
    return Federation(data, split, model=model, **usual | more).fit(1, quiet=True)


def several():
    return fit([({"a": A, "b": B}, Y)] * 2, Both)


def samples_of(run, client):
    """All training samples of a client, as the network gets them."""
    fed = run.federation
    return fed.data.prepare(fed.data.x[fed.splits[client].train])


def table(first=0, last=40, longest=8):
    ids = [one[:longest] for one in SEQUENCES[first:last]]
    return pd.DataFrame({"input_ids": ids, "label": Y[first:last]})


def test_parts_of_a_newcomer_are_those_with_the_same_names():
    run = several()
    for x in ({"a": A, "b": B}, {"b": B, "a": A}):
        joined = samples_of(run, run.onboard((x, Y)))
        assert list(joined) == ["a", "b"]
        assert joined["a"].max() == pytest.approx(A.max(), abs=1)
        assert joined["b"].mean() > 2


@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        ({"a": A, "c": B}, "the newcomer has the parts a, c, but samples of 'data' have the parts"),
        ((A, B), "the newcomer has 2 parts without names, but samples of 'data' have the"),
        ({"a": A, "b": WIDE}, "newcomer has samples of 5 float32 in the part b, 'data' of 4 float"),
        ({"a": A, "b": WORDS[:, :4]}, "newcomer has samples of 4 int64 in the part b, 'data' of 4"),
        (A, "the newcomer has one part without a name, but"),
    ],
)
def test_other_parts_of_a_newcomer_are_refused(x, sentence):
    with pytest.raises(UserError, match=sentence):
        several().onboard((x, Y))


def test_a_newcomer_with_parts_cannot_join_clients_without():
    run = fit([(A, Y)] * 2, "linear")
    with pytest.raises(UserError, match=r"samples of the parts a 4 float32, b 4 .* the shape "):
        run.onboard(({"a": A, "b": B}, Y))


IMAGES = {size: np.ones((40, 1, size, size), "float32") for size in (8, 10)}


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        ({"a": A, "b": B}, {"a": A, "b": WIDE}, "5 float32 in the part b, .* of 4 float32; give"),
        ((A, B), (A, WIDE), "5 float32 in the part 1, .* of 4 float32; give all of them the same"),
        ({"a": A, "b": WORDS}, {"a": A, "b": WIDE}, "5 float32 in the part b, .* of 5 int64"),
        ({"a": A, "b": IMAGES[8]}, {"a": A, "b": IMAGES[10]}, "1×10×10 float32 in the part b"),
        ({"a": A, "b": Y}, {"a": A, "b": WORDS}, "5 int64 in the part b, .* of number int64"),
        ({"a": A, "b": B.astype("uint8")}, {"a": A, "b": B > 3}, "4 bool in the part b"),
        (SEQUENCES, [[float(token) for token in one] for one in SEQUENCES], "8 float32 in the "),
    ],
)
def test_parts_have_one_shape_and_type_everywhere(first, second, sentence):
    with pytest.raises(UserError, match=f"client 1 of 'data' has samples of {sentence}"):
        from_clients([(first, Y), (second, Y)])
    with pytest.raises(UserError, match=f"the test part of 'data' has samples of {sentence}"):
        from_arrays(first, Y, second, Y)


def test_what_is_true_or_false_may_be_numbers_elsewhere():
    data = from_clients([({"a": A, "b": B > 3}, Y), ({"a": A, "b": B}, Y)])
    assert data.fields.dtypes == (torch.float32, torch.float32)


def test_sequences_with_their_own_masks_are_filled_up():
    def padded(width):
        ids = np.ones((40, width), int)
        return {"input_ids": ids, "attention_mask": ids, "table": A}

    data = from_clients([(padded(5), Y), (padded(7), Y)])
    assert data.fields.shapes == ((7,), (7,), (4,))
    assert data.fields.lengths(data.x).unique().tolist() == [5, 7]
    with pytest.raises(UserError, match="5 float32 in the part table"):
        from_clients([(padded(5), Y), (padded(7) | {"table": WIDE}, Y)])


def test_a_mask_is_as_wide_as_the_sequences():
    ragged = {"table": A, "input_ids": SEQUENCES}
    equal = {"table": A, "input_ids": WORDS}
    data = from_clients([(ragged, Y), (equal, Y)])
    assert data.fields.lengths(data.x[data.owners == 1]).unique().tolist() == [5]


@pytest.mark.parametrize("kind", ["float32", "int64"])
def test_targets_of_another_width_are_refused(kind):
    two, three = (np.ones((40, width), kind) for width in (2, 3))
    with pytest.raises(UserError, match="the test part of 'data' has targets of shape N×3"):
        from_arrays(A, two, A, three)
    with pytest.raises(UserError, match="client 1 of 'data' has targets of shape N×3"):
        from_clients([(SEQUENCES, two), (SEQUENCES, three)])


def test_masks_of_other_sizes_are_refused():
    with pytest.raises(UserError, match="the test part of 'data' has targets of shape N×10×10"):
        from_arrays(IMAGES[8], IMAGES[8][:, 0] > 0, IMAGES[10], IMAGES[10][:, 0] > 0)


@pytest.mark.parametrize("longest", [2, 6, 8])
def test_a_newcomer_may_have_shorter_sequences(longest):
    run = fit([(SEQUENCES, Y)] * 2, Reader)
    number = run.onboard(([one[:longest] for one in SEQUENCES], Y))
    x, mask = samples_of(run, number)
    assert x.shape[1] == mask.shape[1] == 8
    assert mask.sum(1).max() == longest
    assert torch.equal(x != 0, mask)
    hits = run.evaluate({"hits": lambda outputs, y: (outputs.argmax(1) == y).float().mean()})
    assert len(hits) == 3
    assert len(run.predict(SEQUENCES, client=number)) == 40


def test_longer_sequences_of_a_newcomer_get_a_sentence():
    run = fit([(SEQUENCES, Y)] * 2, Reader)
    with pytest.raises(UserError, match="sequences are up to 11 long, those of 'data' up to 8; "):
        run.onboard(([one + [1] * 3 for one in SEQUENCES], Y))


def test_the_tokens_of_a_newcomer_have_classes():
    run = fit([(SEQUENCES, TARGETS)] * 2, Tagger)
    number = run.onboard(([one[:5] for one in SEQUENCES], [one[:5] for one in TARGETS]))
    fed = run.federation
    targets = fed.data.y[fed.splits[number].train]
    _, mask = samples_of(run, number)
    assert torch.equal(targets != -100, mask)
    with pytest.raises(UserError, match="newcomer has targets of shape N×3"):
        run.onboard((SEQUENCES, np.ones((40, 3), int)))


@pytest.mark.parametrize("has_mask", [False, True])
def test_tables_of_sequences_take_newcomers_and_new_samples(has_mask):
    def masked(frame):
        masks = [[1] * len(one) for one in frame.input_ids]
        return frame.assign(attention_mask=masks) if has_mask else frame

    whole = masked(table())
    tables = fit([masked(table(0, 20)), masked(table(20, 40))], Named if has_mask else Reader)
    owned = whole.assign(writer=np.arange(40) % 2)
    one = fit(owned, Named if has_mask else Reader, partition.natural("writer"))
    for run in (tables, one):
        first = run.predict(whole, raw=True)
        inputs = whole.drop(columns="label")
        for x in (inputs, {name: list(inputs[name]) for name in inputs}):
            assert np.array_equal(run.predict(x, raw=True), first)
        number = run.onboard(masked(table(longest=6)))
        assert run.federation.data.fields.lengths(run.federation.data.x).max() == 8
        assert len(run.federation.splits[number].train) == 32
        with pytest.raises(UserError, match=r"x has the part ids, but samples have .*; give"):
            run.predict({"ids": SEQUENCES})


def test_a_network_of_arrays_takes_a_table_of_sequences():
    run = fit([(SEQUENCES, Y)] * 2, Reader)
    expected = run.predict(SEQUENCES, raw=True)
    assert np.array_equal(run.predict(table()[["input_ids"]], raw=True), expected)


def test_advice_for_columns_of_text_works():
    frame = pd.DataFrame(A, columns=list("abcd")).assign(label=Y, site=np.where(Y, "ulm", "metz"))
    with pytest.raises(UserError, match=r"name it: partition.natural\('site'\)"):
        from_table(frame)
    with pytest.raises(UserError, match=r"'site' of client 0 .*get_dummies\), or remove it\.$"):
        Federation([frame[:20], frame[20:]])
    with pytest.raises(UserError, match="every entry is a client already; leave the partition out"):
        Federation([frame[:20], frame[20:]], partition.natural("site"))
    assert Federation(frame, partition.natural("site")).names == ("metz", "ulm")


class Aged(Reader):
    def forward(self, ids, age, attention_mask):
        return super().forward(ids, attention_mask) + age[:, None]


def test_clients_and_newcomers_may_be_what_from_table_returns_of_sequences():
    def read(longest, columns=("input_ids",)):
        frame = table(longest=longest).rename(columns={"label": "outcome"})
        frame = frame.assign(ids=frame.input_ids, age=np.linspace(0, 1, 40))
        frame.outcome = np.where(frame.outcome, "hi", "lo")
        return from_table(frame, target="outcome", inputs=list(columns))

    for columns, model in ((["input_ids"], Reader), (["ids", "age"], Aged)):
        one, other = read(8, columns), read(5, columns)
        data = from_clients({"a": one, "b": other})
        assert data.columns == tuple(columns) and data.labels == ("hi", "lo")
        assert torch.equal(data.x[data.owners == "a"], one.x)
        assert data.fields.lengths(data.x_test[data.owners_test == "b"]).max() == 5
        assert len(from_clients([one, other], test=other).x) == 80
        run = fit([one, other], model)
        assert run.onboard(read(4, reversed(columns))) == 2
        new = pd.DataFrame({"input_ids": [[1, 2]], "ids": [[1, 2]], "age": [0.5]})
        assert run.predict(new[columns[::-1]], client=2)[0] in ("hi", "lo")
        assert len(fit({"a": read(2, columns), "b": one}, model).federation.names) == 2


def test_clients_may_be_what_from_arrays_returns_of_several_parts():
    images = DRAW.integers(0, 256, (40, 6, 6), dtype="uint8")
    one = from_arrays({"a": A, "b": images}, Y)
    other = from_arrays({"b": images, "a": A}, Y)
    data = from_clients([one, other])
    assert torch.equal(data.x[data.owners == 0], one.x)
    assert data.fields == one.fields and data.fields.dtypes == (torch.float32, torch.uint8)
    parts = data.prepare(data.x[data.owners == 1])
    assert torch.equal(parts["a"], other.prepare(other.x)["a"])
    with pytest.raises(UserError, match="samples must all have"):
        from_clients([one, from_arrays({"a": A, "c": B}, Y)])
    run = several()
    joined = samples_of(run, run.onboard(from_arrays({"b": B, "a": A}, Y)))
    assert joined["b"].mean() > 2


def test_sequences_of_two_lengths_are_filled_up_at_clients_that_were_read():
    longer = [[*one, 1] for one in SEQUENCES]
    read = [
        from_arrays({"a": SEQUENCES, "b": longer}, Y),
        from_arrays({"a": longer, "b": [[*one, 2] for one in longer]}, Y),
    ]
    assert from_clients(read).fields.shapes == ((9,), (10,), (10,))


def test_tags_of_tokens_at_clients_that_were_read():
    short = [one[:5] for one in SEQUENCES], [one[:5] for one in TARGETS]
    data = from_clients([from_arrays(SEQUENCES, TARGETS), from_arrays(*short)])
    assert data.y.shape[1] == 8
    assert (data.y[data.owners == 1][:, 5:] == -100).all()


class Numbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, a, b):
        return self.head(torch.cat([a, b[:, None]], 1))


def test_a_number_and_a_vector_of_one_have_different_words(tmp_path):
    data = from_arrays({"a": A[:, :1], "b": A[:, 1]}, Y)
    assert "a 1 float32, b number float32" in repr(data)
    run = fit(data, Numbers, "iid", clients=2)
    card = (run.export(tmp_path / "net", formats=["safetensors"]) / "README.md").read_text()
    assert "a 1 float32, b number float32" in card


def test_parts_with_names_take_the_columns_of_a_table():
    run = fit([({"input_ids": SEQUENCES}, Y)] * 2, Named)
    expected = run.predict({"input_ids": SEQUENCES}, raw=True)
    frame = pd.DataFrame({"input_ids": SEQUENCES}).assign(name="somebody")
    assert np.array_equal(run.predict(frame, raw=True), expected)
    equal = frame[:1]  # whose sequences have one length
    assert np.allclose(run.predict(equal, raw=True), expected[:1], atol=1e-6)
    assert run.onboard(frame.assign(label=Y)) == 2
    assert len(run.federation.splits[2].train) == 32


@pytest.mark.parametrize(
    ("x", "has"),
    [
        (SEQUENCES, "one part without a name"),
        (WORDS, "one part without a name"),
        (pd.DataFrame({"ids": SEQUENCES}), "the part ids"),
        ({"ids": SEQUENCES}, "the part ids"),
        ({"ids": SEQUENCES, "attention_mask": SEQUENCES}, "the parts ids, attention_mask"),
    ],
)
def test_sentences_about_parts_leave_out_the_mask_that_was_made(x, has):
    run = fit([({"input_ids": SEQUENCES}, Y)] * 2, Named)
    right = "samples have the part input_ids; give {'input_ids': ...}."
    with pytest.raises(UserError, match=f"^x has {has}, but {right}$"):
        run.predict(x)
    if not isinstance(x, pd.DataFrame):
        with pytest.raises(UserError, match=f"newcomer has {has}, but .* have the part input_ids;"):
            run.onboard((x, Y))


def test_where_a_mask_alone_differs_shapes_are_said():
    run = fit([({"a": A, "b": B}, Y)] * 2, Both)
    sentence = "the parts a 4 float32, b 8 int64, attention_mask 8 bool, but samples have the parts"
    with pytest.raises(UserError, match=f"{sentence} a 4 float32, b 4 float32;"):
        run.predict({"a": A, "b": SEQUENCES})
    run = fit([({"input_ids": SEQUENCES}, Y)] * 2, Named)
    sentence = "x has the part input_ids number int64, but samples have the parts input_ids 8 int64"
    with pytest.raises(UserError, match=sentence):
        run.predict({"input_ids": [1, 2, 3]})
