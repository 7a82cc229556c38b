"""Outputs and what they are taken for: logits or probabilities, and which axis has the classes."""

import re
import warnings

import numpy as np
import pytest
import torch.nn.functional as F
from torch import nn

from fedhelix import Federation, UserError, from_arrays, metrics

draw = np.random.default_rng(0)
X = draw.normal(size=(60, 4)).astype("float32")
Y = (X[:, 0] > 0).astype(int)
LABELS = (X[:, :3] > 0).astype(int)
TOKENS = draw.integers(1, 12, size=(60, 5))
TAGS = np.digitize(TOKENS, [7, 10])


def ending_in(outputs, *last):
    return lambda: nn.Sequential(nn.Linear(4, outputs), *last)


class Tagger(nn.Module):
    """Scores of every token, on the last axis or on the second."""

    def __init__(self, classes=3, last=True):
        super().__init__()
        self.embedding, self.head, self.last = nn.Embedding(12, 8), nn.Linear(8, classes), last

    def forward(self, x, mask=None):
        scores = self.head(self.embedding(x))
        return scores if self.last else scores.transpose(1, 2)


def of_labels(output, target):
    return F.binary_cross_entropy(output, target, reduction="none").mean(1)


def of_one(output, target):
    values = output.squeeze(-1).sigmoid()
    return F.binary_cross_entropy(values, target.float(), reduction="none")


def of_tokens(output, target):
    return F.nll_loss(output.log().transpose(1, 2), target, reduction="none").mean(1)


def federation(x, y, model, classes="auto", **more):
    usual = {"engine": "serial", "kernels": "onednn", "epochs": 1, "clients": 2, "seed": 0}
    return Federation(from_arrays(x, y, classes=classes), "iid", model=model, **usual | more)


@pytest.mark.parametrize(
    ("data", "model", "more", "words"),
    [
        ((X, LABELS), ending_in(3, nn.Sigmoid()), {"loss": of_labels}, "F1 and predict take outp"),
        ((X, LABELS), ending_in(3, nn.Sigmoid()), {"loss": of_labels, "metric": metrics.auc},
         "predict takes outputs above 0 as true, so leave out the model's sigmoid"),
        ((X, LABELS), ending_in(3, nn.Sigmoid()), {}, "binary cross-entropy applies a sigmoid"),
        ((X, Y), ending_in(1, nn.Sigmoid()), {"loss": of_one, "metric": metrics.f1}, "F1 takes"),
        ((X, Y), ending_in(2, nn.Softmax(1)), {}, "cross-entropy applies a softmax itself, so"),
        ((TOKENS, TAGS), lambda: nn.Sequential(Tagger(), nn.Softmax(-1)), {}, "cross-entropy ap"),
        ((TOKENS, TAGS), lambda: nn.Sequential(Tagger(), nn.Softmax(-1)),
         {"loss": of_tokens, "metric": metrics.neg_perplexity}, "neg_perplexity applies a softm"),
    ],
)  # fmt: skip
def test_probabilities_are_noticed_where_logits_are_needed(data, model, more, words):
    with pytest.warns(UserWarning, match=rf"^the model's outputs are probabilities; {words}"):
        federation(*data, model, **more)


def positive():
    """Logits that lie between 0 and 1 for the first samples, as they may by chance."""
    net = nn.Linear(4, 3)
    nn.init.constant_(net.weight, 1e-3)
    nn.init.constant_(net.bias, 0.5)
    return net


@pytest.mark.parametrize(
    ("data", "model", "more"),
    [
        ((X, LABELS), positive, {}),
        ((X, LABELS), positive, {"loss": nn.BCEWithLogitsLoss(reduction="none")}),
        ((X, Y), ending_in(1, nn.Sigmoid()), {"loss": of_one, "metric": metrics.auc}),
        ((X, Y), ending_in(2, nn.LogSoftmax(1)), {}),
        ((X, LABELS.astype("float32")), ending_in(3, nn.Sigmoid()), {"classes": None}),
        ((TOKENS, TAGS), lambda: nn.Sequential(Tagger(), nn.Softmax(-1)), {"loss": of_tokens}),
    ],
)
def test_logits_and_what_fits_probabilities_get_no_warning(data, model, more):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        federation(*data, model, **more)


@pytest.mark.parametrize(
    ("data", "model", "more", "words"),
    [
        ((X, Y), ending_in(1), {"loss": of_one},
         r"one output where .* accuracy, the usual metric, .* give metric=, such as .*\.f1, or"),
        ((X, X[:, 0]), ending_in(2), {"loss": lambda o, t: (o[:, 0] - t).square()},
         r"the usual metric, R², fails for outputs .*; give metric= as well"),
        ((X, Y), ending_in(2), {"metric": lambda o, t: o.size(9)}, "^metric fails for outputs"),
        ((TOKENS, TAGS > 0), lambda: Tagger(2), {},
         "zeros and ones are labels .*classes=2 in from_arrays.* makes them the classes of tokens"),
        ((TOKENS, TAGS > 0), lambda: nn.Sequential(Tagger(1), nn.Flatten()), {"classes": 2},
         r"classes=2 makes the 5 numbers per sample .* leave classes out .*\(y.argmax\(1\)\)"),
        ((TOKENS, TAGS), Tagger, {"classes": 2}, "has 2, but classes=2 .*0 to 1; mark .*-100"),
        ((TOKENS, TAGS + 0.5), Tagger, {"classes": 4}, "must be whole numbers; classes=None"),
        ((X, (10 * X[:, 0]).astype(int)), ending_in(1), {}, "classes=None if these are numbers"),
        ((X, (90000 * X[:, 0] ** 2).astype(int)), ending_in(1), {}, "classes=None if these are"),
    ],
)  # fmt: skip
def test_a_message_says_what_to_give(data, model, more, words):
    with pytest.raises(UserError, match=words):
        federation(*data, model, **more)


@pytest.mark.parametrize("kind", [int, bool, "float32"], ids=str)
@pytest.mark.parametrize("last", [True, False])
def test_zeros_and_ones_are_classes_of_tokens_with_classes(kind, last):
    y = (TAGS > 0).astype(kind)
    fed = federation(TOKENS, y, lambda: Tagger(2, last), classes=2, lr=1.0, epochs=5)
    run = fed.fit(5, quiet=True)
    assert fed.objective.name == "accuracy" and fed.data.outputs == 2
    assert (run.predict(TOKENS) == y).mean() > 0.95
    assert run.onboard((TOKENS[:20], y[:20])) == 2


def test_a_number_of_classes_of_tokens_reaches_the_network():
    seen = []

    def made(outputs):
        seen.append(outputs)
        return Tagger(outputs)

    federation(TOKENS, TAGS, made, classes=7)
    federation(TOKENS, TAGS, made)
    assert set(seen) == {7, 3}


@pytest.mark.parametrize("last", [True, False])
def test_shorter_and_longer_sequences_get_the_classes_of_their_tokens(last):
    x = [draw.integers(1, 12, size=length) for length in draw.integers(2, 9, size=60)]
    run = federation(x, [np.digitize(one, [7, 10]) for one in x], lambda: Tagger(last=last), lr=1.0)
    run = run.fit(1, quiet=True)
    for width in (2, 3, 8, 11):  # 3 is also the number of classes
        new = draw.integers(1, 12, size=(4, width))
        raw = run.predict(list(new), raw=True)
        assert (run.predict(list(new)) == raw.argmax(-1 if last else 1)).all()


def test_classes_of_tokens_have_names():
    names = np.array(["noun", "other", "verb"])
    run = federation(TOKENS, names[TAGS], Tagger, lr=1.0, epochs=5).fit(5, quiet=True)
    assert (run.predict(TOKENS[:9]) == names[TAGS[:9]]).mean() > 0.9


def test_as_many_tokens_as_classes_are_noticed():
    x, y = TOKENS[:, :3], TAGS[:, :3]
    with pytest.warns(
        UserWarning, match=r"\(3, 3, 3\) are taken as N×T×C.* if they are N×C×T, let"
    ):
        federation(x, y, Tagger)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        federation(TOKENS, TAGS, lambda: Tagger(last=False))


@pytest.mark.parametrize(
    ("x", "more", "words"),
    [
        (X, {"mean": [1.0, 2, 3, 4], "std": [2.0] * 4},
         r"\(4,\) float32; the network does not scale samples, so give it \(x - mean\) / std with "
         r"mean \(1.0, 2.0, 3.0, 4.0\) and std \(2.0, .*, one for each channel or column \|"),
        ((99 * abs(X)).astype("uint8").reshape(60, 2, 2), {"mean": 0.5, "std": 0.2},
         r"\(1, 2, 2\) float32; .*, so give it x / 255, then \(x - mean\) / std with mean \(0.5"),
        (X, {}, r"\(4,\) float32; samples as they are \|"),
        ((X, (99 * abs(X)).astype("uint8")), {}, "the uint8 ones as x / 255"),
    ],
)  # fmt: skip
def test_a_card_says_how_to_scale_samples(x, more, words, tmp_path):
    class Any(nn.Linear):
        def forward(self, *parts):
            return super().forward(parts[0].flatten(1))

    data = from_arrays(x, Y, **more)
    usual = {"engine": "serial", "kernels": "onednn", "epochs": 1, "clients": 2}
    run = Federation(data, "iid", model=lambda: Any(4, 2), **usual).fit(1, quiet=True)
    card = (run.export(tmp_path, "safetensors") / "README.md").read_text()
    assert re.search(words, card), card
