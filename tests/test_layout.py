"""The shape of the source itself: packages, imports, lengths, complexity, and nothing pickled."""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import fedhelix
from fedhelix import METHODS
from fedhelix.core.method import HOOKS
from tiers import MATRIX, SLOW

ROOT = Path(fedhelix.__file__).parent
PROJECT = ROOT.parents[1]
FILES = sorted(ROOT.rglob("*.py"))

# From the bottom up; a package imports only from lower levels (and from itself). Imports for the
# type checker and inside of functions count.
LEVELS = [
    {"core"},
    {"data", "models", "store", "components"},
    {"methods", "engines", "report"},
    {"robust"},
    {"federation"},
    {"runs"},
    {"papers", "privacy", "deploy"},
    {"cli"},
]
LEVEL = {package: number for number, packages in enumerate(LEVELS) for package in packages}
# Neighbours that must not know each other although one stands above the other.
STRANGERS = {
    "data": {"models", "store", "components"},
    "models": {"data", "store", "components"},
    "store": {"data", "models", "components"},
    "components": {"data", "models", "store"},
    "report": {"data", "models", "components"},
    "methods": {"data", "models"},
    "engines": {"store", "components"},
    "deploy": {"report"},
}
LOOSE = ("__init__", "__main__", "metrics", "partition")  # users import them; nobody else does
MOST_ENTRIES, MOST_LEVELS, MOST_LINES, MOST_COMPLEX = 20, 10, 350, 12


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    parts = ("fedhelix", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


@cache
def imports(path: Path) -> frozenset[str]:
    """The modules of ours that a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names.add(inner if inner in MODULES else str(node.module))
    return frozenset(name for name in names if name in MODULES)


def packages_of(path: Path) -> set[str]:
    return {package_of(MODULES[name]) for name in imports(path)}


def test_few_packages_and_no_loose_modules():
    entries = [path for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()]
    entries = [path for path in entries if path.name != "__pycache__"]
    assert len(entries) <= MOST_ENTRIES
    loose = {path.name for path in entries if path.is_file()}
    assert loose == {f"{name}.py" for name in LOOSE}
    folders = {path.name for path in entries if path.is_dir()}
    assert folders == LEVEL.keys()


def test_imports_point_down():
    pairs = {(package_of(path), other) for path in FILES for other in packages_of(path)}
    for package, other in sorted(pairs):
        if package in (*LOOSE, other):
            continue
        assert other in LEVEL, f"{package} imports the whole of fedhelix"
        assert LEVEL[other] < LEVEL[package], f"{package} imports {other}, which is not below it"
        assert other not in STRANGERS.get(package, ()), f"{package} must not know {other}"


def longest(name: str, graph: dict[str, set[str]], above: tuple[str, ...] = ()) -> int:
    """The number of levels from a node down; a circle is an error."""
    assert name not in above, f"a circle of imports: {' -> '.join([*above, name])}"
    return 1 + max((longest(other, graph, (*above, name)) for other in graph[name]), default=0)


def test_no_circle_of_modules():
    """A package's `__init__` gathers its modules, so a module may not import its own package."""
    graph = {name: set(imports(path)) - {name} for name, path in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, f"a circle of imports: {' -> '.join([*above, name])}"
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_few_levels_of_packages():
    graph = {package: set[str]() for package in LEVEL}
    for path in FILES:
        if package_of(path) in LEVEL:
            graph[package_of(path)] |= (packages_of(path) & LEVEL.keys()) - {package_of(path)}
    assert max(longest(package, graph) for package in graph) <= MOST_LEVELS


def test_no_file_is_long():
    lines = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in FILES}
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}


def test_no_function_is_complex_and_the_rules_of_the_linter_hold_in_ci():
    rules = PROJECT / "pyproject.toml"
    if not rules.exists():
        pytest.skip("not a source checkout")
    assert re.search(rf"max-complexity = {MOST_COMPLEX}\b", rules.read_text())
    select = ["--select", "C901", "--output-format", "json", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", *select, str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
        cwd=PROJECT,
    )
    assert json.loads(done.stdout) == []


def lines_of_code(path: Path) -> int:
    """Lines with code on them: no blank lines, comments or docstrings."""
    text = path.read_text()
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node) is not None:
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE}
    empty |= {tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in empty:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def test_a_method_is_a_short_file():
    lines = {path.stem: lines_of_code(path) for path in (ROOT / "methods").glob("*.py")}
    assert {name: count for name, count in lines.items() if count > 150} == {}


def test_the_line_counter_counts(tmp_path):
    (tmp_path / "x.py").write_text(
        '"""Doc\nstring."""\n\n# note\nx = (\n    1\n)\n\n\n'
        'def f():\n    """Doc."""\n    return x  # note\n'
    )
    assert lines_of_code(tmp_path / "x.py") == 5


PICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def pickles(path: Path) -> Iterator[str]:
    """The places in a file where something may be pickled."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            names = [module or ""] if module else [alias.name for alias in node.names]
            yield from PICKLERS & {name.split(".")[0] for name in names}
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) in ("torch.load", "torch.save", "pd.read_pickle"):
                yield ast.unparse(node)
            pickled = [kw.value for kw in node.keywords if kw.arg == "allow_pickle"]
            yield from (ast.unparse(node) for value in pickled if ast.unparse(value) != "False")


def test_nothing_on_disk_or_network_is_pickled(tmp_path):
    # A process may hand objects to the workers that it started itself.
    in_memory = ROOT / "engines" / "parallel" / "shared.py"
    found = {path: list(pickles(path)) for path in FILES if path != in_memory}
    assert {path: places for path, places in found.items() if places} == {}
    (tmp_path / "x.py").write_text("import pickle\ntorch.load(a)\nnp.load(a, allow_pickle=True)\n")
    assert len(list(pickles(tmp_path / "x.py"))) == 3


def test_no_two_classes_have_one_name():
    """One name, one meaning; autograd functions and networks of single modules may repeat."""
    homes: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    twice = {name: files for name, files in homes.items() if len(files) > 1}
    assert twice.keys() <= {"Block", "Convolve"}


def test_public_names_are_there():
    assert sorted(fedhelix.__all__) == sorted(set(fedhelix.__all__))
    assert all(hasattr(fedhelix, name) for name in fedhelix.__all__)
    assert (ROOT / "py.typed").exists()
    assert {kind.__name__ for kind in METHODS.values()} <= set(fedhelix.__all__)


def test_the_architecture_page_names_every_package_and_hook():
    page = PROJECT / "docs" / "architecture.md"
    if not page.exists():
        pytest.skip("not a source checkout")
    text = page.read_text()
    rows = dict(re.findall(r"^\| `(\w+)/` \| (.+?) \|", text, flags=re.MULTILINE))
    assert rows.keys() == LEVEL.keys()
    assert all(len(words) > 10 for words in rows.values())
    for hook in HOOKS:
        assert f"`{hook}(" in text


def test_the_table_of_tiers_names_tests_that_exist():
    names = set()
    for path in Path(__file__).parent.rglob("test_*.py"):
        names |= set(re.findall(r"^\s*def (test_\w+)", path.read_text(), flags=re.MULTILINE))
    assert SLOW | MATRIX.keys() <= names


def test_the_development_install_has_all_extras():
    """Otherwise tests that need one are skipped without a word."""
    if not (PROJECT / "Makefile").exists():
        pytest.skip("not a source checkout")
    rules = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    extras = rules["project"]["optional-dependencies"].keys() - {"data"}  # hf has data sets, too
    install = re.search(r'-e "\.\[(dev,.*)\]"', (PROJECT / "Makefile").read_text())
    assert set(install[1].split(",")) == extras
