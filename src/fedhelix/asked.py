"""What a method's hooks return: an answer that does not fit is told here, and not where it would come to harm."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhelix.errors import BadInput, unknown
from fedhelix.method import Batch, Client, Context, Local, LocalRound, Method, Phase, Upload
from fedhelix.tree import SEPARATOR, State, Tree, flatten
from fedhelix.units import Units


@dataclass(frozen=True, eq=False)
class Asked:
    """The hooks of a method, which return what they should or raise BadInput with the name of the hook."""

    method: Method

    # Both sides ------------------------------------------------------------------------------------------------

    def shared(self, units: Units) -> Sequence[str]:
        """Entries of the network."""
        found = self.method.shared(units)
        for name in found:
            if name not in units.names:
                raise unknown(f"entry in {self.method.label}.shared", name, units.names)
        return found

    # Client ----------------------------------------------------------------------------------------------------

    def hello(self, client: Client) -> Tree:
        """A tree."""
        return self._tree("hello", self.method.hello(client))

    def start(self, payload: Tree, own: Tree, client: Client) -> dict[str, State]:
        """Models by their names."""
        found = self.method.start(payload, own, client)
        if not isinstance(found, Mapping) or not found or not all(map(_is_state, found.values())):
            raise self._wrong("start", "models by their names, such as {'model': {...}}", found)
        return found

    def anchor(self, payload: Tree, own: Tree, client: Client) -> Tree:
        """A tree of tensors alone."""
        found = self._tree("anchor", self.method.anchor(payload, own, client))
        for name, value in flatten(found).items():
            if not isinstance(value, Tensor):
                raise self._wrong("anchor", f"tensors alone; '{name}' is", value, "")
        return found

    def phases(self, client: Client, models: Mapping[str, State]) -> list[Phase]:
        """Phases, each of which trains one of the models."""
        found = self._phases("phases", self.method.phases(client))
        for phase in found:
            self._known("phases", phase.model, models)
        return found

    def tune(self, client: Client) -> list[Phase]:
        """Phases."""
        return self._phases("tune", self.method.tune(client))

    def personal(self, models: dict[str, State]) -> str:
        """The name of one of the models."""
        return self._known("personal", self.method.personal(models), models)

    def loss(self, params: Mapping[str, Tensor], batch: Batch, local: Local) -> Tensor:
        """One number for the whole batch."""
        found = self.method.loss(params, batch, local)
        if not isinstance(found, Tensor) or found.dim():
            raise self._wrong("loss", "a tensor with one number for the batch", found)
        return found

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """What is sent, with tensors as its `model`, and what is kept."""
        sent, kept = self._parts("upload", self.method.upload(local), "what is sent", "what is kept")
        if not _is_state(sent.get("model", {})):
            raise self._wrong("upload", "as 'model' a dict of tensors by their names", sent["model"])
        return sent, kept

    def reply(self, payload: Tree, client: Client) -> Tree:
        """A tree."""
        return self._tree("reply", self.method.reply(payload, client))

    def settle(self, payload: Tree, client: Client) -> Tree:
        """A tree."""
        return self._tree("settle", self.method.settle(payload, client))

    # Server ----------------------------------------------------------------------------------------------------

    def begin(self, hellos: Mapping[int, Tree], ctx: Context) -> tuple[Tree, dict[int, Tree]]:
        """The first state, and trees for some clients."""
        found = self.method.begin(hellos, ctx)
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Mapping):
            raise self._wrong("begin", "two things, its first state and a dict of replies", found)
        return self._tree("begin", found[0]), {i: self._tree("begin", reply) for i, reply in found[1].items()}

    def workers(self, server: Tree, cohort: Sequence[int], ctx: Context) -> list[int]:
        """Clients that are there, each once."""
        found, here = self.method.workers(server, cohort, ctx), set(ctx.present)
        if not isinstance(found, Iterable):
            raise self._wrong("workers", "a list of clients", found)
        found = list(found)
        absent = [client for client in found if client not in here]
        if absent or len(set(found)) < len(found):
            which = f"client {absent[0]} is not" if absent else f"{found} are not"
            raise BadInput(f"{self.method.label}.workers must return clients that are present, each once; {which}.")
        return [int(client) for client in found]

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """A tree."""
        return self._tree("download", self.method.download(server, client, ctx))

    def weigh(self, server: Tree, uploads: Sequence[Upload], ctx: Context) -> list[float]:
        """A weight for every upload."""
        found = self.method.weigh(server, uploads, ctx)
        try:
            found = found if isinstance(found, Tensor) else list(found)
            values = torch.as_tensor(found, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            raise self._wrong("weigh", "a list of numbers", found) from None
        weights: list[float] = values.flatten().tolist()
        if values.shape != (len(uploads),) or not all(0 <= weight < math.inf for weight in weights):
            shown = f"{found}"[:100]
            raise BadInput(
                f"{self.method.label}.weigh must return {len(uploads)} finite weights of at least 0, one for each "
                f"upload, not {shown}."
            )
        return weights

    def merge(self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context) -> Tree:
        """A tree."""
        return self._tree("merge", self.method.merge(server, uploads, weights, ctx))

    def welcome(self, server: Tree, message: Tree, ctx: Context) -> tuple[Tree, Tree, bool]:
        """The next state, what the newcomer receives, and whether that was all."""
        found = self.method.welcome(server, message, ctx)
        if not isinstance(found, tuple) or len(found) != 3:
            raise self._wrong("welcome", "three things, its next state, a payload and whether that was all", found)
        return *self._parts("welcome", found[:2], "its next state", "what is received"), bool(found[2])

    def other_bytes(self, ctx: Context) -> int:
        """What the method notes of traffic that is not simulated."""
        noted = self._noted(ctx.notes.get("other_bytes", 0), "other_bytes")
        if isinstance(noted, bool) or not isinstance(noted, int | float) or not 0 <= noted < math.inf:
            raise BadInput(f"{self.method.label} notes {noted!r} as 'other_bytes', which is a number of bytes.")
        return int(noted)

    def notes(self, ctx: Context) -> dict[str, Any]:
        """What the method wants recorded of a round, with tensors as lists."""
        return {key: self._noted(value, key) for key, value in ctx.notes.items()}

    # How answers are looked at ---------------------------------------------------------------------------------

    def _wrong(self, hook: str, right: str, found: object, instead: str = ", not") -> BadInput:
        kind = "None" if found is None else f"a {type(found).__name__}"
        if isinstance(found, Tensor):
            kind += f" of shape {tuple(found.shape)}"
        return BadInput(f"{self.method.label}.{hook} must return {right}{instead} {kind}.")

    def _tree(self, hook: str, found: Any, what: str = "a dict") -> Tree:
        """A tree that can be kept, sent and written down."""
        if not isinstance(found, Mapping):
            raise self._wrong(hook, f"{what} of named tensors and numbers", found)
        return self._level(hook, found, "")

    def _level(self, hook: str, level: Mapping[Any, Any], above: str) -> Tree:
        """One level of it, with NumPy's numbers as ordinary ones."""
        where, tree = f"{self.method.label}.{hook}", dict(level)
        for name, value in level.items():
            if not isinstance(name, str) or SEPARATOR in name:
                inside = f" in '{above.rstrip(SEPARATOR)}'" if above else ""
                raise BadInput(f"{where} has the name {name!r}{inside}; names are text without a '{SEPARATOR}'.")
            if isinstance(value, Tensor):  # most are
                continue
            if isinstance(value, Mapping):
                tree[name] = self._level(hook, value, f"{above}{name}{SEPARATOR}")
            elif isinstance(value, np.generic):
                tree[name] = value.item()
            elif not _is_plain(value):
                raise BadInput(
                    f"{where} has a {type(value).__name__} as '{above}{name}'; only tensors, numbers and dicts of "
                    "them can be kept and sent."
                )
        return tree

    def _parts(self, hook: str, found: Any, *parts: str) -> tuple[Tree, Tree]:
        """Two trees."""
        if not isinstance(found, tuple) or len(found) != 2:
            raise self._wrong(hook, f"two trees, {' and '.join(parts)}", found)
        one, other = (self._tree(hook, part, f"as {what} a dict") for part, what in zip(found, parts, strict=True))
        return one, other

    def _phases(self, hook: str, found: Any) -> list[Phase]:
        given = list(found) if isinstance(found, Iterable) else [found]
        phases = [phase for phase in given if isinstance(phase, Phase)]
        if len(phases) < len(given) or not isinstance(found, Iterable):
            raise self._wrong(hook, "a tuple of phases, such as (Phase(),)", found)
        return phases

    def _known(self, hook: str, name: str, models: Mapping[str, State]) -> str:
        if name not in models:
            raise unknown(f"model in {self.method.label}.{hook}", name, models)
        return name

    def _noted(self, value: Any, key: object) -> Any:
        if isinstance(value, Tensor | np.ndarray | np.generic):
            return value.tolist()
        if isinstance(value, Mapping):
            return {name: self._noted(item, key) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._noted(item, key) for item in value]
        if not _is_plain(value):
            raise BadInput(f"{self.method.label} notes a {type(value).__name__} as '{key}'; note numbers or text.")
        return value


def _is_state(found: Any) -> bool:
    """Whether it maps names to tensors."""
    return isinstance(found, Mapping) and all(isinstance(value, Tensor) for value in found.values())


def _is_plain(value: Any) -> bool:
    """Whether it can be written down without being a tensor."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
