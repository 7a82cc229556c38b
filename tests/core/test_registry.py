import inspect
import sys
from pathlib import Path

import pytest

import fedhelix
from fedhelix import METHODS, FedProx
from fedhelix.core.errors import UserError, nearest
from fedhelix.core.registry import make, method_type, parts
from fedhelix.core.wrapper import check_wrappers

ISSUED = {
    "fedavg", "fedavg-ft", "local", "fedbn", "fedper", "fedrep", "lg-fedavg", "fedbabu",
    "partialfed", "fedfina", "fedlg", "fedlp", "fedprox", "scaffold", "fedopt", "ditto",
}  # fmt: skip

MINE = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Literal
from fedhelix import FedAvg, register
from fedhelix.core.options import option

@register("{name}")
@dataclass(frozen=True)
class Mine(FedAvg):
    '''Mine.'''
    speed: Literal["slow", "fast"] = option("slow", "how fast")
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "mine.py") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_every_method_is_there_with_words_and_a_source():
    assert METHODS.keys() >= ISSUED
    for name, kind in METHODS.items():
        assert kind.name == name and kind.paper and kind.__doc__
        assert getattr(fedhelix, kind.__name__) is kind
        assert kind() == make(name)  # every option has a default


def test_unknown_methods():
    assert method_type("fedprox") is FedProx
    with pytest.raises(UserError, match="unknown method 'fedprx'; did you mean 'fedprox'"):
        make("fedprx")
    with pytest.raises(
        UserError, match=r"unknown method 'xyz'; there are: .*fedasync, fedau, fedavg,"
    ):
        make("xyz")


def test_a_name_of_one_letter_resembles_none():
    assert nearest("0", ["ulm", "330"]) == "there are: 330, ulm."
    assert nearest("A", ["a", "330"]) == "did you mean 'a'?"


def test_unknown_options_of_a_class_are_refused_with_the_nearest_right_one():
    for kind in METHODS.values():
        with pytest.raises(UserError, match=f"unknown option of {kind.__name__} 'no_such_option';"):
            kind(no_such_option=1)
    with pytest.raises(UserError, match="unknown option of FedProx 'nu'; did you mean 'mu'"):
        FedProx(nu=1)
    with pytest.raises(UserError, match=r"of FederationSettings 'batchsize'; .*'batch_size'"):
        fedhelix.FederationSettings(batchsize=8)
    with pytest.raises(UserError, match=r"FedProx\(mu\): too many positional arguments"):
        FedProx(0.1, 0.2)
    assert str(inspect.signature(FedProx)).startswith("(mu: 'float'")  # as help shows it


def test_an_option_of_a_wrapper_says_where_it_belongs():
    said = r"fedper has no option epsilon; use dp-sgd\+fedper or private\+fedper\."
    with pytest.raises(UserError, match=said):
        make("fedper", {"epsilon": 8})


@pytest.mark.parametrize(
    ("spec", "options", "said"),
    [
        (
            "helix",
            {"epsilon": 4},
            "; use finish+calibrated+ancestors+dp-sgd+fedavgm with trained = false.",
        ),
        (
            "helix",
            {"epsilon": 4, "bits": 32, "warm_epochs": 0, "cull": False},
            "; use private+helix.",
        ),
        ("calibrated", {"epsilon": 4}, "; use private+calibrated."),
        ("secure", {"epsilon": 4}, "; use secure+dp-sgd or secure+private."),
        (
            "scaffold",
            {"epsilon": 4},
            ", and dp-sgd+scaffold and private+scaffold are refused; choose another method.",
        ),
    ],
)
def test_only_what_suits_the_method_is_recommended(spec, options, said):
    with pytest.raises(UserError) as refused:
        make(spec, options)
    assert str(refused.value) == f"{spec} has no option epsilon{said}"


def test_what_a_method_names_instead_of_itself_suits():
    for kind in METHODS.values():
        for other, options in kind.instead:
            check_wrappers(make(other, options))


def test_a_method_from_a_file(write):
    path = write(MINE.format(name="mine"))
    assert make(path, {"speed": "fast"}).speed == "fast"
    assert make(path).name == "mine"  # once more: a resumed run reads it again
    with pytest.raises(UserError, match="speed must be one of slow, fast, not 'warp'"):
        make(path, {"speed": "warp"})


def test_copies_of_a_file_have_one_method(write, tmp_path):
    path = write(MINE.format(name="mine"))
    make(path)
    copy = tmp_path / "site" / "mine.py"
    copy.parent.mkdir()
    copy.write_bytes(Path(path).read_bytes())
    assert make(str(copy), {"speed": "fast"}).name == "mine"


def test_a_name_belongs_to_one_file(write):
    with pytest.raises(
        UserError,
        match=r"mine\.py' cannot be used: FedAvg of .*fedavg\.py is called 'fedavg' already",
    ):
        make(write(MINE.format(name="fedavg")))
    assert METHODS["fedavg"] is fedhelix.FedAvg
    make(write(MINE.format(name="mine")))
    with pytest.raises(
        UserError, match=r"Mine of .*mine\.py is called 'mine' already; choose another name"
    ):
        make(write(MINE.format(name="mine") + "\n# another one\n", "other.py"))


def test_a_file_may_have_any_name(write):
    """A file called random.py must not stand in for Python's own module."""
    import random

    make(write(MINE.format(name="mine"), "random.py"))
    assert sys.modules["random"] is random


def test_one_of_several_methods_in_a_file(write):
    path = write(
        MINE.format(name="one")
        + MINE.format(name="two").replace("from __future__ import annotations", "")
    )
    assert method_type(f"{path}:two").name == "two"
    with pytest.raises(UserError, match=r"registers 2 methods; name one as .*mine\.py:NAME"):
        method_type(path)
    with pytest.raises(
        UserError, match=r"unknown method in .*mine\.py' 'three'; there are: one, two"
    ):
        method_type(f"{path}:three")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = 1", r"registers no method; write @register\("),
        ("1 +", "cannot be imported: SyntaxError"),
        ("import no_such_module", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_files_without_a_method(write, text, sentence):
    with pytest.raises(UserError, match=sentence):
        method_type(write(text))


def test_a_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"there is no file '.*none\.py'"):
        method_type(str(tmp_path / "none.py"))


def test_a_plus_in_the_path_of_a_file_is_part_of_it(tmp_path, monkeypatch):
    (tmp_path / "c++").mkdir()
    file = tmp_path / "c++" / "a+b.py"
    file.write_text(MINE.format(name="mine"))
    for spec in (str(file), f"{file}:mine", "c++/a+b.py", "a+b.py"):
        monkeypatch.chdir(file.parent if spec == "a+b.py" else tmp_path)
        assert parts(spec) == [spec] and parts(f"genfed+{spec}") == ["genfed", spec]
        assert make(f"genfed+{spec}", {"speed": "fast", "b": 0.5}).inner.speed == "fast"
    gone = str(tmp_path / "c++" / "gone.py")
    assert parts(f"genfed+{gone}") == [
        "genfed",
        gone,
    ]  # so that what is missing is named as it was given
    wrapper = tmp_path / "wrap.py"
    wrapper.write_text(MINE.format(name="mine"))
    assert parts(f"{wrapper}:mine+fedavg") == [f"{wrapper}:mine", "fedavg"]


@pytest.mark.parametrize("spec", ["genfed+", "genfed++fedau", "+fedavg"])
def test_a_missing_name_is_named(spec):
    with pytest.raises(
        UserError, match=r"a name is missing around '\+' in '.*'; write WRAPPER\+METHOD"
    ):
        make(spec)


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path):
    kinds = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(MINE.format(name=f"mine-{folder}"))
        kinds.append(method_type(str(tmp_path / folder / "mine.py")))
    assert kinds[0].__module__ != kinds[1].__module__
