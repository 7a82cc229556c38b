"""The examples run, with fewer rounds than they ask for."""

import runpy
import sys
from pathlib import Path

import pytest

from fedhelix import METHODS, Federation

EXAMPLES = Path(__file__).parents[2] / "examples"
# The deployment starts a server and three sites; what it does is tested, piece by piece, in
# tests/deploy.
SCRIPTS = [path for path in sorted(EXAMPLES.glob("*.py")) if path.stem != "deployment"]


@pytest.fixture(autouse=True)
def few_rounds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit = Federation.fit
    monkeypatch.setattr(
        Federation, "fit", lambda fed, rounds, **more: fit(fed, min(rounds, 2), quiet=True, **more)
    )
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr().out
    assert said
    for name in [word for word in said.split() if word.endswith((".html", ".png"))]:
        assert (tmp_path / name).stat().st_size > 1000
