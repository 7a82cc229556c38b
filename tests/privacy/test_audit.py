"""Audits of methods and runs through the command line."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from fedhelix import load
from fedhelix.data import Availability
from fedhelix.privacy import audit, victim
from fedhelix.privacy.settings import Audit
from fedhelix.privacy.victim import Victim

QUICK = ["--set", "data=digits", "--set", "images=1", "--set", "restarts=1", "--set", "steps=3"]


def test_what_is_attacked_is_what_is_uploaded():
    settings = Audit(data="digits", model="digits-cnn")
    everything = Victim.of("fedavg", settings)
    assert everything.sent == list(everything.federation.layers.parameters)
    assert Victim.of("partialfed", settings).sent == [
        "conv1.weight",
        "conv1.bias",
        "conv2.weight",
        "conv2.bias",
    ]
    gene = Victim.of("gene-fl", settings)
    sizes = gene.federation.layers.sizes
    assert 0 < sum(sizes[name] for name in gene.sent) <= 0.25 * sum(sizes.values())


def test_the_victims_images_are_normalised_as_in_training(monkeypatch):
    digits = dataclasses.replace(load("digits"), mean=(0.3,), std=(0.4,))
    monkeypatch.setattr(victim, "load_data", lambda settings: digits)
    settings = Audit(data="digits", images=2, restarts=1, steps=300, noise=0.0)
    client = Victim.of("fedavg", settings)
    fed = client.federation
    truth, labels = audit.chosen_images(client, settings)
    seen = audit.observed(client, truth, labels)
    module = fed.engine.setup.module
    module.load_state_dict(client.model)
    inputs = (truth[:1] - 0.3) / 0.4
    loss = torch.nn.functional.cross_entropy(module(inputs), labels[:1])
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    for (name, _), gradient in zip(module.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(seen[name][0], gradient)
    (row,) = audit.audit(["fedavg"], settings)
    assert row["psnr"] > 25  # pixels are compared with pixels


def test_an_audit_writes_a_figure_and_its_numbers(cli, tmp_path):
    result = cli("audit", "idlg", "fedavg", "gene-fl", *QUICK, "-o", "side[x].png")
    assert result.code == 0, result.err
    assert "insider" in result.out and "fedavg + noise" in result.out
    assert "figure: side[x].png\n" in result.out
    assert (tmp_path / "side[x].png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((tmp_path / "side[x].json").read_text())["rows"]
    names = [(row["method"], row["attacker"]) for row in rows]
    whole, part = ["fedavg", "fedavg + noise"], ["outsider", "insider"]
    assert names == [(method, "insider") for method in whole] + [("gene-fl", who) for who in part]
    assert rows[0]["seen"] == 1 and rows[0]["labels"] in (0, 1) and rows[2]["labels"] is None


def test_the_rows_of_an_interrupted_audit_are_kept(cli, tmp_path, monkeypatch):
    def interrupted(victim, settings, noise, insider):
        if noise:
            raise KeyboardInterrupt
        return attack(victim, settings, noise, insider)

    attack = audit.attack
    monkeypatch.setattr(audit, "attack", interrupted)
    result = cli("audit", "idlg", "fedavg", *QUICK, "-o", "side.png")
    assert result.code == 130
    assert "'side.png' and the JSON beside it hold the rows so far" in result.err
    rows = json.loads((tmp_path / "side.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["fedavg"]
    assert (tmp_path / "side.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "here", "loaded"),
    [("auto", True, "cifar10"), ("auto", False, "digits"), ("cifar10", False, "cifar10")],
)
def test_only_auto_falls_back_to_another_data_set(monkeypatch, name, here, loaded):
    cifar = Availability("cifar10", "a folder" if here else None, None, None, "")
    monkeypatch.setattr(victim, "available", lambda data_dir: [cifar])
    monkeypatch.setattr(victim, "load", lambda name, data_dir: name)
    assert victim.load_data(Audit(data=name)) == loaded


def test_a_run_can_be_audited(cli):
    few = ["--rounds", 1, "--clients", 4, "--epochs", 1, "--kernels", "native"]
    assert cli("run", "fedper", *few, "--model", "digits-cnn", "--out", "run").code == 0
    before = Path("run/metrics.jsonl").read_bytes()
    result = cli("audit", "idlg", "run", *QUICK[2:], "--json")
    # An audit does not write to the run.
    assert not Path("run/lock").exists() and Path("run/metrics.jsonl").read_bytes() == before
    assert result.code == 0, result.err
    assert json.loads(result.out)["rows"][0]["method"] == "fedper"
    result = cli("audit", "idlg", "run", "--set", "model=lenet")
    assert result.code == 2 and "leave '--set model=lenet' out" in result.err
    for attack in ("membership", "inversion"):
        result = cli("audit", attack, "run")
        assert result.code == 2 and f"audit {attack} trains methods itself" in result.err
    result = cli("audit", "idlg", ".")
    assert result.code == 2 and "'.' is no run folder" in result.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["dlg", "fedavg"], "unknown attack 'dlg'"),
        (["idlg", "local"], "local uploads no parameters"),
        (["idlg", "fedavg", "secure"], "`fedhelix audit inversion secure` attacks what leaves"),
        (["idlg", "fedavg@lr=0.1"], "idlg takes METHODS without options"),
        (["idlg", "fedavg", "-o", "x.jpg"], "must be a .png"),
        (["idlg", "fedavg", "--set", "images=0"], "images must be at least 1"),
        (["idlg", "fedavg", "--set", "images"], "--set takes KEY=VALUE"),
    ],
)
def test_mistakes_get_one_sentence(cli, words, sentence):
    result = cli("audit", *words, "--set", "data=digits")
    assert result.code == 2 and sentence in result.err and len(result.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("x", "unknown attack 'x'; there are: idlg, inversion, log, membership."),
        ("idgl", "unknown attack 'idgl'; did you mean 'idlg'?"),
        ("idgl fedavg", "unknown attack 'idgl'; did you mean 'idlg'?"),
        ("run", "'run' is a run; first comes one of idlg, .* `fedhelix audit idlg run`."),
        ("run idlg", "'run' is a run; first comes one of idlg, .* `fedhelix audit idlg run`."),
        ("empty", "'empty' is a folder, and no run; first comes one of idlg, "),
        ("a.jsonl", "'a.jsonl' is a file; first comes one of .* `fedhelix audit log a.jsonl`."),
        ("no/where", "there is no file or folder 'no/where'; first comes one of idlg, "),
        ("fedavg", "'fedavg' is a method; first .*, as in `fedhelix audit idlg fedavg`."),
        ("log", "audit log takes audit logs such as site/clinic-a.jsonl, and none is given."),
        ("idlg", "audit idlg takes methods such as fedavg, or run folders, and none is given."),
        ("idlg a.jsonl", "'a.jsonl' is a file, .* checked with `fedhelix audit log a.jsonl`."),
        ("idlg no/where", "there is no folder 'no/where'; audit idlg takes methods such as "),
        ("idlg fedagv", "unknown method 'fedagv'; did you mean 'fedavg'?"),
        ("log empty", "'empty' is a folder; audit log takes audit logs such as "),
        ("log absent.jsonl", "there is no log 'absent.jsonl'."),
    ],
)
def test_what_is_wrong_with_the_words_of_an_audit_is_told(cli, tmp_path, words, says):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("format = 1\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.jsonl").write_text("hello\n")
    done = cli("audit", *words.split())
    assert done.code == 2 and done.err.count("\n") == 1
    first, _, last = says.partition(" .*")
    assert done.err.startswith(f"fedhelix: {first}") and last.strip() in done.err


@pytest.mark.parametrize("attack", ["idlg", "inversion", "membership"])
def test_a_key_is_for_logs_alone(attack, cli):
    done = cli("audit", attack, "fedavg", "--key", "nope.pub")
    assert done.code == 2 and f"--key is for audit log; audit {attack} reads no key" in done.err
