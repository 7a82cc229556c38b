"""Run folders with realistic curves, written as a run would write them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from browser import Browser

from fedhelix.store import RunFolder

Maker = Callable[..., RunFolder]


@pytest.fixture
def make_run(tmp_path: Path) -> Maker:
    def make(
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
        notes: Callable[[int], dict] | None = None,
        census: dict | None = None,
        incidents: dict | None = None,
        name: str | None = None,
        config: dict | None = None,
    ) -> RunFolder:
        name = name or f"{method}-{seed}-{len(list(tmp_path.iterdir()))}"
        draw = np.random.default_rng([seed, len(method), int(1000 * final)])
        skill = draw.normal(0, 0.08, clients)
        asked = {"seed": seed, "method": {"name": method, **(options or {})}, **(config or {})}
        with RunFolder.create(tmp_path / name, asked) as folder:
            if census is not None:
                folder.write_clients(census)
            personal: list[float] = []
            for round in range(1, rounds + 1):
                record: dict = {"round": round, "uplink_bytes": int(mib * 2**20), "seconds": 1.5}
                record |= {"notes": notes(round) if notes else {}, "refused": {}, **(incidents or {})}
                if evaluated and round % every == 0:
                    level = final * (1 - np.exp(-4 * round / rounds)) + draw.normal(0, 0.006)
                    personal = np.clip(level + skill, 0, 1).tolist()
                    record |= {f"personal_{metric}": float(np.mean(personal)), "personal": personal}
                    record |= {"personal_p10": float(np.quantile(personal, 0.1)), f"valid_{metric}": level}
                    if global_model:
                        record |= {metric: level - 0.1}
                folder.append(record)
            if summary:
                folder.write_summary(
                    {
                        "method": method, "options": options or {}, "rounds": rounds, "seed": seed, "data": data,
                        "clients": clients, "complete": complete, "uplink_bytes": int(rounds * mib * 2**20),
                        "seconds": 1.5 * rounds, "best_round": rounds // every * every,
                        f"personal_{metric}_at_best": float(np.mean(personal or [np.nan])),
                    }
                )  # fmt: skip
        return folder

    return make


@pytest.fixture(scope="session")
def one_browser(tmp_path_factory):
    found = Browser(tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()


@pytest.fixture
def browser(one_browser: Browser) -> Browser:
    """A browser whose console has not complained yet."""
    one_browser.complaints.clear()
    return one_browser
