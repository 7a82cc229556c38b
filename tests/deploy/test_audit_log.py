"""The audit log: what is in it, and that every kind of tampering is found."""

import contextlib
import hashlib
import json
import math
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhelix.cli.app import main
from fedhelix.core.bounds import rounded_up
from fedhelix.core.errors import UserError
from fedhelix.deploy import keys
from fedhelix.deploy.audit_log import AuditLog, head_path, moved, read_log
from fedhelix.deploy.server import keep_log
from fedhelix.deploy.site_policy import SitePolicy
from fedhelix.runs.spec import make_spec
from in_process import InProcessDeployment


@pytest.fixture
def log(tmp_path):
    """A log of six lines."""
    log = AuditLog(tmp_path / "north.jsonl", keys.make_site_key(tmp_path, "north"))
    for number in range(5):
        log.append({"kind": "train", "round": number, "bytes": 100 * number})
    return log


def test_a_whole_log_is_read_and_goes_on(log, tmp_path):
    public, private = tmp_path / "north.pub", tmp_path / "north.key"
    assert [entry["kind"] for entry in read_log(log.path, public)] == ["opened"] + ["train"] * 5
    AuditLog(log.path, private).append({"kind": "evaluate"})
    entries = read_log(log.path, None)
    assert entries[-1]["line"] == 7 and entries[-1]["kind"] == "evaluate"
    assert entries[-1]["previous"] == entries[-2]["hash"]


def test_a_loss_that_is_no_number_is_null_in_the_log(log, cli):
    """JSON has no NaN, and other programs do not read it."""
    log.append({"kind": "train", "round": 5, "loss": math.nan})
    read = partial(json.loads, parse_constant=pytest.fail)
    assert [read(line) for line in log.path.read_bytes().splitlines()][-1]["loss"] is None
    printed = read(cli("audit", "log", log.path, "--json").out)
    assert [entry["line"] for entry in printed[str(log.path)]] == [*range(1, 8)]


def swap(lines):
    return [*lines[:2], lines[3], lines[2], *lines[4:]]


TAMPERING = {
    "changed": lambda lines: [line.replace(b'"bytes": 200', b'"bytes": 201') for line in lines],
    "removed": lambda lines: lines[:2] + lines[3:],
    "first removed": lambda lines: lines[1:],
    "reordered": swap,
    "doubled": lambda lines: [*lines[:3], *lines[2:]],
    "cut short": lambda lines: lines[:-1],
    "cut shorter": lambda lines: lines[:-3],
    "emptied": lambda lines: [],
    "torn": lambda lines: [*lines[:-1], lines[-1][:40]],
    "nonsense": lambda lines: [*lines, b"[]"],
    "without signature": lambda lines: [*lines[:-1], b'{"line": 6}'],
}


def test_a_site_does_not_begin_a_new_log_in_place_of_one_that_was_removed(log, tmp_path):
    log.path.unlink()
    with pytest.raises(UserError, match=r"north.jsonl' was changed: at its end 6 of 6 lines"):
        AuditLog(log.path, tmp_path / "north.key")


@pytest.mark.parametrize("how", TAMPERING)
def test_tampering_is_found(how, log, tmp_path):
    lines = TAMPERING[how](log.path.read_bytes().splitlines())
    log.path.write_bytes(b"".join(line + b"\n" for line in lines))
    with pytest.raises(UserError, match=r"was changed: "):
        read_log(log.path, tmp_path / "north.pub")
    with pytest.raises(UserError, match="was changed: "):  # nor does the site go on with it
        AuditLog(log.path, tmp_path / "north.key")


def test_every_changed_byte_is_found(log):
    content = log.path.read_bytes()
    for place in range(0, len(content), 61):
        changed = bytearray(content)
        changed[place] ^= 1
        log.path.write_bytes(bytes(changed))
        with pytest.raises(UserError, match="was changed"):
            read_log(log.path, None)


def test_a_site_checks_its_log_with_either_file_of_its_key_pair(log, tmp_path, cli):
    for name in ("north.pub", "north.key"):
        done = cli("audit", "log", log.path, "--key", tmp_path / name)
        assert done.code == 0 and "6 lines, none changed, signed with the given key" in done.out
    other = keys.make_site_key(tmp_path, "south")
    assert "the key is another site's" in cli("audit", "log", log.path, "--key", other).err
    (tmp_path / "broken.key").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    broken = cli("audit", "log", log.path, "--key", "broken.key")
    assert broken.code == 2 and "cannot be read as a private key" in broken.err
    absent = cli("audit", "log", log.path, "--key", "absent.pub")
    assert absent.code == 2 and "'absent.pub'; correct the path" in absent.err
    new = AuditLog(tmp_path / "new.jsonl", tmp_path / "north.key")
    assert "new.jsonl: 1 line, none changed" in cli("audit", "log", new.path).out


def test_a_log_of_another_key_and_a_forged_head_are_found(log, tmp_path):
    keys.make_site_key(tmp_path, "south")
    with pytest.raises(UserError, match="line 1 is not as signed, or the key is another site's"):
        read_log(log.path, tmp_path / "south.pub")
    with pytest.raises(
        UserError, match=r"was written with another key; .* move it and .*\.head' to"
    ):
        AuditLog(log.path, tmp_path / "south.key")
    head = json.loads(head_path(log.path).read_bytes())
    head_path(log.path).write_text(json.dumps({**head, "line": 5}))
    with pytest.raises(UserError, match="missing or not as signed"):
        read_log(log.path, None)
    head_path(log.path).unlink()
    with pytest.raises(UserError, match="missing or not as signed"):
        read_log(log.path, None)


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    return keys.make_site_key(tmp_path_factory.mktemp("keys"), "north")


@contextlib.contextmanager
def longest_file(size):
    """No file can be longer: a write fails as it does on a full disk, after the bytes that fit."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


WRITES = st.tuples(st.sampled_from(["done", "failed", "killed"]), st.floats(0, 1))


@settings(max_examples=30, deadline=None)
@given(writes=st.lists(WRITES, max_size=6), place=st.floats(0, 0.999))
def test_wherever_a_write_is_cut_short_the_log_goes_on_and_tampering_is_found(key, writes, place):
    """The line or a part of it may be on the disk, with the head before it."""
    with tempfile.TemporaryDirectory() as folder:
        path, kept = Path(folder) / "north.jsonl", []
        with longest_file(400), pytest.raises(UserError, match="cannot be written"):
            AuditLog(path, key)  # there is a head, and half of the first line
        log = AuditLog(path, key)
        for number, (how, share) in enumerate(writes):
            event = {"kind": "train", "round": number}
            head, content = head_path(path).read_bytes(), path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]  # half a line goes with the next write
            if how == "failed":
                with longest_file(len(whole) + int(200 * share)), pytest.raises(OSError):
                    log.append(event)
                assert (head_path(path).read_bytes(), path.read_bytes()) == (head, whole)
                continue
            log.append(event)
            line = path.read_bytes()[len(whole) :]
            written = len(line) if how == "done" else round(share * len(line))
            kept += [number] * (written == len(line))
            if how == "killed":
                head_path(path).write_bytes(head)
                path.write_bytes(whole + line[:written])
                path.with_name(f".{head_path(path).name}.0123").write_bytes(b"{")
                assert [entry.get("round") for entry in read_log(path, None)] == [None, *kept]
                log = AuditLog(path, key)
        log.append({"kind": "evaluate"})
        entries = read_log(path, key.with_suffix(".pub"))
        assert [entry.get("round") for entry in entries] == [None, *kept, None]
        assert {file.name for file in Path(folder).iterdir()} == {"north.head", "north.jsonl"}
        for file in (path, head_path(path)):
            content = bytearray(right := file.read_bytes())
            content[int(place * len(content))] ^= 1
            file.write_bytes(content)
            with pytest.raises(UserError):
                read_log(path, key.with_suffix(".pub"))
            file.write_bytes(right)


def test_a_writer_that_was_killed_leaves_a_log_that_goes_on(log, tmp_path):
    head, whole = head_path(log.path).read_bytes(), log.path.read_bytes()
    log.append({"kind": "train"})
    head_path(log.path).write_bytes(head)  # killed between the line and the head
    assert len(read_log(log.path, None)) == 7
    log.path.write_bytes(whole + b'{"line": 7, "ti')  # killed within the line
    assert len(read_log(log.path, None)) == 6
    AuditLog(log.path, tmp_path / "north.key").append({"kind": "evaluate"})
    assert read_log(log.path, None)[-1]["kind"] == "evaluate"


def test_only_one_line_may_be_ahead_of_the_head(log, tmp_path):
    head = head_path(log.path).read_bytes()
    log.append({"kind": "train"})
    log.append({"kind": "train"})
    head_path(log.path).write_bytes(head)
    with pytest.raises(UserError, match="its end is not the one that was signed last"):
        AuditLog(log.path, tmp_path / "north.key")


def test_a_site_whose_log_was_changed_does_not_start(log, tmp_path, monkeypatch, capsys):
    """Neither the site, which would look healthy, nor a worker that is started later."""
    words = ["--name=north", f"--key={tmp_path / 'north.key'}", f"--folder={tmp_path}"]
    words += ["--data=digits"]
    site = ["fedhelix", "site", *words, "--superlink=127.0.0.1:1", f"--cert={log.path}"]
    log.path.write_bytes(log.path.read_bytes().replace(b'"round": 3', b'"round": 4'))
    monkeypatch.setattr(sys, "argv", site)
    with pytest.raises(SystemExit) as end:
        main()
    sentence = f"fedhelix: '{log.path}' was changed: line 5 is not as signed.\n"
    assert (end.value.code, capsys.readouterr().err) == (2, sentence)
    worker = [sys.executable, "-m", "fedhelix.deploy.site_process", *words]
    ended = subprocess.run(worker, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (2, sentence)


FULL = """
import errno, sys
from pathlib import Path
from fedhelix.core.errors import UserError
from fedhelix.deploy import keys, messages
from fedhelix.deploy.audit_log import AuditLog, read_log
from fedhelix.deploy.site import Site

folder = Path(sys.argv[1])
key, filler = keys.make_site_key(folder, "north"), folder / "filler"

def fill():
    with filler.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1024))
        except OSError as problem:
            assert problem.errno == errno.ENOSPC

def refused():
    try:
        AuditLog(folder / "new.jsonl", key)
    except UserError as problem:
        return "cannot be written (No space left on device)" in str(problem)

fill()
assert refused() and refused()
filler.unlink()
assert len(read_log(AuditLog(folder / "new.jsonl", key).path, None)) == 1
log = AuditLog(folder / "north.jsonl", key)
site = Site("north", "digits", folder, log=log)
left = 1
for _ in range(3):
    left += "error" not in messages.read(site.answer(messages.write({"kind": "describe"}))).header
    fill()
    for _ in range(20):  # the first lines fit into the last block, and their heads do not
        answer = messages.read(site.answer(messages.write({"kind": "describe"})))
        assert answer.header["error"] == "the site's disk: No space left on device"
        assert len(read_log(log.path, None)) == left
    filler.unlink()
    log = site.log = AuditLog(log.path, key)
assert len(read_log(log.path, key.with_suffix(".pub"))) == left == 4
"""


def test_a_full_disk_spoils_no_log(tmp_path):
    """A real file system of a few blocks, in a name space of its own."""
    mounted = 'mount -t tmpfs -o size=64k tmpfs "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "-rm", "sh", "-c", mounted, "sh", str(tmp_path), sys.executable, FULL]
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("no name spaces here")
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("the site's disk: No space left on device") == 60


def test_server_and_sites_log_epsilon_and_what_was_exchanged(tmp_path, monkeypatch, capsys):
    pytest.importorskip("dp_accounting")
    deployment = InProcessDeployment(tmp_path, 2)
    for site in deployment.sites:
        key = keys.make_site_key(tmp_path / "keys", site.name)
        site.log = AuditLog(tmp_path / f"{site.name}.jsonl", key)
    values = {"clients": 2, "rounds": 1, "model": "linear", "epochs": 1, "kernels": "onednn"}
    for number, method in enumerate(("private", "dp-sgd")):
        federation = deployment.federation(make_spec(method, values), f"{number}" * 32)
        key = keys.make_site_key(tmp_path, "audit")
        log = AuditLog(tmp_path / f"{method}.jsonl", key)
        record = federation.fit(1, quiet=True, watch=keep_log(federation, log)).records[0]
        spent = record["metadata"]["epsilon"]["0"]
        delta = federation.method.options()["delta"]
        assert 0 < spent <= 8
        at_site = [e for e in read_log(tmp_path / "site-0.jsonl", None) if e["kind"] == "train"]
        assert at_site[-1]["epsilon"] == pytest.approx(spent, rel=1e-6)
        assert at_site[-1]["delta"] == delta
        entries = read_log(log.path, tmp_path / "audit.pub")
        times = [entry["time"] for entry in entries]
        assert times == sorted(times)  # though sites described themselves before the log was there
        trained = next(entry for entry in entries if entry["kind"] == "train")
        assert trained["received"]["site-0"]["sha256"] == at_site[-1]["sha256"]
        assert trained["asked"]["site-0"] == at_site[-1]["asked"]
        monkeypatch.setattr(sys, "argv", ["fedhelix", "audit", "log", str(log.path)])
        with pytest.raises(SystemExit):
            main()
        said = f"aggregate after round 1  epsilon {rounded_up(spent)} at delta {delta:.3g}\n"
        assert said in capsys.readouterr().out
        done = next(entry for entry in entries if entry["kind"] == "aggregate")
        assert done["epsilon"]["0"] == spent


def test_hashes_in_both_logs_are_those_of_whole_answers(tmp_path, capsys, monkeypatch):
    """Of scores, losses and descriptions as well as of tensors; the log names what left."""
    deployment = InProcessDeployment(tmp_path, 2)
    deployment.sites[1].policy = SitePolicy(metrics=False)  # refuses to send scores
    left = {site.name: [] for site in deployment.sites}
    for node, site in zip(deployment.grid.answers, deployment.sites, strict=True):
        site.log = AuditLog(tmp_path / site.name, keys.make_site_key(tmp_path / "keys", site.name))
        deployment.grid.answers[node] = partial(noted, site, left[site.name])
    values = {"clients": 2, "rounds": 1, "model": "linear", "epochs": 1, "kernels": "onednn"}
    federation = deployment.federation(make_spec("fedavg", values))
    log = AuditLog(tmp_path / "server", keys.make_site_key(tmp_path, "audit"))
    federation.fit(1, quiet=True, watch=keep_log(federation, log))
    lines = [entry for entry in read_log(log.path, None) if "received" in entry]
    assert [entry["kind"] for entry in lines] == ["describe", "describe", "train", "evaluate"]
    for name, hashes in left.items():
        at_site = [entry["sha256"] for entry in read_log(tmp_path / name, None)[1:]]
        came = [entry["received"][name]["sha256"] for entry in lines if name in entry["asked"]]
        assert came == at_site == hashes and len(set(hashes)) == 3
    assert "reports no scores" in lines[-1]["refused"]["site-1"]
    monkeypatch.setattr(sys, "argv", ["fedhelix", "audit", "log", str(tmp_path / "site-0")])
    with pytest.raises(SystemExit):
        main()
    _, described, trained, evaluated, _ = capsys.readouterr().out.splitlines()
    assert "describe  data: " in described
    assert "fedavg  loss, samples, 2 tensors: " in trained
    assert "fedavg  test, test_loss, used, valid: " in evaluated
    monkeypatch.setattr(sys, "argv", ["fedhelix", "audit", "log", str(log.path)])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().out.splitlines()
    assert " bytes left for site-0, " in said[1] and said[1].endswith(" came back from site-0")
    assert " bytes left for site-0, site-1, " in said[3]
    assert said[3].endswith(" came back from site-0, site-1")
    refused = "; site-1 answered: the site's policy reports no scores (metrics = false)"
    assert said[4].endswith(f" came back from site-0, site-1{refused}")


def noted(site, hashes, request):
    """A site's answer, whose hash is kept."""
    answer = site.answer(request)
    hashes.append(hashlib.sha256(answer).hexdigest())
    return answer


def test_a_run_leaves_a_log_at_every_site(tmp_path, capsys, monkeypatch):
    deployment = InProcessDeployment(tmp_path, 3)
    for site in deployment.sites:
        key = keys.make_site_key(tmp_path / "keys", site.name)
        site.log = AuditLog(tmp_path / f"{site.name}.jsonl", key)
    deployment.sites[2].policy = SitePolicy(methods=("fedper",))
    values = {"clients": 3, "rounds": 1, "model": "linear", "epochs": 1, "kernels": "onednn"}
    deployment.fit(make_spec("fedavg", values))
    logs = [tmp_path / f"{site.name}.jsonl" for site in deployment.sites]
    entries = read_log(logs[0], tmp_path / "keys" / "site-0.pub")
    trained = next(entry for entry in entries if entry["kind"] == "train")
    assert trained["method"] == "fedavg" and trained["round"] == 0
    assert trained["bytes"] > 650 * 4 and len(trained["sha256"]) == len(trained["asked"]) == 64
    assert [10, 64] in trained["sent"].values()
    refused = [entry for entry in read_log(logs[2], None) if "error" in entry]
    assert "runs fedper only" in refused[0]["error"]
    monkeypatch.setattr(sys, "argv", ["fedhelix", "audit", "log", *map(str, logs)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert "train of round 1  fedavg  " in printed
    assert "evaluate after round 1  fedavg  " in printed and "round 2" not in printed
    assert "lines, none changed" in printed
    logs[1].write_bytes(logs[1].read_bytes().replace(b'"round": 0', b'"round": 1', 1))
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and "was changed" in capsys.readouterr().err


def test_a_log_with_nothing_but_its_beginning_begins_anew_with_another_key(tmp_path):
    wrong, right = (keys.make_site_key(tmp_path, name) for name in ("wrong", "right"))
    path, public = tmp_path / "site.jsonl", tmp_path / "right.pub"
    AuditLog(path, wrong)  # whose key the server refuses
    head = json.loads(head_path(path).read_bytes())
    log = AuditLog(path, right)
    assert [entry["kind"] for entry in read_log(path, public)] == ["opened"]
    log.append({"kind": "train"})
    with pytest.raises(UserError, match="was written with another key"):
        AuditLog(path, wrong)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0])  # cut off: the head tells
    with pytest.raises(UserError, match="was written with another key"):
        AuditLog(path, wrong)
    head_path(path).write_text(json.dumps(head))  # forged: not this key's
    with pytest.raises(UserError, match="was written with another key"):
        AuditLog(path, keys.make_site_key(tmp_path, "third"))


def test_a_new_beginning_of_a_log_that_was_cut_short_goes_on(tmp_path, monkeypatch):
    wrong, right = (keys.make_site_key(tmp_path, name) for name in ("wrong", "right"))
    path = tmp_path / "site.jsonl"
    AuditLog(path, wrong)
    with monkeypatch.context() as crash, pytest.raises(KeyboardInterrupt):
        crash.setattr(type(path), "unlink", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        AuditLog(path, right)
    AuditLog(path, right)
    assert [entry["kind"] for entry in read_log(path, tmp_path / "right.pub")] == ["opened"]


def test_a_line_of_the_server_names_eight_sites_and_why_three_did_not_answer():
    sites = [f"s{n}" for n in range(10)]
    refused = dict.fromkeys(sites[1:], "is not connected.")
    line = {"bytes": 10, "asked": dict.fromkeys(sites, ""), "received": {"s0": {"bytes": 5}}}
    assert moved({**line, "refused": refused}) == (
        "10 bytes left for s0, s1, s2, s3, s4, s5, s6, s7 and 2 more, 5 bytes came back from s0; "
        "s1 is not connected; s2 is not connected; s3 is not connected; and 6 more"
    )
    empty = {**line, "received": {}, "refused": {}}
    assert moved({**empty, "asked": {"s0": ""}}) == "10 bytes left for s0, 0 bytes came back"
