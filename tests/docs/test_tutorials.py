"""The tutorial's tasks: each stands for itself, runs, and is short."""

import ast
import re
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import pytest

from fedhelix import Federation

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "seven-tasks.md"
TASKS = re.findall(r"^## (.+?)\n.*?^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
MOST_LINES = 10


@pytest.mark.parametrize(("title", "code"), TASKS, ids=[title for title, _ in TASKS])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_task_of_the_tutorial_runs(title, code, tmp_path, monkeypatch):
    needed = set(re.findall(r"^import (\w+)", code, re.M))
    if missing := [name for name in needed if find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)} not installed")
    fit = Federation.fit
    monkeypatch.setattr(Federation, "fit", lambda fed, rounds: fit(fed, min(rounds, 2), quiet=True))
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("task")
    monkeypatch.setitem(sys.modules, "task", module)
    exec(compile(code, title, "exec", dont_inherit=True), vars(module))


def test_there_are_seven_short_tasks():
    assert len(TASKS) == 7
    for title, code in TASKS:
        imports = ast.Import | ast.ImportFrom
        first = next(node for node in ast.parse(code).body if not isinstance(node, imports))
        lines = [line for line in code.splitlines()[first.lineno - 1 :] if line.strip()]
        assert len(lines) <= MOST_LINES, f"{title} takes {len(lines)} lines"
