"""Files of the user's that a federation was made from, network and method: where they are, and
whether they are as they were.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fedhelix.core.errors import UserError
from fedhelix.core.imports import HASHES
from fedhelix.core.method import Method
from fedhelix.core.registry import home_of, is_file, parts
from fedhelix.core.wrapper import Wrapper
from fedhelix.store import RunFolder

# In clients.json: the hash of the file that made the network, and those of the method's files.
NETWORK_SOURCE, METHOD_SOURCE = "network_source", "method_source"


class SourceFile(NamedTuple):
    """A file, and its hash as it was when it was run."""

    file: str
    sha256: str


class Sources(NamedTuple):
    """The files of network and method, where they have some."""

    network: SourceFile | None = None
    method: tuple[SourceFile, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For clients.json."""
        network = {} if self.network is None else {NETWORK_SOURCE: self.network.sha256}
        method = {METHOD_SOURCE: [source.sha256 for source in self.method]} if self.method else {}
        return network | method


def sources_of(model: Any, method: Method) -> Sources:
    """The files that network and method were made from."""
    path = resolved(model).partition(":")[0] if isinstance(model, str) else ""
    network = SourceFile(path, HASHES[path]) if path in HASHES else None
    files = dict.fromkeys(home for one in _nested(method) for home in map(home_of, _kinds(one)))
    return Sources(
        network, tuple(SourceFile(file, HASHES[file]) for file in files if file in HASHES)
    )


def _nested(method: Method) -> Iterator[Method]:
    """A method and those that it is put around."""
    yield method
    if isinstance(method, Wrapper):
        yield from _nested(method.inner)


def _kinds(method: Method) -> list[type[Method]]:
    return [kind for kind in type(method).__mro__ if issubclass(kind, Method)]


def resolved(part: str) -> str:
    """FILE.py or FILE.py:NAME with the whole path; any other name as it is."""
    path, colon, name = part.partition(":")
    return f"{Path(path).expanduser().resolve()}{colon}{name}" if is_file(part) else part


def resolved_method(spec: str) -> str:
    """A method whose files, if it names any, can be found from any folder."""
    return "+".join(map(resolved, parts(spec)))


def check_sources(mine: Sources, folder: RunFolder, goes_on: bool) -> None:
    """Say that a file of network or method is another one than it was when the run began: the run
    may not go on, and its models may be others.
    """
    its, network = folder.clients, mine.network
    if network is not None and its.get(NETWORK_SOURCE) not in (None, network.sha256):
        _tell(network, "network", folder, goes_on)
    for source in mine.method:
        if METHOD_SOURCE in its and source.sha256 not in its[METHOD_SOURCE]:
            _tell(source, "method", folder, goes_on)


def _tell(source: SourceFile, whose: str, folder: RunFolder, goes_on: bool) -> None:
    what = f"'{source.file}', the file of the {whose}, has changed since '{folder.path}' was run"
    if goes_on:
        raise UserError(f"{what}; restore it as it was then, or start a new run.")
    warnings.warn(f"{what}; its models may give other outputs than they did then.", stacklevel=5)
