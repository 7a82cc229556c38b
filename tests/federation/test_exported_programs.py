"""Exported programs of models that their methods use in ways of their own."""

import pytest
import torch

from helpers import small


@pytest.mark.parametrize("method", ["knn-per", "fedcp"])
def test_a_program_predicts_as_the_method_does_for_any_number_of_samples(method, tmp_path):
    run = small(method, "mlp").fit(1, quiet=True)
    run.export(tmp_path, "torch", client=1)
    program = torch.export.load(tmp_path / "model.pt2").module()
    data = run.federation.data
    for count in (1, 5):
        x = data.prepare(data.x_test[:count])
        assert torch.allclose(program(x), run.personal(1)(x), atol=1e-5)
