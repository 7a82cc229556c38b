"""Networks and methods of the user's own in a deployment: every site has the same files.

No code travels. The server sends the names of a network and a method with the hashes of their
files, and a site takes part only with files of its own that are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedhelix.core.errors import UserError
from fedhelix.core.imports import import_file, is_as_imported
from fedhelix.core.registry import METHODS, home_of, is_file, is_known, parts
from fedhelix.deploy.schema import clipped
from fedhelix.runs.spec import RunSpec


def file_hash(path: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def by_name(paths: Iterable[str | Path]) -> dict[str, Path]:
    """Files by their names without folders, which differ between machines."""
    files: dict[str, Path] = {}
    for path in paths:
        place = Path(path).expanduser().resolve()
        if files.setdefault(place.name, place) != place:
            raise UserError(f"two files are called '{place.name}'; rename one of them everywhere.")
    return files


def code_files(spec: RunSpec) -> dict[str, Path]:
    """The files of the user's that a run needs."""
    named = [*parts(spec.spec), spec.config.model]
    return by_name(part.partition(":")[0] for part in named if is_file(part))


def public_names(spec: RunSpec) -> tuple[str, str]:
    """A run's method and network as sites name them: without the folders of this machine."""
    methods = "+".join(_registered_name(part) for part in parts(spec.spec))
    path, colon, name = spec.config.model.partition(":")
    return methods, f"{Path(path).name}{colon}{name}"


def _registered_name(part: str) -> str:
    if not is_file(part):
        return part
    path, _, wanted = part.partition(":")
    return wanted or next(name for name, kind in METHODS.items() if home_of(kind) == path)


class SiteCode:
    """The files of a site whose networks and methods a run may name; their methods register."""

    def __init__(self, paths: Iterable[str | Path] = ()):
        self.files = by_name(paths)
        for path in self.files.values():
            import_file(str(path))

    def settled(self, settings: Mapping[str, Any], hashes: Mapping[str, str]) -> dict[str, Any]:
        """A run's settings with the site's own files; refuses what the site has not, or has
        otherwise.
        """
        for name, wanted in hashes.items():
            self._check(name, wanted)
        method, model = str(settings["method"]["name"]), str(settings.get("model", "auto"))
        if not is_known(method):
            raise UserError(f"the site knows no method '{clipped(method)}'.")
        homes = [home_of(METHODS[part]) for part in parts(method)]
        used = [name for name, path in self.files.items() if str(path) in homes]
        file, colon, network = model.partition(":")
        if ".py" in model:
            used.append(file)
        for name in used:
            if name not in hashes:
                raise UserError(f"the server does not say which '{clipped(name)}' it has.")
        if ".py" in model:
            model = f"{self.files[file]}{colon}{network}"
        return {**settings, "model": model}

    def localized(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a run folder with the site's own files in place of those of their names
        on the server.
        """
        method = dict(settings["method"])
        method["name"] = "+".join(map(self._here, parts(str(method["name"]))))
        return {**settings, "method": method, "model": self._here(settings.get("model", "auto"))}

    def _here(self, part: str) -> str:
        path, colon, name = part.partition(":")
        return f"{self.files.get(Path(path).name, path)}{colon}{name}"

    def _check(self, name: str, wanted: str) -> None:
        if name not in self.files:
            raise UserError(
                f"the run needs the file '{clipped(name)}', which the site has not; put the "
                f"server's file there and start the site with --code {clipped(name)}."
            )
        if file_hash(self.files[name]) != wanted:
            raise UserError(
                f"the site's file '{name}' differs from the server's, whose SHA-256 begins with "
                f"{wanted[:12]}; install the same file at both."
            )
        if not is_as_imported(str(self.files[name])):  # replaced while the site runs
            import_file(str(self.files[name]))
