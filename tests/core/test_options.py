from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pytest

from fedhelix import Ditto, FedAvg, FedAvgFT, FedBN, FedLP, FedOpt, FedProx
from fedhelix.core.errors import UserError
from fedhelix.core.options import Checked, build, find, option
from fedhelix.core.registry import make
from fedhelix.engines.local import Training


@dataclass(frozen=True)
class Example(Checked):
    count: int = option(1, "a number of things", low=0, high=9)
    rate: float = option(0.5, "a rate", above=0, below=2)
    loud: bool = option(False, "a flag")
    kind: Literal["red", "blue"] = option("red", "a choice")
    bits: Literal[1, 8] = option(1, "a choice of numbers")
    limit: int | None = option(None, "a number or nothing", low=1)
    word: str = option("x", "text")
    folder: str | None = option(None, "text or nothing")
    rates: tuple[float, ...] = option((0.1,), "some numbers", above=0)
    pair: tuple[int, str] | None = option(None, "a number and a word")
    either: int | str = option(1, "a number or text")
    numeric: float | int | None = option(None, "a number of either kind")
    nested: tuple[tuple[int, ...], ...] = option((), "some lists")
    picked: tuple[Literal["red", "blue"], ...] = option((), "some choices")


@pytest.mark.parametrize(
    ("key", "given", "kept"),
    [
        ("count", "7", 7),
        ("count", 7.0, 7),
        ("rate", "1e-3", 0.001),
        ("rate", 1, 1.0),
        ("loud", "YES", True),
        ("loud", "off", False),
        ("kind", "blue", "blue"),
        ("bits", 8, 8),
        ("bits", "8", 8),
        ("limit", "3", 3),
        ("limit", "auto", None),
        ("limit", "None", None),
        ("limit", None, None),
        ("word", "auto", "auto"),
        ("folder", "none", "none"),
        ("folder", None, None),
        ("rates", "0.1, 2", (0.1, 2.0)),
        ("rates", [1, 2], (1.0, 2.0)),
        ("rates", "(3)", (3.0,)),
        ("pair", "1,x", (1, "x")),
        ("pair", "none", None),
        ("either", "abc", "abc"),
        ("either", "12", 12),
        ("either", 3, 3),
        ("numeric", "0.5", 0.5),
        ("numeric", 2, 2),
        ("picked", ["blue"], ("blue",)),
    ],
)
def test_values_are_read_as_their_types(key, given, kept):
    value = getattr(Example(**{key: given}), key)
    assert value == kept and type(value) is type(kept)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("count", "many", "count must be a whole number, not 'many'."),
        ("count", "2.5", "count must be a whole number, not '2.5'."),
        ("count", 2.5, "count must be a whole number, not '2.5'."),
        ("count", True, "count must be a whole number, not 'True'."),
        ("count", [1], r"count must be a whole number, not '\[1\]'."),
        ("count", float("inf"), "count must be a whole number, not 'inf'."),
        ("count", -1, "count must be at least 0, not -1."),
        ("count", "10", "count must be at most 9, not 10."),
        ("rate", "fast", "rate must be a number, not 'fast'."),
        ("rate", "nan", "rate must be a number, not 'nan'."),
        ("rate", 0, "rate must be greater than 0, not 0.0."),
        ("rate", 2, "rate must be less than 2, not 2.0."),
        ("rate", 10**400, "rate must be a number"),
        ("loud", "maybe", "loud must be true or false, not 'maybe'."),
        ("loud", 1, "loud must be true or false, not '1'."),
        ("kind", "green", "kind must be one of red, blue, not 'green'."),
        ("kind", "Blue", r"kind must be one of red, blue, not 'Blue'; did you mean 'blue'\?"),
        ("bits", "2", "bits must be one of 1, 8, not '2'."),
        ("bits", True, "bits must be one of 1, 8, not 'True'."),
        ("kind", None, "kind must be one of red, blue, not 'None'."),
        ("limit", 0, "limit must be at least 1, not 0."),
        ("limit", "few", "limit must be a whole number, not 'few'."),
        ("count", None, "count must be a whole number, not 'None'."),
        ("word", 3, "word must be text, not '3'."),
        ("rates", "0.1;0.2", "rates must be a list, each a number, not '0.1;0.2'."),
        ("rates", 0.1, "rates must be a list, each a number, not '0.1'."),
        ("rates", (1, -1), "rates must be greater than 0, not -1.0."),
        ("nested", "[[1,2],[3,4]]", "nested must be a list, each a list"),
        ("pair", "1", "pair must be a list, each a whole number and text, not '1'."),
        ("either", 0.5, "either must be a whole number or text, not '0.5'."),
        ("picked", "red,green", "picked must be a list, each one of red, blue, not 'red,green'."),
    ],
)
def test_what_does_not_fit_is_refused_with_its_name_and_what_would_be_right(key, value, sentence):
    with pytest.raises(UserError, match=sentence):
        Example(**{key: value})


@pytest.mark.parametrize(
    "kind", [list, dict[str, int], set, Callable[[int], int], tuple[list, ...], int | list]
)
def test_what_cannot_be_checked_is_no_option(kind):
    @dataclass(frozen=True)
    class Loose(Checked):
        value: kind = None

    with pytest.raises(
        UserError,
        match=r"value is declared as .*; an option is a number, text, a choice, or a tuple",
    ):
        Loose()


def test_infinity_is_no_setting():
    with pytest.raises(UserError, match="lr must be finite, not inf"):
        Training(lr="inf")


@pytest.mark.parametrize("key", ["bn.filter", "bn_filter", "bn-filter", "fedbn.bn_filter"])
def test_a_dot_or_a_hyphen_reads_as_an_underscore(key):
    assert make("fedbn", {key: "name"}) == FedBN(bn_filter="name")


def test_the_keys_of_the_specification_work():
    assert make("fedlp", {"fedlp.redraw": "run"}) == FedLP(redraw="run")
    assert make("fedavg-ft", {"ft.epochs": "5", "ft.part": "head"}) == FedAvgFT(
        ft_epochs=5, ft_part="head"
    )
    assert make("lg-fedavg", {"lg.shared_layers": 2, "lg.warm_start": 3}).warm_start == 3
    assert make("local", {"local.follow_sampling": "true"}).follow_sampling is True
    assert make("fedlg", {"fedlg.select": "gradient"}).select == "gradient"


def test_unknown_keys_are_refused_with_the_nearest_right_one():
    with pytest.raises(
        UserError, match="unknown key of the method fedopt 'server_rate'; did you mean 'server_lr'"
    ):
        make("fedopt", {"server_rate": 1})
    with pytest.raises(UserError, match="unknown key of the method fedprox 'zzz'; there are: mu"):
        make("fedprox", {"zzz": 1})
    with pytest.raises(UserError, match="unknown key of an example 'cuont'; did you mean 'count'"):
        build(Example, {"cuont": 1}, "an example")


def test_a_group_may_be_left_out_only_where_that_is_allowed():
    assert find("anything.rate", ["rate"]) == "rate"
    with pytest.raises(UserError, match=r"unknown key 'anything\.rate'"):
        find("anything.rate", ["rate"], grouped=False)


def test_methods_are_values():
    assert FedProx(mu=0.5) == FedProx(mu="0.5") and FedProx(mu=0.5) != FedProx(mu=0.6)
    assert hash(FedAvg()) == hash(FedAvg())
    with pytest.raises(AttributeError):
        FedProx().mu = 3
    with pytest.raises(UserError, match="mu must be at least 0, not -1"):
        Ditto(mu=-1)
    with pytest.raises(UserError, match="optimizer must be one of adam, yogi, adagrad, not 'sgd'"):
        FedOpt(server_optimizer="sgd")
