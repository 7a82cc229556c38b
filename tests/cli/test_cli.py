"""The command line: what it prints, what it refuses and how, and that a stopped run goes on."""

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import fedhelix_command
from fedhelix import METHODS, __version__
from fedhelix.cli import app as command_line
from fedhelix.core.docs import summary
from fedhelix.core.errors import UserError
from fedhelix.runs import jobs
from fedhelix.runs.config import Config
from fedhelix.store import RunFolder
from helpers import checkpoint, on_disk, same

SMALL = (
    "--clients", 6, "--cohort", 3, "--rounds", 2, "--epochs", 1, "--batch-size", 64,
    "--model", "mlp",
    "--engine", "serial",
)  # fmt: skip


# What it does


def test_a_run_leaves_a_folder_and_prints_one_line(cli, tmp_path):
    done = cli("run", "fedprox", *SMALL, "--set", "method.mu=0.5", "--seed", 3)
    assert (done.code, done.err) == (0, "")
    found = dict(word.split("=", 1) for word in done.out.split())
    assert found["method"] == "fedprox" and found["rounds"] == "2"
    folder = tmp_path / found["folder"]
    assert folder == tmp_path / "runs" / "fedprox-digits-seed3"
    files = {"config.toml", "clients.json", "metrics.jsonl", "summary.json", "checkpoint"}
    assert {path.name for path in folder.iterdir()} == files
    config = RunFolder.open(folder).config
    assert config["method"] == {"name": "fedprox", "mu": 0.5} and config["seed"] == 3
    assert config["versions"]["fedhelix"] == __version__
    for record in RunFolder.open(folder).records():
        assert {
            "round", "accuracy", "personal_accuracy", "personal", "personal_p10", "loss",
            "uplink_bytes",
            "downlink_bytes", "other_bytes", "seconds",
        } <= record.keys()  # fmt: skip
    summary = json.loads((folder / "summary.json").read_text())
    assert {
        "method", "parameters", "rounds", "final_accuracy", "best_round", "personal_accuracy",
        "uplink_bytes",
        "downlink_bytes", "other_bytes", "seconds", "seed",
    } <= summary.keys()  # fmt: skip
    assert summary["parameters"] == 64 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10


def test_two_runs_never_share_a_folder(cli, tmp_path):
    for _ in range(2):
        assert cli("run", "local", *SMALL).code == 0
    one, other = (
        tmp_path / "runs" / name for name in ("local-digits-seed0", "local-digits-seed0-2")
    )
    assert on_disk(one) == on_disk(other)


def test_json_is_json(cli):
    done = json.loads(cli("run", "fedavg", *SMALL, "--out", "mine", "--json").out)
    assert (
        done["method"] == "fedavg" and done["folder"] == "mine" and 0 <= done["final_accuracy"] <= 1
    )
    again = json.loads(cli("resume", "mine", "--json").out)
    assert again == done
    rows = json.loads(cli("compare", "fedavg", "fedper", *SMALL, "--out", "both", "--json").out)
    assert {row["method"] for row in rows} == {"fedavg", "fedper"}
    assert json.loads(cli("resume", "both", "--json").out) == rows
    listed = json.loads(cli("methods", "--json").out)
    assert listed.keys() == METHODS.keys() and listed["fedprox"]["options"]["mu"]["default"] == 0.01
    assert {row["name"]: bool(row["found"]) for row in json.loads(cli("data", "--json").out)}[
        "digits"
    ]


def test_a_comparison_shows_a_table_and_leaves_a_figure(cli, tmp_path):
    done = cli("compare", "fedavg", "local", *SMALL, "--seeds", 2, "--out", "both")
    assert done.code == 0 and done.err == ""
    for word in ("fedavg", "local", "±", "figure: both/comparison.png"):
        assert word in done.out
    assert (tmp_path / "both" / "comparison.png").stat().st_size > 5000
    assert len([path for path in (tmp_path / "both").iterdir() if path.is_dir()]) == 4


def test_the_config_of_a_run_starts_the_same_run_again(cli, tmp_path):
    cli("run", "fedprox", *SMALL, "--set", "method.mu=0.5", "--seed", 5, "--out", "one")
    assert cli("run", "fedprox", "--config", "one/config.toml", "--out", "two").code == 0
    assert on_disk(tmp_path / "one") == on_disk(tmp_path / "two")


def test_methods_and_their_options_are_explained(cli):
    shown = cli("methods").words
    for name, kind in METHODS.items():
        assert f"{name} {summary(kind)}" in shown
    one = cli("methods", "fedopt").words
    assert (
        "method.server_optimizer = adam" in one
        and "(adam | yogi | adagrad)" in one
        and "arXiv:2003.00295" in one
    )
    assert "fedavg-ft" not in one


def test_a_method_without_a_paper_has_no_line_about_one(cli, tmp_path):
    code = (
        "from fedhelix import FedAvg, register\n@register('plain')\nclass Plain(FedAvg): 'Mine.'\n"
    )
    (tmp_path / "plain.py").write_text(code)
    assert "paper" not in cli("methods", "plain.py").out


def test_data_says_what_is_here_and_how_to_get_the_rest(cli, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shown = cli("data").words
    assert "digits yes scikit-learn" in shown
    for name in ("mnist", "fashion-mnist", "emnist", "cifar10", "cifar100", "svhn"):
        assert name in shown
    assert re.search(r"cifar100 no .*cifar100\.npz", shown)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_data_sums_up_what_clients_have_of_many_classes(cli, monkeypatch, tmp_path, width):
    labels = np.concatenate([np.full(90, 7), np.full(60, 3), np.arange(62).repeat(2)])
    kept = tmp_path / "many.npz"
    np.savez(kept, x=np.zeros((len(labels), 3), np.float32), y=labels, owners=labels * 0)
    for key, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": str(width)}.items():
        monkeypatch.setenv(key, value)
    shown = re.sub(r"\x1b\[\d*m", "", cli("data", kept, "--clients", 1).out)
    (row,) = json.loads(cli("data", kept, "--clients", 1, "--json").out)["classes"]
    assert f"{sum(map(bool, row))} of 62" in shown
    assert f"7: {row[7]}, 3: {row[3]}, " in shown
    assert max(map(len, shown.splitlines())) <= width


@pytest.mark.parametrize("classes", [2, 30])
def test_data_names_classes_whose_labels_are_text(cli, tmp_path, classes):
    labels = np.array([f"kind{number}" for number in range(classes)]).repeat(12)
    kept = tmp_path / "named.npz"
    np.savez(kept, x=np.zeros((len(labels), 3), np.float32), y=labels, owners=["ulm"] * len(labels))
    census = json.loads(cli("data", kept, "--json").out)
    assert census["class_names"] == sorted(set(labels.tolist()))
    (row,) = census["classes"]
    largest = max(row)
    name = census["class_names"][row.index(largest)]
    assert f"{name}: {largest}" in cli("data", kept).words


def test_data_shows_who_gets_what(cli):
    settings = ("--shift", "concept:3", "--clients", 6, "--seed", 1)
    census = json.loads(cli("data", "digits", *settings, "--json").out)
    assert census["shift"].count("none") == 2 and len(census["classes"]) == 6
    shown = cli("data", "digits", *settings).words
    for client, name in enumerate(census["shift"]):
        classes = " ".join(map(str, census["classes"][client]))
        assert f"{client} {census['samples'][client]} {classes} {name}" in shown
    assert cli("data", "digits", "--clients", 3, "--json").out.count("shift") == 0
    refused = cli("data", "--shift", "concept:3")
    assert refused.code == 2 and "--shift needs the name of a data set" in refused.err


def test_version_and_help(cli):
    assert cli("--version").out.strip() == f"fedhelix {__version__}"
    top = cli("--help")
    assert top.code == 0 and all(
        word in top.out for word in ("run", "resume", "compare", "methods", "data")
    )
    shown = cli("run", "--help").out
    for name in Config.names:
        assert "--" + name.replace("_", "-") in shown
    for word in ("--out", "--config", "--preset", "--set", "--json"):
        assert word in shown
    assert "--seeds" in cli("compare", "--help").out
    for command, has in ((("run",), True), (("deploy", "run"), False)):
        shown = cli(*command, "--help").out
        for flag in ("--engine", "--workers", "--client-state", "--devices"):
            assert (f"{flag} " in shown) == has, flag
    bare = cli()
    assert "Commands" in bare.out and bare.err == ""


# Bad input: one sentence, exit code 2, nothing written


def files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("run fedavgg", "unknown method 'fedavgg'; did you mean 'fedavg'?"),
        ("run xyz", "unknown method 'xyz'; there are: "),
        ("run mine.py", "there is no file 'mine.py'."),
        ("run", "Missing argument 'METHOD'; see `fedhelix run --help`."),
        ("compare", "Missing argument 'METHOD...'"),
        ("compare fedavg fedavg", "'fedavg' is named twice; a comparison needs different methods."),
        ("compare fedavg local --seeds 0", "seeds must lie between 1 and 1000, not 0."),
        ("compare fedavg local --seeds many", "Invalid value for '--seeds'"),
        ("methods fedprx", "unknown method 'fedprx'; did you mean 'fedprox'?"),
        ("walk", "No such command 'walk'"),
        (
            "run fedavg --round 3",
            "No such option '--round'. Did you mean '--rounds'? See `fedhelix",
        ),
        ("run fedavg --learning-rate 1", "No such option '--learning-rate'; lr is the learning"),
        ("run fedprox --mu 1", "'--mu'; options of methods are written --set fedprox.mu=VALUE"),
        ("run fedavg --set learning_rate=1", "there is no setting 'learning_rate'; lr is the"),
        ("run fedavg@learning_rate=1", "there is no setting 'learning_rate'; lr is the learning"),
        ("resume x --rounds 3", "No such option '--rounds'; write --set rounds=VALUE; see"),
        ("tune x.toml --lr 3", "No such option '--lr'; FILE has the lr in its table [settings]"),
        ("report --rounds 3", "No such option '--rounds'; see `fedhelix report --help`."),
        ("run fedavg --zzz", "No such option '--zzz'; see `fedhelix run --help`."),
        ("run fedprox --set mu=1", "'mu' is an option of fedprox; write method.mu."),
        ("run fedavg --data digit", "unknown data set 'digit'; did you mean 'digits'?"),
        ("run fedavg --model digits-cn", "unknown model 'digits-cn'; did you mean 'digits-cnn'?"),
        ("run fedavg --preset pfedgpa", "unknown preset 'pfedgpa'; did you mean 'pfedgpa."),
        ("run fedavg --engine fast", "unknown engine 'fast'"),
        (
            "run fedavg --device toaster",
            "there is no device 'toaster' here; use auto to take what there is.",
        ),
        ("run fedavg --set round=3", "unknown key 'round'; did you mean 'rounds'?"),
        ("run fedavg --set rounds", "--set takes KEY=VALUE, not 'rounds'."),
        (
            "compare fedavg fedprox --set fedprox.muu=3",
            "unknown key of the method fedprox 'muu'; did you mean 'mu'?",
        ),
        (
            "run fedavg --batch-size 99999999999",
            "batch_size must be at most 1000000, not 99999999999.",
        ),
        (
            "compare fedavg local --seeds 99999999999",
            "seeds must lie between 1 and 1000, not 99999999999.",
        ),
        (
            "run fedprox --set method.muu=3",
            "unknown key of the method fedprox 'muu'; did you mean 'mu'?",
        ),
        ("run fedprox --set fedprox.mu=much", "mu must be a number, not 'much'."),
        ("run fedprox --set method.mu=-1", "mu must be at least 0, not -1.0."),
        (
            "run fedopt --set method.server_optimizer=sgd",
            "server_optimizer must be one of adam, yogi, adagrad, not 'sgd'.",
        ),
        ("run fedavg --rounds many", "rounds must be a whole number, not 'many'."),
        ("run fedavg --rounds 2.5", "rounds must be a whole number, not '2.5'."),
        ("run fedavg --rounds 0", "rounds must be at least 1, not 0."),
        ("run fedavg --lr nan", "lr must be a number, not 'nan'."),
        ("run fedavg --lr inf", "lr must be finite, not inf."),
        ("run fedavg --lr -0.1", "lr must be greater than 0, not -0.1."),
        ("run fedavg --momentum 1.5", "momentum must be less than 1, not 1.5."),
        ("run fedavg --seed -1", "seed must be at least 0, not -1."),
        (
            "run fedavg --set fedprox.mu=1",
            "--set fedprox.mu=1 is an option of fedprox, which does not run here.",
        ),
        (
            "run fedavg --set fedprox.lam=1",
            "unknown option of fedprox, which does not run here: 'lam'; there are: mu",
        ),
        ("run fedavg --partition dirichlet:0", "alpha must be greater than 0, not 0.0."),
        ("run fedavg --partition dirichlet:-1", "alpha must be greater than 0, not -1.0."),
        ("run fedavg --partition dirichlet", "the partition 'dirichlet' lacks its alpha"),
        ("run fedavg --partition dirichlet:x", "alpha must be a number, not 'x'."),
        (
            "run fedavg --partition shard:11",
            "every client should hold 11 distinct classes, but there are only 10",
        ),
        ("run fedavg --partition potluck", "unknown partition 'potluck'"),
        ("run fedavg --partition natural", "'digits' does not say who owns which sample"),
        (
            "run fedavg --clients 2000",
            "2000 clients cannot share 1438 samples; lower clients to at most 1438.",
        ),
        ("run fedavg --clients 0", "clients must be at least 1, not 0."),
        (
            "run fedavg --cohort 21",
            "cohort must lie between 1 and the number of clients (20), not 21.",
        ),
        (
            "run fedbn",
            "fedbn needs a model with BatchNorm and this one has none; try resnet18 or "
            "digits-bn-cnn.",
        ),
        (
            "run fedrep --model linear",
            "fedrep would share no layer of this model; choose a model with more layers.",
        ),
        ("run fedavg --model resnet18 --set fedavg.x=1", "unknown key of the method fedavg 'x'"),
        ("run fedavg --config none.toml", "'none.toml' is missing."),
        (
            "run fedavg --config newer.toml",
            "'newer.toml' was written by a newer fedhelix (format 99, this one reads up",
        ),
        ("run fedavg --config broken.toml", "'broken.toml' is not valid TOML"),
        ("run fedavg --config wrong.toml", "unknown key 'roundz'; did you mean 'rounds'?"),
        ("run fedavg --config .", "'.' cannot be read"),
        (
            "run fedavg --data mnist --data-dir none",
            "none', which is no folder; create it or name another.",
        ),
        ("data --data-dir none", "none', which is no folder"),
        (
            "run fedavg --data mnist --data-dir bad",
            "labels outside the classes: 11 at index 3, where 0 to 9 would be",
        ),
        (
            "run fedavg --out full",
            "'full' is not empty; choose an empty or a new folder for the run.",
        ),
        (
            "run fedavg --out newer.toml",
            "'newer.toml' is a file or lies below one; choose a folder for the run.",
        ),
        (
            "run fedavg --out newer.toml/x",
            "'newer.toml/x' is a file or lies below one; choose a folder for the run.",
        ),
        (
            "compare fedavg local --out full",
            "'full' is not empty; choose an empty or a new folder for the comparison.",
        ),
        ("compare fedavg fedbn", "fedbn needs a model with BatchNorm"),
        (
            "run fedavg --devices slow.csv --clients 2",
            "gives client 1 the speed -3; it must be above 0.",
        ),
        (
            "run fedavg --devices uniform --deadline 1e-9 --out mine",
            "meets the deadline of 1e-09",
        ),
        ("run fedavg --deadline 5", "deadline needs simulated devices; set devices, such as"),
        (
            "resume none",
            "'none' is not a run: it holds no config.toml; the runs beside it are newer.",
        ),
        ("resume tuned", "with the command that began them: `fedhelix tune FILE --out tuned`."),
        (
            "resume benched",
            "began them: `fedhelix bench NAME --out benched` or `fedhelix leaderboard",
        ),
        ("resume full", "'full' is not a run: it holds no config.toml."),
        (
            "resume newer",
            "'newer' was written by a newer fedhelix (format 99, this one reads up to 2); upgrade",
        ),
    ],
)
def test_a_mistake_gets_one_sentence_and_exit_code_2(cli, tmp_path, words, sentence):
    (tmp_path / "newer.toml").write_text("format = 99\nrounds = 1\n")
    (tmp_path / "broken.toml").write_text("rounds =")
    (tmp_path / "wrong.toml").write_text("roundz = 3")
    (tmp_path / "slow.csv").write_text("client,speed\n0,5\n1,-3\n")
    for name in ("full", "bad", "newer"):
        (tmp_path / name).mkdir()
    for name in ("tuned/fedavg-trial0", "benched/fedavg-digits-seed0-0123456789"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.toml").touch()
    (tmp_path / "full" / "thesis.txt").write_text("do not lose this")
    (tmp_path / "newer" / "config.toml").write_text("format = 99\n")
    images, labels = np.zeros((20, 28, 28), dtype=np.uint8), np.array([0, 1, 2, 11] * 5)
    np.savez(
        tmp_path / "bad" / "mnist.npz",
        x_train=images,
        y_train=labels,
        x_test=images,
        y_test=labels % 10,
    )
    before = files(tmp_path)
    done = cli(*words.split())
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("fedhelix: ") and sentence in done.err
    assert done.err.count("\n") == 1 and done.err.endswith("\n")
    assert files(tmp_path) == before


def test_a_folder_that_cannot_be_written(cli, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    done = cli("run", "fedavg", *SMALL, "--out", "mine")
    assert (done.code, done.err) == (
        2,
        "fedhelix: 'mine' cannot be written (Permission denied); choose another folder.\n",
    )
    done = cli("compare", "fedavg", "local", *SMALL, "--out", "both")
    assert (done.code, done.err) == (
        2,
        "fedhelix: 'both' cannot be written (Permission denied); choose another folder.\n",
    )


def test_an_existing_run_is_never_written_over(cli, tmp_path):
    cli("run", "fedavg", *SMALL, "--out", "mine")
    before = {path: path.read_bytes() for path in files(tmp_path) if path.is_file()}
    done = cli("run", "fedper", *SMALL, "--out", "mine")
    assert done.code == 2
    assert (
        "'mine' holds a run already; continue it with `fedhelix resume mine` or choose another"
        in done.err
    )
    assert {path: path.read_bytes() for path in files(tmp_path) if path.is_file()} == before


@pytest.mark.parametrize("damage", [b"", b"nonsense", None])
def test_a_damaged_checkpoint_is_named_and_nothing_is_lost(cli, tmp_path, damage):
    cli("run", "fedper", *SMALL, "--out", "mine")
    for victim in sorted((tmp_path / "mine" / "checkpoint").iterdir()):
        content, records = victim.read_bytes(), (tmp_path / "mine" / "metrics.jsonl").read_bytes()
        victim.write_bytes(content[: len(content) // 2] if damage is None else damage)
        done = cli("resume", "mine")
        assert done.code == 2 and done.err.count("\n") == 1
        assert f"'mine/checkpoint/{victim.name}'" in done.err and "damaged" in done.err
        assert (tmp_path / "mine" / "metrics.jsonl").read_bytes() == records
        victim.write_bytes(content)
    victim.unlink()
    done = cli("resume", "mine")
    assert (
        done.code == 2
        and f"'mine/checkpoint/{victim.name}' of the checkpoint cannot be read" in done.err
    )


def test_a_damaged_metrics_file_is_named(cli, tmp_path):
    cli("run", "fedavg", *SMALL, "--out", "mine")
    metrics = tmp_path / "mine" / "metrics.jsonl"
    metrics.write_text("nonsense\n" + metrics.read_text())
    done = cli("resume", "mine")
    assert done.code == 2 and "'mine/metrics.jsonl' was changed" in done.err


def test_a_damaged_summary_is_made_anew(cli, tmp_path):
    cli("run", "fedavg", *SMALL, "--out", "mine")
    summary = tmp_path / "mine" / "summary.json"
    whole = summary.read_bytes()
    summary.write_text("garbage")
    for command in (("resume", "mine"), ("report", "mine")):
        done = cli(*command)
        assert done.code == 2 and "without one, delete it and resume the run.\n" in done.err
    summary.unlink()
    assert cli("resume", "mine").code == 0
    new = json.loads(summary.read_bytes())
    assert new["final_accuracy"] == json.loads(whole)["final_accuracy"]


def test_what_is_said_of_a_damaged_metrics_file_helps(cli, tmp_path):
    cli("run", "fedavg", *SMALL, "--out", "mine")
    metrics = tmp_path / "mine" / "metrics.jsonl"
    whole, records = metrics.read_bytes(), on_disk(tmp_path / "mine")
    # A line that the checkpoint knows.
    metrics.write_bytes(whole.replace(b"round", b"ruond", 1))
    for command in (("resume", "mine"), ("report", "mine")):
        done = cli(*command)
        assert done.code == 2 and done.err.count("\n") == 1
        assert "restore it from a backup; without one its records are lost: delete" in done.err
        assert done.err.endswith("and `fedhelix resume mine` runs all rounds again.\n")
    shutil.rmtree(tmp_path / "mine" / "checkpoint")
    # Without a checkpoint none is kept.
    done = cli("resume", "mine")
    assert done.code == 2 and "line 1 of 'mine/metrics.jsonl' is damaged" in done.err
    assert "delete this line and those below it, and `fedhelix resume mine` runs the" in done.err
    metrics.unlink()
    done = cli("resume", "mine")
    assert done.code == 0 and on_disk(tmp_path / "mine") == records
    # A line after the checkpoint.
    metrics.write_bytes(metrics.read_bytes() + b"nonsense\n")
    done = cli("resume", "mine")
    lines = len(records)
    assert done.code == 2 and f"line {lines + 1} of 'mine/metrics.jsonl' is damaged" in done.err
    assert f"`fedhelix resume mine` runs the rounds from {lines + 1} on again" in done.err
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:lines]))
    assert cli("resume", "mine").code == 0


def test_a_deployment_is_not_told_to_run_its_rounds_again(tmp_path):
    config = {"deployment": {"where": " --folder there"}}
    with RunFolder.create(tmp_path / "run", config) as folder:
        folder.append({"round": 1})
        folder.checkpoint(1, {}, {})
        folder._metrics_path.write_text("nonsense\n")
        with pytest.raises(UserError, match=r"from a backup; nothing else can replace its recor"):
            folder.records()
        folder._metrics_path.write_text('{"round": 1}\nnonsense\n')
        with pytest.raises(UserError, match=r"`fedhelix deploy resume .* --folder there` runs the"):
            folder.records()


def test_resuming_a_finished_run_says_so_and_how_to_train_on(cli):
    cli("run", "fedavg", *SMALL, "--out", "mine")
    done = cli("resume", "mine")
    said = "fedhelix: 'mine' was finished already, so nothing was trained; for more rounds: "
    assert done.code == 0 and "rounds=2 " in done.out
    assert done.err == f"{said}fedhelix resume mine --set rounds=4\n"
    command = done.err.split("more rounds: fedhelix ")[1].split()
    done = cli(*command)
    assert (done.code, done.err) == (0, "") and "rounds=4 " in done.out
    cli("compare", "fedavg", "local", *SMALL, "--out", "both")
    done = cli("resume", "both")
    assert done.code == 0 and "'both' was finished already, so nothing was trained" in done.err


def test_a_run_that_has_spent_its_budget_is_not_said_to_get_more_rounds(cli):
    pytest.importorskip("dp_accounting")
    cli("run", "private", *SMALL, "--cohort", 6, "--set", "method.epsilon=8", "--out", "mine")
    for changes in ((), ("--set", "rounds=4")):
        done = cli("resume", "mine", *changes)
        assert done.code == 0 and "rounds=2 " in done.out
        assert done.err.endswith(
            "fedhelix: 'mine' was finished already, so nothing was trained; its privacy budget is "
            "spent, so more rounds need a new run, with more noise or a larger epsilon\n"
        )


# Stopped runs

LONG = (*SMALL, "--rounds", 20, "--partition", "iid")


def rounds_done(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def wait_for(rounds: int, folder: Path, alive) -> None:
    deadline = time.monotonic() + 60
    while rounds_done(folder) < rounds and alive():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_ends_with_130_and_the_run_goes_on_as_if_nothing_had_happened(cli, tmp_path):
    settings = [*map(str, LONG), "--rounds", "40"]  # enough to be stopped in time on a busy machine
    words = [sys.executable, "-m", "fedhelix", "run", "fedrep", *settings, "--out", "stopped"]
    # Tests that run in the background may have been told to ignore Ctrl-C, which children would
    # inherit.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "preexec_fn": heard,
    }
    with subprocess.Popen(words, cwd=tmp_path, **pipes) as process:
        wait_for(3, tmp_path / "stopped", lambda: process.poll() is None)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err == "stopped; continue with: fedhelix resume stopped\n"
    assert 3 <= rounds_done(tmp_path / "stopped") < 40
    assert not (tmp_path / "stopped" / "lock").exists()
    assert cli("resume", "stopped").code == 0
    assert cli("run", "fedrep", *settings, "--out", "straight").code == 0
    assert on_disk(tmp_path / "stopped") == on_disk(tmp_path / "straight")
    assert same(checkpoint(tmp_path / "stopped"), checkpoint(tmp_path / "straight"))


def test_ctrl_c_during_the_imports(monkeypatch, capsys):
    def interrupt(name, *_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("builtins.__import__", interrupt)
        with pytest.raises(SystemExit) as ended:
            fedhelix_command.main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "fedhelix: stopped.\n")


def test_ctrl_c_while_a_mistake_is_explained(monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "_stop", interrupt)
    monkeypatch.setattr(sys, "argv", ["fedhelix", "run", "no-such-method"])
    with pytest.raises(SystemExit) as ended:
        fedhelix_command.main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "fedhelix: stopped.\n")


def test_ctrl_c_before_the_first_round_promises_nothing(cli, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "start", interrupt)
    done = cli("run", "fedavg", *SMALL)
    assert (done.code, done.err) == (130, "stopped; nothing was written yet.\n")


def test_ctrl_c_in_a_comparison_says_how_to_go_on(cli, tmp_path, monkeypatch):
    start = jobs.Session.start

    def interrupt(self, spec, *rest, **more):
        if spec.spec == "local":
            raise KeyboardInterrupt
        return start(self, spec, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(jobs.Session, "start", interrupt)
        done = cli("compare", "fedavg", "local", *SMALL, "--out", "both")
    assert (done.code, done.out) == (130, "")
    assert done.err == "stopped; continue with: fedhelix resume both\n"
    assert cli("resume", "both").code == 0
    assert (tmp_path / "both" / "local-seed0" / "summary.json").exists()


def call(words: list[str], folder: Path) -> None:
    os.chdir(folder)
    sys.argv = ["fedhelix", *words]
    with Path(os.devnull).open("w") as sys.stdout:
        command_line.main()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process")
@pytest.mark.parametrize("method", ["scaffold", "fedrep"])
def test_killed_five_times_and_resumed_equals_the_straight_run(cli, tmp_path, method):
    assert cli("run", method, *LONG, "--out", "straight").code == 0
    draw, start = random.Random(method), multiprocessing.get_context("fork").Process
    stops = sorted(draw.sample(range(1, 19), 5))
    words = ["run", method, *map(str, LONG), "--out", "killed"]
    for stop in stops:
        process = start(target=call, args=(words, tmp_path))
        process.start()
        wait_for(stop, tmp_path / "killed", process.is_alive)
        time.sleep(draw.uniform(0, 0.03))  # anywhere in a round, or in the middle of a write
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        words = ["resume", "killed"]
    assert cli(*words).code == 0
    assert on_disk(tmp_path / "killed") == on_disk(tmp_path / "straight")
    assert same(checkpoint(tmp_path / "killed"), checkpoint(tmp_path / "straight"))
    one, other = (
        json.loads((tmp_path / name / "summary.json").read_text())
        for name in ("killed", "straight")
    )
    assert {**one, "seconds": 0} == {**other, "seconds": 0}


BROKEN = """
from fedhelix import FedAvg, register

@register("broken")
class Broken(FedAvg):
    def upload(self, local):
        if local.client.id == {client}:
            return super().upload(local.nonsense)
        return super().upload(local)
"""


@pytest.mark.parametrize("engine", ["serial", "parallel", "batched"])
def test_a_hook_that_fails_is_named(cli, tmp_path, engine):
    (tmp_path / "broken.py").write_text(BROKEN.format(client=1))
    few = [
        "--clients",
        3,
        "--rounds",
        1,
        "--model",
        "linear",
        "--epochs",
        1,
        "--engine",
        engine,
        "-q",
    ]
    done = cli("run", "broken.py", *few)
    assert done.code == 1 and "Traceback" not in done.err and len(done.err.splitlines()) == 1
    assert (
        "broken.upload of client 1 failed with AttributeError: 'LocalRound' object has no attribute"
        in done.err
    )
    assert "FEDHELIX_DEBUG=1" in done.err


def test_its_traceback_can_be_had(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDHELIX_DEBUG", "1")
    (tmp_path / "broken.py").write_text(BROKEN.format(client=1))
    with pytest.raises(AttributeError, match="nonsense"):
        cli(
            "run",
            "broken.py",
            "--clients",
            3,
            "--rounds",
            1,
            "--model",
            "linear",
            "--engine",
            "serial",
            "-q",
        )


def test_an_unknown_command_is_answered_once(cli):
    assert (
        cli("rnu").err
        == "fedhelix: No such command 'rnu'. Did you mean 'run'? See `fedhelix --help`.\n"
    )
    assert cli("reprot").err.count("Did you mean") == 1
    assert "Did you mean 'serve'?" in cli("dashboard").err


def test_a_warning_is_printed_once_for_all_runs(cli):
    shown = cli(
        "compare", "local", "--attack", "sign-flip", "--rounds", "1", "--seeds", "2", "--model",
        "linear", "--engine", "serial", "-q",
    )  # fmt: skip
    assert shown.err.count("has nothing to forge") == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--epsilon", "0"), "epsilon must be greater than 0"),
        (("--delta", "1"), "delta must be less than 1"),
        (("--epsilon", "much"), "epsilon must be a number, not 'much'"),
    ],
)
@pytest.mark.parametrize("method", ["private", "dp-sgd"])
def test_a_budget_that_cannot_be_is_refused(cli, method, flags, said):
    done = cli("run", method, *SMALL, *flags)
    assert done.code == 2 and said in done.err and done.err.count("\n") == 1


def test_a_budget_finds_the_noise(cli, tmp_path):
    pytest.importorskip("dp_accounting")
    done = cli(
        "run", "private", *SMALL, "--epsilon", 20, "--delta", "1e-4", "--out", tmp_path / "r"
    )
    assert done.code == 0
    spent = max(RunFolder.open(tmp_path / "r").records()[-1]["metadata"]["epsilon"].values())
    assert 10 < spent <= 20
    assert cli("run", "fedavg", *SMALL, "--epsilon", 20).code == 2


def test_a_budget_beside_a_method_without_one_says_what_to_write(cli):
    done = cli("compare", "private+fedper", "fedper", "dp-sgd+fedper", "--epsilon", 8)
    both = "--set private.epsilon=8 --set dp-sgd.epsilon=8"
    assert done.code == 2
    assert done.err == f"fedhelix: fedper has no option epsilon; write {both}.\n"
    done = cli("compare", "fedavg", "private", "--delta", "1e-4")
    assert "fedavg has no option delta; write --set private.delta=1e-4." in done.err
