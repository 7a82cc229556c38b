"""Sweeps: a grid of settings is a comparison of variants.

methods = ["fedavg", "genfed"]
seeds = 3

[settings]                      # any key, the same for all
preset = "genfed.strong"
data = "digits"

[grid]                          # every combination is run
lr = [0.05, 0.1]
"genfed.rho_max" = [3, 5]       # for this method only

`fedhelix tune` reads the same file without seeds. It chooses from the grid's lists and from ranges:

trials = 20                     # of every method

[range]
lr = { low = 0.001, high = 1.0, log = true }
epochs = { low = 1, high = 5 }
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhelix.core import toml
from fedhelix.core.errors import UserError, unknown
from fedhelix.core.registry import is_known, resolve
from fedhelix.runs.config import Config, flat, layered
from fedhelix.runs.spec import groups_of

KEYS = {
    "methods": list, "seeds": int, "settings": dict, "grid": dict, "trials": int, "range": dict,
}  # fmt: skip
A = {list: "a list", int: "a whole number", dict: "a table"}
Space = dict[str, Any]  # for each key a list of values, or a range


@dataclass(frozen=True)
class Sweep:
    """What a file asks for, as the arguments of `compare`."""

    methods: list[str]  # with what each variant sets for itself
    settings: dict[str, Any]
    seeds: int


@dataclass(frozen=True)
class Search:
    """What a file asks `fedhelix tune` for."""

    methods: list[str]
    settings: dict[str, Any]
    space: Space
    trials: int

    def trials_of(self, method: str) -> int:
        """How many trials a method has: no more than there are settings, where these are lists."""
        lists = concerned(method, self.space).values()
        if not all(isinstance(values, list) for values in lists):
            return self.trials
        return min(self.trials, math.prod(map(len, lists)))


def read_sweep(file: str | Path) -> Sweep:
    """The sweep that a TOML file describes."""
    content = _checked(file)
    if "range" in content or "trials" in content:
        raise UserError(f"'{file}' has ranges or trials; use `fedhelix tune` instead of `sweep`.")
    grid = flat(content.get("grid", {}))
    return Sweep(
        [variant for method in content["methods"] for variant in variants(str(method), grid)],
        _settings(content),
        content.get("seeds", 1),
    )


def read_search(file: str | Path) -> Search:
    """The search that a TOML file describes."""
    content = _checked(file, one_seed=True)
    ranges, trials = dict(content.get("range", {})), content.get("trials", 20)
    for key, given in ranges.items():
        _check_range(f"'{key}' in the ranges of '{file}'", given)
    space = {**flat(content.get("grid", {})), **ranges}
    if not space:
        raise UserError(f"'{file}' has neither a grid nor ranges to search in.")
    if trials < 1:
        raise UserError(f"'trials' in '{file}' must be at least 1, not {trials}.")
    return Search([str(method) for method in content["methods"]], _settings(content), space, trials)


def _check_range(what: str, given: Any) -> None:
    """A range has two numbers in order; on a logarithmic scale they are positive."""
    example = "{ low = 0.001, high = 1.0, log = true }"
    if not isinstance(given, dict) or not {"low", "high"} <= given.keys() <= {"low", "high", "log"}:
        raise UserError(f"{what} must be a range such as {example}, not {given!r}.")
    numbers = [given["low"], given["high"]]
    fine = all(isinstance(x, int | float) and not isinstance(x, bool) for x in numbers)
    if not fine or not numbers[0] < numbers[1] or (given.get("log") and numbers[0] <= 0):
        raise UserError(f"{what} needs numbers low < high, above 0 with log, not {given!r}.")


def _check_places(content: dict[str, Any], file: str | Path, one_seed: bool) -> None:
    """Refuse a key of the whole file that stands in one of its tables, and seeds of a search."""
    tables = {key: content.get(key, {}) for key, kind in KEYS.items() if kind is dict}
    if one_seed and any("seeds" in table for table in (content, *tables.values())):
        raise UserError(
            f"'{file}' has seeds, but all trials of a search have one seed; write seed in its "
            "table [settings], and repeat the best settings with `fedhelix compare --seeds`."
        )
    for name, table in tables.items():
        for key in table.keys() & KEYS.keys():
            raise UserError(
                f"'{key}' stands in the table [{name}] of '{file}'; write it above the first table."
                if key not in tables
                else f"'{file}' has [{name}.{key}]; write [{key}]."
            )


def _settings(content: dict[str, Any]) -> dict[str, Any]:
    settings = dict(content.get("settings", {}))
    preset = settings.pop("preset", None)
    return layered(preset) | flat(settings)


def _checked(file: str | Path, one_seed: bool = False) -> dict[str, Any]:
    """The content of a file, whose keys have the right types and concern its methods."""
    content = toml.read(file)
    for key, value in content.items():
        if key in Config.names:
            raise UserError(
                f"'{key}' stands above the tables of '{file}'; write it in the table [settings], "
                "or, with a list of values to try, in [grid]."
            )
        if key not in KEYS:
            raise unknown(f"key in '{file}'", key, KEYS)
        if not isinstance(value, KEYS[key]):
            raise UserError(f"'{key}' in '{file}' must be {A[KEYS[key]]}, not {value!r}.")
    _check_places(content, file, one_seed)
    methods, grid = content.get("methods", []), flat(content.get("grid", {}))
    searched = {**grid, **content.get("range", {})}
    if not methods:
        raise UserError(
            f'\'{file}\' names no methods; write for example methods = ["fedavg", "genfed"].'
        )
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise UserError(
                f"'{key}' in the grid of '{file}' must be a list of values, not {values!r}."
            )
    known = {kind.name for method in methods for kind in resolve(str(method).partition("@")[0])}
    for key in searched:
        group, _, rest = key.partition(".")
        if rest and is_known(group) and group not in known:
            raise UserError(
                f"'{key}' in the grid of '{file}' concerns none of its methods; leave it out."
            )
        if rest and group not in (*known, "method"):
            raise unknown(f"method of '{key}' in the grid of '{file}'", group, known)
    return content


def variants(method: str, grid: Space) -> list[str]:
    """The method with every combination of the values that concern it: `fedavg@lr=0.1,epochs=2`."""
    mine = concerned(method, grid)
    return [
        variant(method, dict(zip(mine, chosen, strict=True)))
        for chosen in itertools.product(*mine.values())
    ]


def concerned(method: str, space: Space) -> Space:
    """The keys that concern a method, without its name."""
    names = {kind.name for kind in resolve(method.partition("@")[0])}
    return {
        rest if rest and group in names else key: values
        for key, values in space.items()
        for group, _, rest in [key.partition(".")]
        if not rest or group in names or group == "method" or not is_known(group)
    }


def variant(method: str, chosen: dict[str, Any]) -> str:
    """The method with some values of its own."""
    pairs = ",".join(f"{key}={_text(value)}" for key, value in chosen.items())
    joint = "," if "@" in method else "@"
    return f"{method}{joint}{pairs}" if pairs else method


def command_of(methods: Sequence[str], settings: Space) -> str:
    """The command that runs methods, which may be variants, under settings."""
    groups = {group for method in methods for group in groups_of(method)}
    words = ["fedhelix", "compare" if len(methods) > 1 else "run", *methods]
    for key, value in settings.items():
        group, dot, _ = key.partition(".")
        if not dot or group in groups or not is_known(group):
            words += ["--set", f"{key}={_text(value)}"]
    return shlex.join(words)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
