"""Loaders of LEAF, HAR, AG News and Hugging Face sets, on small files of the right format."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from fedhelix import Federation, UserError, load
from fedhelix.data import (
    available,
    from_ag_news,
    from_clients,
    from_har,
    from_hub,
    from_leaf,
    from_table,
)
from fedhelix.data.federated import LETTERS


def leaf(folder, users):
    """Writes both sides of a LEAF data set; of each user the last sample is for testing."""
    for side, rows in (("train", slice(None, -1)), ("test", slice(-1, None))):
        (folder / side).mkdir(parents=True)
        data = {user: {"x": x[rows], "y": y[rows]} for user, (x, y) in users.items()}
        content = {"users": list(users), "num_samples": [0] * len(users), "user_data": data}
        (folder / side / f"all_data_{side}_9.json").write_text(json.dumps(content))


def femnist(folder):
    images = np.random.default_rng(0).integers(256, size=(5, 784))
    rows = (images / 255).tolist()
    leaf(folder, {"f0001": (rows[:3], [0, 61, 2]), "f0002": (rows[3:], [5, 1])})
    return images


def test_femnist_is_images_by_writer(tmp_path):
    images = femnist(tmp_path / "femnist")
    data = load("FEMNIST", tmp_path)
    assert data.classes == 62 and data.shape == (1, 28, 28)
    assert data.x.flatten(1).tolist() == images[[0, 1, 3]].tolist()
    assert data.y.tolist() == [0, 61, 5] and data.y_test.tolist() == [2, 1]
    assert data.owners.tolist() == ["f0001"] * 2 + ["f0002"]
    assert data.owners_test.tolist() == ["f0001", "f0002"]
    assert Federation(data, model="linear").names == ("f0001", "f0002")


def test_users_that_only_test_are_a_common_test_set(tmp_path):
    femnist(tmp_path)
    file = tmp_path / "test" / "all_data_test_9.json"
    content = json.loads(file.read_text())
    content["users"], content["user_data"] = ["other"], {"other": content["user_data"]["f0001"]}
    file.write_text(json.dumps(content))
    data = from_leaf(tmp_path, classes=62)
    assert data.owners_test is None and data.y_test.tolist() == [2]


def rewrite(file, change):
    content = json.loads(file.read_text())
    change(content["users"], content["user_data"])
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("how", ["left out", "empty"])
def test_a_user_without_a_test_part_trains_but_is_not_evaluated(tmp_path, how):
    femnist(tmp_path)

    def change(users, data):
        if how == "empty":
            data["f0001"] = {"x": [], "y": []}
        else:
            users.remove("f0001")

    rewrite(tmp_path / "test" / "all_data_test_9.json", change)
    data = from_leaf(tmp_path, classes=62)
    assert data.owners_test.tolist() == ["f0002"] and data.y_test.tolist() == [1]
    with pytest.warns(
        UserWarning, match=r"^1 of the 2 clients of 'leaf' have no test samples of th"
    ):
        fed = Federation(data, model="linear", engine="serial")
    assert [len(split.test) for split in fed.splits] == [0, 1]


def test_users_that_cannot_be_are_named_with_their_side(tmp_path):
    def refused(side, change, sentence):
        shutil.rmtree(tmp_path / "leaf", ignore_errors=True)
        femnist(tmp_path / "leaf")
        rewrite(tmp_path / "leaf" / side / f"all_data_{side}_9.json", change)
        with pytest.raises(UserError, match=sentence):
            from_leaf(tmp_path / "leaf", classes=62)

    def strange(users, data):
        users.append("new")
        data["new"] = data["f0001"]

    def given(**values):
        return lambda users, data: data["f0001"].update(values)

    def nobody(users, data):
        users.clear()

    refused("train", given(x=[], y=[]), r"^user 'f0001' of 'leaf' has no training samples \(x and")
    refused("train", given(y=[]), "^y of the train samples of 'f0001' of 'leaf' is empty; give one")
    refused("test", given(x=[]), "^x of the test samples of 'f0001' of 'leaf' is empty; give one p")
    refused("test", given(x=3), "^x and y of the test samples of 'f0001' of 'leaf' must be two lis")
    refused("test", strange, "^user 'new' of 'leaf' has test samples but no training samples; remo")
    refused("test", nobody, "^no user of 'leaf' has test samples; give some of them a few")
    refused("train", nobody, "^no user of 'leaf' has training samples; ")


def test_a_file_that_is_no_json_is_named_with_its_line(tmp_path):
    femnist(tmp_path)
    file = tmp_path / "train" / "all_data_train_9.json"
    for text, sentence in (
        (b'{"users": [],\n "user_data": {', r"line 2 is not valid JSON \(Expecting property name"),
        (b"", r"line 1 is not valid JSON \(Expecting value\); remove it"),
        (b"[1]", "it is no object with users and user_data; "),
        (b'{"users": [], "x": "\xff"}', "it cannot be read: 'utf-8' codec can't decode byte"),
    ):
        file.write_bytes(text)
        with pytest.raises(UserError, match=f"all_data_train_9.json' is damaged: {sentence}"):
            from_leaf(tmp_path)


def test_shakespeare_is_tokens_by_role(tmp_path):
    texts = ["to be or not ", "o be or not t", " be or not to"]
    leaf(tmp_path / "shakespeare", {"HAMLET": (texts, ["t", "o", "!"])})
    data = load("shakespeare", tmp_path)
    assert len(LETTERS) == len(set(LETTERS)) == 80 == data.classes
    assert "".join(LETTERS[token] for token in data.x[1]) == texts[1]
    assert LETTERS[data.y[1]] == "o" and LETTERS[data.y_test[0]] == "!"


def test_text_needs_a_vocabulary_with_all_its_characters(tmp_path):
    leaf(tmp_path, {"HAMLET": (["ab", "ba", "bb"], ["a", "b", "a"])})
    with pytest.raises(UserError, match="'HAMLET' of 'leaf' is text; give the vocabulary"):
        from_leaf(tmp_path)
    with pytest.raises(UserError, match="'b' of 'HAMLET' of 'leaf' is not in the vocabulary"):
        from_leaf(tmp_path, vocabulary="a")
    assert from_leaf(tmp_path, vocabulary="ab").x.tolist() == [[0, 1], [1, 0]]


def test_har_by_subject(tmp_path):
    folder = tmp_path / "har"
    draw = np.random.default_rng(0)
    rows = {"train": draw.normal(size=(20, 5)), "test": draw.normal(size=(10, 5))}
    subjects = {"train": [1] * 12 + [3] * 8, "test": [2] * 10}
    for side, x in rows.items():
        (folder / side).mkdir(parents=True)
        np.savetxt(folder / side / f"X_{side}.txt", x)
        np.savetxt(folder / side / f"y_{side}.txt", np.arange(len(x)) % 6 + 1, fmt="%d")
        np.savetxt(folder / side / f"subject_{side}.txt", subjects[side], fmt="%d")
    data = load("har", tmp_path)
    assert data.classes == 6 and data.shape == (5,)
    sizes = np.bincount(data.owners) + np.bincount(data.owners_test)
    assert sizes.tolist() == [0, 12, 10, 8]  # subjects 1, 2, 3
    everything = np.concatenate([data.x.numpy(), data.x_test.numpy()])
    expected = np.concatenate(list(rows.values()))
    assert np.allclose(np.sort(everything, 0), np.sort(expected, 0), atol=1e-6)
    (folder / "test" / "y_test.txt").write_text("1\n2\n")
    with pytest.raises(UserError, match="have different numbers of lines"):
        from_har(folder)


def test_a_file_that_har_lacks_is_named(tmp_path, recwarn):
    folder = tmp_path / "har"
    for side in ("train", "test"):
        (folder / side).mkdir(parents=True)
    with pytest.raises(UserError, match=r"har' lacks train/X_train.txt; get .*"):
        load("har", tmp_path)
    (how,) = [row.how for row in available(tmp_path) if row.name == "har"]
    assert "har' lacks train/X_train.txt" in how
    names = [f"{side}/{kind}_{side}.txt" for kind in ("X", "y") for side in ("train", "test")]
    for name in names:
        with pytest.raises(UserError, match=rf"har/{name}' is missing; put the file of that name"):
            from_har(folder)
        (folder / name).write_text("1 2\n")
    for text, said in (("", "it is empty"), ("a b\n", "could not convert string")):
        (folder / names[0]).write_text(text)
        with pytest.raises(UserError, match=f"X_train.txt' is damaged: {said}"):
            from_har(folder)
    (folder / names[0]).write_text("1 2 3\n")
    with pytest.raises(UserError, match=r"X_test.txt' have different numbers of columns\."):
        from_har(folder)
    assert not recwarn.list


def test_ag_news_as_counts_of_words(tmp_path):
    (tmp_path / "train.csv").write_text(
        '"3","Stocks fall, stocks rise","Wall Street"\n"4","A chip","The ""chip"" war"\n'
    )
    with pytest.raises(UserError, match=r"test.csv' is missing; put the file of that name there"):
        from_ag_news(tmp_path)
    (tmp_path / "test.csv").write_text('"1","Unseen words","of a chip"\n')
    data = from_ag_news(tmp_path, words=3)
    # The most frequent words of the training texts: stocks and chip twice, then fall.
    assert data.x.tolist() == pytest.approx(np.log1p([[2, 0, 1], [0, 2, 0]]))
    assert data.x_test.tolist() == pytest.approx(np.log1p([[0, 1, 0]]))
    assert (data.y.tolist(), data.y_test.tolist(), data.classes) == ([2, 3], [0], 4)
    (tmp_path / "test.csv").write_text('"5","x","y"\n')
    with pytest.raises(UserError, match="line 1 is no class from 1 to 4"):
        from_ag_news(tmp_path)
    for side in ("train", "test"):
        (tmp_path / f"{side}.csv").write_text('"1","","?!"\n')
    with pytest.raises(UserError, match="have no words, so there is no vocabulary"):
        from_ag_news(tmp_path)


class Table:
    """What the loader uses of a Hugging Face data set."""

    def __init__(self, **columns):
        self.columns, self.column_names = columns, list(columns)

    def __getitem__(self, name):
        return self.columns[name]


def test_a_hub_set_by_its_owner_column():
    images = list(np.random.default_rng(0).integers(256, size=(20, 8, 8), dtype=np.uint8))
    labels = [number % 2 for number in range(20)]
    table = Table(image=images, label=labels, writer=["b"] * 10 + ["a"] * 10)
    data = from_hub(table, "writer")
    sizes = [(data.owners == one).sum() + (data.owners_test == one).sum() for one in ("a", "b")]
    assert sizes == [10, 10]
    assert data.shape == (1, 8, 8) and data.classes == 2
    with pytest.raises(UserError, match="unknown column of 'hub' 'writers'; did you mean 'writer'"):
        from_hub(table, "writers")


def labelled(*names, **columns):
    """A table whose column `label` has class names."""
    table = Table(**columns)
    table.features = {"label": SimpleNamespace(names=list(names))}
    return table


def test_class_names_of_a_hub_set_and_of_clients_are_kept():
    x, y = list(np.arange(20.0)), [number % 2 for number in range(20)]
    rows = {"image": [np.ones(3)] * 20, "label": y, "writer": ["a", "b"] * 10}
    owned = labelled("low", "high", **rows)
    assert from_hub(owned, "writer").labels == ("low", "high")
    few = labelled("low", "high", "never seen", **rows)
    for data in (from_hub(few, "writer"), from_table(few, inputs=["image"])):
        assert data.labels == ("low", "high", "never seen") and data.classes == 3
    assert from_table(few, inputs=["image"], classes=2).labels is None
    parts = [labelled("low", "high", x=x, label=y) for _ in range(2)]
    assert from_clients({"ulm": parts[0], "bern": parts[1]}).labels == ("low", "high")
    unseen = from_clients([labelled("low", "high", "none", x=x, label=y) for _ in range(2)])
    assert unseen.labels == ("low", "high", "none") and unseen.classes == 3
    with pytest.raises(UserError, match=r"differently \(low, high; high, low\).* one ClassLabel"):
        from_clients([parts[0], labelled("high", "low", x=x, label=y)])


def test_what_is_missing_or_damaged_is_named(tmp_path):
    with pytest.raises(UserError, match=r"har is not on this machine; get .* the folder 'har'"):
        load("har", tmp_path)
    assert {row.name for row in available(tmp_path)} >= {"femnist", "shakespeare", "ag-news"}
    (tmp_path / "train").mkdir()
    with pytest.raises(UserError, match="there is no JSON file of LEAF"):
        from_leaf(tmp_path)
    (tmp_path / "train" / "x.json").write_text('{"users": ["a"]}')
    with pytest.raises(UserError, match=r"x.json' is damaged: it lacks 'user_data'"):
        from_leaf(tmp_path)
    (tmp_path / "train" / "x.json").write_text('{"users": ["a"], "user_data": {"a": {"x": []}}}')
    (tmp_path / "test").mkdir()
    with pytest.raises(UserError, match="the train samples of 'a' of 'leaf' lack x or y"):
        from_leaf(tmp_path)
