"""Public data sets that come with owners, or as text: LEAF's, HAR, AG News, and Hugging Face's."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedhelix.core.errors import UserError, unknown
from fedhelix.core.imports import may_need
from fedhelix.core.options import checks_arguments
from fedhelix.data.arrays import from_arrays, from_clients
from fedhelix.data.columns import has_splits
from fedhelix.data.datasets import Dataset
from fedhelix.data.readers import absent, damaged
from fedhelix.data.tables import from_table

# The characters of LEAF's Shakespeare, in its order.
LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
WORDS = 2000  # of AG News that are counted
OWNED: dict[str, int] = {"femnist": 62, "shakespeare": len(LETTERS), "har": 6, "ag-news": 4}

Part = tuple[np.ndarray, np.ndarray]


@checks_arguments
def from_leaf(
    folder: str | Path,
    name: str = "leaf",
    vocabulary: str | None = None,
    classes: int | None = None,
) -> Dataset:
    """A data set in LEAF's format: folders `train` and `test` with JSON files of users.

    Users without test samples train, but are not evaluated. Where no user of the training files is
    in the test files, all are tested on these together.

    Rows of numbers are samples as they are, squares of 784 numbers images of 28×28. Texts of equal
    length become tokens, whose label is the character that comes next; a `vocabulary` says which
    characters there are.
    """
    parts = {}
    for side in ("train", "test"):
        users = _leaf_users(Path(folder) / side)
        parts[side] = {
            user: _leaf_part(data, f"'{user}' of '{name}'", side, vocabulary)
            for user, data in users.items()
        }
    train = {user: part for user, part in parts["train"].items() if part is not None}
    test = {user: part for user, part in parts["test"].items() if part is not None}
    if empty := next((user for user in parts["train"] if user not in train), None):
        raise UserError(
            f"user '{empty}' of '{name}' has no training samples (x and y are empty); remove it."
        )
    for what, users in (("training", train), ("test", test)):
        if not users:
            raise UserError(f"no user of '{name}' has {what} samples; give some of them a few.")
    if not test.keys() & train.keys():  # others than those that train
        whole = tuple(np.concatenate(column) for column in zip(*test.values(), strict=True))
        return from_clients(train, whole, classes or "auto", name)
    if strangers := [user for user in test if user not in train]:
        raise UserError(
            f"user '{strangers[0]}' of '{name}' has test samples but no training samples; remove "
            "it from the test files."
        )
    return from_clients(train, [test.get(user) for user in train], classes or "auto", name)


def _leaf_users(folder: Path) -> dict[str, Any]:
    """What all JSON files of a folder say about users."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise UserError(f"there is no JSON file of LEAF in '{folder}'; put some there.")
    users: dict[str, Any] = {}
    for file in files:
        try:
            content = json.loads(file.read_bytes())
            users |= {user: content["user_data"][user] for user in content["users"]}
        except json.JSONDecodeError as problem:
            what = f"line {problem.lineno} is not valid JSON ({problem.msg})"
            raise damaged(file, what) from None
        except KeyError as problem:
            raise damaged(file, f"it lacks {problem}") from None
        except TypeError:
            raise damaged(file, "it is no object with users and user_data") from None
        except (OSError, ValueError) as problem:
            raise damaged(file, f"it cannot be read: {problem}") from None
    return users


def _leaf_part(data: Any, whose: str, side: str, vocabulary: str | None) -> Part | None:
    """One user's samples; None where there are none."""
    if not isinstance(data, Mapping) or not {"x", "y"} <= data.keys():
        raise UserError(f"the {side} samples of {whose} lack x or y.")
    if not isinstance(data["x"], list) or not isinstance(data["y"], list):
        raise UserError(f"x and y of the {side} samples of {whose} must be two lists.")
    if not data["x"] and not data["y"]:
        return None
    if not data["x"] or not data["y"]:
        empty = "y" if data["x"] else "x"
        raise UserError(f"{empty} of the {side} samples of {whose} is empty; give one per sample.")
    x, y = data["x"], data["y"]
    if isinstance(x[0], str):
        rows = np.array([_tokens(text, vocabulary, whose) for text in x])
        return rows, np.array([_tokens(text, vocabulary, whose)[0] for text in y])
    rows = np.asarray(x, dtype=np.float32)
    if rows.shape[1:] == (784,):  # images whose pixels lie between 0 and 1
        rows = np.rint(rows.reshape(-1, 28, 28) * 255).astype(np.uint8)
    return rows, np.asarray(y)


def _tokens(text: str, vocabulary: str | None, whose: str) -> list[int]:
    """The places of characters in the vocabulary."""
    if not vocabulary:
        raise UserError(f"{whose} is text; give the vocabulary, a string of all its characters.")
    places = {letter: place for place, letter in enumerate(vocabulary)}
    for letter in text:
        if letter not in places:
            raise UserError(f"{letter!r} of {whose} is not in the vocabulary; add it there.")
    return [places[letter] for letter in text]


@checks_arguments
def from_har(folder: str | Path) -> Dataset:
    """Human Activity Recognition Using Smartphones: every subject is an owner.

    The official test subjects are owners like the others, and each keeps a fifth for testing.
    """
    root = Path(folder)
    columns = []
    for kind in ("X", "y", "subject"):
        files = [root / side / f"{kind}_{side}.txt" for side in ("train", "test")]
        tables = [_read_table(file) for file in files]
        if tables[0].shape[1] != tables[1].shape[1]:
            raise UserError(f"'{files[0]}' and '{files[1]}' have different numbers of columns.")
        columns.append(np.concatenate(tables))
    x, y, subject = columns
    if not len(x) == len(y) == len(subject):
        raise UserError(f"the files of HAR in '{root}' have different numbers of lines.")
    rows, labels, whose = x.astype(np.float32), y[:, 0].astype(np.int64) - 1, subject[:, 0]
    parts = {int(one): (rows[whose == one], labels[whose == one]) for one in np.unique(whose)}
    return from_clients(parts, None, OWNED["har"], "har")


def _read_table(file: Path) -> np.ndarray:
    """The numbers in a text file."""
    if not file.is_file():
        raise absent(file)
    try:
        text = file.read_text(encoding="utf-8")
        if not text.strip():
            raise ValueError("it is empty")
        return np.loadtxt(io.StringIO(text), ndmin=2)
    except (OSError, ValueError) as problem:
        raise damaged(file, problem) from None


@checks_arguments
def from_ag_news(folder: str | Path, words: int = WORDS) -> Dataset:
    """AG News: how often each of the most frequent words occurs, as log(1 + count).

    The words are those of the training texts. Nobody owns the texts.
    """
    train, test = (_read_news(Path(folder) / f"{side}.csv") for side in ("train", "test"))
    frequent = Counter(word for text, _ in train for word in text).most_common(words)
    places = {word: place for place, (word, _) in enumerate(frequent)}
    if not places:
        raise UserError(f"the texts in '{folder}' have no words, so there is no vocabulary.")
    (x, y), (x_test, y_test) = (_counted(news, places) for news in (train, test))
    return from_arrays(x, y, x_test, y_test, classes=OWNED["ag-news"], name="ag-news")


def _counted(news: Sequence[tuple[list[str], int]], places: Mapping[str, int]) -> Part:
    """The logarithms of how often words occur, and the classes."""
    counts = np.zeros((len(news), len(places)), dtype=np.float32)
    for row, (text, _) in enumerate(news):
        for word in text:
            if word in places:
                counts[row, places[word]] += 1
    return np.log1p(counts), np.array([label for _, label in news])


def _read_news(file: Path) -> list[tuple[list[str], int]]:
    """The words and the class of each line: class, title, text."""
    if not file.is_file():
        raise absent(file)
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            rows = [row for row in csv.reader(lines) if row]
    except (OSError, ValueError, csv.Error) as problem:
        raise UserError(f"'{file}' cannot be read: {problem}.") from None
    news = []
    for number, row in enumerate(rows, start=1):
        if len(row) < 2 or row[0] not in ("1", "2", "3", "4"):
            raise damaged(file, f"line {number} is no class from 1 to 4 and a text")
        news.append((re.findall(r"[a-z0-9]+", " ".join(row[1:]).lower()), int(row[0]) - 1))
    if not news:
        raise damaged(file, "it is empty")
    return news


@checks_arguments
def from_hub(
    data: Any,
    owner: str,
    x: str = "image",
    y: str = "label",
    split: str = "train",
    name: str | None = None,
) -> Dataset:
    """A data set of Hugging Face `datasets`, or its name there, by the owners that a column names.

    Of a `DatasetDict` the `split` counts, and its table called test is the test set of the split
    called train. Without one, a fifth of each owner's samples is held out. With a name, `split` may
    also be a part, such as `train[:10%]`.
    """
    if isinstance(data, str):
        try:
            from datasets import load_dataset
        except ImportError:
            raise UserError(
                f"'{data}' needs Hugging Face datasets; pip install 'fedhelix[data]'."
            ) from None
        some = None if split.isidentifier() else split  # train[:10%], say: no name of a table
        name, data = name or data, load_dataset(data, split=some)
    test = None
    if has_splits(data):
        if split not in data:
            raise unknown("split", split, data)
        data, test = data[split], data.get("test") if split == "train" else None
    with may_need("PIL", "data"):  # to decode images
        return from_table(data, y, owner, x, test=test, name=name or "hub")


class Folder(NamedTuple):
    """A data set that is a folder of official files."""

    read: Callable[[Path], Dataset]
    sign: str  # a file or folder that tells that it is there
    how: str  # to get it


FOLDERS = {
    "femnist": Folder(
        lambda folder: from_leaf(folder, "femnist", classes=OWNED["femnist"]),
        "train",
        "make it with LEAF (github.com/TalwalkarLab/leaf)",
    ),
    "shakespeare": Folder(
        lambda folder: from_leaf(folder, "shakespeare", LETTERS, OWNED["shakespeare"]),
        "train",
        "make it with LEAF (github.com/TalwalkarLab/leaf)",
    ),
    "har": Folder(
        from_har, "train/X_train.txt", "get `UCI HAR Dataset` (archive.ics.uci.edu, number 240)"
    ),
    "ag-news": Folder(from_ag_news, "train.csv", "get train.csv and test.csv of AG News"),
}


def find_folder(name: str, roots: Sequence[Path]) -> Path | None:
    """Where the official files of a data set are: in a folder of its name."""
    sign = FOLDERS[name].sign
    return next((place for place in _named(name, roots) if (place / sign).exists()), None)


def how_to_get(name: str, roots: Sequence[Path]) -> str:
    """What to do where no folder of its name holds a data set; one that lacks a file is named."""
    sign, how = FOLDERS[name].sign, FOLDERS[name].how
    lacking = "".join(f"'{place}' lacks {sign}; " for place in _named(name, roots)[:1])
    return f"{lacking}{how} and put the files into the folder '{name}' of data_dir"


def _named(name: str, roots: Sequence[Path]) -> list[Path]:
    """The folders of a data set's name."""
    spellings = dict.fromkeys((name, name.replace("-", "_")))
    places = [root / spelling for root in roots for spelling in spellings]
    return [place for place in places if place.is_dir()]
