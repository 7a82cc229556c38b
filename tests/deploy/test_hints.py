"""What commands of a deployment say: how to go on, and that a file cannot be written."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from flwr.proto.node_pb2 import NodeInfo

from fedhelix.cli import deploy as commands
from fedhelix.deploy import submit
from fedhelix.deploy.backup import back_up
from fedhelix.deploy.control import Control
from fedhelix.deploy.keys import make_certificates
from fedhelix.deploy.localhost import free_port
from fedhelix.deploy.site_state import MODEL
from fedhelix.report.locate import select
from fedhelix.runs.spec import make_spec

AT = ("--superlink", "127.0.0.1:8913")


class Link(nullcontext):
    """A control without a SuperLink."""

    closed = 0

    def __exit__(self, *_):
        Link.closed += 1

    def connected(self):
        return ["a", "b"]


@pytest.fixture
def stopped(monkeypatch):
    """A deployment in which every run is stopped by Ctrl-C."""
    monkeypatch.setattr(commands, "_control", lambda *_: Link())
    monkeypatch.setattr(Link, "closed", 0)

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
    done = cli("deploy", "run", "fedavg", "--clients", 2, "--out", "runs/r", *options)
    assert Link.closed == 3  # connections
    told = f"fedhelix deploy resume runs/r {said}".rstrip()
    assert done.code == 2 and f"holds a run already; continue it with `{told}` or" in done.err
    done = cli("resume", "runs/r")
    assert done.code == 2 and f"are sites; continue it with `{told}`." in done.err
    done = cli("deploy", "resume", "runs/r", "--set", "lr=0.5", *options)
    told = f"fedhelix deploy run fedavg --config runs/r/config.toml --set lr=0.5 {said}".rstrip()
    assert done.code == 2 and f"start a new one with `{told}`." in done.err
    assert any(f"{said}".rstrip() in command for command in select([Path("runs/r")]).commands)


def test_a_run_goes_on_where_it_was_begun_unless_told_otherwise(stopped, cli, monkeypatch):
    asked = []
    monkeypatch.setattr(commands, "_control", lambda *at: asked.append(at) or Link())
    given = (*AT, "--folder", "my server")
    cli("deploy", "run", "fedavg", "--clients", 2, "--out", "runs/r", *given)
    done = cli("deploy", "resume", "runs/r")
    told = f"fedhelix deploy resume runs/r {' '.join(AT)} --folder 'my server'"
    assert done.code == 130 and done.err == f"stopped; continue with: {told}\n"
    cli("deploy", "resume", "runs/r", "--superlink", "localhost:1", "--folder", "other")
    assert asked == [(AT[1], Path("my server"))] * 2 + [("localhost:1", Path("other"))]


@pytest.mark.parametrize(
    ("folder", "named"), [("deployment", ""), ("my srv", " --folder 'my srv'")]
)
def test_what_is_missing_is_made_by_the_command_that_is_told(folder, named, cli):
    """Each command is the next one, until it works."""
    at = f"127.0.0.1:{(port := free_port())}"
    admit = ("deploy", "admit", "a", "--superlink", at, "--folder", folder)
    for command in (("deploy", "serve", "--folder", folder), admit):
        done = cli(*command)
        assert done.code == 2 and f" with `fedhelix deploy keys{named}`" in done.err
    assert cli("deploy", "keys", "--folder", folder).code == 0
    done = cli(*admit)
    assert done.code == 2 and f" with `fedhelix deploy keys a{named}`." in done.err
    assert cli("deploy", "keys", "a", "--folder", folder).code == 0
    done = cli(*admit)
    assert done.code == 2 and f"`fedhelix deploy serve --port {port}{named}`" in done.err
    assert f", or `fedhelix up{named}` on one machine" in done.err
    done = cli("deploy", "run", "fedavg", "--folder", folder)
    assert done.code == 2 and f"; start one with `fedhelix up{named}`, or give" in done.err


def test_a_site_keeps_the_certificate_of_its_server(cli, tmp_path):
    make_certificates(tmp_path / "server", [])
    here = tmp_path / "deployment" / "keys"
    here.mkdir(parents=True)
    (here / "ca.pem").write_bytes((tmp_path / "server" / "ca.pem").read_bytes())
    done = cli("deploy", "keys", "a")
    assert done.code == 0 and done.out.splitlines() == [
        "deployment/keys/a.key",
        "SITE.pub goes to the server, whose deployment/keys/ca.pem is kept; SITE.key stays here.",
    ]
    assert sorted(path.name for path in here.iterdir()) == ["a.key", "a.pub", "ca.pem"]
    for words in ((), ("a", "--host", "fl.example.org")):
        done = cli("deploy", "keys", *words)
        assert done.code == 2 and done.err.startswith(
            "fedhelix: 'deployment/keys/ca.pem' is there without server.key, as at a site: "
        )
    assert (here / "ca.pem").read_bytes() == (tmp_path / "server" / "ca.pem").read_bytes()
    done = cli("deploy", "keys", "a", "--folder", "renewed")
    assert "the ca.pem that counts is the server's, not this one." in done.out


@pytest.mark.parametrize("name", ["a.key", "a.pub", "ca.pem", "server.key", "server.pem"])
def test_a_folder_in_the_place_of_a_key_is_one_sentence(name, cli, tmp_path):
    (tmp_path / "deployment" / "keys" / name).mkdir(parents=True)
    done = cli("deploy", "keys", "a")
    said = f"'deployment/keys/{name}' is a folder, and a file of that name is needed; move it."
    assert done.code == 2 and done.err == f"fedhelix: {said}\n"


@pytest.mark.parametrize(
    ("name", "what"), [("a.key", "private key"), ("server.pem", "certificate")]
)
def test_a_key_that_is_none_is_one_sentence(name, what, cli, tmp_path):
    (tmp_path / "deployment" / "keys").mkdir(parents=True)
    (tmp_path / "deployment" / "keys" / name).write_text("x")
    done = cli("deploy", "keys", "a")
    assert done.code == 2 and done.err.count("\n") == 1
    assert done.err.startswith(f"fedhelix: 'deployment/keys/{name}' cannot be read as a {what}")


@pytest.mark.parametrize("folder", ["deployment", "new"])
def test_a_restored_server_is_reached_by_its_address(folder, cli, tmp_path):
    make_certificates(tmp_path / "old" / "keys", [])
    submit.create(make_spec("fedavg", {"rounds": 1, "clients": 2}), tmp_path / "r").close()
    back_up(tmp_path / "old", tmp_path / "b.tar.gz", [tmp_path / "r"])
    done = cli("deploy", "restore", "b.tar.gz", "--folder", folder)
    keys = "" if folder == "deployment" else " --folder new"
    assert done.code == 0 and done.out.splitlines() == [
        f"{folder} is as it was; start it with: fedhelix deploy serve{keys}",
        "keys that were withdrawn after the backup was made are admitted again: `fedhelix deploy "
        f"sites{keys}` lists the sites that are admitted, and `fedhelix deploy expel SITE{keys}` "
        "withdraws a key.",
        f"go on with: fedhelix deploy resume {folder}/runs/r --superlink 127.0.0.1:8000{keys}",
        "(instead of 127.0.0.1:8000, give the address that the server listens on)",
    ]


def test_admitted_sites_are_listed_and_withdrawn_ones_are_not(cli, tmp_path, monkeypatch):
    make_certificates(tmp_path / "deployment" / "keys", [])
    done = cli("deploy", "sites", "--superlink", f"127.0.0.1:{free_port()}")
    assert done.code == 2 and "there is no SuperLink at 127.0.0.1" in done.err
    states = [("south", "offline"), ("east", "unregistered"), ("north", "online")]
    nodes = [NodeInfo(name=name, status=status) for name, status in states]
    monkeypatch.setattr(Control, "_nodes", lambda _: nodes)
    assert cli("deploy", "sites").out == "north: connected\nsouth: not connected\n"
    nodes.clear()
    assert cli("deploy", "sites").out == "no site is admitted.\n"


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
