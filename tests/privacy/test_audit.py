"""Audits of methods and runs through the command line."""

import json
from pathlib import Path

import pytest

from fedhelix.data import Availability
from fedhelix.privacy import audit, victim
from fedhelix.privacy.settings import Audit
from fedhelix.privacy.victim import Victim

QUICK = ["--set", "data=digits", "--set", "images=1", "--set", "restarts=1", "--set", "steps=3"]


def test_what_is_attacked_is_what_is_uploaded():
    requested = Audit(data="digits", model="digits-cnn")
    everything = Victim.of("fedavg", requested)
    assert everything.sent == list(everything.federation.layers.parameters)
    assert Victim.of("partialfed", requested).sent == [
        "conv1.weight",
        "conv1.bias",
        "conv2.weight",
        "conv2.bias",
    ]
    gene = Victim.of("gene-fl", requested)
    sizes = gene.federation.layers.sizes
    assert 0 < sum(sizes[name] for name in gene.sent) <= 0.25 * sum(sizes.values())


def test_an_audit_leaves_a_picture_and_its_figures(cli, tmp_path):
    found = cli("audit", "idlg", "fedavg", "gene-fl", *QUICK, "-o", "side[x].png")
    assert found.code == 0, found.err
    assert (
        "insider" in found.out
        and "fedavg + noise" in found.out
        and "picture: side[x].png\n" in found.out
    )
    assert (tmp_path / "side[x].png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((tmp_path / "side[x].json").read_text())["rows"]
    names = [(row["method"], row["attacker"]) for row in rows]
    whole, part = ["fedavg", "fedavg + noise"], ["outsider", "insider"]
    assert names == [(method, "insider") for method in whole] + [("gene-fl", who) for who in part]
    assert rows[0]["seen"] == 1 and rows[0]["labels"] in (0, 1) and rows[2]["labels"] is None


def test_what_a_stopped_audit_has_found_is_kept(cli, tmp_path, monkeypatch):
    def interrupted(victim, requested, noise, insider):
        if noise:
            raise KeyboardInterrupt
        return attack(victim, requested, noise, insider)

    attack = audit.attack
    monkeypatch.setattr(audit, "attack", interrupted)
    found = cli("audit", "idlg", "fedavg", *QUICK, "-o", "side.png")
    assert (
        found.code == 130
        and "'side.png' and the JSON beside it hold what was found so far" in found.err
    )
    assert [row["method"] for row in json.loads((tmp_path / "side.json").read_text())["rows"]] == [
        "fedavg"
    ]
    assert (tmp_path / "side.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("requested", "here", "taken"),
    [("auto", True, "cifar10"), ("auto", False, "digits"), ("cifar10", False, "cifar10")],
)
def test_only_who_does_not_choose_gets_other_pictures(monkeypatch, requested, here, taken):
    found = Availability("cifar10", "a folder" if here else None, None, None, "")
    monkeypatch.setattr(victim, "available", lambda data_dir: [found])
    monkeypatch.setattr(victim, "load", lambda name, data_dir: name)
    assert victim.found_data(Audit(data=requested)) == taken


def test_a_run_can_be_audited(cli):
    assert (
        cli(
            "run", "fedper", "--rounds", 1, "--clients", 4, "--model", "digits-cnn", "--out", "run"
        ).code
        == 0
    )
    before = Path("run/metrics.jsonl").read_bytes()
    found = cli("audit", "idlg", "run", *QUICK[2:], "--json")
    assert (
        not Path("run/lock").exists() and Path("run/metrics.jsonl").read_bytes() == before
    )  # it only looks
    assert found.code == 0, found.err
    assert json.loads(found.out)["rows"][0]["method"] == "fedper"
    found = cli("audit", "idlg", "run", "--set", "model=lenet")
    assert found.code == 2 and "leave '--set model=lenet' out" in found.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["dlg", "fedavg"], "unknown attack 'dlg'"),
        (["idlg", "local"], "local uploads no parameters"),
        (["idlg", "fedavg", "-o", "x.jpg"], "must be a .png"),
        (["idlg", "fedavg", "--set", "images=0"], "images must be at least 1"),
        (["idlg", "fedavg", "--set", "images"], "--set takes KEY=VALUE"),
    ],
)
def test_mistakes_get_one_sentence(cli, words, sentence):
    found = cli("audit", *words, "--set", "data=digits")
    assert found.code == 2 and sentence in found.err and len(found.err.splitlines()) == 1
