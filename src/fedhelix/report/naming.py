"""What runs are called beside each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

MOST_TOLD = 4  # settings in a label, whatever their values

# Settings that a reader expects to be the same for all methods of a comparison.
OF_EVERY_METHOD = ("data", "clients")


class Named(Protocol):
    """What a run's label is made of."""

    @property
    def method(self) -> str:
        """The method's name."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Those of the method."""

    @property
    def circumstances(self) -> Mapping[str, Any]:
        """All other settings that can change a result."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The run's config.toml."""

    @property
    def complete(self) -> bool:
        """Whether the run is finished."""


def label_of(result: Named, others: Sequence[Named]) -> str:
    """The method's name, and in brackets what tells the run from others of its method or data:
    where that is much, only what is not as in most runs.
    """
    mine = _settings(result)
    kin = [_settings(other) for other in others if other.method == result.method]
    keys = dict.fromkeys(key for other in kin for key in other if key not in OF_EVERY_METHOD)
    different = [
        key
        for key, value in result.circumstances.items()
        if any(other.circumstances.get(key, value) != value for other in others)
    ]
    told = [
        key
        for key in keys
        if key in different or any(other.get(key) != mine.get(key) for other in kin)
    ]
    told += [key for key in different if key in OF_EVERY_METHOD]
    if len(told) > MOST_TOLD:
        settings = [_settings(other) for other in others]
        usual = {key: Counter(str(one.get(key)) for one in settings).most_common(1) for key in told}
        told = [key for key in told if str(mine.get(key)) != usual[key][0][0]]
    details = [f"{key}={mine.get(key, 'auto')}" for key in told]
    if "deployment" in result.config and any("deployment" not in other.config for other in others):
        details.append("deployed")
    if not result.complete:
        details.append("pruned" if result.config.get("pruned") else "unfinished")
    return f"{result.method} ({', '.join(details)})" if details else result.method


def _settings(result: Named) -> dict[str, Any]:
    return {**result.circumstances, **result.options}
