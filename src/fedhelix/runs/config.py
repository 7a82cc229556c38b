"""The settings of a run: defaults, presets, files and flags become one checked value, and a
federation.
"""

from __future__ import annotations

import dataclasses
import hashlib
import platform
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from fedhelix.core import toml
from fedhelix.core.errors import UserError, unknown
from fedhelix.core.method import Method
from fedhelix.core.options import find, option
from fedhelix.core.registry import is_file, is_known, make, option_names, parts, resolve
from fedhelix.core.renamed import OPTIONS
from fedhelix.core.version import __version__
from fedhelix.data import Dataset, from_npz, load, partitions
from fedhelix.engines import Engine
from fedhelix.engines.local import Setup
from fedhelix.federation import Federation, FederationSettings
from fedhelix.federation.setup import device_of
from fedhelix.models import suited
from fedhelix.runs.presets import PRESETS
from fedhelix.store import FORMAT

# Entries of a run's config.toml that describe where it came from; they are written, not obeyed.
PROVENANCE = ("format", "versions", "deployment")
# Settings that must not, or need not, differ between the methods of a comparison.
FOR_ALL = ("seed", "kernels", "workers", "data_dir", "checkpoint_every")
LONGEST = 200  # bytes of a folder's name; file systems take 255
# Where and how a run is computed; none of it changes what is run.
PLACES = ("device", "data_dir", "engine", "workers", "kernels", "checkpoint_every", "client_state")


@dataclass(frozen=True)
class Config(FederationSettings):
    """Everything that determines a run, but for the method's own options."""

    data: str = option(
        "digits", "digits, mnist, fashion-mnist, emnist, cifar10, cifar100, svhn, or FILE.npz"
    )
    data_dir: str | None = option(
        None, "folder with NAME.npz or the official files (or set FEDHELIX_DATA)"
    )
    train_samples: int | None = option(
        None, "take only the first so many training samples (auto: all)", low=1
    )
    test_samples: int | None = option(
        None, "take only the first so many test samples (auto: all)", low=1
    )
    model: str = option(
        "auto", "network: auto, cnn, mlp, linear, small-cnn, fedpac-cnn, genfed-cnn, resnet18, ..."
    )
    clients: int = option(20, "how many clients there are", low=1)
    cohort: int | None = option(
        None, "clients sampled in each round (auto: 10, or all if there are fewer)", low=1
    )
    partition: str | None = option(
        None,
        "who owns what: iid, shard:S, dirichlet:A, dominant:S or natural (auto: natural where the data name owners, "
        "else dirichlet:0.3)",
    )
    valid: float = option(
        0.1, "share of a client's samples kept for choosing rounds and settings", low=0, high=0.9
    )
    rounds: int = option(30, "rounds of the federation", low=1)
    eval_every: int = option(1, "evaluate after every so many rounds, and after the last", low=1)
    eval_clients: int | None = option(
        None, "clients whose personal models are judged (auto: all; 0: none)", low=0
    )
    checkpoint_every: int = option(1, "write a checkpoint after every so many rounds", low=1)
    client_state: Literal["memory", "disk"] = option(
        "memory", "where clients' state is kept (memory, disk)"
    )
    seed: int = option(0, "every random draw follows from it", low=0)
    engine: str = option("auto", "how many clients run at once: auto, serial, parallel or batched")
    device: str = option("auto", "cpu, cuda or auto")
    workers: int | None = option(
        None, "processes of the parallel engine (auto: as many as there are cores)", low=1
    )
    kernels: Literal["auto", "onednn", "native", "tuned", "compiled"] = option(
        "auto", "CPU kernels (auto: the fastest)"
    )

    names: ClassVar[list[str]]

    def load(self) -> Dataset:
        """The data that these settings name."""
        pool = (
            from_npz(self.data)
            if self.data.endswith(".npz")
            else load(self.data, data_dir=self.data_dir)
        )
        return pool.first(self.train_samples, self.test_samples)

    def federation(
        self,
        method: Method,
        engine: str | Callable[[Setup], Engine] | None = None,
        data: Dataset | None = None,
        **instead: Any,
    ) -> Federation:
        """The federation that these settings describe, but for what is given: engine, data,
        arguments of its own.
        """
        same = ("model", "cohort", "eval_clients", "seed", "device", "workers", "kernels")
        arguments = {name: getattr(self, name) for name in same}
        pool = data if data is not None else self.load()
        if "partition" not in instead:
            text = partitions.usual(pool) if self.partition is None else self.partition
            instead["partition"] = partitions.parse(text, self.clients, valid=self.valid)
        settings = self
        if "validation_size" in instead:
            settings = dataclasses.replace(self, validation_size=instead.pop("validation_size"))
        arguments |= {"method": method, "engine": engine or self.engine, "settings": settings}
        return Federation(pool, **arguments | instead)

    def settled(self, federation: Federation) -> dict[str, Any]:
        """What was left open, as it was chosen: a run's folder says exactly what made it."""
        data = federation.data
        return {
            "partition": partitions.usual(data) if self.partition is None else self.partition,
            "cohort": federation.cohort_size,
            "model": suited(data.shape, data.name) if self.model == "auto" else self.model,
            # timed: a resumed run must compute as it began
            "kernels": federation.engine.setup.kernels,
        }


Config.names = [field.name for field in dataclasses.fields(Config)]


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


def layered(
    preset: str | None = None,
    file: str | Path | None = None,
    flags: Mapping[str, Any] | None = None,
    assignments: list[str] | None = None,
) -> dict[str, Any]:
    """Flat keys and values; later layers win: preset, file, flags, and KEY=VALUE assignments."""
    layers: list[dict[str, Any]] = []
    if preset is not None:
        if not isinstance(preset, str) or preset not in PRESETS:
            raise unknown("preset", str(preset), PRESETS)
        layers.append(flat(PRESETS[preset]))
    if file is not None:
        layers.append(read_settings(file))
    layers.append({key: value for key, value in (flags or {}).items() if value is not None})
    for text in assignments or []:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set takes KEY=VALUE, not '{text}'.")
        layers.append({key.strip(): value.strip()})
    values: dict[str, Any] = {}
    for layer in layers:
        # Two spellings of one key are settled by their order, so what is set anew goes to the end.
        values = {key: value for key, value in values.items() if key not in layer} | layer
    return values


def read_settings(file: str | Path) -> dict[str, Any]:
    """The settings in a TOML file; the method's options in a run's config.toml count for that
    method only.
    """
    content = toml.read(file)
    number = content.get("format")
    if isinstance(number, int) and number > FORMAT:
        raise UserError(
            f"'{file}' was written by a newer fedhelix (format {number}, this one reads up to {FORMAT}); "
            "upgrade fedhelix to read it."
        )
    if content.get("library"):
        raise UserError(
            f"'{file}' describes Python objects and not settings; give the config.toml of a command's run."
        )
    method = content.get("method")
    if isinstance(method, Mapping):
        name = str(method.get("name")).removesuffix("+fedavg")
        content = {key: value for key, value in content.items() if key != "method"}
        content[name if is_known(name) else "method"] = {
            key: value for key, value in method.items() if key != "name"
        }
    return flat(content)


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables as dotted keys, without the entries that only say where a run came from."""
    return toml.flat({key: value for key, value in values.items() if key not in PROVENANCE})


def make_spec(spec: str, values: Mapping[str, Any]) -> RunSpec:
    """A checked plan for one method.

    Keys are those of `Config`; `method.KEY` is an option of the method, and `NAME.KEY` one of the
    method NAME only (also where NAME wraps another method or is wrapped by one).
    `SPEC@KEY=VALUE,...` is a variant with keys of its own.
    """
    spec, variant = split_variant(spec)
    spec, values = absolute(spec), located(values)
    settings: dict[str, Any] = {}
    options: dict[str, Any] = {}
    mine = groups_of(spec)
    own = _of_variant(variant, mine)
    for key, value in (*values.items(), *own.items()):
        group, _, rest = key.partition(".")
        if group in mine and rest:
            options[rest] = value
        elif rest and is_known(group):
            # An option of another method, perhaps in the same comparison or from a preset.
            find(
                rest,
                [name for kind in resolve(group) for name in option_names(kind)],
                f"key of the method {group}",
            )
        else:
            settings[find(key, Config.names, grouped=False)] = value
    return RunSpec(spec, make(spec, options), Config(**settings), variant)


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
    return [make_spec(spec, values) for spec in specs]


def split_variant(spec: str) -> tuple[str, str]:
    """A method and what is set for it alone: `fedavg@lr=0.1,epochs=5` has its own learning rate and
    epochs.
    """
    name, at, variant = spec.rpartition("@")
    return (name, variant) if at and ".py" not in variant else (spec, "")


def _of_variant(text: str, groups: set[str]) -> dict[str, str]:
    """The keys of a variant: those of `Config`, and any other is an option of the method."""
    found: dict[str, str] = {}
    for assignment in filter(
        None, re.split(r",(?![^\[(]*[\])])", text)
    ):  # not within brackets: those are tuples
        key, equals, value = (word.strip() for word in assignment.partition("="))
        if not equals or not key:
            raise UserError(
                f"a variant is METHOD@KEY=VALUE,... and '{assignment}' is no KEY=VALUE."
            )
        field = key.replace(".", "_").replace("-", "_")
        if field in FOR_ALL:
            raise UserError(f"a variant cannot have a {field} of its own; set it for all methods.")
        known = field in Config.names or key.partition(".")[0] in groups
        found[key if known else f"method.{key}"] = value
    return found


def read_spec(config: Mapping[str, Any], where: str | Path) -> RunSpec:
    """The plan behind a run folder's config."""
    method = config.get("method")
    if not isinstance(method, Mapping) or "name" not in method:
        raise UserError(f"'{where}' does not say which method it ran.")
    if config.get("library"):
        raise UserError(
            f"'{where}' was made from Python objects; resume it with Federation.fit(out=..., resume=True)."
        )
    values = {key: value for key, value in flat(config).items() if key != "method.name"}
    name = str(method["name"])
    renamed = {old: new for part in parts(name) for old, new in OPTIONS.get(part, {}).items()}
    values = {
        f"method.{renamed[key.removeprefix('method.')]}"
        if key.startswith("method.") and key.removeprefix("method.") in renamed
        else key: value
        for key, value in values.items()
    }
    return make_spec(name, values)


def located(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings whose files can be found from any folder."""
    found = dict(values)
    for key in ("data", "data_dir"):
        place = found.get(key)
        if isinstance(place, str) and (key == "data_dir" or place.endswith(".npz")):
            found[key] = str(Path(place).expanduser().resolve())
    return found


def absolute(spec: str) -> str:
    """A spec whose files, if it names any, can be found from any folder."""
    plain, variant = split_variant(spec)
    found = []
    for part in parts(plain):
        path, colon, name = part.partition(":")
        found.append(f"{Path(path).resolve()}{colon}{name}" if is_file(part) else part)
    return "+".join(found) + (f"@{variant}" if variant else "")


def versions() -> dict[str, str]:
    """What produced a run: package versions, and the commit when this is a source checkout."""
    found = {
        "fedhelix": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
    }
    commit = _git("rev-parse", "HEAD")
    if commit:
        found["commit"] = commit + (
            "+changes" if _git("status", "--porcelain", "--", "src") else ""
        )
    return found


def device_name(device: str) -> str:
    """What computes a run: the GPU's name, or CPU."""
    return torch.cuda.get_device_name() if device_of(device).type == "cuda" else "CPU"


@cache
def _git(*words: str) -> str:
    # Only a checkout of this project counts, not whatever repository an installed package happens
    # to lie in.
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return ""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
