"""Which trees of a round differ in form from all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fedhelix.core.tree import Tree, flatten
from fedhelix.deploy.schema import clipped


def inconsistent_trees(trees: Mapping[int, Tree]) -> dict[int, str]:
    """Trees that lack a group which all others have, or differ in form where all others agree.

    The model's entries, packed or not, are checked against the network elsewhere. For the rest of
    what a method sends the other clients are the only reference.
    """
    flat = {client: flatten(tree) for client, tree in trees.items()}
    problems = {}
    for client, tree in flat.items():
        others = [other for number, other in flat.items() if number != client]
        if len(others) >= 2 and (problem := _inconsistency(tree, others)):
            problems[client] = problem
    return problems


def _inconsistency(tree: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str | None:
    """How one flat tree differs from what all others have in common, if it does."""
    groups = Counter(group for other in others for group in _groups(other))
    common = {group for group, count in groups.items() if count == len(others)}
    if lacking := common - _groups(tree):
        return f"lacks '{min(lacking)}', which all others have."
    problem = None
    for path, value in tree.items():
        if path.startswith(("model/", "packed/")):
            continue
        forms = {_form(other[path]) for other in others if path in other}
        if len(forms) == 1 and _form(value) not in forms:
            problem = f"has another shape or type for '{clipped(path)}' than all others."
    return problem


def _form(value: object) -> tuple[object, object]:
    """Shape and type of a tensor; numbers are alike."""
    return getattr(value, "shape", None), getattr(value, "dtype", value is None)


def _groups(tree: Mapping[str, Any]) -> set[str]:
    """The first parts of the paths: "model", "control", ..."""
    return {path.partition("/")[0] for path in tree}
