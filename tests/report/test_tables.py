import io
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from fedhelix.core.errors import UserError
from fedhelix.report.documents import markdown_report
from fedhelix.report.headline import warnings
from fedhelix.report.locate import Selection
from fedhelix.report.page import html
from fedhelix.report.results import Result, by_setting, read, unequal
from fedhelix.report.tables import _for_latex, comparison, latex, markdown, render, texts
from fedhelix.store import RunFolder


def small_run(path, method, seed, personal, **summary) -> RunFolder:
    with RunFolder.create(path, {"seed": seed, "method": {"name": method}}) as folder:
        costs = {"uplink_bytes": 1024, "seconds": 2.0, "train_loss": 1.0}
        folder.append({"round": 1, "personal_accuracy": 0.99, "valid_accuracy": 0.5, **costs})
        folder.append({"round": 2, "personal_accuracy": personal, **costs})
        folder.append({"round": 3, **costs})
        known = {"method": method, "options": {}, "seed": seed, "complete": True, "best_round": 1}
        folder.write_summary(known | summary)
    return folder


def test_means_errors_and_paired_differences_by_hand(tmp_path):
    folders = [
        small_run(tmp_path / "a1", "fedavg", 1, 0.50),
        small_run(tmp_path / "a2", "fedavg", 2, 0.60),
        small_run(tmp_path / "b1", "genfed", 1, 0.70, personal_accuracy_at_best=0.75),
        small_run(tmp_path / "b2", "genfed", 2, 0.90, personal_accuracy_at_best=0.85),
        small_run(
            tmp_path / "b3", "genfed", 3, 0.80, personal_accuracy_at_best=0.80, uplink_bytes=6144
        ),
    ]
    table = comparison(folders)
    assert list(table.index) == ["fedavg", "genfed"]
    fedavg, genfed = table.loc["fedavg"], table.loc["genfed"]
    assert fedavg["seeds"] == 2 and genfed["seeds"] == 3 and fedavg["rounds"] == 3
    # The last evaluated round counts, not the best one (0.99).
    assert fedavg["personal_accuracy"] == pytest.approx(0.55)
    assert fedavg["personal_accuracy_se"] == pytest.approx(
        0.05
    )  # s = 0.0707, divided by the root of 2
    assert genfed["personal_accuracy_at_best"] == pytest.approx(0.80)
    # Seed 3 has no partner; the other differences are 0.2 and 0.3.
    assert genfed["pairs"] == 2
    assert genfed["difference"] == pytest.approx(0.25) and genfed["difference_se"] == pytest.approx(
        0.05
    )
    assert (
        fedavg["uplink_bytes"] == 3072 and genfed["uplink_bytes"] == 4096 and fedavg["seconds"] == 6
    )
    assert "accuracy" not in table, "nobody measured a global model"
    headers, *rows = markdown(table).splitlines(keepends=True)
    assert headers == (
        "| method | seeds | rounds | personal % | chosen on validation % | vs fedavg | uploaded "
        "| time |\n"
    )
    assert "".join(rows) == (
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| fedavg | 2 | 3 | 55.0 ± 5.0 | – | – | 3.0 KiB | 6.0 s |\n"
        "| genfed | 3 | 3 | 80.0 ± 5.8 | 80.0 ± 2.9 | +25.0 ± 5.0 | 4.0 KiB | 6.0 s |\n"
    )


def test_a_run_that_diverged_is_not_reported_with_an_earlier_round(tmp_path):
    folders = [
        small_run(tmp_path / "a1", "fedavg", 1, 0.50),
        small_run(tmp_path / "a2", "fedavg", 2, 0.60),
        small_run(tmp_path / "b1", "genfed", 1, 0.70),
        small_run(tmp_path / "b2", "genfed", 2, math.nan),
    ]
    table = comparison(folders)
    assert table["seeds"].tolist() == [2, 2] and table.loc["genfed", "pairs"] == 2
    assert table.loc["genfed"][["personal_accuracy", "personal_accuracy_se"]].isna().all()
    assert "difference" not in table and "| genfed | 2 | 3 | – | 3.0 KiB |" in markdown(table)
    (warning,) = warnings([read(folders[3])])
    assert warning.endswith("b2 has diverged: its personal accuracy is not a number any more.")
    alone = comparison(folders[3:])
    assert math.isnan(alone.loc["genfed", "personal_accuracy"]), "what diverged stays in sight"


def test_a_seed_that_was_not_evaluated_yet_takes_nothing_away(tmp_path):
    folders = []
    for seed, evaluated in ((1, {"personal_accuracy": 0.5}), (2, {})):
        with RunFolder.create(
            tmp_path / str(seed), {"seed": seed, "method": {"name": "fedavg"}}
        ) as young:
            young.append({"round": 1, "uplink_bytes": 1024, "seconds": 2.0, **evaluated})
        folders.append(young)
    (row,) = comparison(folders).to_dict("records")
    assert row["seeds"] == 2 and row["personal_accuracy"] == 0.5


@pytest.mark.parametrize(("best_round", "shown"), [(1, 0.75), (3, math.nan), (None, math.nan)])
def test_a_round_that_no_validation_set_chose_is_not_shown_as_chosen(tmp_path, best_round, shown):
    chosen = small_run(tmp_path / "a", "fedavg", 0, 0.5, personal_accuracy_at_best=0.7)
    other = small_run(
        tmp_path / "b", "genfed", 0, 0.5, personal_accuracy_at_best=0.75, best_round=best_round
    )
    assert comparison([chosen, other])["personal_accuracy_at_best"].tolist() == pytest.approx(
        [0.7, shown], nan_ok=True
    )


def test_clients_that_diverged_have_no_final_metric(tmp_path):
    with RunFolder.create(tmp_path / "run", {"method": {"name": "fedavg"}}) as folder:
        folder.append({"round": 1, "personal": [0.5, 0.6, 0.7]})
        folder.append(
            {"round": 2, "personal": [0.4, None, None], "unevaluated": {"2": "did not answer"}}
        )
    assert read(folder).client_finals() == {0: 0.4, 2: 0.7}
    assert read(folder).clients()[1] == [(1, 0.6)]


def test_one_seed_shows_no_error(make_run):
    table = comparison([make_run("fedavg"), make_run("local", mib=0, global_model=False)])
    assert math.isnan(table.loc["fedavg"].get("personal_accuracy_se", math.nan))
    assert math.isnan(table.loc["local", "accuracy"])
    assert "±" not in markdown(table)
    assert table.loc["local", "uplink_bytes"] == 0


def test_the_largest_epsilon_that_a_client_has_spent_is_a_column(make_run):
    def ledger(step):
        return lambda round: {"epsilon": {"0": step * round, "1": 2 * step * round, "2": "much"}}

    spent = [make_run("private", seed, metadata=ledger(0.1 + seed)) for seed in (0, 1)]
    table = comparison([make_run("fedavg"), *spent])
    assert table["epsilon"]["private"] == pytest.approx(1.1 * 2 * 20)
    headers, rows = texts(table)
    assert [row[headers.index("epsilon")] for row in rows] == ["–", "44"]
    assert re.search(r"<th[^>]*>(<button[^>]*>)?epsilon<", html(Selection(spent, [])))
    assert "epsilon" not in comparison([make_run("fedavg", options={"delta": 0.1})])
    table = comparison([make_run("private", 2, metadata=ledger(0.1), options={"delta": 1e-5})])
    assert table["delta"].tolist() == [1e-5]
    assert "4 at δ = 1e-05" in markdown(table) and r"4 at $\delta$ = 1e-05" in latex(table)
    both = [
        make_run(name, 3, metadata=lambda _, level=level: {"epsilon": {"0": 2}} | level)
        for name, level in (
            ("dp-sgd", {"privacy_level": "sample"}),
            ("private", {"privacy_level": "client"}),
        )
    ]
    headers, rows = texts(comparison(both))
    shown = [row[headers.index("epsilon")] for row in rows]
    assert shown == ["2, sample-level", "2, client-level"]
    nonsense = make_run("private", metadata=lambda round: {"epsilon": [round]})
    assert "epsilon" not in comparison([nonsense])


def test_reports_name_the_options_of_methods(make_run, tmp_path):
    runs = [make_run("private", options={"delta": 1e-5, "epsilon": at}) for at in (2.0, 4.0)]
    runs += [make_run("fedavg"), make_run("mine", options={"strength": None})]
    text = markdown_report(Selection(runs, []), tmp_path / "r.md")
    sets = "delta = 1e-05, epsilon = 2.0; or delta = 1e-05, epsilon = 4.0"
    assert f"| options of private | {sets} |" in text
    assert "| options of mine | strength = auto |" in text and "options of fedavg" not in text
    assert "<dt>options of mine</dt><dd>strength = auto</dd>" in html(Selection(runs, []))


def test_negative_numbers_have_a_minus_in_latex():
    assert _for_latex("-30.6 ± 11.2") == r"$-$30.6 $\pm$ 11.2"
    assert _for_latex("delta 1e-05, fedavg-ft") == "delta 1e-05, fedavg-ft"


def test_the_terminal_table_shows_labels_as_they_are(make_run):
    runs = [make_run("genfed", options={"keep": keep}) for keep in ("[bold]", "all")]
    console = Console(file=io.StringIO(), width=200)
    console.print(render(comparison(runs)))
    assert (
        "genfed (keep=[bold])" in console.file.getvalue() and "20.0 MiB" in console.file.getvalue()
    )


def test_labels_name_only_the_settings_that_differ(make_run):
    runs = [
        make_run("fedavg"),
        make_run("genfed", options={"rho_max": 1, "decay": 0.5}),
        make_run("genfed", options={"rho_max": 3, "decay": 0.5}),
        make_run("genfed", options={"rho_max": 3, "decay": 0.5}, complete=False),
        make_run("genfed", seed=1, options={"rho_max": 3, "decay": 0.5}, summary=False, rounds=6),
    ]
    table = comparison(runs)
    assert list(table.index) == [
        "fedavg",
        "genfed (rho_max=1)",
        "genfed (rho_max=3)",
        "genfed (rho_max=3, unfinished)",
    ]
    assert table.loc["genfed (rho_max=3, unfinished)", ["seeds", "rounds"]].tolist() == [2, 6]


def test_of_many_settings_labels_name_those_that_are_not_as_in_most_runs(make_run):
    usual = {"lr": 0.1, "epochs": 2, "momentum": 0.9, "valid": 0.2, "cohort": 5}
    others = [{key: 7} for key in usual]
    runs = [make_run(seed=seed, config=usual) for seed in range(4)]
    runs += [make_run(config={**usual, **other}, name=f"{other}") for other in others]
    assert list(comparison(runs).index) == [
        "fedavg", *(f"fedavg ({key}=7)" for key in usual)
    ]  # fmt: skip


def test_settings_that_differ_between_methods_are_named(make_run):
    """As those are that `fedhelix tune` found the best ones of each method."""
    runs = [
        make_run("fedavg", seed, config={"lr": 0.1, "epochs": 2}, options={"mine": 3})
        for seed in (0, 1)
    ]
    runs += [make_run("fedprox", config={"lr": 0.03, "epochs": 2}), make_run("local")]
    assert list(comparison(runs).index) == ["fedavg (lr=0.1)", "fedprox (lr=0.03)", "local"]


def test_deployed_runs_belong_together_but_not_to_simulated_ones(make_run):
    def deployed(seed, **more):
        terms = {"experiment": f"drawn anew {seed}", "deadline": 600.0 + seed, **more}
        return make_run("fedavg", seed, config={"deployment": terms})

    assert list(comparison([deployed(0), deployed(1)]).index) == ["fedavg"]
    both = comparison(
        [deployed(0), deployed(1), make_run("fedavg", config={"client_state": "disk"})]
    )
    assert list(both.index) == ["fedavg (deployed)", "fedavg"] and both["seeds"].tolist() == [2, 1]
    held = comparison([deployed(0, server_data="one.npz"), deployed(0, server_data="other.npz")])
    assert list(held.index) == ["fedavg (server_data=one.npz)", "fedavg (server_data=other.npz)"]


def test_different_data_are_named(make_run):
    table = comparison([make_run("fedavg"), make_run("genfed", data="mnist")])
    assert list(table.index) == ["fedavg (data=digits)", "genfed (data=mnist)"]


def test_the_same_run_twice_is_refused(make_run):
    with pytest.raises(UserError, match="are both fedavg with seed 0; compare only one"):
        comparison([make_run("fedavg"), make_run("fedavg")])
    runs = [make_run(name=name) for name in ("stop", "my stop")]
    runs.insert(0, make_run("genfed", name="other"))
    names = f"`{runs[0].path} {runs[1].path}`"
    with pytest.raises(UserError, match=rf"naming runs instead of the folder .*: {names}\."):
        comparison(runs)
    with pytest.raises(UserError, match="no run to compare"):
        comparison([])


def test_other_metrics_and_empty_runs(make_run):
    scores = markdown(
        comparison([make_run(metric="score"), make_run("local", metric="score", final=0.7)])
    )
    assert "personal score" in scores and "global score" in scores and "%" not in scores
    empty = comparison([make_run(rounds=0, summary=False), make_run("local", evaluated=False)])
    assert empty["rounds"].tolist() == [0, 20]
    assert "| fedavg (unfinished) | 1 | 0 |" in markdown(empty)


def with_settings(path, method, seed=0, **settings) -> Result:
    """A run with some settings."""
    small_run(path, method, seed, 0.5)
    return replace(read(RunFolder.open(path)), circumstances=settings)


def test_methods_with_different_settings_are_not_ranked_without_a_word(tmp_path):
    one = with_settings(tmp_path / "a", "fedavg", lr=0.02, epochs=1, data="digits")
    other = with_settings(tmp_path / "b", "fedprox", lr=0.2, epochs=1, data="digits", devices="x")
    (sentence,) = warnings([one, other])
    assert sentence == (
        "The methods have different settings: lr is 0.02 with fedavg, 0.2 with fedprox; "
        "devices is not set with fedavg, x with fedprox."
    )
    # A grid that both have gone through, and other data, are told apart by labels and sections.
    grid = [
        with_settings(tmp_path / f"{method}{lr}", method, lr=lr, data="digits")
        for method in ("fedavg", "fedprox")
        for lr in (0.1, 0.2)
    ]
    assert unequal(grid) == {}
    assert unequal([one, replace(other, circumstances={"data": "wine", "lr": 0.2})]) == {}
    assert unequal([*grid, replace(grid[0], seed=1)]) == {}


def test_what_has_no_shift_says_so(tmp_path):
    one = with_settings(tmp_path / "a", "fedavg", shift="none")
    other = with_settings(tmp_path / "b", "fedavg", shift="rotation:2")
    assert list(by_setting([one, other])) == ["no shift", "rotation:2"]
