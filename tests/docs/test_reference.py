"""The sections of the API reference: each of what is public, and nothing that is not there."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import fedhelix
from fedhelix.core.method import HOOKS

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
SECTION = re.compile(
    r"^::: ([\w.]+)$(?:\n    options:\n      members: \[([^\]]*)\])?", re.MULTILINE
)


def found(path):
    """What a dotted path leads to."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        home, _, name = path.rpartition(".")
        return getattr(found(home), name)


def documented():
    """What the page has a section of, by identity."""
    for path, members in SECTION.findall(PAGE.read_text(encoding="utf-8")):
        value = found(path)
        yield value
        yield from (getattr(value, name) for name in re.findall(r"\w+", members))


def test_all_that_is_public_has_a_section():
    there = list(documented())
    public = {name: getattr(fedhelix, name) for name in fedhelix.__all__ if name != "__version__"}
    public |= {name: value for name, value in vars(fedhelix.Run).items() if name[0] != "_"}
    modules = [name for name, value in public.items() if inspect.ismodule(value)]
    for name in modules:
        module = public.pop(name)
        public |= {f"{name}.{one}": getattr(module, one) for one in module.__all__}
    internal = {"Partition", "Split", "as_text", "class_split", "usual"}  # of the partitions
    for name, value in public.items():
        is_method = inspect.isclass(value) and issubclass(value, fedhelix.Method)  # have pages
        is_field = name == "folder"
        if not is_method and not is_field and name.removeprefix("partition.") not in internal:
            assert any(value is one for one in there), f"docs/api.md has no section of {name}"


@pytest.mark.parametrize(
    "line",
    ["import fedhelix.metrics, fedhelix.partition", "from fedhelix.metrics import auc",
     "from fedhelix.partition import iid", "from fedhelix import metrics; metrics.auc",
     "from fedhelix import *; metrics.auc, partition.iid"],
)  # fmt: skip
def test_metrics_and_partitions_can_be_imported(line):
    exec(line, {})


def test_the_page_on_own_methods_lists_every_hook():
    page = PAGE.with_name("your-own-method.md").read_text(encoding="utf-8")
    table = page.partition("## All hooks")[2].partition("What the arguments hold")[0]
    assert set(HOOKS) == set(re.findall(r"^\| `(\w+)\(", table, re.MULTILINE))
