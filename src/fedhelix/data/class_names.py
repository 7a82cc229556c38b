"""The names of classes that tables of Hugging Face come with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fedhelix.core.errors import UserError
from fedhelix.data.columns import is_table, names_of, target_of
from fedhelix.data.targets import Classes


def class_names(table: Any, target: str) -> tuple[str, ...] | None:
    """The names of the classes in a column that is a ClassLabel of Hugging Face, or a list of
    them.
    """
    kind = _feature(table, target)
    names = getattr(getattr(kind, "feature", kind), "names", None)
    return tuple(names) if names else None


def _feature(table: Any, column: str) -> Any:
    """What Hugging Face says about a column."""
    features = getattr(table, "features", None)
    return features.get(column) if isinstance(features, Mapping) else None


def single_names(table: Any, target: str) -> tuple[str, ...] | None:
    """The same only where every sample has one class."""
    return None if hasattr(_feature(table, target), "feature") else class_names(table, target)


def named_classes(classes: Classes, table: Any, target: str) -> Classes:
    """As many classes as have names, unless the user gives a number; some may have no samples."""
    names = single_names(table, target)
    return len(names) if names and classes == "auto" else classes


def with_names(y: Any, part: Any, where: str) -> Any:
    """The labels of what one client has as the names of their classes, where it has names."""
    names = single_names(part, target_of(names_of(part), where)) if is_table(part) else None
    return np.array(names)[y] if names and y.min() >= 0 else y


def common_class_names(
    parts: Iterable[Any], classes: Classes, data_name: str
) -> tuple[tuple[str, ...] | None, Classes]:
    """Those of all clients, and how many there are; refuses clients whose numbers mean different
    classes.
    """
    tables = [
        (part, target_of(names_of(part), f"'{data_name}'")) for part in parts if is_table(part)
    ]
    found = [class_names(*table) for table in tables]
    different = list(dict.fromkeys(filter(None, found)))
    if len(different) > 1:
        one, other = (", ".join(names) for names in different[:2])
        raise UserError(
            f"clients of '{data_name}' name their classes differently ({one}; {other}), so that "
            "one number means several; cast the columns to one ClassLabel."
        )
    for table in tables:
        classes = named_classes(classes, *table)
    return different[0] if different else None, classes
