"""The settings of a run: defaults, presets, files and flags become one checked value, and a
federation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from fedhelix.core import toml
from fedhelix.core.errors import UserError, unknown
from fedhelix.core.method import Method
from fedhelix.core.options import option
from fedhelix.core.registry import is_known
from fedhelix.data import Dataset, from_npz, load, partitions
from fedhelix.engines import Engine
from fedhelix.engines.local import Setup
from fedhelix.federation import Federation, FederationSettings
from fedhelix.federation.inputs import USUAL_CLIENTS
from fedhelix.models import suited
from fedhelix.runs.presets import PRESETS
from fedhelix.store import FORMAT

# Entries of a run's config.toml that describe where it came from; they are written, not obeyed.
PROVENANCE = ("format", "versions", "deployment", "pruned")
# Where and how a run is computed; none of it changes what is run.
PLACES = (
    "device", "data_dir", "engine", "workers", "address", "kernels", "checkpoint_every",
    "client_state",
)  # fmt: skip
# What may change when a run goes on: nothing that its rounds so far were computed with.
CHANGEABLE = ("rounds", "eval_every", "eval_trained", *PLACES)


@dataclass(frozen=True)
class Config(FederationSettings):
    """Everything that determines a run, but for the method's own options."""

    data: str = option(
        "digits",
        "digits, wine, breast-cancer, synthetic-text, synthetic-series, mnist, "
        "fashion-mnist, emnist, cifar10, cifar100, svhn, femnist, shakespeare, har, ag-news, "
        "or FILE.npz; across sites also own: every site's own samples",
    )
    data_dir: str | None = option(
        None, "folder with NAME.npz or the official files (auto: that of FEDHELIX_DATA, or a cache)"
    )
    train_samples: int | None = option(
        None, "take only the first so many training samples (auto: all)", low=1
    )
    test_samples: int | None = option(
        None, "take only the first so many test samples (auto: all)", low=1
    )
    model: str = option(
        "auto",
        "the network: auto, cnn, mlp, linear, small-cnn, fedpac-cnn, genfed-cnn, resnet18, ..., or "
        "your own FILE.py:NAME",
    )
    clients: int | None = option(
        None,
        f"how many clients there are (auto: as many as the data have owners, else {USUAL_CLIENTS})",
        low=1,
    )
    cohort: int | None = option(
        None, "clients sampled in each round (auto: 10, or all if there are fewer)", low=1
    )
    partition: str | None = option(
        None,
        "who owns what: iid, shard:S, dirichlet:A, quantity:A, dominant:S or dominant:S:N with N "
        "samples for each client, fedpac likewise, natural, or natural:N without owners of fewer "
        "than N samples "
        "(auto: natural where the data name owners, else dirichlet:0.3)",
    )
    valid: float = option(
        0.1, "share of a client's samples kept for choosing rounds and settings", low=0, high=0.9
    )
    rounds: int = option(30, "rounds of the federation", low=1)
    eval_every: int = option(1, "evaluate after every so many rounds, and after the last", low=1)
    eval_clients: int | None = option(
        None, "clients whose personal models are evaluated (auto: all; 0: none)", low=0
    )
    eval_trained: bool = option(
        False, "evaluate clients also after one round's local training, every method alike"
    )
    checkpoint_every: int = option(1, "write a checkpoint after every so many rounds", low=1)
    client_state: Literal["memory", "disk"] = option(
        "memory", "where clients' state is kept (memory, disk)"
    )
    seed: int = option(0, "every random draw follows from it", low=0)
    engine: str = option(
        "auto", "how many clients run at once: auto, serial, parallel, batched or ray"
    )
    device: str = option("auto", "cpu, cuda or auto")
    workers: int | None = option(
        None, "processes of the parallel or ray engine (auto: as many as there are cores)", low=1
    )
    address: str | None = option(
        None, "Ray cluster of the ray engine: HOST:PORT, or auto (none: Ray starts on this machine)"
    )
    kernels: Literal["auto", "onednn", "native", "tuned", "compiled"] = option(
        "auto", "CPU kernels (auto: the fastest)"
    )

    names: ClassVar[list[str]]

    @property
    def client_count(self) -> int:
        """How many clients there are, unless the owners of the data decide it."""
        return USUAL_CLIENTS if self.clients is None else self.clients

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
        kind: Callable[..., Federation] = Federation,
        **instead: Any,
    ) -> Federation:
        """The federation that these settings describe, but for what is given: engine, data, kind
        of federation, arguments of its own.
        """
        evaluated = ("eval_clients", "eval_trained")
        places = ("device", "workers", "address", "kernels")
        same = ("model", "cohort", *evaluated, "seed", *places)
        arguments = {name: getattr(self, name) for name in same}
        pool = data if data is not None else self.load()
        if "partition" not in instead:
            text = partitions.usual(pool) if self.partition is None else self.partition
            instead["partition"] = partitions.parse(text, self.client_count, valid=self.valid)
            instead["clients"] = self.clients
        settings = self
        if "validation_size" in instead:
            settings = dataclasses.replace(self, validation_size=instead.pop("validation_size"))
        arguments |= {"method": method, "engine": engine or self.engine, "settings": settings}
        return kind(pool, **arguments | instead)

    def settled(self, federation: Federation) -> dict[str, Any]:
        """What was left open, as it was chosen: a run's folder says exactly what made it."""
        data = federation.data
        return {
            "partition": partitions.usual(data) if self.partition is None else self.partition,
            "clients": federation.known,
            "cohort": federation.cohort_size,
            "model": suited(data.shape, data.name) if self.model == "auto" else self.model,
            # timed: a resumed run must compute as it began
            "kernels": federation.engine.setup.kernels,
        }


Config.names = [field.name for field in dataclasses.fields(Config)]


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
            f"'{file}' was written by a newer fedhelix (format {number}, this one reads up to "
            f"{FORMAT}); "
            "upgrade fedhelix to read it."
        )
    if content.get("library"):
        raise UserError(
            f"'{file}' describes Python objects and not settings; give the config.toml of a "
            "command's run."
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
