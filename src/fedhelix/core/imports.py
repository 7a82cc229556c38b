"""Modules that may be missing, and Python files of the user's, which lie anywhere and are run as
modules.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhelix.core.errors import UserError
from fedhelix.core.renamed import import_hint

if TYPE_CHECKING:
    from fedhelix.core.method import Method

IMPORTED: dict[str, str] = {}
"""The files so far, by the names of their modules."""

HASHES: dict[str, str] = {}
"""The SHA-256 of each as it was when it was run, by its path."""


def package_folder(name: str) -> Path:
    """Where an installed package lies; it is not imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"{name} is not installed; install fedhelix again.")
    return Path(spec.submodule_search_locations[0])


def from_extra(module: str, extra: str) -> Any:
    """A module that only an extra installs."""
    try:
        return importlib.import_module(module)
    except ImportError:
        needed = module.partition(".")[0]
        raise UserError(
            f"this needs {needed}; install it with: pip install 'fedhelix[{extra}]'."
        ) from None


@contextmanager
def may_need(module: str, extra: str) -> Iterator[None]:
    """Where others import a module that only an extra installs, and raise ImportError without."""
    try:
        yield
    except ImportError:
        from_extra(module, extra)
        raise


def check_extra(method: Method) -> None:
    """Refuse a method whose server needs a module that is missing, before anything is trained."""
    if needed := method.capabilities.server_extra:
        from_extra(*needed)


def import_file(path: str) -> str:
    """Run a file, so that the methods in it register themselves; returns the name of its module."""
    if not Path(path).is_file():
        raise UserError(f"there is no file '{path}'.")
    # A name of its own: a file called random.py must not stand in for the library's module.
    # Its folder counts too: a/mine.py and b/mine.py are two modules.
    whole = str(Path(path).resolve())
    place = hashlib.sha256(whole.encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"fedhelix_file_{Path(path).stem}_{place}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"'{path}' is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = (
        module  # dataclasses look here when they resolve the types of their fields
    )
    try:
        content = Path(whole).read_bytes()
        HASHES[whole] = hashlib.sha256(content).hexdigest()
        # Not by the loader, which may take a cached version of an older file of the same length.
        exec(compile(content, whole, "exec"), vars(module))
    except UserError as problem:
        raise UserError(f"'{path}' cannot be used: {problem}") from problem
    except ImportError as problem:
        reason = import_hint(problem) or _beside(whole, problem)
        reason = reason or f"{type(problem).__name__}: {problem}"
        raise UserError(f"'{path}' cannot be imported: {reason}.") from problem
    except (Exception, SystemExit) as problem:
        raise UserError(
            f"'{path}' cannot be imported: {type(problem).__name__}: {problem}."
        ) from problem
    IMPORTED[spec.name] = whole
    return spec.name


def _beside(path: str, problem: ImportError) -> str | None:
    """What to do about a module that lies beside the file, where Python does not look for it."""
    folder, module = Path(path).parent, (problem.name or "").partition(".")[0]
    if not any(Path(folder, name).exists() for name in (f"{module}.py", f"{module}/__init__.py")):
        return None
    return (
        f"it imports '{module}', which lies beside it; put both into one file, install '{module}' "
        f"as a package, or set PYTHONPATH={folder}"
    )


def is_as_imported(path: str) -> bool:
    """Whether a file has not changed since it was run; one that is gone cannot be run again."""
    try:
        return HASHES.get(path) == hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return path in HASHES


def find_in_file(path: str, name: str) -> Any:
    """A class or function of such a file, which is run again where it has changed since."""
    known = {file: module for module, file in IMPORTED.items() if is_as_imported(file)}
    return attrgetter(name)(sys.modules[known.get(path) or import_file(path)])
