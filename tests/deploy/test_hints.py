"""What commands of a deployment say: how to go on, and that a file cannot be written."""

from types import SimpleNamespace

import pytest

from fedhelix.cli import deploy as commands
from fedhelix.deploy import submit
from fedhelix.deploy.backup import back_up
from fedhelix.deploy.keys import make_certificates
from fedhelix.deploy.site_state import MODEL
from fedhelix.runs.spec import make_spec

AT = ("--superlink", "127.0.0.1:8913")


@pytest.fixture
def stopped(monkeypatch):
    """A deployment in which every run is stopped by Ctrl-C."""
    here = SimpleNamespace(connected=lambda: ["a", "b"])
    monkeypatch.setattr(commands, "_control", lambda *_: here)

    def follow(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(submit, "follow", follow)
    state = {"address": "127.0.0.1:1", "sites": ["a", "b"], "settings": {"data": "digits"}}
    monkeypatch.setattr("fedhelix.deploy.localhost.read_state", lambda _: state)


@pytest.mark.parametrize("options", [(), AT, ("--folder", "my server"), (*AT, "--folder", "x")])
def test_a_run_that_was_stopped_says_the_whole_command(options, stopped, cli):
    said = " ".join(f"'{word}'" if " " in word else word for word in options)
    expected = f"stopped; continue with: fedhelix deploy resume runs/r {said}".rstrip() + "\n"
    done = cli("deploy", "run", "fedavg", "--clients", 2, "--out", "runs/r", *options)
    assert done.code == 130 and done.err == expected
    done = cli("deploy", "resume", "runs/r", *options)
    assert done.code == 130 and done.err == expected


@pytest.mark.parametrize("folder", ["deployment", "new"])
def test_a_restored_server_is_reached_by_its_address(folder, cli, tmp_path):
    make_certificates(tmp_path / "old" / "keys", [])
    submit.create(make_spec("fedavg", {"rounds": 1, "clients": 2}), tmp_path / "r").close()
    back_up(tmp_path / "old", tmp_path / "b.tar.gz", [tmp_path / "r"])
    done = cli("deploy", "restore", "b.tar.gz", "--folder", folder)
    keys = "" if folder == "deployment" else " --folder new"
    assert done.code == 0 and done.out.splitlines() == [
        f"{folder} is as it was; start it with: fedhelix deploy serve{keys}",
        f"go on with: fedhelix deploy resume {folder}/runs/r --superlink 127.0.0.1:8000{keys}",
        "(instead of 127.0.0.1:8000, give the address that the server listens on)",
    ]


def test_files_that_cannot_be_written_are_one_sentence(cli, tmp_path, monkeypatch):
    """Permissions do not stop root, but a file in the place of a folder does."""
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.npy").mkdir()
    make_certificates(tmp_path / "deployment" / "keys", [])
    model = tmp_path / "site" / "run" / "a" / MODEL
    model.parent.mkdir(parents=True)
    model.write_bytes(b"")
    monkeypatch.setattr("fedhelix.deploy.site_predictions.trained_site", lambda *_, **__: None)
    words = ("--name", "a", "--data", "d", "--inputs", "x.npy")
    for command in (
        ("site", "predict", *words, "--out", "file/sub/p.npy"),
        ("site", "model", "--name", "a", "--out", "file/sub/m.safetensors"),
        ("deploy", "keys", "a", "--folder", "file/sub"),
        ("deploy", "backup", "file/sub/b.tar.gz"),
    ):
        done = cli(*command)
        assert done.code == 2 and done.err.startswith("fedhelix: 'file/sub"), command
        assert done.err.endswith(" cannot be written (Not a directory); choose another folder.\n")
    done = cli("site", "predict", *words, "--out", "folder.npy")
    said = "fedhelix: 'folder.npy' is a folder; name a file to write.\n"
    assert done.code == 2 and done.err == said
