import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*words: object, **more) -> str:
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, timeout=100, **more
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_runs_outside_the_source_tree(tmp_path):
    source, place, elsewhere = tmp_path / "source", tmp_path / "place", tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copytree(
        ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source)
    (wheel,) = tmp_path.glob("fedhelix-*.whl")
    run(*pip, "install", "--no-deps", "--no-index", "--target", place, wheel)
    program = "import fedhelix; print(fedhelix.__file__); from fedhelix_command import main; main()"
    words = ["run", "fedavg", "--rounds", 1, "--clients", 4, "--model", "linear", "--out", "mine"]
    out = run(
        sys.executable,
        "-c",
        program,
        *words,
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(place)},
    )
    assert Path(out.splitlines()[0]) == place / "fedhelix" / "__init__.py"
    assert (place / "fedhelix" / "report" / "static" / "app.js").exists()
    assert (place / "fedhelix" / "py.typed").exists() and (place / "bin" / "fedhelix").exists()
    assert (elsewhere / "mine" / "summary.json").exists()
