"""Ready metrics against scikit-learn."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, jaccard_score, log_loss, roc_auc_score

from fedhelix import UserError
from fedhelix.core.metrics import IGNORED, auc, f1, iou, neg_perplexity, perplexity
from fedhelix.core.objective import binary_cross_entropy, token_accuracy, token_cross_entropy


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_perplexity_is_the_exponential_of_the_log_loss():
    output, target = normal(6, 5, 4), torch.arange(30).reshape(6, 5) % 4
    expected = math.exp(log_loss(target.flatten(), output.flatten(0, 1).softmax(-1).numpy()))
    assert perplexity(output, target).item() == pytest.approx(expected, rel=1e-5)
    assert neg_perplexity(output, target).item() == pytest.approx(-expected, rel=1e-5)
    assert perplexity(torch.zeros(3, 7), torch.tensor([0, 1, 6])).item() == pytest.approx(7)


def test_padding_counts_in_no_metric_of_tokens():
    output, target = normal(2, 4, 3), torch.tensor([[0, 1, 2, 0], [1, 1, IGNORED, IGNORED]])
    kept = torch.cat([output[0], output[1, :2]]), torch.tensor([0, 1, 2, 0, 1, 1])
    assert perplexity(output, target) == pytest.approx(perplexity(*kept).item())
    assert token_accuracy(output, target) == (kept[0].argmax(1) == kept[1]).float().mean()
    first, second = token_cross_entropy(output, target)
    alone = torch.nn.functional.cross_entropy
    assert first.item() == pytest.approx(alone(output[0], target[0]).item())
    assert second.item() == pytest.approx(alone(output[1, :2], target[1, :2]).item())


def test_f1_is_macro_over_the_labels():
    output, target = normal(40, 3), normal(40, 3, 1)[..., 0] > 0.4
    expected = f1_score(target.numpy(), (output > 0).numpy(), average="macro")
    assert f1(output, target).item() == pytest.approx(expected)
    assert f1(output, target.long()).item() == f1(output, target.int()).item()
    assert f1(output, target.long()).item() == pytest.approx(expected)
    nowhere = torch.cat([target, torch.zeros(40, 1, dtype=torch.bool)], 1)
    assert f1(torch.cat([output, -torch.ones(40, 1)], 1), nowhere) == f1(output, target)


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_f1_of_classes_is_macro(classes):
    output, target = normal(40, classes), torch.arange(40) % (classes - (classes == 5))
    expected = f1_score(target, output.argmax(1), average="macro")
    assert f1(output, target).item() == pytest.approx(expected)
    tokens, padded = output.reshape(8, 5, classes), target.reshape(8, 5).clone()
    assert f1(tokens, padded).item() == pytest.approx(expected)
    padded[0] = IGNORED
    expected = f1_score(target[5:], output[5:].argmax(1), average="macro")
    assert f1(tokens, padded).item() == pytest.approx(expected)


def test_f1_of_one_output_takes_its_sign():
    output, target = normal(40, 1), torch.arange(40) % 2
    expected = f1_score(target, output[:, 0] > 0, average="macro")
    assert f1(output, target).item() == pytest.approx(expected)
    assert f1(output[:, 0], target).item() == pytest.approx(expected)


def test_iou_is_macro_over_the_classes():
    output, target = normal(3, 4, 5, 6), torch.arange(90).reshape(3, 5, 6) % 4
    found = output.argmax(1).flatten()
    expected = jaccard_score(target.flatten(), found, average="macro")
    assert iou(output, target).item() == pytest.approx(expected)
    assert iou(torch.eye(2)[None, :, :, None], torch.tensor([[[0], [1]]])).item() == 1
    assert iou(-torch.eye(2)[None, :, :, None], torch.tensor([[[0], [1]]])).item() == 0


@pytest.mark.parametrize("levels", [1000, 4])  # with few levels many scores are equal
def test_auc(levels):
    draw = np.random.default_rng(levels)
    target, score = draw.integers(0, 2, 60), draw.integers(0, levels, 60) / levels
    expected = roc_auc_score(target, score)
    one, two = torch.from_numpy(score)[:, None], torch.from_numpy(np.stack([-score, score], 1))
    for output in (one, two):
        assert auc(output, torch.from_numpy(target)).item() == pytest.approx(expected)
    assert math.isnan(auc(one, torch.ones(60)))


def test_auc_of_more_classes_is_one_against_the_rest():
    output, target = normal(60, 4), torch.arange(60) % 4
    expected = roc_auc_score(target, output.double().softmax(1), multi_class="ovr")
    assert auc(output, target).item() == pytest.approx(expected)
    unseen = torch.cat([output, torch.full((60, 1), -50.0)], 1)  # a fifth class, without samples
    assert auc(unseen, target).item() == pytest.approx(expected)


def test_auc_of_labels_is_their_mean():
    output, target = normal(40, 3), normal(40, 3, 1)[..., 0] > 0.4
    expected = roc_auc_score(target, output, average="macro")
    assert auc(output, target).item() == pytest.approx(expected)
    assert auc(output, target.long()).item() == pytest.approx(expected)


@pytest.mark.parametrize("metric", [f1, auc])
def test_a_single_score_of_a_pixel_or_sample_is_that_of_class_1(metric):
    score, target = normal(3, 4, 5), torch.arange(60).reshape(3, 4, 5) % 2
    both = torch.stack([torch.zeros_like(score), score], 1)
    assert metric(score, target) == metric(both, target)
    flat, label = score.reshape(-1, 1), target.reshape(-1, 1)
    assert metric(flat, label) == metric(both.movedim(1, -1).reshape(-1, 2), label[:, 0])


def test_perplexity_of_pixels_has_the_classes_second():
    output, target = normal(3, 4, 5, 6), torch.arange(90).reshape(3, 5, 6) % 4
    flat = output.movedim(1, -1).flatten(0, 2), target.flatten()
    assert perplexity(output, target).item() == pytest.approx(perplexity(*flat).item())


@pytest.mark.parametrize("metric", [f1, auc, iou, perplexity])
def test_metrics_of_classes_refuse_numbers(metric):
    with pytest.raises(UserError, match=f"{metric.__name__} needs classes"):
        metric(normal(5, 1), normal(5))
    if metric in (iou, perplexity):
        with pytest.raises(UserError, match="needs classes"):
            metric(normal(5, 3), normal(5, 3) > 0)


def test_the_loss_of_labels_is_their_mean():
    output, target = torch.tensor([[0.0, 2.0]]), torch.tensor([[True, False]])
    by_hand = (math.log(2) + math.log(1 + math.exp(2))) / 2
    assert binary_cross_entropy(output, target).tolist() == [pytest.approx(by_hand)]


@pytest.mark.parametrize("metric", [auc, f1])
def test_outputs_that_are_not_numbers_have_no_score(metric):
    output, target = torch.eye(2).repeat(3, 1), torch.tensor([0, 1] * 3)
    assert metric(output, target) == 1
    output[3, 0] = torch.nan
    assert metric(output, target).isnan()
