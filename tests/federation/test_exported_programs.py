"""Exported programs give the outputs of the models that the methods use."""

import numpy as np
import pytest
import torch

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
    for count in (1, 5):
        x = data.prepare(data.x_test[:count])
        assert torch.allclose(program(x), run.personal_model(1)(x), atol=1e-5)


@pytest.mark.parametrize(("method", "network"), METHODS[-2:])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
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
