import json
import math
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from fedhelix.core import tree
from fedhelix.core.errors import UserError
from fedhelix.core.tree import load
from fedhelix.store import FORMAT, RunFolder, checkpoint, lock

CONFIG = {"seed": 3, "method": {"name": "fedavg"}}


@pytest.fixture
def run(tmp_path):
    with RunFolder.create(tmp_path / "run", CONFIG) as folder:
        yield folder


def state(value: float) -> dict:
    return {"model": {"weight": torch.full((3, 2), float(value))}, "step": int(value)}


def value_of(tree: dict) -> float:
    assert tree["model"]["weight"].unique().numel() == 1
    assert tree["model"]["weight"][0, 0] == tree["step"]
    return tree["step"]


def files(run: RunFolder) -> set[str]:
    return {path.name for path in (run.path / "checkpoint").iterdir()}


# Folder and config


def test_create_then_open(run):
    assert RunFolder.open(run.path).config == {"format": FORMAT, **CONFIG}
    assert RunFolder.open(str(run.path)).summary is None
    assert run.records() == [] and list(run.metrics.columns) == ["round"]


def test_an_existing_run_is_never_written_over(run):
    with pytest.raises(UserError, match="holds a run already; continue it with `fedhelix resume"):
        RunFolder.create(run.path, {"seed": 4})
    assert run.config["seed"] == 3


def test_create_wants_an_empty_or_a_new_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    RunFolder.create(tmp_path / "empty", CONFIG)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not lose this")
    with pytest.raises(UserError, match="is not empty"):
        RunFolder.create(tmp_path / "mine", CONFIG)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    for path in (tmp_path / "mine" / "thesis.txt", tmp_path / "mine" / "thesis.txt" / "run"):
        with pytest.raises(UserError, match="is a file or lies below one"):
            RunFolder.create(path, CONFIG)


def test_create_after_a_killed_create(tmp_path):
    (tmp_path / "lock").write_text(
        json.dumps({"pid": 2**22 + 1, "host": socket.gethostname(), "process": "x"})
    )
    (tmp_path / ".config.toml.abc").write_text("seed")
    (tmp_path / ".lock.abc").write_text("")
    assert RunFolder.create(tmp_path, CONFIG).config["seed"] == 3


def test_an_unwritable_folder_is_reported(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(lock.os, "open", refuse)
    with pytest.raises(UserError, match="cannot be written: Permission denied"):
        RunFolder.create(tmp_path / "run", CONFIG)


def test_open_refuses_what_is_no_run(tmp_path):
    with pytest.raises(UserError, match="is not a run"):
        RunFolder.open(tmp_path)
    (tmp_path / "config.toml").write_text("seed = \n")
    with pytest.raises(UserError, match="line 1"):
        RunFolder.open(tmp_path)
    (tmp_path / "config.toml").write_text("seed = 1")
    with pytest.raises(UserError, match="lacks the line `format = 2`"):
        RunFolder.open(tmp_path)
    (tmp_path / "config.toml").write_text(f"format = {FORMAT + 1}")
    with pytest.raises(UserError, match="was written by a newer fedhelix"):
        RunFolder.open(tmp_path)


# Metrics and summary


def test_records_come_back_as_strict_json(run):
    run.append(
        {
            "round": 1,
            "accuracy": np.float32(0.5),
            "loss": math.nan,
            "personal": np.array([0.25, math.inf]),
        }
    )
    run.append({"round": 2, "refused": {3: "NaN"}, "participants": (1, np.int64(2))})
    assert run.records() == [
        {"round": 1, "accuracy": 0.5, "loss": None, "personal": [0.25, None]},
        {"round": 2, "refused": {"3": "NaN"}, "participants": [1, 2]},
    ]
    assert run.metrics["round"].tolist() == [1, 2]
    assert run.metrics["accuracy"].isna().tolist() == [False, True]


def test_a_half_written_last_line_is_ignored_and_a_damaged_one_is_named(run):
    run.append({"round": 1})
    metrics = run.path / "metrics.jsonl"
    whole = metrics.read_bytes()
    metrics.write_bytes(whole + b'{"round": 2, "acc')
    assert run.records() == [{"round": 1}]
    edited = (
        b'{"round": 2, "uplink_bytes": "x"}\n',
        b'{"round": 2, "refused": []}\n',
        b'{"round": 2, "accuracy": "x"}\n',
    )
    for damage in (b'{"round": 2, "acc\n', b"[2]\n", b'{"accuracy": 0.5}\n', b"\xff\n", *edited):
        metrics.write_bytes(whole + damage + whole)
        with pytest.raises(UserError, match=r"line 2 of '.*metrics\.jsonl' is damaged"):
            run.records()


def test_summary(run):
    run.write_summary(
        {"method": "fedavg", "final_accuracy": np.float64(0.5), "best_round": math.nan}
    )
    assert run.summary == {"method": "fedavg", "final_accuracy": 0.5, "best_round": None}
    for damage in ("{", "[1]"):
        (run.path / "summary.json").write_text(damage)
        with pytest.raises(UserError, match=r"summary\.json' is damaged"):
            _ = run.summary


# Checkpoints


def test_checkpoint_round_trip_writes_only_what_changed(run):
    run.checkpoint(5, state(5), {0: state(5), 3: state(5), 4: {}})
    run.checkpoint(10, state(10), {3: state(10)})
    assert files(run) == {
        "manifest.json",
        "server-000010.safetensors",
        "client-000000-000005.safetensors",
        "client-000003-000010.safetensors",
    }
    round, server, client_states = RunFolder.open(run.path)._checkpoint.read("cpu")
    assert (round, value_of(server)) == (10, 10)
    assert {client: value_of(tree) for client, tree in client_states.items()} == {0: 5, 3: 10}


def test_an_empty_tree_means_that_the_client_keeps_nothing(run):
    run.checkpoint(1, state(1), {0: state(1)})
    run.checkpoint(2, state(2), {0: {}})
    assert run.restore()[2] == {}
    assert files(run) == {"manifest.json", "server-000002.safetensors"}


def test_unchanged_trees_are_not_written_again(run):
    run.checkpoint(1, state(1), {0: state(1)})
    run.checkpoint(2, state(1), {0: state(1)})
    assert files(run) == {
        "manifest.json",
        "server-000001.safetensors",
        "client-000000-000001.safetensors",
    }
    assert run.restore()[0] == 2


def test_restore_cuts_the_metrics_back(run):
    for round in range(1, 8):
        run.append({"round": round})
        if round == 5:
            run.checkpoint(round, state(round), {})
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"round": 8, "ac')
    round, _, _ = run.restore()
    assert round == 5 and [record["round"] for record in run.records()] == [1, 2, 3, 4, 5]
    run.append({"round": 6})
    assert len(run.records()) == 6


def test_restore_without_a_checkpoint_starts_over(run):
    run.append({"round": 1})
    assert run.restore() is None and run.records() == []


@pytest.mark.parametrize("name", ["server-000001.safetensors", "client-000002-000001.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_a_damaged_checkpoint_is_named_and_nothing_is_touched(run, name, damage):
    run.append({"round": 1})
    run.checkpoint(1, state(1), {2: state(1)})
    run.append({"round": 2})
    path = run.path / "checkpoint" / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    if damage == "delete":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flip" else content[:-5])
    with pytest.raises(UserError, match=name):
        run.restore()
    assert len(run.records()) == 2


@pytest.mark.parametrize("damage", ["{", "[]", "{}", '{"round": 1, "server": null, "clients": {}}'])
def test_a_damaged_manifest_is_named(run, damage):
    run.checkpoint(1, state(1), {})
    (run.path / "checkpoint" / "manifest.json").write_text(damage)
    with pytest.raises(UserError, match=r"manifest\.json' is damaged"):
        run.restore()


class Killed(BaseException):
    pass


@pytest.mark.parametrize("new_round", [1, 2])
def test_a_stop_at_every_step_leaves_the_old_or_the_new_checkpoint(
    tmp_path, monkeypatch, new_round
):
    steps_of_one_checkpoint = 4  # client 0, client 1, server, manifest
    write = checkpoint.write_atomically
    for survived in range(steps_of_one_checkpoint + 1):
        run = RunFolder.create(tmp_path / str(survived), CONFIG)
        run.checkpoint(1, state(1), {0: state(1), 1: state(1)})
        left = survived

        def dying_write(path, content):
            nonlocal left
            if left == 0:
                (path.parent / f".{path.name}.half").write_bytes(
                    content[:5]
                )  # what a kill would leave behind
                raise Killed
            left -= 1
            write(path, content)

        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "write_atomically", dying_write)
            try:
                run.checkpoint(new_round, state(9), {0: state(9), 1: state(9)})
            except Killed:
                assert survived < steps_of_one_checkpoint
        _, server, client_states = run.restore()
        expected = 9 if survived == steps_of_one_checkpoint else 1
        assert [value_of(tree) for tree in (server, client_states[0], client_states[1])] == [
            expected
        ] * 3
        run.checkpoint(3, state(3), {0: state(3), 1: state(3)})
        assert len(files(run)) == 4, "leftovers are swept"


def test_states_that_are_restored_lazily_are_checked_at_once_and_read_when_used(
    tmp_path, monkeypatch
):
    with RunFolder.create(tmp_path / "run", CONFIG) as run:
        run.checkpoint(1, state(1), {0: state(3), 1: state(4)})
        read = []
        monkeypatch.setattr(
            tree,
            "load",
            lambda path, device: read.append(path.name) or load(path, device),
        )
        _, _, client_states = run.restore(lazily=True)
        assert len(read) == 1 and read[0].startswith("server")
        assert value_of(client_states[1]) == 4 and len(read) == 2
        next((run.path / "checkpoint").glob("client-000000*")).write_bytes(b"?")
        with pytest.raises(UserError, match="checksum is wrong"):
            run.restore(lazily=True)


def run_until_killed(path, started):
    with RunFolder.open(path) as run:
        restored = run.restore()
        round = restored[0] if restored else 0
        started.set()
        while True:
            round += 1
            run.append({"round": round})
            run.checkpoint(
                round, state(round), {client: state(round) for client in (round % 5, 5 + round % 3)}
            )


@pytest.mark.skipif(
    not hasattr(os, "fork"), reason="forks, so that a process with torch starts in no time"
)
def test_a_kill_at_any_moment_leaves_a_run_that_goes_on(tmp_path):
    RunFolder.create(tmp_path / "run", CONFIG)
    context = multiprocessing.get_context("fork")
    moments = random.Random(0)
    last_round = 0
    for attempt in range(150):
        if attempt >= 40 and last_round > 10:
            break
        started = context.Event()
        process = context.Process(target=run_until_killed, args=(tmp_path / "run", started))
        process.start()
        assert started.wait(10)
        time.sleep(
            moments.uniform(0, 0.03 * (1 + attempt / 20))
        )  # on a busy machine a round takes longer
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        with RunFolder.open(
            tmp_path / "run"
        ) as run:  # the dead process's lock does not stand in the way
            restored = run.restore()
            round, server, client_states = restored or (0, {}, {})
            assert round >= last_round and [record["round"] for record in run.records()] == list(
                range(1, round + 1)
            )
            if restored:
                assert value_of(server) == round
            for client, tree in client_states.items():
                period, offset = (5, 0) if client < 5 else (3, 5)
                changed = round - (round - (client - offset)) % period
                assert value_of(tree) == changed, (
                    "each client as it was in the last round that changed it"
                )
        last_round = round
    assert last_round > 10


# The lock


def test_two_writers_at_a_time_are_refused(run):
    other = RunFolder.open(run.path)
    with pytest.raises(UserError, match=f"is being written by process {os.getpid()} on"):
        other.append({"round": 1})
    run.close()
    other.append({"round": 1})
    with pytest.raises(UserError, match="is being written"):
        run.append({"round": 2})
    other.close()
    assert run.records() == [{"round": 1}]


def test_a_live_process_keeps_the_lock_and_a_dead_one_does_not(tmp_path):
    run = RunFolder.create(tmp_path / "run", CONFIG)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = {"pid": process.pid, "host": socket.gethostname(), "process": "x"}
    (run.path / "lock").write_text(json.dumps(owner))
    try:
        with pytest.raises(
            UserError, match=f"process {process.pid} .*or delete '.*lock' if it is gone"
        ):
            run.append({"round": 1})
    finally:
        process.kill()
        process.communicate()
    with run:
        run.append({"round": 1})
    assert not (run.path / "lock").exists()


def test_locks_of_other_machines_count_and_locks_of_an_earlier_life_do_not(tmp_path):
    run = RunFolder.create(tmp_path / "run", CONFIG)
    lock = run.path / "lock"
    lock.write_text(json.dumps({"pid": 1, "host": "elsewhere", "process": "x"}))
    with pytest.raises(UserError, match="process 1 on elsewhere"):
        run.append({"round": 1})
    lock.write_text(
        json.dumps(
            {"pid": os.getpid(), "host": socket.gethostname(), "process": "before the restart"}
        )
    )
    with run:
        run.append({"round": 1})


def test_only_one_of_two_processes_gets_a_dead_lock(tmp_path):
    RunFolder.create(tmp_path / "run", CONFIG)
    dead = json.dumps({"pid": 2**22 + 1, "host": socket.gethostname(), "process": "x"})
    (tmp_path / "run" / "lock").write_text(dead)
    slow, fast = (lock.Lock(tmp_path / "run" / "lock") for _ in range(2))
    stale = slow._identity(slow.path)  # the slow one has seen that the owner is dead ...
    fast.acquire()
    slow._remove(stale)  # ... and goes on when the fast one has taken over
    assert json.loads(fast.path.read_text())["pid"] == os.getpid()
    assert not list(fast.path.parent.glob(".lock.*"))
    with pytest.raises(UserError, match="is being written by"):
        lock.Lock(fast.path).acquire()
    fast.release()


def test_an_unsigned_lock_counts_only_for_a_moment(tmp_path):
    run = RunFolder.create(tmp_path / "run", CONFIG)
    lock = run.path / "lock"
    lock.touch()
    with pytest.raises(UserError, match="another process"):
        run.append({"round": 1})
    long_ago = time.time() - 60
    os.utime(lock, (long_ago, long_ago))
    with run:
        run.append({"round": 1})
