"""The documentation is true: its code runs, its commands work, its links lead somewhere."""

from __future__ import annotations

import dataclasses
import re
import runpy
import shlex
import sys
import types
from pathlib import Path

import pytest

from fedhelix import METHODS, Federation
from fedhelix.cli import app as cli

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
WITH_CODE = [
    "README.md",
    "docs/index.md",
    "docs/your-own-method.md",
    "docs/your-own-data.md",
    "docs/methods.md",
    "docs/devices.md",
    "docs/heterogeneity.md",
    "docs/tutorials.md",
    "docs/coming-from.md",
]
WITH_COMMANDS = [
    "README.md",
    "docs/index.md",
    "docs/your-own-method.md",
    "docs/devices.md",
    "docs/heterogeneity.md",
    "docs/looking-at-runs.md",
    "docs/privacy.md",
    "docs/reproducing.md",
]

# A file that a page shows begins with a comment that names it.
FILE_NAME = re.compile(r"# (\w+\.py)\n")
# What makes a command of the documentation cheap; of an option given twice the last one counts.
CHEAPLY = {
    "run": ["--rounds", "1", "--clients", "5"],
    "compare": ["--rounds", "1", "--clients", "5", "--seeds", "1"],
    "sweep": ["--minutes", "0.1"],  # long enough to finish a round, which `report` needs
    "bench": ["--minutes", "0.01"],
    "audit": ["--set", "steps=3", "--set", "images=1"],
}
FEW_ROUNDS = 4


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[list[str]]:
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    return [
        words[1:]
        for line in lines
        if (words := shlex.split(line, comments=True)) and words[0] == "fedhelix"
    ]


@pytest.mark.parametrize("page", WITH_CODE)
def test_code_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fit = Federation.fit
    monkeypatch.setattr(
        Federation, "fit", lambda fed, rounds, **more: fit(fed, min(rounds, FEW_ROUNDS), **more)
    )
    module = types.ModuleType("docs_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    scope = vars(module)
    alone = "Every block runs alone" in (ROOT / page).read_text(encoding="utf-8")
    found = blocks(page, "python")
    assert found, f"{page} has no code"
    for number, block in enumerate(found, start=1):
        here = {"__name__": module.__name__} if alone else scope
        exec(compile(block, f"{page}, block {number}", "exec", dont_inherit=True), here)
    for name, test in list(scope.items()):
        if name.startswith("test_") and callable(test):
            takes_folder = "tmp_path" in test.__code__.co_varnames[: test.__code__.co_argcount]
            (tmp_path / name).mkdir()
            test(**({"tmp_path": tmp_path / name} if takes_folder else {}))


def test_the_private_tutorial_prints_accuracy_and_budget(capsys):
    pytest.importorskip("dp_accounting")
    *_, block = blocks("docs/tutorials.md", "python")
    exec(compile(block, "tutorials", "exec", dont_inherit=True), {"__name__": "private"})
    lines = capsys.readouterr().out.splitlines()[-2:]
    (accuracy,) = re.fullmatch(r"accuracy (0\.\d+)", lines[0]).groups()
    (epsilon,) = re.fullmatch(r"epsilon (\d+\.\d+) at delta 1e-05", lines[1]).groups()
    assert float(accuracy) > 0.85 and 0 < float(epsilon) < 8


def test_the_tutorials_promise_that_blocks_run_alone_and_nobody_counts_networks_by_hand():
    assert "Every block runs alone" in (ROOT / "docs/tutorials.md").read_text(encoding="utf-8")
    assert not re.search(r"\w+ networks by name", (ROOT / "README.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for block in blocks(page, "python"):
        if name := FILE_NAME.match(block):
            (tmp_path / name[1]).write_text(block, encoding="utf-8")
    found = commands(page)
    assert found, f"{page} has no commands"
    for number, words in enumerate(found):
        cheaply = CHEAPLY.get(words[0], [])
        suffix = ".png" if words[0] == "audit" else ""
        out = (
            ["--out", f"runs/run-{number}{suffix}"]
            if cheaply and not {"--out", "-o"} & set(words)
            else []
        )
        monkeypatch.setattr(sys, "argv", ["fedhelix", *words, *cheaply, *out])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 0, f"fedhelix {' '.join(words)}: {capsys.readouterr().err}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    for target in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, context = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), f"{page.name} points to {target}, which is not there"
        if context:
            assert context in anchors(other), (
                f"{page.name} points to {target}, and there is no such heading"
            )


def anchors(page: Path) -> set[str]:
    """The names by which headings are linked to on GitHub."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_what_is_generated_is_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")  # where `python docs/make.py` finds what it imports
    make = runpy.run_path(str(ROOT / "docs" / "make.py"))
    stale = [str(page.relative_to(ROOT)) for page, _ in make["stale"]()]
    assert stale == [], "run `python docs/make.py`"


def test_method_pages_have_a_figure_and_generated_parts():
    pages = sorted((ROOT / "docs" / "methods").glob("*.md"))
    assert pages
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert page.stem in METHODS, f"there is no method {page.stem}"
        assert (ROOT / "docs" / "figures" / "methods" / f"{page.stem}.svg").exists()
        for part in ("use", "options", "results"):
            assert f"<!-- made: {part} {page.stem} -->" in text


def test_every_method_is_in_the_table():
    table = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE))
    assert listed == set(METHODS)


def test_options_of_methods_are_in_the_table():
    rows = dict(
        re.findall(
            r"^\| `([\w-]+)` \|(.*)$", (ROOT / "docs/methods.md").read_text("utf-8"), re.MULTILINE
        )
    )
    for name, kind in METHODS.items():
        for field in dataclasses.fields(kind):
            if field.name != "inner":
                assert f"`{field.name}`" in rows[name], (
                    f"docs/methods.md lacks the option {field.name} of {name}"
                )
