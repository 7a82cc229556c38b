"""Sweeps: a grid of settings is a comparison of variants.

methods = ["fedavg", "genfed"]
seeds = 3

[settings]                      # any key, the same for all
preset = "genfed.strong"
data = "digits"

[grid]                          # every combination is run
lr = [0.05, 0.1]
"genfed.rho_max" = [3, 5]       # for this method only
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhelix.core import toml
from fedhelix.core.errors import UserError, unknown
from fedhelix.core.registry import is_known, resolve
from fedhelix.runs.config import flat, layered

KEYS = {"methods": list, "seeds": int, "settings": dict, "grid": dict}


@dataclass(frozen=True)
class Sweep:
    """What a file asks for, as the arguments of `compare`."""

    methods: list[str]  # with what each variant sets for itself
    settings: dict[str, Any]
    seeds: int


def read_sweep(file: str | Path) -> Sweep:
    """The sweep that a TOML file describes."""
    content = toml.read(file)
    for key, value in content.items():
        if key not in KEYS:
            raise unknown(f"key in '{file}'", key, KEYS)
        if not isinstance(value, KEYS[key]):
            raise UserError(f"'{key}' in '{file}' must be a {KEYS[key].__name__}, not {value!r}.")
    methods, grid = content.get("methods", []), flat(content.get("grid", {}))
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
    for key in grid:
        group, _, rest = key.partition(".")
        if rest and is_known(group) and group not in known:
            raise UserError(
                f"'{key}' in the grid of '{file}' concerns none of its methods; leave it out."
            )
    settings = dict(content.get("settings", {}))
    preset = settings.pop("preset", None)
    return Sweep(
        [variant for method in methods for variant in variants(str(method), grid)],
        layered(preset) | flat(settings),
        content.get("seeds", 1),
    )


def variants(method: str, grid: dict[str, list[Any]]) -> list[str]:
    """The method with every combination of the values that concern it: `fedavg@lr=0.1,epochs=2`."""
    names = {kind.name for kind in resolve(method.partition("@")[0])}
    mine = {
        rest if rest and group in names else key: values
        for key, values in grid.items()
        for group, _, rest in [key.partition(".")]
        if not rest or group in names or group == "method" or not is_known(group)
    }
    specs = []
    for chosen in itertools.product(*mine.values()):
        pairs = ",".join(f"{key}={_text(value)}" for key, value in zip(mine, chosen, strict=True))
        joint = "," if "@" in method else "@"
        specs.append(f"{method}{joint}{pairs}" if pairs else method)
    return specs


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
