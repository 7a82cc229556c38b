import json
import os
import signal
import socket

import pytest

from fedhelix.deploy import localhost
from fedhelix.deploy.localhost import STATE_FILE, free_port, signals_ignored
from fedhelix.deploy.node import only_process
from fedhelix.store.lock import Lock


def test_a_second_ctrl_c_waits_until_all_is_stopped():
    before = signal.getsignal(signal.SIGINT)
    with signals_ignored():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("command", ["deploy serve", "up"])
def test_a_port_that_is_taken_is_told_before_anything_starts(command, cli, monkeypatch):
    monkeypatch.setattr(os, "execve", lambda *command: None)
    cli("deploy", "keys")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ended = cli(*command.split(), "--host=127.0.0.1", f"--port={port}")
    said = f"fedhelix: no server can listen on 127.0.0.1:{port} (Address already in use); stop what"
    assert ended.code == 2 and ended.err.startswith(said) and ended.err.count("\n") == 1


def test_a_folder_has_one_server_at_a_time(cli, monkeypatch, tmp_path):
    held = []
    monkeypatch.setattr(os, "execve", lambda *command: held.extend(folder.glob("*.lock")))
    cli("deploy", "keys")
    folder, serve = tmp_path / "deployment", ("deploy", "serve", f"--port={free_port()}")
    assert folder.exists() and cli(*serve).code == 0 and held
    with only_process(folder, "superlink"):
        for command in (serve, ("up", "--sites=2")):
            ended = cli(*command)
            assert ended.code == 2 and "another process runs the server's superlink" in ended.err
    lock = Lock(folder / "lock")  # as `fedhelix up` holds it
    lock.acquire()
    monkeypatch.setattr(Lock, "this_process", "another")
    monkeypatch.setattr("fedhelix.store.lock._alive", lambda owner: True)
    assert "is being written by process" in cli(*serve).err
    lock.release()


def test_an_address_of_another_machine_is_told(cli, monkeypatch):
    monkeypatch.setattr(os, "execve", lambda *command: None)
    cli("deploy", "keys")
    ended = cli("deploy", "serve", "--host=192.0.2.1", f"--port={free_port()}")
    assert ended.code == 2 and "no server can listen on 192.0.2.1:" in ended.err


def test_commands_of_the_server_find_what_up_has_started(cli, tmp_path, monkeypatch):
    usual, started = (f"127.0.0.1:{free_port()}" for _ in range(2))
    monkeypatch.setattr(localhost, "SERVER", usual)
    cli("deploy", "keys")
    for here in (usual, started):
        for words in (["sites"], ["expel", "a"]):
            done = cli("deploy", *words)
            assert done.code == 2 and f"there is no SuperLink at {here}" in done.err
        (tmp_path / "deployment" / STATE_FILE).write_text(json.dumps({"address": started}))
