"""The audit log: what is in it, and that every kind of tampering is found."""

import hashlib
import json
import sys
from functools import partial

import pytest

from fedhelix.cli.app import main
from fedhelix.core.errors import UserError
from fedhelix.deploy import keys
from fedhelix.deploy.audit_log import AuditLog, head_path, read_log
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
    with pytest.raises(UserError, match=r"north.jsonl' was removed"):
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


def test_a_log_of_another_key_and_a_forged_head_are_found(log, tmp_path):
    keys.make_site_key(tmp_path, "south")
    with pytest.raises(UserError, match="line 1 is not as signed, or the key is another site's"):
        read_log(log.path, tmp_path / "south.pub")
    head = json.loads(head_path(log.path).read_bytes())
    head_path(log.path).write_text(json.dumps({**head, "line": 5}))
    with pytest.raises(UserError, match="missing or not as signed"):
        read_log(log.path, None)
    head_path(log.path).unlink()
    with pytest.raises(UserError, match="missing or not as signed"):
        read_log(log.path, None)


def test_a_writer_that_was_killed_leaves_a_log_that_goes_on(log, tmp_path):
    head, whole = head_path(log.path).read_bytes(), log.path.read_bytes()
    log.append({"kind": "train"})
    head_path(log.path).write_bytes(head)  # killed between the line and the head
    assert len(read_log(log.path, None)) == 7
    log.path.write_bytes(whole + b'{"line": 7, "ti')  # killed within the line
    AuditLog(log.path, tmp_path / "north.key").append({"kind": "evaluate"})
    assert read_log(log.path, None)[-1]["kind"] == "evaluate"


def test_server_and_sites_log_epsilon_and_what_was_exchanged(tmp_path):
    pytest.importorskip("dp_accounting")
    deployment = InProcessDeployment(tmp_path, 2)
    for site in deployment.sites:
        key = keys.make_site_key(tmp_path / "keys", site.name)
        site.log = AuditLog(tmp_path / f"{site.name}.jsonl", key)
    settings = {"clients": 2, "rounds": 1, "model": "linear", "epochs": 1, "kernels": "onednn"}
    for number, method in enumerate(("private", "dp-sgd")):
        federation = deployment.federation(make_spec(method, settings), f"{number}" * 32)
        key = keys.make_site_key(tmp_path, "audit")
        log = AuditLog(tmp_path / f"{method}.jsonl", key)
        record = federation.fit(1, quiet=True, watch=keep_log(federation, log)).records[0]
        spent = record["metadata"]["epsilon"]["0"]
        assert 0 < spent <= 8
        at_site = [e for e in read_log(tmp_path / "site-0.jsonl", None) if e["kind"] == "train"]
        assert at_site[-1]["epsilon"] == pytest.approx(spent, rel=1e-6)
        entries = read_log(log.path, tmp_path / "audit.pub")
        trained = next(entry for entry in entries if entry["kind"] == "train")
        assert trained["received"]["site-0"]["sha256"] == at_site[-1]["sha256"]
        assert trained["asked"]["site-0"] == at_site[-1]["asked"]
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
    settings = {"clients": 2, "rounds": 1, "model": "linear", "epochs": 1, "kernels": "onednn"}
    federation = deployment.federation(make_spec("fedavg", settings))
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
    settings = {"clients": 3, "rounds": 1, "model": "linear", "epochs": 1, "kernels": "onednn"}
    deployment.fit(make_spec("fedavg", settings))
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
