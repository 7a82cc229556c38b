"""The commands on a real comparison, and what they refuse."""

import re

import pytest

from fedhelix.core.errors import UserError
from fedhelix.methods import GenFed
from helpers import small


def test_from_a_comparison_to_its_report(cli, tmp_path):
    assert "there is no run in 'runs/' yet" in cli("report").err
    words = [
        "compare",
        "fedavg",
        "genfed",
        "--rounds",
        2,
        "--clients",
        5,
        "--model",
        "linear",
        "--attack",
        "noise",
    ]
    assert cli(*words, "--out", "runs/mine", "--engine", "serial", "-q").code == 0
    done = cli("report", "--format", "latex")
    assert (
        done.out.strip() == "report.tex"
        and r"\textbf{genfed} & 1 & 2" in (tmp_path / "report.tex").read_text()
    )
    assert cli("report", "-o", "r.html").code == 0
    page = (tmp_path / "r.html").read_text()
    assert (
        re.search("fedhelix compare fedavg genfed --seeds 1 .*--set attack=noise", page)
        and "attacked in 2 of 2 runs" in page
        and "personal metrics and the 10th percentile count them too." in page
    )
    assert cli("export", "runs/mine", "-o", "t.csv").out == "t.csv: 4 rows\n"


@pytest.mark.parametrize("value", [None, "x", -1, [], {"a": {"b": [1]}}])
@pytest.mark.parametrize(
    "key", ["options", "seed", "personal_accuracy_at_best", "uplink_bytes", "clients"]
)
def test_a_summary_that_somebody_edited_gives_no_traceback(cli, make_run, key, value):
    run = make_run()
    run.write_summary({**(run.summary or {}), key: value})
    run.close()
    done = cli("report", run.path, "--format", "latex")
    assert done.code == 0 or (done.code == 2 and "is damaged" in done.err)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["report", "--format", "latex", "-o", "x.html"],
            "--format latex writes a file that ends in .tex",
        ),
        (["report", "--format", "pdf"], "--format must be html, md or latex, not 'pdf'"),
        (
            ["report", "-o", "run/metrics.jsonl"],
            "a report ends in .html, .md or .tex, and 'run/metrics.jsonl' does not",
        ),
        (["plot", "nothing"], "'nothing' holds no run"),
        (["serve", "nothing"], "there is no folder 'nothing'"),
    ],
)
def test_mistakes_end_with_one_sentence(cli, words, sentence):
    done = cli(*words)
    assert done.code == 2 and sentence in done.err


def test_a_run_draws_itself_with_or_without_a_folder(tmp_path):
    run = small(GenFed(), attack="noise").fit(2, quiet=True)
    figure = run.plot(tmp_path / "run.svg")
    assert "genfed" in (tmp_path / "run.svg").read_text() and len(figure.axes) == 3
    with pytest.raises(UserError, match="must end in"):
        run.plot(tmp_path / "run.gif")


def test_runs_say_who_has_what(tmp_path):
    fed = small(attack="label-flip", attack_share=0.4, eval_clients=4)
    run = fed.fit(1, out=tmp_path / "run", quiet=True)
    census = run.folder.clients
    assert [sum(counts) for counts in census["classes"]] == census["samples"]
    assert census["samples"] == [len(split.train) for split in fed.splits]
    assert census["attackers"] == sorted(fed.attackers.ids) and len(census["attackers"]) == 2
    assert len(census["evaluated"]) == 4 == len(run.records[0]["personal"])
