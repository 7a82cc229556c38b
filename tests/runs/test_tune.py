"""`fedhelix tune`: equal trials, validation, pruning, and searches that go on."""

import json
import shlex

import pytest

from fedhelix import UserError
from fedhelix.core import imports
from fedhelix.report.headline import warnings
from fedhelix.report.live import Watch
from fedhelix.report.results import grouped, read
from fedhelix.runs.jobs import Session
from fedhelix.runs.spec import read_spec
from fedhelix.runs.sweep import read_search, read_sweep
from fedhelix.runs.tune import FILE, Trial, best, tune_all
from fedhelix.store import RunFolder

SEARCH = """
methods = ["fedavg", "fedprox"]
trials = 3
[settings]
data = "digits"
train_samples = 200
test_samples = 60
rounds = 2
model = "linear"
clients = 4
cohort = 2
engine = "serial"
kernels = "onednn"
[grid]
batch_size = [16, 32]
[range]
lr = { low = 0.001, high = 1.0, log = true }
epochs = { low = 1, high = 2 }
"fedprox.mu" = { low = 0.0, high = 1.0 }
"""
QUIET = Session(quiet=True)


def search(folder, text=SEARCH):
    path = folder / "search.toml"
    path.write_text(text)
    return read_search(path)


def test_a_search_that_was_stopped_ends_as_one_that_was_not(tmp_path):
    pytest.importorskip("optuna")
    asked = search(tmp_path)
    whole = tune_all(asked, tmp_path / "whole", QUIET)
    assert [(t.method, t.number) for t in whole] == [
        (method, number) for method in ("fedavg", "fedprox") for number in range(3)
    ]
    for trial in whole:
        assert trial.chosen["batch_size"] in (16, 32) and trial.chosen["epochs"] in (1, 2)
        assert 0.001 <= trial.chosen["lr"] <= 1
        assert ("mu" in trial.chosen) == (trial.method == "fedprox")
        assert set(trial.values) == {1, 2} and not trial.pruned
    config = json.loads((tmp_path / "whole" / FILE).read_text())
    assert len(config["trials"]) == 6
    # The first four are there; the rest, and more trials than before, are the same as in one go.
    (tmp_path / "part").mkdir()
    config["trials"] = config["trials"][:4]
    (tmp_path / "part" / FILE).write_text(json.dumps(config))
    again = tune_all(asked, tmp_path / "part", QUIET)
    assert [t.chosen for t in again] == [t.chosen for t in whole]
    assert [t.values for t in again] == [t.values for t in whole]
    found = best(again)
    assert found["fedavg"].best == max(t.best for t in whole[:3])
    assert found["fedavg"].spec.startswith("fedavg@batch_size=")
    with pytest.raises(UserError, match="holds another search; choose another folder with --out"):
        tune_all(search(tmp_path, SEARCH.replace("0.001", "0.002")), tmp_path / "part", QUIET)
    (tmp_path / "part" / FILE).write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        tune_all(asked, tmp_path / "part", QUIET)


def test_lists_are_tried_once_each(tmp_path):
    pytest.importorskip("optuna")
    text = SEARCH.partition("[range]")[0].replace('"fedavg", ', "").replace("= 3", "= 9")
    asked = search(tmp_path, text + '"fedprox.mu" = [0.0, 1.0]')
    assert asked.trials_of("fedprox") == 4 and search(tmp_path).trials_of("fedprox") == 3
    chosen = [trial.chosen for trial in tune_all(asked, tmp_path / "out", QUIET)]
    assert sorted((one["batch_size"], one["mu"]) for one in chosen) == [
        (16, 0.0), (16, 1.0), (32, 0.0), (32, 1.0)
    ]  # fmt: skip


def test_a_hopeless_trial_ends_early(tmp_path):
    """Five good trials are known; the sixth can only choose a rate at which nothing is learnt."""
    pytest.importorskip("optuna")
    text = SEARCH.replace('["fedavg", "fedprox"]', '["fedavg"]').replace("trials = 3", "trials = 6")
    text = text.replace("rounds = 2", "rounds = 4").replace('"fedprox.mu" = ', "momentum = ")
    text = text.replace("low = 0.001, high = 1.0, log", "low = 1e-9, high = 1e-8, log")
    text = text.replace("momentum = { low = 0.0, high = 1.0 }", "")
    asked = search(tmp_path, text)
    good = {"batch_size": 16, "lr": 5e-9, "epochs": 1}
    known = [Trial("fedavg", n, good, False, dict.fromkeys(range(1, 5), 0.99)) for n in range(5)]
    out = tmp_path / "out"
    out.mkdir()
    described = {"methods": ["fedavg"], "settings": asked.settings, "space": asked.space}
    content = {"search": {**described, "trials": 0}, "trials": [vars(trial) for trial in known]}
    (out / FILE).write_text(json.dumps(content))
    last = tune_all(asked, out, QUIET)[-1]
    assert last.pruned and 1 <= len(last.values) < 4 and last.best < 0.99
    assert json.loads((out / FILE).read_text())["trials"][-1]["pruned"] is True
    result = read(RunFolder.open(next(out.glob("*-trial5"))))
    said = f"was pruned by `fedhelix tune` after {len(last.values)} of 4 rounds."
    assert any(sentence.endswith(said) for sentence in warnings([result]))
    assert list(grouped([result])) == ["fedavg (pruned)"] and "pruned" not in result.circumstances
    watch = Watch(out)
    watch.refresh()
    assert [(run["status"], run["done"]) for run in watch.overview()] == [
        ("pruned", len(last.values))
    ]
    assert read_spec(result.config, "a trial").config.rounds == 4  # its settings are still a run's


def test_time_that_is_up_keeps_what_is_done(tmp_path):
    pytest.importorskip("optuna")
    assert tune_all(search(tmp_path), tmp_path / "out", Session.limited(0, True)) == []


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("low = 0.001, high = 1.0, log", "low = 0, high = 1.0, log", "above 0 with log"),
        ("low = 1, high = 2", "low = 2, high = 1", "low < high"),
        ("{ low = 1, high = 2 }", "[1, 2]", "must be a range such as"),
        ("trials = 3", "trials = 0", "must be at least 1"),
        ("trials = 3", "seeds = 3", r"all trials of a search have one seed; write seed in its"),
        ("rounds = 2", "seeds = 3", r"all trials of a search have one seed; write seed in its"),
        ("rounds = 2", "trials = 3", r"'trials' stands in the table \[settings\] of .* above"),
        ("batch_size = [16, 32]", "trials = 3", r"'trials' stands in the table \[grid\] of"),
        ("[range]", "[settings.range]", r"has \[settings.range\]; write \[range\]"),
        ('"fedprox.mu"', '"fedper.ft_epochs"', "concerns none of its methods"),
    ],
)
def test_bad_searches_get_one_sentence(tmp_path, old, new, sentence):
    with pytest.raises(UserError, match=sentence):
        search(tmp_path, SEARCH.replace(old, new))


def test_seeds_of_a_sweep_stand_above_its_tables(tmp_path):
    path = tmp_path / "sweep.toml"
    path.write_text('methods = ["fedavg"]\n[settings]\nrounds = 2\nseeds = 3\n')
    with pytest.raises(UserError, match=r"'seeds' stands in the table \[settings\] .*above the fi"):
        read_sweep(path)


def test_the_best_settings_are_a_command_that_can_be_copied(cli, tmp_path):
    pytest.importorskip("optuna")
    text = SEARCH.partition("[range]")[0].replace("batch_size", "epochs").replace("16, 32", "1, 2")
    text = text.replace(
        "[grid]", '"fedprox.mu" = 0.2\nlr_decay = [1.0, 0.9]\nsampler = "balanced"\n[grid]'
    )
    (tmp_path / "search.toml").write_text(text)
    done = cli("tune", "search.toml", "--out", "tuned", "--quiet")
    line = next(line for line in done.out.splitlines() if line.startswith("fedhelix compare"))
    assert "--set rounds=2" in line and "fedavg@epochs=" in line and "fedprox@epochs=" in line
    assert cli(*shlex.split(line)[1:], "--out", "again", "--quiet").code == 0
    rows = json.loads(cli("tune", "search.toml", "--out", "tuned", "--quiet", "--json").out)
    assert "fedprox.mu" not in rows[0]["command"] and "fedprox.mu=0.2" in rows[1]["command"]
    for row in rows:
        name = row["method"]
        assert cli(*shlex.split(row["command"])[1:], "--out", name, "--quiet").code == 0
        trial = RunFolder.open(tmp_path / "tuned" / f"{name}-trial{row['number']}")
        assert RunFolder.open(tmp_path / name).config == trial.config
        found = {one["round"]: one["valid_accuracy"] for one in trial.records()}
        best = max(found, key=found.__getitem__)
        shown = next(line for line in done.out.splitlines() if line.split()[:1] == [name])
        assert shown.split()[-3:] == [f"{100 * found[best]:.1f}", "%", str(best)]


def test_ranges_are_not_for_sweeps_and_a_search_needs_a_space(tmp_path):
    path = tmp_path / "search.toml"
    path.write_text(SEARCH)
    with pytest.raises(UserError, match="use `fedhelix tune`"):
        read_sweep(path)
    with pytest.raises(UserError, match="neither a grid nor ranges"):
        search(tmp_path, 'methods = ["fedavg"]\ntrials = 2\n')


def test_without_optuna_one_sentence_says_what_to_install(tmp_path, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(imports.importlib, "import_module", missing)
    with pytest.raises(UserError, match=r"this needs optuna; .*'fedhelix\[tune\]'"):
        tune_all(search(tmp_path), tmp_path / "out", QUIET)
