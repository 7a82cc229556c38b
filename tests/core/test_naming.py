"""Hooks with a wrong name or signature are refused when their class is registered."""

import textwrap

import pytest

from fedhelix import METHODS, FedAvg, register
from fedhelix.core.errors import UserError
from fedhelix.core.method import HOOKS, Method
from fedhelix.core.registry import method_type
from fedhelix.core.renamed import FLAGS
from fedhelix.core.renamed import HOOKS as OLD_HOOKS
from fedhelix.core.wrapper import Wrapper


def mine(**members):
    return register("mine")(type("Mine", (FedAvg,), members))


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("aggregat", "aggregate"),
        ("agregate", "aggregate"),
        ("train_client", "phases"),
        ("aggregate_fit", "aggregate"),
        ("selectclients", "select_clients"),
        ("uploads", "upload"),
    ],
)
def test_a_misspelt_or_guessed_hook_is_refused_with_the_right_name(name, right):
    with pytest.raises(UserError, match=rf"Mine\.{name} is no hook; did you mean {right}\?"):
        mine(**{name: lambda self, *args: None})
    assert "mine" not in METHODS


def test_a_name_like_no_hook_lists_them_all():
    with pytest.raises(UserError, match=r"Mine\.xyz is no hook; there are: check, shared_params"):
        mine(xyz=lambda self: None)


@pytest.mark.parametrize(("old", "new"), OLD_HOOKS.items())
def test_old_hooks_are_refused_with_their_new_names(old, new):
    assert new in HOOKS
    with pytest.raises(UserError, match=rf"Mine\.{old} is now called {new}; rename it\."):
        mine(**{old: lambda self, *args: None})


@pytest.mark.parametrize(("old", "new"), FLAGS.items())
def test_old_flags_are_fields_of_the_capabilities(old, new):
    with pytest.raises(UserError, match=rf"Mine\.{old} is now the field {new} of `capabilities`"):
        mine(**{old: property(lambda self: True)})


def test_a_wrong_signature_is_refused():
    with pytest.raises(UserError, match=r"Mine\.loss must take \(self, params, batch, local\)"):
        mine(loss=lambda self, params, batch: None)
    with pytest.raises(UserError, match=r"Mine\.weights must take \(self, server, uploads, ctx\)"):
        mine(weights=lambda self, server, uploads, ctx, more: None)
    with pytest.raises(UserError, match=r"Mine\.weights is a hook and must be a function"):
        mine(weights=0.5)
    mine(loss=lambda self, params, *rest: None, upload=lambda self, local, more=1: None)


def test_helpers_begin_with_an_underscore_and_overrides_of_others_are_fine():
    assert mine(_helper=lambda self: 1, options=lambda self: {}) is METHODS["mine"]


def test_every_hook_is_delegated_by_a_wrapper():
    """A hook that is added to `Method` needs no line in `Wrapper`."""
    seen = []

    def spy(name):
        def call(self, *args):
            seen.append((name, args))
            return name

        return call

    inner = type("Inner", (FedAvg,), {name: spy(name) for name in HOOKS})()
    around = type("Around", (Wrapper,), {})(inner)
    for name, hook in HOOKS.items():
        arguments = tuple(range(hook.arguments))
        assert getattr(around, name)(*arguments) == (None if name == "check" else name)
        assert seen.pop() == (name, arguments)
    assert all(getattr(Wrapper, name) is not getattr(Method, name) for name in HOOKS)


OLD_FILE = """
from dataclasses import dataclass
from fedhelix import FedAvg, register

@register("old")
@dataclass(frozen=True)
class Old(FedAvg):
    def weigh(self, server, uploads, ctx):
        return [1.0] * len(uploads)
"""


def test_an_old_file_gets_a_sentence_that_says_what_to_rename(tmp_path):
    (tmp_path / "old.py").write_text(OLD_FILE)
    with pytest.raises(
        UserError, match=r"old\.py' cannot be used: Old\.weigh is now called weights"
    ):
        method_type(str(tmp_path / "old.py"))
    imported = textwrap.dedent(OLD_FILE).replace("from fedhelix import FedAvg, register", "{}")
    for line, hint in {
        "from fedhelix.method import Method": "fedhelix.method is now fedhelix.core.method",
        "from fedhelix.tree import add": "fedhelix.tree is now fedhelix.core.tree",
        "from fedhelix.core.layers import Units": "Units is now called Layers",
    }.items():
        (tmp_path / "old.py").write_text(imported.format(line))
        with pytest.raises(UserError, match=f"cannot be imported: {hint}"):
            method_type(str(tmp_path / "old.py"))


def test_old_attributes_are_named_in_the_error():
    from helpers import small

    class Old(FedAvg):
        name = "old"

        def loss(self, params, batch, local):
            return local.risk(params, batch)

    with pytest.raises(UserError, match=r"Local\.risk is now called base_loss; rename it\."):
        small(Old()).fit(1, quiet=True)
