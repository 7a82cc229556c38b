"""Certificates and keys, and the commands that need no network."""

import contextlib
import datetime
import os
import ssl
import stat
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from cryptography import x509
from flwr.proto.node_pb2 import NodeInfo

from fedhelix.cli import deploy as commands
from fedhelix.core.errors import UserError
from fedhelix.deploy import control, keys, localhost, node, submit
from fedhelix.runs.spec import make_spec
from fedhelix.store.lock import Lock


def test_the_server_is_known_by_every_name_that_sites_call_it(tmp_path):
    keys.make_certificates(tmp_path, ["fl.example.org", "10.0.0.7"])
    leaf = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "fl.example.org"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == [
        "127.0.0.1",
        "::1",
        "10.0.0.7",
    ]
    root = x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes())
    leaf.verify_directly_issued_by(root)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    assert stat.S_IMODE((tmp_path / "server.key").stat().st_mode) == 0o600


def test_a_site_that_trusts_both_authorities_connects_before_and_after_the_renewal(tmp_path):
    for folder in ("old", "new"):
        keys.make_certificates(tmp_path / folder, [])
    both = b"".join((tmp_path / folder / "ca.pem").read_bytes() for folder in ("old", "new"))
    for folder in ("old", "new"):
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(tmp_path / folder / "server.pem", tmp_path / folder / "server.key")
        site = ssl.create_default_context(cadata=both.decode())
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = [
            site.wrap_bio(down, up, server_hostname="localhost"),
            server.wrap_bio(up, down, server_side=True),
        ]
        for _ in range(3):  # each end in turn, until both are done
            for end in ends:
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        assert ends[0].getpeercert()["subject"][0][0] == ("commonName", "fedhelix server")


def test_the_end_of_a_certificate_is_told(cli, tmp_path, monkeypatch):
    end = datetime.date.today() + datetime.timedelta(days=keys.DAYS)
    ended = cli("deploy", "keys", "--host", "fl.example.org")
    assert ended.code == 0 and f"valid until {end}" in ended.out
    monkeypatch.setattr(os, "execve", lambda *command: None)
    serve = ("deploy", "serve", "--host=127.0.0.1", f"--port={localhost.free_port()}")
    assert cli(*serve).err == ""
    (tmp_path / "deployment/keys/server.pem").unlink()
    monkeypatch.setattr(keys, "DAYS", 30)
    cli("deploy", "keys")
    end = datetime.date.today() + datetime.timedelta(days=30)
    assert f"certificate is valid until {end}, and no site" in cli(*serve).err
    end = datetime.date.today() - datetime.timedelta(days=1)
    for module in (keys, localhost):
        monkeypatch.setattr(module, "last_day", lambda folder: end)
    expired = cli("deploy", "keys")
    assert f"expired on {end}, so that no site connects: make new ones" in expired.out
    assert f"the server's certificate expired on {end}" in cli(*serve).err


def test_a_refused_certificate_is_no_missing_server(tmp_path):
    here = control.Control.__new__(control.Control)
    here.address, here.folder = "127.0.0.1:8000", tmp_path
    for words, sentence in (
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate has expired", "has a certificate that is"),
        ("[Errno 111] Connection refused", "there is no SuperLink at 127.0.0.1:8000"),
    ):
        with pytest.raises(UserError, match=sentence), here._user_errors():
            raise httpx.ConnectError(words)


def test_a_file_that_is_no_certificate_is_named(cli, tmp_path):
    keys.make_certificates(tmp_path, [])
    key, whole = keys.make_site_key(tmp_path, "north"), (tmp_path / "ca.pem").read_bytes()
    der = ssl.PEM_cert_to_DER_cert(whole.decode())
    site = ("site", "--name=north", "--data=digits", "--superlink=127.0.0.1:1", f"--key={key}")
    (tmp_path / "deployment" / "keys").mkdir(parents=True)
    here = tmp_path / "deployment" / "keys" / "ca.pem"
    for bad in (b"", der, key.read_bytes(), whole[: len(whole) // 2]):
        here.write_bytes(bad)
        ended = cli(*site, f"--cert={here}")
        said = f"'{here}' is no certificate in PEM format; give the server's ca.pem as --cert."
        assert (ended.code, ended.err) == (2, f"fedhelix: {said}\n")
        ended = cli("deploy", "admit", "north")
        assert ended.code == 2 and "no certificate in PEM format; this is a" in ended.err
    ended = cli(*site, "--cert=nowhere.pem")
    assert ended.code == 2 and "'nowhere.pem' cannot be read (No such file" in ended.err


def test_a_certificate_in_the_place_of_a_key_is_named(cli, tmp_path):
    keys.make_certificates(tmp_path, [])
    ended = cli("audit", "log", "x.jsonl", "--key", "ca.pem")
    said = "fedhelix: 'ca.pem' is a certificate and no key; give SITE.pub or SITE.key.\n"
    assert (ended.code, ended.err) == (2, said)
    site = ("site", "--name=north", "--data=digits", "--superlink=127.0.0.1:1", "--cert=ca.pem")
    ended = cli(*site, "--key=ca.pem")
    said = "fedhelix: 'ca.pem' is a certificate and no private key; give SITE.key.\n"
    assert (ended.code, ended.err) == (2, said)
    with pytest.raises(UserError, match=r"is a certificate and no public key; give SITE\.pub"):
        keys.read_public_key(tmp_path / "ca.pem")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("unable to get local issuer certificate", "; give --cert the ca.pem in the keys folder"),
        ("certificate has expired", "; on the server, make a new one with `fedhelix deploy keys"),
        ("certificate is not yet valid", "; set the clocks of both machines."),
        ("Hostname mismatch, not valid for 'a'", "; give --superlink a name that the certificate"),
    ],
)
def test_a_site_says_what_helps_against_a_refused_certificate(words, said, tmp_path):
    problem = httpx.ConnectError(f"[SSL] certificate verify failed: {words} (_ssl.c:1006)")
    assert f"(_ssl.c:1006){said}" in str(node.refused(problem, "a:1", tmp_path))
    plain = node.refused(httpx.ConnectError("EOF"), "a:1", tmp_path)
    assert str(plain) == "there is no connection to a:1: EOF."


def test_keys_are_made_once_and_kept_private(tmp_path):
    private = keys.make_site_key(tmp_path, "north")
    before = private.read_bytes()
    assert keys.make_site_key(tmp_path, "north").read_bytes() == before
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    public = keys.read_private_key(private).public_key()
    assert keys.read_public_key(tmp_path / "north.pub").startswith(b"-----BEGIN PUBLIC KEY-----")
    assert public.key_size == 256
    private.rename(tmp_path / "away")  # the site has taken it
    with pytest.raises(UserError, match=r"north.pub' is there without north.key, which the site"):
        keys.make_site_key(tmp_path, "north")
    (tmp_path / "away").rename(private)
    with pytest.raises(UserError, match="cannot be read as a private key"):
        keys.read_private_key(tmp_path / "north.pub")
    with pytest.raises(UserError, match="cannot be read as a public key"):
        keys.read_public_key(private)
    for read in (keys.read_private_key, keys.read_public_key):
        with pytest.raises(UserError, match=r"there is no key '.*south'; correct the path"):
            read(tmp_path / "south")


def test_keys_that_were_half_made_are_made_whole(tmp_path):
    keys.make_certificates(tmp_path, [])
    keys.make_site_key(tmp_path, "north")
    public = (tmp_path / "north.pub").read_bytes()
    for name in ("server.pem", "north.pub"):  # a kill came before these were written
        (tmp_path / name).unlink()
    keys.make_certificates(tmp_path, [])
    keys.make_site_key(tmp_path, "north")
    assert (tmp_path / "north.pub").read_bytes() == public
    root, leaf = (
        x509.load_pem_x509_certificate((tmp_path / name).read_bytes())
        for name in ("ca.pem", "server.pem")
    )
    leaf.verify_directly_issued_by(root)


def test_bad_names_of_hosts_and_sites(tmp_path):
    keys.make_certificates(tmp_path, ["fl.example.org"])
    keys.make_certificates(tmp_path, ["fl.example.org", "127.0.0.1"])
    with pytest.raises(UserError, match=r"is not for other\.example\.org"):
        keys.make_certificates(tmp_path, ["other.example.org"])
    with pytest.raises(UserError, match="no address or name of a machine"):
        keys.make_certificates(tmp_path / "new", ["böse..x"])
    with pytest.raises(UserError, match="no name for a site"):
        keys.make_site_key(tmp_path, "../x")


class Book:
    """What a SuperLink knows of keys."""

    def __init__(self):
        self.nodes = []

    def ListNodes(self, _):
        return SimpleNamespace(nodes_info=self.nodes)

    def RegisterNode(self, request):
        number = len(self.nodes) + 1
        self.nodes.append(
            NodeInfo(
                node_id=number, name=request.name, public_key=request.public_key, status="online"
            )
        )

    def UnregisterNode(self, request):
        self.nodes[request.node_id - 1].status = "unregistered"


def test_connections_to_a_superlink_are_closed(tmp_path):
    keys.make_certificates(tmp_path / "keys", [])
    with control.Control("127.0.0.1:1", tmp_path) as link:
        assert not link.is_up()
    with pytest.raises(RuntimeError, match="client has been closed"):
        link.is_up()


def test_a_site_has_one_key_until_it_is_expelled(tmp_path):
    keys.make_certificates(tmp_path / "keys", [])
    link = control.Control("127.0.0.1:1", tmp_path)
    link._client.close()
    link._client = book = Book()
    public = {
        name: keys.make_site_key(tmp_path / name, name).with_suffix(".pub")
        for name in ("north", "south")
    }
    for name, path in public.items():
        link.register(name, path)
        link.register(name, path)
    assert link.connected() == ["north", "south"]
    with pytest.raises(UserError, match="belongs to 'north'; every site needs a key of its own"):
        link.register("south", public["north"])
    told = rf"put the west.pub of the site there, or make .*keys west --folder {tmp_path}`"
    with pytest.raises(UserError, match=told):
        link.register("west", tmp_path / "west.pub")
    link.register("north", keys.make_site_key(tmp_path / "new", "north").with_suffix(".pub"))
    assert [node.status for node in book.nodes] == ["unregistered", "online", "online"]
    with pytest.raises(
        UserError,
        match=rf"withdrawn permanently; delete north\.key and .*keys north --folder {tmp_path}`",
    ):
        link.register("north", public["north"])
    link.expel("north")
    assert link.connected() == ["south"]
    with pytest.raises(UserError, match="unknown site 'north'"):
        link.expel("north")


@pytest.mark.parametrize("words", [["sites"], ["admit", "a"], ["run", "fedavg"]])
def test_a_command_for_the_server_says_so_in_the_folder_of_a_site(words, cli, tmp_path):
    command = ("deploy", *words, "--superlink", "127.0.0.1:1")
    said = cli(*command).err
    assert "this is a command for the server's folder: name that with --folder, or make" in said
    keys.make_certificates(tmp_path / "server", [])
    place = tmp_path / "deployment" / "keys"
    place.mkdir(parents=True)
    (place / "ca.pem").write_bytes((tmp_path / "server" / "ca.pem").read_bytes())
    keys.make_site_key(place, "a")
    done = cli(*command)
    assert done.code == 2 and "'deployment/keys' holds the keys of a site, and this is" in done.err


def test_commands_say_what_is_missing(cli, tmp_path):
    done = cli(
        "site", "--name", "a", "--superlink", "127.0.0.1:1", "--data", "digits", "--key", "a.key"
    )
    assert done.code == 2 and "--cert" in done.err
    done = cli("deploy", "run", "fedavg")
    assert done.code == 2 and "`fedhelix up` is running in 'deployment'; start one" in done.err
    assert "start one with `fedhelix up`, or" in done.err
    assert "--superlink HOST:PORT of the server that `fedhelix deploy serve` runs" in done.err
    done = cli("up", "--data", "nope")
    assert done.code == 2 and "nope" in done.err
    done = cli("up", "--data", "mnist", "--data-dir", "nowhere")
    assert done.code == 2 and "nowhere" in done.err
    done = cli("up", "--data", ".")
    assert done.code == 2 and "'.' is a folder; pack its arrays into one FILE.npz" in done.err
    done = cli("up", "--host", "192.168.0.7")
    assert done.code == 2 and "would not find a server at 192.168.0.7" in done.err
    done = cli("up", "--port", 99999999)
    assert done.code == 2 and "65535" in done.err
    done = cli("deploy", "serve")
    assert done.code == 2 and "make one with `fedhelix deploy keys`" in done.err
    done = cli("deploy", "keys", "north", "south", "--host", "fl.example.org")
    assert done.code == 0 and (tmp_path / "deployment/keys/south.pub").exists()
    done = cli("deploy", "admit", "north", "--superlink", f"127.0.0.1:{localhost.free_port()}")
    assert done.code == 2 and "there is no SuperLink at 127.0.0.1" in done.err
    done = cli("deploy", "expel", "north", "--superlink", f"127.0.0.1:{localhost.free_port()}")
    assert done.code == 2 and "there is no SuperLink at 127.0.0.1" in done.err
    done = cli(
        "deploy",
        "run",
        "fedavg",
        "--superlink",
        f"127.0.0.1:{localhost.free_port()}",
        "--clients",
        2,
    )
    assert (
        done.code == 2
        and "there is no SuperLink at 127.0.0.1" in done.err
        and not (tmp_path / "runs").exists()
    )


def test_one_deployment_in_a_folder(cli, tmp_path):
    (tmp_path / "deployment").mkdir()
    (tmp_path / "deployment" / localhost.STATE_FILE).write_text("of the one that runs")
    lock = Lock(tmp_path / "deployment" / "lock")
    lock.acquire()
    done = cli("up")
    assert done.code == 2 and "is being written by process" in done.err
    assert sorted(path.name for path in (tmp_path / "deployment").iterdir()) == [
        localhost.STATE_FILE,
        "lock",
        "superlink.lock",
    ]


def test_runs_take_the_data_of_the_deployment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys.make_certificates(tmp_path / "keys", [])
    here = localhost.LocalDeployment(".", 2, "own.npz", "files")
    for process in ("wait_for_superlink", "admit"):
        monkeypatch.setattr(here, process, lambda *_: None)
    monkeypatch.setattr(localhost.Process, "start", lambda process: None)
    with here:
        _, settings = commands.deployment(None, Path())
    assert settings == {
        "clients": 2,
        "data": str(tmp_path / "own.npz"),
        "data_dir": str(tmp_path / "files"),
    }
    assert not (tmp_path / localhost.STATE_FILE).exists() and not (tmp_path / "lock").exists()


def test_runs_are_resumed_where_their_clients_are(cli, tmp_path):
    spec = make_spec("fedavg", {"rounds": 1, "clients": 2})
    submit.create(spec, tmp_path / "across").close()
    done = cli("resume", "across")
    assert done.code == 2 and done.err == (
        "fedhelix: the clients of 'across' are sites; continue it with `fedhelix deploy resume "
        "across`.\n"
    )
    done = cli("deploy", "resume", "across")
    assert done.code == 2 and "no deployment of `fedhelix up` is running" in done.err


def test_without_flower_one_sentence_says_how_to_get_it(cli, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = cli("up")
    assert done.code == 2 and 'pip install "fedhelix[flower]"' in done.err


def test_the_bundle_holds_no_code():
    assert "fedhelix.deploy.app:server_app" in control.BUNDLE
    from flwr.cli.build import build_fab_from_files

    files = {
        "pyproject.toml": control.BUNDLE.format(version="0.1.0").encode(),
        "LICENSE": b"Apache-2.0\n",
    }
    content, _ = build_fab_from_files(files)
    assert len(content) < 2000
