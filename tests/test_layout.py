"""The shape of the source itself: imports point down, methods are short, nothing is pickled."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

import fedhelix

ROOT = Path(fedhelix.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# From the ground up; a room imports only from rooms on lower floors (and from itself).
FLOORS = [
    {"errors", "folders", "seeds", "records", "progress", "selection"},
    {"options", "tree", "toml", "imports", "cpu", "cuda", "task"},
    {"data", "models", "store", "participation", "track"},
    {"units", "report"},
    {"genes", "pruning", "generative"},
    {"method"},
    {"wrapper", "asked"},
    {"registry", "clustering"},
    {"methods", "client"},
    {"probe", "blame", "describe"},
    {"engines", "channel", "attacks", "defences", "standing"},
    {"federation"},
    {"__init__"},
    {"runs"},
    {"papers", "privacy"},
    {"deploy"},
    {"cli"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
# Neighbours that must not know each other although one stands above the other.
STRANGERS = {
    "engines": {"methods", "registry"},
    "client": {"methods", "registry"},
    "probe": {"methods", "registry"},
    "deploy": {"report"},
    "report": {"data", "models", "participation"},
    "store": {"data", "models"},
    "data": {"models"},
    "units": {"data", "store"},
    "generative": {"progress"},  # usable without the rest, and whoever uses it says how to watch
}


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """The rooms that a file imports; what is only for the type checker does not count."""
    code = ast.parse(path.read_text())
    for node in ast.walk(code):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            if node.module == "fedhelix":
                found |= {f"fedhelix.{alias.name}" for alias in node.names}
            else:
                found.add(str(node.module))
    ours = [name.split(".") for name in found if name.split(".")[0] == "fedhelix"]
    return {name[1] if len(name) > 1 and name[1] in FLOOR else "__init__" for name in ours}


def test_every_room_has_its_floor():
    assert {room_of(path) for path in FILES} <= FLOOR.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    room = room_of(path)
    for other in imports(path) - {room}:
        assert FLOOR[other] < FLOOR[room], f"{room} imports {other}, which stands above it"
        assert other not in STRANGERS.get(room, ()), f"{room} must not know {other}"


def lines_of_code(path: Path) -> int:
    """Lines with code on them: no blank lines, comments or docstrings."""
    text = path.read_text()
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    empty = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in empty:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "methods").glob("*.py")), ids=lambda path: path.stem
)
def test_a_method_is_a_short_file(path):
    assert lines_of_code(path) < 60


def test_the_line_counter_counts(tmp_path):
    (tmp_path / "x.py").write_text(
        '"""Doc\nstring."""\n\n# note\nx = (\n    1\n)\n\n\ndef f():\n    """Doc."""\n    return x  # note\n'
    )
    assert lines_of_code(tmp_path / "x.py") == 5


PICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_on_disk_or_network_is_pickled(path):
    in_memory = (
        room_of(path) == "engines"
    )  # a process may hand objects to the workers that it started itself
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom) and not in_memory:
            module = node.module if isinstance(node, ast.ImportFrom) else None
            names = [module or ""] if module else [alias.name for alias in node.names]
            assert not PICKLERS & {name.split(".")[0] for name in names}
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in ("torch.load", "torch.save", "pd.read_pickle")
            pickled = [keyword.value for keyword in node.keywords if keyword.arg == "allow_pickle"]
            assert all(ast.unparse(value) == "False" for value in pickled)


def test_public_names_are_there():
    assert sorted(fedhelix.__all__) == sorted(set(fedhelix.__all__))
    assert all(hasattr(fedhelix, name) for name in fedhelix.__all__)
    assert (ROOT / "py.typed").exists()
