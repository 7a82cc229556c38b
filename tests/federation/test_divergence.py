"""A run that diverges says so: while it runs, in its summary and in its report."""

import io
import json
import math
import warnings
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from fedhelix import FedAvg, Federation, Scaffold, from_clients
from fedhelix.federation.loop import _outlying
from fedhelix.report.headline import warnings as report_warnings
from fedhelix.report.results import Result
from fedhelix.report.terminal import show_run
from fedhelix.store.progress import Progress
from fedhelix.store.records import (
    at_clients,
    diverged_clients,
    diverged_since,
    risen,
    why_untrained,
)


def records(*losses, **other):
    return [
        {"round": number, "train_loss": loss, "participants": [0], "missing": {}, **other}
        for number, loss in enumerate(losses, start=1)
    ]


@pytest.mark.parametrize(
    ("losses", "since"),
    [
        ((2.0, 1.0, 0.5), None),
        ((2.0, 2.4, 2.4, 2.4), None),  # above the first, but by less than a quarter
        ((2.0, 2.6, 2.6, 2.6), 2),
        ((2.0, 1.0, 2.6, 2.6), None),  # two rounds may be chance
        ((2.0, 1.0, 201.0), 3),  # a hundred times the first loss is none
        ((2.0, float("nan")), 2),
        ((2.0, None, None), 2),  # as files have it
        ((float("inf"), float("inf")), 1),
        ((2.0, float("nan"), 1.0), None),  # it has recovered
        ((0.05, 0.2, 0.2, 0.2), None),  # low, whatever it was after a warm start
        ((0.05, 0.4, 0.4, 0.4), 2),
        ((), None),
    ],
)
def test_the_round_from_which_on_losses_are_bad(losses, since):
    assert diverged_since(records(*losses)) == since


def test_a_loss_on_test_samples_that_is_no_number_counts_and_rounds_without_clients_do_not():
    assert diverged_since(records(1.0, 0.5, loss=None)) == 1
    idle = [{**one, "participants": [3], "missing": {"3": "away"}} for one in records(float("nan"))]
    assert diverged_since(idle) is None


def plants():
    """Two clients whose inputs are so large that usual steps are far too long."""
    draw = torch.Generator().manual_seed(0)
    xs = [1000 * torch.randn(40, 3, generator=draw) for _ in range(2)]
    return [(x, x.sum(1)) for x in xs]


def test_a_low_first_loss_is_no_divergence_while_models_stay_accurate():
    rising = records(0.1, 0.5, 0.5, 0.5)
    assert diverged_since(rising) == 2
    for accuracies, since in (
        ((0.9, 0.91, 0.88, 0.9), None),
        ((0.9, 0.91, 0.88, 0.7), 2),  # far below the best
        ((0.5, 0.5, 0.5, 0.5), 2),  # never good
    ):
        pairs = zip(rising, accuracies, strict=True)
        assert diverged_since([{**one, "accuracy": value} for one, value in pairs]) == since
    huge = [{**one, "accuracy": 0.9} for one in records(0.1, 0.5, 50.0)]
    assert diverged_since(huge) == 2


def test_a_diverged_run_is_named_in_warning_summary_and_report(tmp_path, capsys):
    with pytest.warns(UserWarning) as warned:
        run = Federation(plants(), model="linear", engine="serial").fit(
            4, out=tmp_path / "run", quiet=True
        )
    sentences = [str(one.message) for one in warned]
    assert sum("diverged since round 1" in one and "standardize" in one for one in sentences) == 1
    assert run.summary["diverged"] == 1
    kept = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert kept["diverged"] == 1

    result = Result("a", "fedavg", {}, {}, 0, True, run.records, kept, {}, {})
    (sentence,) = [one for one in report_warnings([result]) if "diverged" in one]
    assert sentence.startswith("a has diverged since round 1. What may help: scale the targets")
    show_run(tmp_path / "run", kept, as_json=False)
    assert capsys.readouterr().err.endswith("fedhelix: the run has diverged since round 1.\n")
    show_run(tmp_path / "run", kept, as_json=False, advised=False)  # it stands in a server's log
    assert "since round 1; what may help: scale the" in capsys.readouterr().err
    assert [one for one in report_warnings([replace(result, summary={})]) if "diverged" in one] == [
        "a has diverged since round 1."
    ]


def test_clients_that_diverge_alone_are_named(tmp_path, capsys):
    """The inputs of one client overflow; the others learn."""
    draw = torch.Generator().manual_seed(0)
    xs = [factor * torch.randn(40, 3, generator=draw) for factor in (1, 1e38, 1)]
    fed = Federation([(x, (x.sum(1) > 0).long()) for x in xs], model="linear", engine="serial")
    with pytest.warns(UserWarning, match="has diverged at client 1 since round 1: losses are no"):
        run = fed.fit(2, out=tmp_path / "run", quiet=True)
    assert [record["nonfinite_losses"] for record in run.records] == [[1], [1]]
    kept = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (kept["diverged"], kept["diverged_clients"]) == (1, [1])
    result = Result("a", "fedavg", {}, {}, 0, True, run.records, kept, {}, {})
    (sentence,) = [one for one in report_warnings([result]) if "diverged" in one]
    assert sentence.startswith("a has diverged at client 1 since round 1.")
    show_run(tmp_path / "run", kept, as_json=False)
    assert "fedhelix: the run has diverged at client 1 since round 1." in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["serial", "batched"])
@pytest.mark.parametrize("ill", [[2], [0, 1, 2]])
def test_personal_models_that_are_no_numbers_have_diverged(ill, engine):
    """The server's model is sound, and so is training."""

    class Mine(FedAvg):
        def deliver(self, server, client, ctx):
            factor = math.nan if client in ill else 1.0
            return {"model": {name: factor * value for name, value in server["model"].items()}}

    draw = torch.Generator().manual_seed(0)
    xs = [torch.randn(40, 3, generator=draw) for _ in range(3)]
    data = [(x, (x.sum(1) > 0).long()) for x in xs]
    fed = Federation(data, method=Mine(), model="linear", engine=engine)
    named = " at client 2" if ill == [2] else ""
    with pytest.warns(UserWarning, match=rf"diverged{named} since round 1: the losses of the mode"):
        run = fed.fit(2, quiet=True)
    assert [record["nonfinite_personal"] for record in run.records] == [ill, ill]
    assert (run.summary["diverged"], run.summary["diverged_clients"]) == (1, ill * bool(named))


@pytest.mark.parametrize("engine", ["serial", "batched"])
@pytest.mark.parametrize("method", ["fedavg", "fedper"])
def test_a_client_without_labels_has_no_loss_rather_than_a_diverged_one(method, engine):
    draw = torch.Generator().manual_seed(0)
    train = [(x, (x[..., 0] > 0).long()) for x in torch.randn(3, 20, 4, 3, generator=draw)]
    tests = [(x[:6], y[:6].clone()) for x, y in train]
    tests[1][1].fill_(-100)

    def loss(output, target):
        return torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    usual = {"model": tagger, "loss": loss, "engine": engine, "method": method, "epochs": 1}
    fed = Federation(from_clients(train, test=tests, classes=2), eval_trained=True, **usual)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = fed.fit(2, quiet=True)
    for record in run.records:
        assert "nonfinite_personal" not in record and record["unmeasured_clients"] == [1]
        own = record["personal"]
        assert math.isnan(own[1]) and record["personal_accuracy"] == pytest.approx(
            (own[0] + own[2]) / 2
        )
        assert math.isfinite(record["loss"]) and math.isfinite(record["trained_accuracy"])
    assert (run.summary["diverged"], run.summary["diverged_clients"]) == (None, [])


def tagger():
    """A class for each token."""
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))


def test_where_all_clients_diverge_none_is_named_and_of_many_some_are():
    (record,) = records(float("nan"), nonfinite_losses=[0])
    assert diverged_clients([record]) == []
    crowd = {**record, "participants": list(range(9)), "nonfinite_losses": list(range(7))}
    assert at_clients(diverged_clients([crowd])) == " at clients 0, 1, 2, 3, 4 and 2 more"
    assert diverged_clients([]) == []


def test_standardised_inputs_do_not_diverge(recwarn):
    run = Federation(plants(), model="linear", engine="serial", standardize=True, lr=0.01).fit(
        3, quiet=True
    )
    assert run.summary["diverged"] is None
    assert not [one for one in recwarn if "not scaled" in str(one.message)]


def test_the_progress_says_it():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=160)
    with Progress(3, "fedavg", console=console) as progress:
        for record in records(1.0, float("nan")):
            progress.update(record)
    assert "diverged since round 2" in screen.getvalue()
    lines = io.StringIO()
    with Progress(3, "fedavg", lines=True, console=Console(file=lines, width=160)) as progress:
        for record in records(1.0, float("nan"), accuracy=0.1):
            progress.update(record)
    assert "diverged_since=2" in lines.getvalue().splitlines()[-1]


@pytest.mark.parametrize(
    ("losses", "accuracies", "bad"),
    [
        ((1, 2, 2, 2, 2, 2), (1, 3, 1, 1, 2, 1), True),
        ((1, 2, 2, 2, 2), (1, 3, 1, 1, 2), False),  # too soon to say
        ((1, 2, 2, 2, 2, 2), (1, 3, 1, 1, 2, 4), False),  # better than before
        ((1, 2, 2, 2, 2, 1), (1, 3, 1, 1, 2, 1), False),  # the loss is as low as at first
        ((1, 2, 2, 2, 2, 2), (8, 9, 9, 9, 9, 9), False),  # nothing is wrong with such models
        ((1, 2, 2, 2, 2, 2), (None, None, 3, None, None, 1), False),  # hardly evaluated
    ],
)
def test_losses_that_rise_while_models_get_no_better(losses, accuracies, bad):
    pairs = zip(records(*losses), accuracies, strict=True)
    found = [{**one} if value is None else {**one, "accuracy": value / 10} for one, value in pairs]
    assert (risen(found) is not None) == bad
    scores = [{("score" if k == "accuracy" else k): v for k, v in one.items()} for one in found]
    assert (risen(scores) is not None) == (bad or 8 in accuracies)  # a score has no good level


def test_scaffold_says_what_it_needs_where_it_stays_at_chance_and_only_there(recwarn):
    """With the defaults it falls to chance where clients have few classes; its docs say why."""
    common = {"method": Scaffold(), "engine": "batched"}
    Federation("digits", "shard:2", model="linear", **common).fit(6, quiet=True)
    Federation("digits", "dirichlet:0.3", model="linear", **common).fit(6, quiet=True)
    assert not recwarn.list  # its first loss is the lowest for some rounds, but it learns
    Federation("digits", "dirichlet:0.1", seed=1, **common).fit(8, quiet=True)
    (sentence,) = [str(one.message) for one in recwarn.list]
    assert sentence.startswith("models get no better: the clients' mean loss was 1.38 in the first")
    assert "control = steps, momentum = 0" in sentence


def test_the_advice_names_targets_that_are_not_scaled():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    fed = Federation([(x, 1e4 * x[:, 0] + 1e5)], model="linear", engine="serial", lr=10)
    with pytest.warns(UserWarning, match=r"scale the targets \(mean 1e\+05 and standard") as warned:
        fed.fit(4, quiet=True)
    assert len(warned) == 1  # and not that uploads are refused, too


class Spoiled(FedAvg):
    """Its server cannot compute."""

    def aggregate(self, server, uploads, weights, ctx):
        return {"model": {name: value / 0 for name, value in server["model"].items()}}


class Nobody(FedAvg):
    """It selects no client."""

    def select_clients(self, server, cohort, ctx):
        return []


class Weightless(FedAvg):
    """Nobody's upload counts, except in some rounds."""

    rounds = ()

    def weights(self, server, uploads, ctx):
        return [float(ctx.round in self.rounds)] * len(uploads)


@pytest.mark.parametrize(
    ("method", "why"),
    [
        (Weightless(), "all uploads had weight zero; check what the method's `weights` returns"),
        (Spoiled(), "every upload was refused (that of client 0 "),
        (Nobody(), "no client has trained"),
    ],
)
@pytest.mark.parametrize("rounds", [1, 4])
def test_a_run_that_learns_nothing_says_so(method, why, rounds, tmp_path, capsys):
    common = {"model": "linear", "engine": "serial", "standardize": True, "lr": 1e-9}
    fed = Federation(plants(), method=method, **common)
    with pytest.warns(UserWarning, match="nothing was learned in") as warned:
        run = fed.fit(rounds, out=tmp_path / "run", quiet=True)
    assert len(warned) == 1 and warned[0].filename == __file__
    assert run.summary["untrained"].startswith(why)
    show_run(tmp_path / "run", run.summary, as_json=False)
    assert f"nothing was learned: {why}" in capsys.readouterr().err
    result = Result("a", "mine", {}, {}, 0, True, run.records, run.summary, {}, {})
    assert any(f"a has learned nothing: {why}" in one for one in report_warnings([result]))
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=160)
    with Progress(rounds, "mine", console=console) as progress:
        progress.update(run.records[0])
    assert "nothing learned yet" in screen.getvalue()


def test_one_round_with_an_upload_is_enough():
    assert why_untrained(records(1.0)) is None
    refused, lost = {"0": "is odd"}, {"0": "is away"}
    assert why_untrained([*records(1.0, refused=refused), *records(1.0)]) is None
    assert why_untrained([{**records(1.0)[0], "missing": lost}]) == "no client has trained"
    assert why_untrained([]) is None


def test_weights_of_zero_in_some_rounds_are_no_reason_to_warn():
    class Sometimes(Weightless):
        rounds = (1,)

    run = Federation(plants(), method=Sometimes(), model="linear", standardize=True).fit(3)
    assert [one.get("weightless", False) for one in run.records] == [True, False, True]
    assert run.summary["untrained"] is None and run.summary["idle_since"] == 3

    class Otherwise(Weightless):  # which needs no weights
        def aggregate(self, server, uploads, weights, ctx):
            return super().aggregate(server, uploads, [1.0] * len(uploads), ctx)

    run = Federation(plants(), method=Otherwise(), model="linear", standardize=True).fit(3)
    assert not any("weightless" in one for one in run.records)


@pytest.mark.parametrize("rounds", [1, 5])
@pytest.mark.parametrize("clients", [None, 0])
def test_a_metric_that_is_a_number_for_nobody_is_named_once(rounds, clients):
    def recall(output, target):
        return math.nan

    common = {"model": "linear", "standardize": True, "eval_clients": clients}
    fed = Federation(plants(), metric=recall, **common)
    with pytest.warns(UserWarning, match=r"^the metric recall is not a number \(NaN\)") as warned:
        fed.fit(rounds, quiet=True)
    assert len(warned) == 1 and warned[0].filename == __file__


@pytest.mark.parametrize("without", [1, 2, 3])
def test_a_metric_that_is_a_number_for_few_says_for_how_many_it_is_none(without):
    xs = [torch.randn(20, 3, generator=torch.Generator().manual_seed(n)) for n in range(4)]

    def recall(output, target):
        return math.nan if target.mean() < without else 0.5

    clients = [(x, torch.full((20,), 0.5 + n)) for n, x in enumerate(xs)]
    fed = Federation(clients, metric=recall, model="linear", engine="serial", standardize=True)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run = fed.fit(4, quiet=True)
    assert run.records[0]["unmeasured_clients"] == list(range(without))
    said = [str(one.message) for one in warned if "recall is not a number" in str(one.message)]
    if without < 3:  # the mean is that of most
        assert not said
        return
    (sentence,) = said
    assert "for the test samples of 3 of 4 clients, who do not count in its mean" in sentence


def test_a_metric_that_is_a_number_sometimes_is_not():
    calls = []

    def recall(output, target):
        calls.append(1)
        return math.nan if len(calls) < 8 else 0.5

    Federation(plants(), metric=recall, model="linear", standardize=True).fit(5, quiet=True)
    assert len(calls) > 8


@pytest.mark.parametrize(
    ("losses", "odd"),
    [
        ({0: 0.3, 1: 0.4, 2: 2e20}, [2]),
        ({0: 0.3, 1: math.nan}, [1]),
        ({0: math.inf, 1: math.nan, 2: math.nan}, []),
        ({0: 1e-6, 1: 2e-6, 2: 5.0}, []),  # hard samples, where the others' are learnt by heart
        ({0: 4e8, 1: 6e8, 2: 1e10}, []),  # targets of a regression
        ({0: 1e20}, []),
    ],
)
def test_losses_far_beyond_those_of_the_others_are_out_of_place(losses, odd):
    assert _outlying(losses) == odd
