"""Exported programs give the outputs of the models that the methods use."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from fedhelix import Federation, UserError, from_arrays, from_table
from helpers import small

METHODS = [
    ("knn-per", "mlp"),
    ("fedcp", "mlp"),
    ("helix", "digits-cnn"),
    ("fedper", "digits-bn-cnn"),
    ("heterofl", "digits-bn-cnn"),
    ("fedit", "lora-mlp"),
]


@pytest.mark.parametrize(("method", "network"), METHODS)
def test_a_program_predicts_as_the_method_does_for_any_number_of_samples(method, network, tmp_path):
    run = small(method, network).fit(1, quiet=True)
    run.export(tmp_path, "torch", client=1)
    program = torch.export.load(tmp_path / "model.pt2").module()
    data = run.federation.data
    for count in (1, 5, 30):
        x = data.prepare(data.x_test[:count])
        assert torch.allclose(program(x), run.personal_model(1)(x), atol=1e-5)


@pytest.mark.parametrize(("method", "network"), METHODS[-2:])
def test_onnx_predicts_as_the_method_does(method, network, tmp_path):
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    run = small(method, network).fit(1, quiet=True)
    run.export(tmp_path, "onnx", client=1)
    session = reference.ReferenceEvaluator(str(tmp_path / "model.onnx"))
    data = run.federation.data
    x = data.prepare(data.x_test[:5])
    (found,) = session.run(None, {session.input_names[0]: x.numpy()})
    assert np.allclose(found, run.personal_model(1)(x).detach().numpy(), atol=1e-5)


def test_an_export_prints_nothing(tmp_path):
    """In a process of its own: what the exporter says of its parts, it says when it is imported."""
    pytest.importorskip("onnxscript")
    lines = (
        "from fedhelix import Federation",
        "fed = Federation('digits', clients=2, engine='serial', kernels='native')",
        "run = fed.fit(1, quiet=True)",
        f"run.export({str(tmp_path)!r}, ('onnx', 'torch'))",
    )
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    assert (tmp_path / "model.onnx").is_file()
    assert (ended.stdout, ended.stderr) == ("", "")


class Reader(nn.Module):
    """The mean of embedded tokens, as far as the mask says."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 4), nn.Linear(4, 2)

    def forward(self, words, seen):
        return self.head((self.embedding(words) * seen[..., None]).sum(1))


class Recurrent(Reader):
    """The last state before the padding, of which PyTorch makes a program of so many steps."""

    def __init__(self):
        super().__init__()
        self.steps = nn.GRU(4, 4, batch_first=True)

    def forward(self, words, seen):
        states, _ = self.steps(self.embedding(words))
        return self.head((states * seen[..., None]).sum(1))


class Choosy(Reader):
    """What it does depends on values, which no program can follow."""

    def forward(self, words, seen):
        return super().forward(words, seen) * (2 if words.sum() > 50 else 1)


def trained(network):
    draw = np.random.default_rng(0)
    x = [draw.integers(0, 20, length) for length in draw.integers(2, 9, 40)]
    data = from_arrays(x, np.arange(40) % 2)
    return Federation(data, "iid", clients=2, model=network, kernels="onednn").fit(1, quiet=True)


def test_a_program_takes_sequences_of_any_length(tmp_path):
    run = trained(Reader)
    run.export(tmp_path, "torch")
    program = torch.export.load(tmp_path / "model.pt2").module()
    for width in (3, 12):
        words = torch.arange(width).expand(5, -1)
        found = program(words, torch.ones_like(words, dtype=torch.bool))
        assert np.allclose(found.detach(), run.predict(words, raw=True), atol=1e-5)
    card = (tmp_path / "README.md").read_text()
    assert "words 8 int64, seen 8 bool; sequences are padded at the end, and seen is 1" in card
    assert "alone" not in card


def test_a_recurrent_program_takes_one_length_and_the_card_says_so(tmp_path):
    run = trained(Recurrent)
    words = [[1, 2, 3], [4, 5]]
    assert run.prepare(words)[0].shape == (2, 3), "the network itself masks the padding"
    card = (run.export(tmp_path, "torch") / "README.md").read_text()
    assert "\nmodel.pt2 takes sequences of length 8 alone; `run.prepare(x, padded=True)`" in card
    program = torch.export.load(tmp_path / "model.pt2").module()
    found = program(*run.prepare(words, padded=True)).detach()
    assert np.allclose(found, run.predict(words, raw=True), atol=1e-5)


def test_a_recurrent_network_as_onnx_takes_what_its_card_says(tmp_path):
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    run = trained(Recurrent)
    words = [[1, 2, 3], [4, 5]]
    card = (run.export(tmp_path, "onnx") / "README.md").read_text()
    session = reference.ReferenceEvaluator(str(tmp_path / "model.onnx"))
    given = [part.numpy() for part in run.prepare(words, padded="of length 8 alone" in card)]
    (found,) = session.run(None, dict(zip(session.input_names, given, strict=True)))
    assert np.allclose(found, run.predict(words, raw=True), atol=1e-5)


def test_what_cannot_be_exported_is_refused(tmp_path):
    run = trained(Choosy)
    with pytest.raises(UserError, match=r"a program of this network \(.*\); onnx may succeed"):
        run.export(tmp_path, "torch")
    with pytest.raises(UserError, match="formats is empty; give some of safetensors, torch, onnx"):
        run.export(tmp_path, [])
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="PyTorch cannot make a program of this network"):
        run.export(tmp_path / "new" / "model", "torch")
    with pytest.raises(UserError, match="formats are safetensors, torch, onnx, not 'pickle'"):
        run.export(tmp_path / "other", ["safetensors", "pickle"], client="nobody")
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="PyTorch cannot make a program of this network"):
        run.export(tmp_path / "both", ["safetensors", "torch"])
    assert [file.name for file in (tmp_path / "both").iterdir()] == ["model.safetensors"]


def test_the_card_of_a_table_lists_its_columns_and_one_sample_needs_an_axis(tmp_path):
    rows = np.random.default_rng(0).random((60, 2))
    table = pd.DataFrame({"bmi": rows[:, 0], "age": rows[:, 1], "y": np.arange(60) % 2})
    fed = Federation(from_table(table, "y"), "iid", clients=2, model="mlp", kernels="onednn")
    run = fed.fit(1, quiet=True)
    card = (run.export(tmp_path) / "README.md").read_text()
    assert "| Columns, in this order | bmi, age |" in card
    with pytest.raises(UserError, match=r"x is one sample, of shape \(2,\), .* such as x\[None\]"):
        run.predict(rows[0])
    assert run.predict(rows[:1]).shape == run.predict(rows[0][None]).shape == (1,)


def test_the_card_counts_classes_of_pixels(tmp_path):
    x, y = np.random.default_rng(0).random((12, 1, 3, 3)), np.arange(12 * 9).reshape(12, 3, 3) % 4
    fed = Federation(from_arrays(x, y), "iid", clients=2, model=nn.Conv2d(1, 4, 1), engine="serial")
    fed.fit(1, quiet=True).export(tmp_path, ["safetensors"])
    assert "| Classes | 4 |" in (tmp_path / "README.md").read_text()
