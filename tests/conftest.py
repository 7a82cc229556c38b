import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import settings

from fedhelix import METHODS
from fedhelix.cli import app as command_line
from fedhelix.store import RunFolder
from tiers import is_slow

torch.set_num_threads(1)  # tests run side by side
# Busy machines are slow, and a commit must not fail by an unlucky draw.
settings.register_profile("patient", deadline=None, derandomize=True)
settings.load_profile("patient")


def pytest_collection_modifyitems(items):
    """Mark what is not for the fast tier."""
    for item in items:
        name, _, case = item.name.partition("[")
        if is_slow(name, case.removesuffix("]")):
            item.add_marker(pytest.mark.slow)


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """The output without the line breaks of a narrow screen."""
        return " ".join(self.out.split())


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """A registry that forgets what a test registers: tests may come in any order."""
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


@pytest.fixture(autouse=True)
def draws(request, monkeypatch) -> None:
    """A module's generator starts anew with every test: tests may come in any order."""
    if isinstance(getattr(request.module, "DRAW", None), np.random.Generator):
        monkeypatch.setattr(request.module, "DRAW", np.random.default_rng(0))


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys) -> Callable[..., Result]:
    """The command line, called in this process and in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["fedhelix", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            command_line.main()
        return Result(int(stop.value.code or 0), *capsys.readouterr())

    return call


Maker = Callable[..., RunFolder]


@pytest.fixture
def make_run(tmp_path: Path) -> Maker:
    def make(  # noqa: PLR0913, PLR0917 - all of them have defaults
        method: str = "fedavg",
        seed: int = 0,
        final: float = 0.8,
        rounds: int = 20,
        clients: int = 20,
        every: int = 2,
        mib: float = 1.0,
        complete: bool = True,
        summary: bool = True,
        global_model: bool = True,
        evaluated: bool = True,
        metric: str = "accuracy",
        options: dict | None = None,
        data: str = "digits",
        metadata: Callable[[int], dict] | None = None,
        census: dict | None = None,
        incidents: dict | None = None,
        name: str | None = None,
        config: dict | None = None,
    ) -> RunFolder:
        name = name or f"{method}-{seed}-{len(list(tmp_path.iterdir()))}"
        draw = np.random.default_rng([seed, len(method), int(1000 * final)])
        skill = draw.normal(0, 0.08, clients)
        requested = {"seed": seed, "method": {"name": method, **(options or {})}, **(config or {})}
        with RunFolder.create(tmp_path / name, requested) as folder:
            if census is not None:
                folder.write_clients(census)
            personal: list[float] = []
            for round in range(1, rounds + 1):
                record: dict = {"round": round, "uplink_bytes": int(mib * 2**20), "seconds": 1.5}
                record |= {
                    "metadata": metadata(round) if metadata else {},
                    "refused": {},
                    **(incidents or {}),
                }
                if evaluated and round % every == 0:
                    level = final * (1 - np.exp(-4 * round / rounds)) + draw.normal(0, 0.006)
                    personal = np.clip(level + skill, 0, 1).tolist()
                    record |= {f"personal_{metric}": float(np.mean(personal)), "personal": personal}
                    record |= {
                        "personal_p10": float(np.quantile(personal, 0.1)),
                        f"valid_{metric}": level,
                    }
                    if global_model:
                        record |= {metric: level - 0.1}
                folder.append(record)
            if summary:
                folder.write_summary(
                    {
                        "method": method, "options": options or {}, "rounds": rounds, "seed": seed,
                        "data": data, "clients": clients, "complete": complete,
                        "uplink_bytes": int(rounds * mib * 2**20),
                        "seconds": 1.5 * rounds, "best_round": rounds // every * every,
                        f"personal_{metric}_at_best": float(np.mean(personal or [np.nan])),
                    }
                )  # fmt: skip
        return folder

    return make
