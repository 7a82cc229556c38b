"""What a command says when it is stopped before it began, and files that it must not replace."""

from pathlib import Path

import pytest

from fedhelix.core.errors import UserError
from fedhelix.core.files import writable_file
from fedhelix.methods import FedAvg
from fedhelix.papers import study
from fedhelix.runs import jobs
from helpers import small

SWEEP = """methods = ["fedavg"]
[settings]
rounds = {rounds}
clients = 4
cohort = 2
model = "linear"
engine = "serial"
"""
SMALL = ("--rounds", 1, "--clients", 4, "--cohort", 2, "--model", "linear", "--engine", "serial")


@pytest.fixture
def interrupted(monkeypatch):
    """Ctrl-C comes while the data are read."""

    def interrupt(*_):
        raise KeyboardInterrupt

    return lambda: monkeypatch.setattr(jobs.DatasetCache, "load", interrupt)


def test_a_changed_sweep_that_is_stopped_names_no_older_one(cli, tmp_path, interrupted):
    file = tmp_path / "lr.toml"
    file.write_text(SWEEP.format(rounds=1))
    assert cli("sweep", file, "-q").code == 0
    file.write_text(SWEEP.format(rounds=2))
    said = cli("sweep", file, "-q").err
    assert "holds another comparison; choose another folder with --out." in said
    interrupted()
    done = cli("sweep", file, "-q")
    assert (done.code, done.err) == (130, "stopped; the same command goes on where it stopped.\n")


def test_a_run_that_is_stopped_names_no_older_one(cli, interrupted):
    assert cli("run", "fedavg", *SMALL, "--out", "mine", "-q").code == 0
    interrupted()
    done = cli("run", "fedprox", *SMALL, "--out", "mine", "-q")
    assert (done.code, done.err) == (130, "stopped; nothing was written yet.\n")
    assert cli("resume", "mine").err == "stopped; continue with: fedhelix resume mine\n"


@pytest.fixture
def protected(tmp_path):
    """A file that its owner has made read-only."""

    def make(name):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
        path.chmod(0o444)
        return path

    return make


@pytest.mark.parametrize("name", ["r.html", "r.md", "r.tex", "rounds.csv"])
def test_reports_and_tables_replace_no_protected_file(cli, make_run, protected, name):
    with make_run() as run:
        path = protected(name)
        done = cli("export" if name == "rounds.csv" else "report", run.path, "--out", path)
    said = f"fedhelix: '{path}' is write-protected; allow writing, or name another file.\n"
    assert (done.code, done.out, done.err) == (2, "", said)
    assert not list(path.parent.glob("*-figures"))
    assert path.read_text() == "mine" and path.stat().st_mode & 0o777 == 0o444


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["bench", "genfed-table4", "--out"], "genfed-table4-quick.json"),
        (["leaderboard", "--out"], "leaderboard-quick.json"),
    ],
)
def test_a_result_that_is_protected_is_refused_before_any_run(
    cli, protected, monkeypatch, words, name
):
    monkeypatch.setattr(study, "run_studies", None)
    monkeypatch.setattr("fedhelix.papers.leaderboard.run_leaderboard", None)
    path = protected(f"results/{name}")
    done = cli(*words, path.parent)
    assert done.code == 2 and f"'{path}' is write-protected" in done.err


@pytest.mark.parametrize("attack", ["idlg", "membership"])
def test_an_audit_replaces_no_protected_numbers(cli, protected, attack):
    path = protected("audit.json")
    done = cli("audit", attack, "fedavg", "--out", path.with_suffix(".png"))
    assert done.code == 2 and f"'{path}' is write-protected" in done.err


@pytest.mark.parametrize("name", ["model.safetensors", "README.md"])
def test_an_exported_model_replaces_no_protected_file(tmp_path, protected, name):
    path = protected(f"model/{name}")
    run = small(FedAvg(), "linear").fit(1, quiet=True)
    with pytest.raises(UserError, match="is write-protected"):
        run.export(path.parent)
    assert [file.name for file in path.parent.iterdir()] == [name]


def test_a_device_is_no_file_to_replace():
    with pytest.raises(UserError, match="'/dev/null' is no regular file; name a file to write"):
        writable_file(Path("/dev/null"))
