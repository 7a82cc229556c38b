"""Inversion of a real round: counts of labels by hand, what is seen, and what protection does."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from fedhelix import FedAvg, FedPer, Secure, UserError, load
from fedhelix.cli.app import main
from fedhelix.core.bounds import rounded_up
from fedhelix.privacy.reconstruction import (
    InversionAudit,
    _federation,
    found_share,
    inversion,
    label_counts,
    matched,
    observed,
    total_variation,
)

FEW = InversionAudit(clients=2, images=2, steps=1, restarts=1)


def test_total_variation_by_hand():
    """Rows 0 1 3 and 0 0 0: differences down 0 1 3, to the right 1 2 0 0."""
    image = torch.tensor([[[0.0, 1, 3], [0, 0, 0]]])
    assert float(total_variation(image)) == pytest.approx(4 / 3 + 3 / 4)


def test_images_are_matched_with_the_true_ones():
    truth = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(matched(truth[[2, 0, 1]] + 0.01, truth), truth + 0.01)


def test_a_share_of_labels_by_hand():
    assert found_share(torch.tensor([2, 0, 1]), torch.tensor([1, 1, 1])) == pytest.approx(2 / 3)


def test_the_server_sees_the_gradient_of_a_client_or_the_mean_of_all():
    data = load("digits")
    alone, _ = observed(_federation(FedAvg(), data, FEW))
    fed = _federation(Secure(), data, FEW)
    mean, spent = observed(fed)
    assert spent is None
    gradients = []
    for split in fed.splits:
        rows = torch.from_numpy(split.train)
        module = fed.engine.setup.module
        module.load_state_dict(fed.initial)
        outputs = module(fed.data.prepare(fed.data.x[rows]))
        loss = torch.nn.functional.cross_entropy(outputs, fed.data.y[rows])
        gradients.append(torch.autograd.grad(loss, list(module.parameters())))
    names = [name for name, _ in fed.engine.setup.module.named_parameters()]
    for name, first, second in zip(names, *gradients, strict=True):
        assert torch.allclose(alone[name].float(), first, atol=1e-4)
        assert torch.allclose(mean[name].float(), (first + second) / 2, atol=1e-4)


def test_labels_are_counted_from_biases_where_these_are_sent():
    settings = replace(FEW, images=8)
    fed = _federation(FedAvg(), load("digits"), settings)
    seen, _ = observed(fed)
    module = fed.engine.setup.module.double().eval()
    model = {name: value.double() for name, value in fed.initial.items()}
    counts = label_counts(module, model, fed, seen, 8)
    true = torch.bincount(fed.data.y[torch.from_numpy(fed.splits[0].train)], minlength=10)
    assert int(counts.sum()) == 8 and found_share(counts, true) >= 7 / 8
    head = {name: value for name, value in seen.items() if name not in fed.layers.head}
    assert label_counts(module, model, fed, head, 8) is None
    assert set(observed(_federation(FedPer(), load("digits"), FEW))[0]) == set(head)


def test_images_leak_from_an_upload_and_not_through_noise(tmp_path, monkeypatch, capsys):
    pytest.importorskip("dp_accounting")
    words = ["audit", "inversion", "fedavg", "dp-sgd@epsilon=8", "-o", str(tmp_path / "a.png")]
    few = {"clients": 2, "images": 1, "steps": 120, "restarts": 1}
    words += [word for key, value in few.items() for word in ("--set", f"{key}={value}")]
    monkeypatch.setattr(sys, "argv", ["fedhelix", *words])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0 and (tmp_path / "a.png").exists()
    plain, noisy = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert plain["psnr"] > 18 and noisy["psnr"] < 12
    assert plain["labels"] == 1 and plain["epsilon"] is None
    assert noisy["epsilon"] == pytest.approx(8, rel=0.01)
    shown = capsys.readouterr().out.splitlines()
    assert "epsilon" in shown[0] and "none" in shown[2] and shown[2].count(" 100.0 %") == 2
    assert rounded_up(noisy["epsilon"]) in shown[3].split()


@pytest.mark.parametrize(
    ("methods", "settings", "said"),
    [
        (["fedavg"], {"data": "wine"}, "does not classify images"),
        (["fedavg"], {"images": 1000}, "has only"),
        (["local"], {}, "uploads no parameters"),
    ],
)
def test_bad_input(methods, settings, said):
    with pytest.raises(UserError, match=said):
        list(inversion(methods, replace(FEW, **settings)))
