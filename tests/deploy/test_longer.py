"""A run across sites gets more rounds, and keeps all other settings."""

import signal

import pytest

from fedhelix import UserError
from fedhelix.cli import deploy as commands
from fedhelix.deploy import messages, submit
from fedhelix.runs.spec import make_spec
from fedhelix.store import RunFolder
from fedhelix.store.mistakes import longer
from helpers import checkpoint, same
from in_process import InProcessDeployment, Link, small_images

AT = ("--superlink", "127.0.0.1:8913", "--quiet")


@pytest.fixture
def soon(monkeypatch):
    """Who follows a run looks often."""
    monkeypatch.setattr(submit, "FOLDER_SECONDS", 0.02)
    monkeypatch.setattr(submit, "STATUS_SECONDS", 0.02)


@pytest.fixture
def begun(tmp_path, monkeypatch, soon):
    """A complete run of two rounds with FedPer, whose sites keep a part, and its deployment."""
    data = small_images(tmp_path)
    small = {"clients": 2, "rounds": 2, "epochs": 1, "data": data, "partition": "iid"}
    spec = make_spec("fedper", {**small, "model": "mlp", "kernels": "onednn"})
    link = Link(InProcessDeployment(tmp_path, 2, data, common=True).grid)
    monkeypatch.setattr(commands, "_control", lambda *_: link)
    folder = submit.create(spec, tmp_path / "run")
    submit.follow(link, folder, quiet=True)
    return spec, link, RunFolder.open(folder.path)


def test_more_rounds_are_those_of_a_run_that_was_as_long_from_the_start(begun, cli, tmp_path):
    spec, _, folder = begun
    old = folder.records()
    told = cli("resume", "run", "--set", "rounds=4").err
    assert told.endswith("with `fedhelix deploy resume run --set rounds=4`.\n")
    done = cli("deploy", "resume", "run", "--set", "rounds=4", *AT)
    assert done.code == 0 and "rounds=4" in done.out, done.err
    assert folder.config["rounds"] == 4 and folder.summary["rounds"] == 4
    assert folder.records()[:2] == old  # also what the sites evaluated at the former end
    here = spec.config.federation(spec.method, engine="serial")
    here.fit(4, out=tmp_path / "here", quiet=True)
    assert same(checkpoint(folder.path)["server"], checkpoint(tmp_path / "here")["server"])
    done = cli("deploy", "resume", "run", "--set", "rounds=4", *AT)  # there is nothing left to do
    assert done.code == 0 and len(folder.records()) == 4
    said = "'run' was finished already, with 4 rounds, so nothing was trained; for more rounds: "
    assert done.err == f"fedhelix: {said}`fedhelix deploy resume run --set rounds=8`.\n"


@pytest.mark.parametrize("words", [["run", "fedper", "--clients", "2"], ["resume", "run"]])
def test_sigterm_stops_a_run_as_ctrl_c_does(words, begun, cli, monkeypatch):
    _, link, folder = begun
    folder.remove_summary()
    stopped = []
    monkeypatch.setattr(link, "connected", lambda: ["site-0", "site-1"], raising=False)
    monkeypatch.setattr(link, "submit", lambda _: 7)
    monkeypatch.setattr(link, "stop", stopped.append, raising=False)
    monkeypatch.setattr(
        submit._Watcher, "_show_records", lambda _: signal.raise_signal(signal.SIGTERM)
    )
    done = cli("deploy", *words, *AT, *(("--out", "new") if words[0] == "run" else ()))
    assert (done.code, stopped) == (130, [7])
    name = "new" if words[0] == "run" else "run"
    said = f"stopped; continue with: fedhelix deploy resume {name} --superlink 127.0.0.1:8913\n"
    assert done.err.endswith(said)


def test_what_cannot_change_is_refused_before_anything_is_written(begun, cli):
    spec, link, folder = begun
    files = {path: path.read_bytes() for path in folder.path.iterdir() if path.is_file()}

    def refused(*changes):
        done = cli("deploy", "resume", "run", *changes, *AT)
        assert done.code == 2 and done.err.count("\n") == 1
        assert files == {path: path.read_bytes() for path in files}
        return done.err

    assert "'run' has 2 rounds already, so rounds must be 2 or more" in refused("--set", "rounds=1")
    again = "`fedhelix deploy run fedper --config run/config.toml --set lr=0.5`"
    assert f"keeps its settings; start a new one with {again}." in refused("--set", "lr=0.5")
    assert "engine = serial has no effect across sites" in refused("--set", "engine=serial")
    link.active = 1
    assert "'run' is running, and keeps its settings" in refused("--set", "rounds=3")
    with pytest.raises(UserError, match="is no run of a deployment"):
        simulated = RunFolder.create("simulated", spec.as_dict())
        submit.change(link, simulated, ["rounds=3"])


def test_a_kill_between_both_writes_leaves_a_run_that_ends_as_before(begun, monkeypatch):
    _, link, folder = begun
    whole = folder.summary
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(
            RunFolder, "write_config", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        submit.change(link, folder, ["rounds=3"])
    assert folder.summary is None
    assert submit.follow(link, folder, quiet=True)["rounds"] == whole["rounds"] == 2


def test_a_run_that_ends_just_before_it_is_followed_is_not_submitted_again(begun, monkeypatch):
    _, link, folder = begun
    whole = folder.summary
    folder.remove_summary()

    def ends(path):
        folder.write_summary(whole)

    monkeypatch.setattr(link, "active_run_id", ends)
    monkeypatch.setattr(link, "submit", None)
    assert submit.follow(link, folder, quiet=True) == whole


@pytest.mark.filterwarnings("ignore:nothing was learned")
def test_a_run_without_any_work_goes_on_by_the_command_that_it_names(
    tmp_path, cli, monkeypatch, soon
):
    data = small_images(tmp_path)
    small = {"clients": 2, "rounds": 2, "epochs": 1, "data": data, "partition": "iid"}
    spec = make_spec("fedavg", {**small, "model": "mlp", "kernels": "onednn"})
    link = Link(InProcessDeployment(tmp_path, 2, data, common=True).grid)
    monkeypatch.setattr(commands, "_control", lambda *_: link)
    honest = dict(link.grid.answers)

    def silent(content, answer):
        return None if messages.read(content).header["kind"] == "train" else answer(content)

    for node, answer in honest.items():
        link.grid.answers[node] = lambda content, answer=answer: silent(content, answer)
    submit.create(spec, tmp_path / "run", ["deadline=0.2"])
    words = ("deploy", "resume", "run")
    for _ in range(2):
        told = cli(*words, *AT)
        assert told.code == 1 and "no site did any work in this run" in told.err
        assert "go on with `fedhelix deploy resume run --set rounds=4`" in told.err
    link.grid.answers = honest
    done = cli(*words, "--set", "rounds=4", *AT)
    assert done.code == 0 and "rounds=4" in done.out, done.err
    assert [len(record["missing"]) for record in RunFolder.open("run").records()] == [2, 2, 0, 0]


@pytest.mark.parametrize(
    ("spent", "least", "goes_on"),
    [([], 1, True), ([0], 1, True), ([0], 2, False), ([0, 1], 1, False)],
)
def test_a_run_gets_more_rounds_while_enough_sites_have_budget_left(spent, least, goes_on):
    records = [{"metadata": {"epsilon": {"0": 8.0, "1": 7.0}, "budget_spent": spent}}]
    assert (longer(records, "train on", 2, least) == "for more rounds: train on") is goes_on
    assert longer([], "train on", 2, least) == "for more rounds: train on"
