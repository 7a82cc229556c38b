import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import r2_score

from fedhelix.core.errors import UserError
from fedhelix.core.objective import (
    Objective,
    accuracy,
    cross_entropy,
    evaluate_all,
    evaluate_outputs,
    objective_for,
    r2,
    squared_error,
)


def test_losses_give_one_value_per_sample():
    output, target = torch.randn(5, 3), torch.tensor([0, 1, 2, 1, 0])
    assert torch.equal(
        objective_for(3).loss(output, target), F.cross_entropy(output, target, reduction="none")
    )
    by_hand = torch.tensor([[1.0], [4.0]]), torch.tensor([3.0, 4.0])
    assert squared_error(*by_hand).tolist() == [4.0, 0.0]
    assert squared_error(torch.tensor([[1.0, 5.0]]), torch.tensor([[2.0, 2.0]])).tolist() == [
        (1 + 9) / 2
    ]


def test_accuracy_and_r2():
    assert accuracy(torch.eye(4), torch.tensor([0, 1, 3, 3])).item() == 0.75
    draw = np.random.default_rng(0)
    target = draw.normal(size=50).astype("float32")
    output = (target + draw.normal(size=50) / 2).astype("float32")
    found = r2(torch.from_numpy(output)[:, None], torch.from_numpy(target)).item()
    assert found == pytest.approx(r2_score(target, output), abs=1e-5)


def test_r2_of_several_targets_is_weighted_by_their_variance():
    draw = np.random.default_rng(1)
    target = draw.normal(size=(40, 3)) * [1, 5, 20]
    output = target + draw.normal(size=(40, 3)) * 4
    expected = r2_score(target, output, multioutput="variance_weighted")
    assert r2(*map(torch.from_numpy, (output, target))).item() == pytest.approx(expected)
    assert math.isnan(r2(torch.ones(1, 1), torch.zeros(1)).item())  # one sample has no variance


def test_padding_does_not_count():
    objective = objective_for(3)
    output, target = torch.randn(6, 3), torch.tensor([0, 1, 2, 1, 0, 0])
    mask = torch.tensor([1.0, 1, 1, 1, 0, 0])
    assert objective.mean_loss(output, target, mask).item() == pytest.approx(
        objective.mean_loss(output[:4], target[:4]).item()
    )
    assert objective.mean_loss(output, target, torch.zeros(6)).item() == 0


def test_names_and_replacements():
    assert objective_for(10).name == "accuracy" and objective_for(None).name == "score"
    metric = lambda output, target: 0.5  # noqa: E731
    assert objective_for(10, metric=metric).name == "score"
    scalar = Objective(lambda output, target: (output - target).abs().mean(), metric)
    assert evaluate_outputs(scalar, torch.ones(4), torch.zeros(4)) == (0.5, 1.0)
    assert all(map(math.isnan, evaluate_outputs(scalar, torch.ones(0), torch.zeros(0))))


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (None, "NoneType"),
        (torch.ones(4), r"Tensor of shape \(4,\)"),
        (np.ones(4), "ndarray of shape"),
        ("x", "str"),
    ],
    ids=["nothing", "tensor", "array", "text"],
)
def test_a_metric_is_one_number(found, kind):
    objective = objective_for(3, metric=lambda output, target: found)
    with pytest.raises(
        UserError, match=f"metric must return one number for all samples, not {kind}"
    ):
        evaluate_outputs(objective, torch.eye(3), torch.arange(3))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"loss": "mse"}, "loss is a function of outputs and targets, not 'mse'"),
        ({"metric": "AUC"}, "not the text 'AUC'; did you mean fedhelix.metrics.auc?"),
        (
            {"metric": "mse"},
            "not the text 'mse'; fedhelix.metrics has auc, f1, iou, neg_perplexity, perplexity",
        ),
        ({"metric": 3}, "metric is a function of outputs and targets, not 3."),
    ],
)
def test_losses_and_metrics_are_functions(given, said):
    with pytest.raises(UserError, match=re.escape(said)):
        objective_for(3, **given)


def test_several_models_on_the_same_samples_are_evaluated_as_one_after_the_other():
    draws = torch.Generator().manual_seed(0)
    outputs = [torch.randn(50, 4, generator=draws) for _ in range(3)]
    target = torch.randint(4, (50,), generator=draws)
    plain = objective_for(4)
    assert plain.by_sample is not None
    together = evaluate_all(plain, outputs, [target] * 3)
    for found, output in zip(together, outputs, strict=True):
        assert found == pytest.approx(evaluate_outputs(plain, output, target))
    nothing = evaluate_all(plain, [torch.zeros(0, 4)] * 2, [target[:0]] * 2)
    assert all(math.isnan(value) for pair in nothing for value in pair)


def test_a_metric_that_raises_value_error_is_named_with_the_shapes():
    """As scikit-learn's do, given outputs where they want classes."""

    def picky(outputs, targets):
        raise ValueError("a mix of targets.\nmore")

    objective = Objective(cross_entropy, picky)
    said = r"^metric fails for outputs of shape \(4, 2\) and targets of shape \(4,\) with 'a mix of"
    with pytest.raises(UserError, match=said):
        objective.measure(torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))
