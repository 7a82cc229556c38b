"""Labels that are text, as numbers: one for each sample, or one for each token of a sequence."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedhelix.core.errors import UserError, unknown
from fedhelix.data.fields import Parts, is_ragged
from fedhelix.data.reading import first_missing, is_text, label_array

FEW = 3  # names in a sentence
RawPair = tuple[Any, Any]  # x and y as the user gives them


def coded(
    pairs: Sequence[RawPair], where: Sequence[str]
) -> tuple[list[Any], tuple[str, ...] | None]:
    """Targets whose texts are numbers, in alphabetical order, and what these mean; `where` names
    the parts of the data that they come from.
    """
    arrays = [_labels(x, y, part) for (x, y), part in zip(pairs, where, strict=True)]
    texts = [array for array in arrays if array is not None and is_text(array)]
    if not texts:
        return [y for _, y in pairs], None
    if len(texts) < sum(y is not None for _, y in pairs):
        raise UserError("some labels are text and others numbers; use one of both.")
    names = np.unique(np.concatenate([text.astype(str).ravel() for text in texts]))
    found = [
        None if array is None else _as_given(np.searchsorted(names, array.astype(str)), y)
        for array, (_, y) in zip(arrays, pairs, strict=True)
    ]
    return found, tuple(names.tolist())


def numbered(pair: RawPair, names: Sequence[str] | None, where: str) -> Any:
    """Labels as the numbers of classes with these names (None: they have none); numbers stay, with
    a warning where there are names.
    """
    (codes,), texts = coded([pair], [where])
    if texts is None:
        if any(one.isdecimal() and one != str(place) for place, one in enumerate(names or ())):
            raise UserError(
                f"y of {where} holds numbers, which could be names or places of the classes "
                f"{', '.join(names or ())}; give these names, as text."
            )
        if names:
            listed = ", ".join(f"{place} is '{one}'" for place, one in enumerate(names[:FEW]))
            warnings.warn(
                f"y of {where} holds numbers, which are taken as places of the classes ({listed}"
                f"{', ...' if len(names) > FEW else ''}); to be sure, give names, as text.",
                stacklevel=5,
            )
        return codes
    if names is None:
        raise UserError(f"y of {where} is text, but the classes have no names; give numbers.")
    for text in texts:
        if text not in names:
            raise unknown(f"label of {where}", text, names)
    places = np.array([names.index(text) for text in texts])
    return [places[row] for row in codes] if isinstance(codes, list) else places[codes]


def _labels(x: Any, y: Any, where: str) -> np.ndarray | None:
    """The labels of all samples, those of tokens in one row; None where there are none, or numbers
    of tokens.
    """
    if y is None:
        return None
    if not is_ragged(y):
        array = label_array(y)
        missing = first_missing(array)
    else:
        rows = [label_array(row) for row in y]
        lengths = [len(row) for row in rows]
        if not any(map(is_text, rows)):
            _check_lengths(x, lengths, where)
            return None
        if not _have_lengths(x, lengths):
            raise UserError(
                f"y of {where} has several texts per sample; give as many as x has tokens, or, if "
                "several labels may hold, a column of 0 and 1 for each, as scikit-learn's "
                "MultiLabelBinarizer makes them."
            )
        array = np.concatenate(rows)
        missing = next((n for n, row in enumerate(rows) if first_missing(row) is not None), None)
    if missing is not None:
        raise UserError(
            f"y of {where} has no label in sample {missing}; remove samples without one, or fill "
            "it in."
        )
    return array


def _have_lengths(x: Any, lengths: list[int]) -> bool:
    """Whether the sequences of a sample's inputs are so long."""
    if isinstance(x, Parts):  # read already, and padded
        longest = max(lengths)
        return any(part.dim() > 1 and part.shape[1] == longest for part in x.tensors.values())
    return lengths in _lengths(x)


def _check_lengths(x: Any, lengths: list[int], where: str) -> None:
    """Refuse numbers that would fit the tokens only once both are padded; where the longest differ,
    they can be something else, which the loss has to know.
    """
    inputs = [] if isinstance(x, Parts) else _lengths(x)
    for sizes in inputs if lengths not in inputs else ():
        if len(sizes) == len(lengths) and max(sizes) == max(lengths):
            pairs = enumerate(zip(sizes, lengths, strict=True))
            sample, (tokens, labels) = next(one for one in pairs if one[1][0] != one[1][1])
            raise UserError(
                f"sample {sample} of {where} has {tokens} tokens and {labels} labels; give one "
                "for each token, -100 where it does not count."
            )


def _lengths(x: Any) -> list[list[int]]:
    """How long the sequences of a sample's inputs are, in each part with different lengths."""
    parts = list(x.values()) if isinstance(x, Mapping) else [x]
    parts += list(x) if isinstance(x, tuple) else []
    return [[len(sequence) for sequence in part] for part in parts if is_ragged(part)]


def _as_given(codes: np.ndarray, y: Any) -> Any:
    """Numbers in the form of the labels that they stand for."""
    if not is_ragged(y):
        return codes
    return np.split(codes, np.cumsum([len(row) for row in y])[:-1])
