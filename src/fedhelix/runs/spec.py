"""What to run: a method with its options, and the settings it runs under."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhelix.core.errors import UserError
from fedhelix.core.method import Method
from fedhelix.core.options import find
from fedhelix.core.registry import is_known, make, option_names, parts, resolve
from fedhelix.core.renamed import OPTIONS
from fedhelix.federation.description import as_command, located
from fedhelix.federation.devices import FILES
from fedhelix.federation.keywords import elsewhere
from fedhelix.federation.provenance import device_name, versions
from fedhelix.federation.sources import resolved_method
from fedhelix.runs.config import CHANGEABLE, Config, flat, layered

# Settings that must not, or need not, differ between the methods of a comparison.
FOR_ALL = ("seed", "kernels", "workers", "address", "data_dir", "checkpoint_every")
MOVABLE = ("data", "model")  # what may be a file, whose content a run that goes on compares
LONGEST = 200  # bytes of a folder's name; file systems take 255


@dataclass(frozen=True)
class RunSpec:
    """A method with its options, and the settings it runs under."""

    # the method as it was named: a registered name, wrappers such as genfed+fedau, or FILE.py
    spec: str
    method: Method
    config: Config
    variant: str = ""  # what was set for it alone, as KEY=VALUE,...

    @property
    def label(self) -> str:
        """What tells it from the other plans of a comparison; good for a folder."""
        if not self.variant:
            return self.method.label
        name = f"{self.method.label}@{self.variant}".replace("/", "_")
        if len(name.encode()) <= LONGEST:
            return name
        return f"{name[: LONGEST // 4]}...{hashlib.sha256(name.encode()).hexdigest()[:10]}"

    def as_dict(self) -> dict[str, Any]:
        """For config.toml; `read_plan` gives the same plan back."""
        values = {**vars(self.config), "method": {"name": self.spec, **self.method.options()}}
        return {**values, "versions": {**versions(), "device": device_name(self.config.device)}}

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process, which reads a method of a file again."""
        return _again, (self.spec, self.method.options(), self.config, self.variant)


def _again(spec: str, options: Mapping[str, Any], config: Config, variant: str) -> RunSpec:
    method = make_spec(spec, flat({"method": options})).method
    return RunSpec(spec, method, config, variant)


def make_spec(spec: str, values: Mapping[str, Any], rivals: Sequence[str] = ()) -> RunSpec:
    """A checked plan for one method.

    Keys are those of `Config`; `method.KEY` is an option of the method, and `NAME.KEY` one of the
    method NAME only (also where NAME wraps another method or is wrapped by one).
    `SPEC@KEY=VALUE,...` is a variant with keys of its own. Where a key is wrong, an option of a
    method beside which this one runs (`rivals`) may be what was meant.
    """
    spec, variant = split_variant(spec)
    spec, values = absolute(spec), located(values)
    settings: dict[str, Any] = {}
    options: dict[str, Any] = {}
    mine = groups_of(spec)
    own = _of_variant(spec, variant, mine)
    for key, value in (*values.items(), *own.items()):
        group, _, rest = key.partition(".")
        _check_word(spec, rest if group in mine and rest else key)
        if group in mine and rest:
            if key not in own:
                _check_home(spec, key, rest, rivals)
            options[rest] = value
        elif rest and is_known(group):
            # An option of another method, perhaps in the same comparison or from a preset.
            find(
                rest,
                [name for kind in resolve(group) for name in option_names(kind)],
                f"key of the method {group}",
            )
        else:
            if key not in Config.names:
                _check_home(spec, key, key, rivals)
            beside = option_keys([spec, *rivals]) if rest else ()
            settings[find(key, Config.names, grouped=False, beside=beside)] = value
    method = make(spec, options, beside=Config.names if variant else ())
    return RunSpec(spec, method, Config(**settings), variant)


def _check_word(spec: str, key: str) -> None:
    """Refuse a keyword of other libraries, and say what there is here."""
    known = {*Config.names, *(name for kind in resolve(spec) for name in option_names(kind))}
    if key not in known and (how := elsewhere(key)):
        raise UserError(f"there is no setting '{key}'; {how}.")


def _check_home(spec: str, key: str, option: str, rivals: Sequence[str]) -> None:
    """Refuse an option that lacks the word before the dot, or that only a rival has."""
    if any(option in option_names(kind) for kind in resolve(spec)):
        if key != option:
            return
        homes = option_keys(rivals) if len(rivals) > 1 else [f"method.{option}"]
        problem = f"'{option}' is an option of {spec}"
    else:
        homes, problem = option_keys(rivals), f"{spec} has no option {option}"
    homes = [home for home in homes if home.partition(".")[2] == option]
    if homes:
        raise UserError(f"{problem}; write {' or '.join(homes)}.")


def option_keys(specs: Sequence[str]) -> list[str]:
    """The options of methods, as keys."""
    kinds = [kind for spec in specs for kind in resolve(absolute(split_variant(spec)[0]))]
    keys = [f"{kind.name}.{option}" for kind in kinds for option in option_names(kind)]
    return list(dict.fromkeys(keys))


def groups_of(spec: str) -> set[str]:
    """What stands before the dot in keys that are options of this method: `method`, or a name of
    its own.
    """
    names = [kind.name for kind in resolve(absolute(split_variant(spec)[0]))]
    return {"method", *names, "+".join(names)}


def make_specs(specs: Sequence[str], values: Mapping[str, Any]) -> list[RunSpec]:
    """Checked plans for several methods; each takes of the values what is for all and what is its
    own.
    """
    for spec in specs:
        resolve(
            absolute(split_variant(spec)[0])
        )  # now the methods of files are known by their names too
    return [make_spec(spec, values, specs) for spec in specs]


def split_variant(spec: str) -> tuple[str, str]:
    """A method and what is set for it alone: `fedavg@lr=0.1,epochs=5` has its own learning rate and
    epochs.
    """
    name, at, variant = spec.rpartition("@") if ".py" in spec else spec.partition("@")
    return (name, variant) if at and ".py" not in variant else (spec, "")


def _of_variant(spec: str, text: str, groups: set[str]) -> dict[str, str]:
    """The keys of a variant: those of `Config`, and any other is an option of the method."""
    options: dict[str, str] = {}
    for assignment in filter(
        None, re.split(r",(?![^\[(]*[\])])", text)
    ):  # not within brackets: those are tuples
        key, equals, value = (word.strip() for word in assignment.partition("="))
        if not equals or not key:
            raise UserError(
                f"a variant is METHOD@KEY=VALUE,... and '{assignment}' is no KEY=VALUE."
            )
        before, plus, inner = value.partition("+")
        inner, _, more = inner.partition("@")
        if plus and is_known(inner):  # 1e+5 is a value
            options_last = f"{spec}+{inner}@{key}={before}" + (f",{more}" if more else "")
            raise UserError(f"options come after all methods; write {options_last}.")
        field = key.replace(".", "_").replace("-", "_")
        if field in FOR_ALL:
            raise UserError(f"a variant cannot have a {field} of its own; set it for all methods.")
        known = field in Config.names or key.partition(".")[0] in groups
        options[key if known else f"method.{key}"] = value
    return options


def read_spec(config: Mapping[str, Any], where: str | Path) -> RunSpec:
    """The plan behind a run folder's config."""
    config = in_names(config)
    method = config.get("method")
    if not isinstance(method, Mapping) or "name" not in method:
        raise UserError(f"'{where}' does not say which method it ran.")
    if config.get("library"):
        raise UserError(
            f"'{where}' was made from Python objects, so that no command can set it up again; in "
            "Python, Federation.fit(out=..., resume=True) goes on with it."
        )
    values = {key: value for key, value in flat(config).items() if key != "method.name"}
    if config.get("partition") == "natural" and "deployment" not in config:
        values.pop("clients", None)  # owners decide it; older runs have the usual number there
    name = str(method["name"])
    for part in parts(name):
        _check_file("method", part, where)
    renamed = {old: new for part in parts(name) for old, new in OPTIONS.get(part, {}).items()}
    values = {
        f"method.{renamed[key.removeprefix('method.')]}"
        if key.startswith("method.") and key.removeprefix("method.") in renamed
        else key: value
        for key, value in values.items()
    }
    return make_spec(name, values)


def in_names(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A run's config; that of a run from Python as a command has it, where all of it is names."""
    given, method = config.get("made_from"), config.get("method")
    if given is None or not isinstance(method, Mapping):
        return config
    named = "method" in given or is_known(str(method.get("name")))
    return as_command(config) if named else config


def check_files(config: Mapping[str, Any], where: str | Path, otherwise: str) -> None:
    """Refuse a run whose data or network are in a file that is gone; says what else can be done."""
    for key in (*MOVABLE, "devices"):
        advice = f", or {otherwise.replace('KEY', key)}" if key in MOVABLE else ""
        _check_file(key, config.get(key), where, advice)


def _check_file(key: str, value: Any, where: str | Path, advice: str = "") -> None:
    if (file := file_of(value)) and not Path(file).is_file():
        raise UserError(f"there is no file '{file}', the {key} of '{where}'; put it back{advice}.")


def file_of(value: Any) -> str:
    """The file that a setting names; empty where it names none."""
    path = str(value).partition(":")[0]
    return path if path.endswith((".npz", ".py", *FILES)) else ""


def changed_settings(begun: RunSpec, spec: RunSpec) -> dict[str, Any]:
    """What differs in the plan of a run that goes on, of all that may."""
    old, new = vars(begun.config), vars(spec.config)
    return {key: new[key] for key in (*CHANGEABLE, *MOVABLE) if new[key] != old[key]}


def changed_spec(
    spec: RunSpec,
    where: str | Path,
    changes: Sequence[str],
    command: Sequence[str] = ("run",),
    options: str = "",
) -> RunSpec:
    """The plan of a run that goes on, with some KEY=VALUE of those that may change; `command` with
    `options` begins a new one.
    """
    assigned = layered(assignments=list(changes))
    known = {key: value for key, value in flat(spec.as_dict()).items() if key != "method.name"}
    new = make_spec(spec.spec, {key: known[key] for key in known.keys() - assigned} | assigned)
    for key, value in flat(new.as_dict()).items():
        moved = key in MOVABLE and file_of(value) and file_of(known[key])
        if key not in (*CHANGEABLE, "method.name") and value != known[key] and not moved:
            words = ["fedhelix", *command, spec.spec]
            words += ["--config", str(Path(where) / "config.toml")]
            again = shlex.join([*words, *(word for text in changes for word in ("--set", text))])
            old = "auto" if known[key] is None else known[key]
            raise UserError(
                f"'{where}' was begun with {key} = {old}, and a run keeps its settings; "
                f"start a new one with `{again}{options}`."
            )
    return new


def absolute(spec: str) -> str:
    """A spec whose files, if it names any, can be found from any folder."""
    plain, variant = split_variant(spec)
    return resolved_method(plain) + (f"@{variant}" if variant else "")
