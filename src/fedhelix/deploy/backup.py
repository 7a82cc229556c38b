"""Backup and restore of a server: its keys, Flower's registered sites, and run folders."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from fedhelix.core.errors import UserError
from fedhelix.core.files import writable_file

DATABASE = "superlink.db"
KEPT = ("keys", "flower", DATABASE)  # of a deployment's folder; logs and locks are not
RUNS = "runs"


def back_up(folder: Path, archive: Path, runs: Sequence[Path] = ()) -> int:
    """Write a deployment's folder and some run folders into one archive; returns its bytes.

    The SuperLink may run meanwhile: its database is copied as SQLite does it, and checkpoints of
    runs are whole at any time.
    """
    if not (folder / "keys" / "server.pem").exists():
        raise UserError(f"'{folder}' holds no deployment to back up.")
    for run in runs:
        if not (run / "config.toml").exists():
            raise UserError(f"'{run}' is no run folder.")
    if repeated := {run.name for run in runs if [one.name for one in runs].count(run.name) > 1}:
        raise UserError(f"two run folders are called '{min(repeated)}'; back them up apart.")
    if archive.exists():
        raise UserError(f"'{archive}' exists; name another file, or delete it first.")
    writable_file(archive)
    half = archive.with_name(f".{archive.name}.half")
    try:
        with os.fdopen(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            with tarfile.open(fileobj=file, mode="w:gz") as tar:
                for path, name in _members(folder, runs):
                    tar.add(path, name)
                _add_database(folder / DATABASE, tar)
            file.flush()
            os.fsync(file.fileno())
        half.replace(archive)
    finally:
        half.unlink(missing_ok=True)
    return archive.stat().st_size


def _members(folder: Path, runs: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    for name in KEPT:
        if name != DATABASE and (folder / name).exists():
            yield folder / name, name
    for run in runs:
        yield run, f"{RUNS}/{run.resolve().name}"


def _add_database(path: Path, tar: tarfile.TarFile) -> None:
    """A copy of the database as of one moment."""
    if not path.exists():
        return
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / DATABASE
        with (
            closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)
        tar.add(copy, DATABASE)


def restore(archive: Path, folder: Path) -> list[Path]:
    """Unpack an archive into a new folder; returns the run folders in it, below `runs/`.

    Of an archive that cannot be restored nothing is left behind. Runs go on by `fedhelix deploy
    resume`.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"'{folder}' is not empty; restore into a new folder.")
    try:
        with tarfile.open(archive) as tar:
            tops = {member.name.split("/")[0] for member in tar.getmembers()}
            if strange := tops - {*KEPT, RUNS}:
                raise UserError(f"'{archive}' is no backup of a deployment: '{min(strange)}'.")
            _extract(tar, folder)
    except FileNotFoundError:
        raise UserError(f"there is no file '{archive}'.") from None
    except tarfile.ReadError:
        raise UserError(f"'{archive}' cannot be restored: it is no whole archive.") from None
    except (OSError, tarfile.TarError, EOFError) as problem:
        raise UserError(f"'{archive}' cannot be restored: {problem}.") from None
    for key in (folder / "keys").glob("*.key"):
        key.chmod(0o600)
    return sorted((folder / RUNS).iterdir()) if (folder / RUNS).exists() else []


def _extract(tar: tarfile.TarFile, folder: Path) -> None:
    """Unpack everything or nothing; the folder is new or empty."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        tar.extractall(folder, filter="data")  # no links or paths that lead out of it
    except BaseException:
        for name in (*KEPT, RUNS):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / DATABASE).unlink(missing_ok=True)
        if is_new:
            folder.rmdir()
        raise
