"""Every file of a run is chained to its checkpoint: a change never goes unnoticed."""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch

from fedhelix.core.errors import UserError
from fedhelix.store import RunFolder
from fedhelix.store.checkpoint import Checkpoint
from fedhelix.store.json import loads
from fedhelix.store.lock import Lock, _here, started
from fuzz.mutations import changed_file

FILES = ("config.toml", "clients.json", "choices.json", "metrics.jsonl", "summary.json")


@pytest.fixture
def run(tmp_path):
    """A finished run of three rounds."""
    with RunFolder.create(tmp_path / "run", {"seed": 1, "method": {"name": "fedavg"}}) as folder:
        folder.write_clients({"samples": [3, 4]})
        for round in (1, 2, 3):
            folder.append({"round": round, "accuracy": round / 4, "seconds": 1.0})
            folder.write_choices({"kernels": "onednn"})
            model = {"w": torch.full((3,), float(round))}
            folder.checkpoint(round, {"model": model}, {0: {"own": model}, 1: {"own": model}})
        folder.write_summary({"accuracy": 0.75})
    return folder.path


def look(path):
    """Everything that `resume` and `report` read."""
    folder = RunFolder.open(path)
    parts = [folder.config, folder.records(), folder.clients, folder.choices, folder.summary]
    return [*parts, folder.state()]


def test_mutations_of_every_file_are_refused_by_name(run, tmp_path):
    names = [*FILES, *(f"checkpoint/{path.name}" for path in (run / "checkpoint").iterdir())]
    assert len(names) == len(FILES) + 4
    look(run)
    draw = random.Random(0)
    for name in names:
        path, honest = run / name, (run / name).read_bytes()
        for _ in range(40):
            path.write_bytes(changed_file(honest, draw))
            with pytest.raises(UserError, match=path.name):
                look(run)
        path.unlink()
        if path.name not in ("manifest.json", "summary.json"):
            with pytest.raises(UserError, match=path.name):
                look(run)
        path.write_bytes(honest)
    look(run)


def test_records_after_the_checkpoint_may_come_and_go(run):
    with RunFolder.open(run) as folder:
        folder.append({"round": 4, "accuracy": 1.0, "seconds": 1.0})
    assert len(RunFolder.open(run).records()) == 4
    with RunFolder.open(run) as folder:
        assert folder.restore()[0] == 3
        folder.append({"round": 4, "accuracy": 0.5, "seconds": 1.0})
        folder.checkpoint(4, {"model": {"w": torch.zeros(1)}}, {})
    assert [record["accuracy"] for record in RunFolder.open(run).records()] == [
        0.25,
        0.5,
        0.75,
        0.5,
    ]
    assert RunFolder.open(run).summary == {"accuracy": 0.75}


def test_a_kill_between_file_and_checksum_is_no_change(run):
    with RunFolder.open(run) as folder:
        folder._replace("summary.json", b'{"accuracy": 0.5}\n')  # the last thing before the kill
    assert RunFolder.open(run).summary == {"accuracy": 0.5}


def test_runs_of_earlier_versions_have_no_checksums(run):
    manifest = json.loads((run / "checkpoint" / "manifest.json").read_text())
    for key in ("files", "metrics", "digest"):
        del manifest[key]
    (run / "checkpoint" / "manifest.json").write_text(json.dumps(manifest))
    (run / "summary.json").write_text("{}")
    assert RunFolder.open(run).summary == {}
    with RunFolder.open(run) as folder:
        assert folder.restore()[0] == 3


def test_settings_are_changed_by_a_command_and_not_in_an_editor(cli, tmp_path):
    settings = ("--clients", "4", "--rounds", "1", "--epochs", "1", "--model", "linear")
    assert cli("run", "fedavg", *settings, "--out", "run", "-q").code == 0
    config = tmp_path / "run" / "config.toml"
    before = config.read_text()
    config.write_text(before.replace("rounds = 1", "rounds = 2"))
    for command in ("resume", "report"):
        refused = cli(command, "run")
        assert refused.code == 2 and "config.toml' was changed" in refused.err
    assert "`resume --set` changes" in cli("resume", "run").err
    config.write_text(before)
    assert cli("resume", "run", "--set", "rounds=3", "-q").code == 0
    assert len(RunFolder.open(tmp_path / "run").records()) == 3
    assert "rounds = 3" in config.read_text()
    assert cli("resume", "run", "--set", "rouns=3").code == 2
    shutil.rmtree(tmp_path / "run")


def test_a_changed_checkpoint_of_a_complete_run_is_refused_by_resume_and_report(cli, tmp_path):
    settings = ("--clients", "2", "--rounds", "1", "--epochs", "1", "--model", "mlp")
    methods = ("fedavg", "fedper", "--seeds", "1")
    assert cli("compare", *methods, *settings, "--out", "both", "-q").code == 0
    run = tmp_path / "both" / "fedper-seed0"
    calls = [("resume", "both"), ("resume", run), ("report", run, "--format", "latex")]
    assert [cli(*call).code for call in calls] == [0, 0, 0]
    for kind in ("server", "client"):
        path = min((run / "checkpoint").glob(f"{kind}-*"))
        honest = path.read_bytes()
        path.write_bytes(honest[:-1] + bytes([honest[-1] ^ 1]))
        for call in calls:
            refused = cli(*call)
            assert refused.code == 2 and f"{path.name}' of the checkpoint" in refused.err
        path.write_bytes(honest)


def test_files_that_another_process_replaces_meanwhile_are_no_longer_part_of_it(run, monkeypatch):
    folder, check = RunFolder.open(run), Checkpoint._checked

    def replaced(checkpoint, entry):
        monkeypatch.undo()
        with RunFolder.open(run) as writer:
            writer.checkpoint(4, {"model": {"w": torch.zeros(1)}}, {0: {}})
        return check(checkpoint, entry)

    monkeypatch.setattr(Checkpoint, "_checked", replaced)
    folder.verify()
    (run / "checkpoint" / "server-000004.safetensors").unlink()
    with pytest.raises(UserError, match="server-000004"):
        folder.verify()


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "1" * 400, "-" + "9" * 30, "1e400", '{"a": -1E+999}']
)
def test_json_that_nobody_writes_is_a_sentence(text, run):
    with pytest.raises(ValueError, match=r"nested too deep|digits|too large"):
        loads(text.encode())
    (run / "checkpoint" / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest\.json' is damaged"):
        RunFolder.open(run)


def test_json_is_read_as_ever():
    values = [0.1 + 0.2, 1e22, 12345678901234567890, 5e-324, 1.7976931348623157e308, -1, "1e400"]
    assert loads(json.dumps(values).encode()) == values


def lock_of(pid, **more):
    owner = {"pid": pid, "host": socket.gethostname(), "process": "another"}
    return json.dumps({**owner, **more}).encode()


@pytest.mark.parametrize("pid", [10**30, 2**31, -5, 0])
def test_a_lock_with_an_absurd_number_is_void(pid, run):
    (run / "lock").write_bytes(lock_of(pid))
    with RunFolder.open(run):
        pass


@pytest.mark.skipif(started(os.getpid()) is None, reason="needs /proc")
def test_a_lock_whose_number_belongs_to_another_program_is_void(run):
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (run / "lock").write_bytes(lock_of(other.pid, started=started(other.pid)))
        with pytest.raises(UserError, match=f"process {other.pid}"):
            Lock(run / "lock").acquire()
        (run / "lock").write_bytes(lock_of(other.pid, started=started(other.pid) - 1))
        lock = Lock(run / "lock")
        lock.acquire()
        lock.release()
    finally:
        other.communicate()


def test_a_checkpoint_can_be_read_while_it_is_replaced(run):
    manifest = Checkpoint(run / "checkpoint")
    over = threading.Event()

    def write():
        while not over.is_set():
            for digest in ("1", "2", None):
                manifest.seal("summary.json", digest)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert {Checkpoint(run / "checkpoint").rounds() for _ in range(300)} == {3}
    finally:
        over.set()
        writer.join()


def test_halves_of_locks_are_deleted_if_their_process_is_gone(run):
    dead = {"pid": 2**30, "host": socket.gethostname(), "process": "x", "started": 1}
    halves = {".lock.dead": dead, ".lock.mine": dead | {"pid": os.getppid(), "started": None}}
    halves[".lock.elsewhere"] = dead | {"host": "elsewhere"}
    for name, owner in halves.items():
        (run / name).write_text(json.dumps(owner))
    (run / ".lock.unsigned").touch()  # its process may be about to sign it
    with RunFolder.open(run):
        pass
    left = {path.name for path in run.glob(".lock.*")}
    assert left == {".lock.mine", ".lock.elsewhere", ".lock.unsigned"}


def test_a_lock_whose_process_was_killed_before_it_signed_is_cleaned(run):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    for pid in (child.pid, os.getpid()):
        (run / f".lock.{_here()}-{pid}-0123456789abcdef").touch()
    (run / f".lock.elsewhere-{child.pid}-0123456789abcdef").touch()
    with RunFolder.open(run):
        pass
    left = {path.name.split("-")[1] for path in run.glob(f".lock.{_here()}-*")}
    assert left == {str(os.getpid())} and len(list(run.glob(".lock.elsewhere-*"))) == 1


def test_what_a_kill_after_the_result_left_behind_is_cleaned(run):
    (run / "checkpoint" / ".manifest.json.1f").touch()
    (run / "lock").write_text(
        json.dumps({"pid": 2**30, "host": socket.gethostname(), "process": "x"})
    )
    RunFolder(run).tidy()
    assert not (run / "lock").exists() and not list((run / "checkpoint").glob(".*"))


def test_what_a_kill_left_behind_is_cleaned_at_the_next_start(run):
    names = (".config.toml.1f", ".metrics.jsonl.1f", ".lock.1f", "checkpoint/.manifest.json.1f")
    for name in names:
        (run / name).write_text("")
    os.utime(run / ".lock.1f", (time.time() - 100,) * 2)
    (run / ".notes.txt").write_text("mine")
    with RunFolder.open(run):
        pass
    assert not any((run / name).exists() for name in names) and (run / ".notes.txt").exists()
    assert not list(run.glob(".lock*"))
