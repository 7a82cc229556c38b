"""Network, loss, metric and data are tried before the first round; predict takes what fits."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset as TorchDataset

from fedhelix import Augmentation, Federation, UserError, from_arrays, metrics

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(60, 4)).astype("float32")
CLASSES = from_arrays(X, (X[:, 0] > 0).astype(int))
NUMBERS = from_arrays(X, X[:, 0])
LABELS = from_arrays(X, X[:, :3] > 0)
WORDS = [DRAW.integers(0, 20, length).tolist() for length in (*range(2, 15), *range(2, 14))]
TEXTS = from_arrays(WORDS, np.arange(25) % 2)


def federation(data=CLASSES, **more):
    usual = {"model": "linear", "engine": "serial", "kernels": "onednn", "clients": 2, "epochs": 1}
    return Federation(data, "iid", **usual | more)


def fit(*data, **more):
    return federation(*data, **more).fit(1, quiet=True)


class Doubled(nn.Linear):
    """Changes its inputs."""

    def forward(self, x):
        return super().forward(x.mul_(2))


class Reader(nn.Module):
    """The mean of the words' vectors."""

    def __init__(self, words=20):
        super().__init__()
        self.words, self.head = nn.Embedding(words, 4), nn.Linear(4, 2)

    def forward(self, x, mask):
        vectors = self.words(x) * mask[..., None]
        return self.head(vectors.sum(1) / mask.sum(1, keepdim=True))


class Folder(TorchDataset):
    """One of its files is missing."""

    def __init__(self, missing):
        self.missing = missing

    def __len__(self):
        return 5

    def __getitem__(self, index):
        if index == self.missing:
            raise OSError(f"no file {index}.png")
        return torch.zeros(2), index % 2


class Zeroed(Augmentation):
    """Changes its inputs, too."""

    numbers = 1

    def draw(self, count, generator):
        return torch.zeros(count, 1)

    def apply(self, x, drawn):
        return x.zero_()


@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 2)),
        lambda: Doubled(4, 2),
        # writes, though these values stay what they are
        lambda: nn.Sequential(nn.Hardtanh(-99, 99, inplace=True), nn.Linear(4, 2)),
    ],
)
def test_a_network_that_would_change_the_data_is_refused_and_has_not(model):
    before = CLASSES.x.clone()
    with pytest.raises(UserError, match="changes its inputs in place; let its forward begin"):
        federation(model=model)
    assert torch.equal(CLASSES.x, before)


def test_an_augmentation_in_place_changes_no_data():
    before = CLASSES.x.clone()
    fit(augment=Zeroed())
    assert torch.equal(CLASSES.x, before)


def own_data(missing):
    return lambda: Federation([Folder(None), Folder(missing)])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: federation(NUMBERS, metric=metrics.f1), "f1 needs classes or labels"),
        (lambda: federation(NUMBERS, metric=metrics.auc), "auc needs classes or labels"),
        (lambda: federation(LABELS, metric=metrics.iou), "iou needs classes"),
        (lambda: federation(LABELS, metric=metrics.neg_perplexity), "perplexity needs classes"),
        (
            lambda: federation(NUMBERS, metric=lambda o, t: -((o - t) ** 2).mean()),
            r"metric compares every output with every target: .*o\.squeeze\(-1\)",
        ),
        (
            lambda: federation(loss=nn.CrossEntropyLoss),
            r"loss is the class CrossEntropyLoss; give CrossEntropyLoss\(\)\.",
        ),
        (
            lambda: federation(metric=lambda o: 1),
            "metric must take outputs and targets, in this order, and return one number: too many",
        ),
        (
            lambda: federation(metric=lambda o, t, k: 1),
            "metric must take outputs and targets, .* return one number: missing .* 'k'",
        ),
        (
            lambda: federation(loss=lambda o: o.sum()),
            "loss must take outputs and targets, .* return one value per sample: too many",
        ),
        (lambda: federation(metric=lambda o, t: o.size(9)), r"metric fails for outputs of shape"),
        (lambda: federation(metric=lambda o, t: "good"), "metric must return one number"),
        (lambda: federation(loss=lambda o, t: o.argmax(1).float()), "loss has no gradient"),
        (lambda: federation(TEXTS, model=lambda: Reader(19)), "tokens go up to 19, so .* 20 rows"),
        (lambda: federation(model=nn.DataParallel(nn.Linear(4, 2))), r"give .* model\.module"),
        (own_data(3), r"sample 3 of client 1 of 'data' cannot be read: OSError: no file 3\.png"),
        (own_data(0), "sample 0 of client 1 of 'data' cannot be read"),
        (
            lambda: federation(from_arrays(np.ones((9, 16, 16, 3)), np.arange(9) % 2), model="cnn"),
            "Channels come first: give images as N×C×H×W",
        ),
        (
            lambda: federation(
                from_arrays(np.ones((9, 3, 4, 4)), np.eye(4, dtype=int)[None].repeat(9, 0) * 255),
                model=lambda: nn.Conv2d(3, 2, 1),
            ),
            "Target 255 is out of bounds'; number the classes .* by -100",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:the labels of .* go up to 255")
def test_mistakes_are_named_before_the_first_round(make, words):
    with pytest.raises(UserError, match=words):
        make()


def test_a_loss_that_returns_a_plain_number_is_refused_without_pytorchs_warning(recwarn):
    torch.set_warn_always(True)  # otherwise once per process
    try:
        with pytest.raises(UserError, match=r"one value per sample or one number; .* a float"):
            federation(loss=lambda o, t: float(nn.functional.cross_entropy(o, t)))
    finally:
        torch.set_warn_always(False)
    assert not [one for one in recwarn if "requires_grad" in str(one.message)]


@pytest.mark.parametrize(
    "more",
    [
        {"loss": lambda o, t: ((o - t[:, None]) ** 2).mean()},
        {"metric": lambda o, t: -((o - t[:, None]) ** 2).mean()},
        {"metric": lambda o, t: -((o[:, 0] - t) ** 2).mean()},
    ],
)
def test_one_output_may_be_compared_as_a_column_or_alone(more):
    federation(NUMBERS, **more)


def test_a_metric_may_need_more_than_a_few_samples():
    def picky(output, target):
        raise ValueError("only one class is present")

    federation(metric=picky)


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (lambda o: 1, "must take outputs and targets, in this order, and return one number"),
        (lambda o, t, k: 1, "must take outputs and targets, .*: missing .* 'k'"),
        (lambda o, t: o + "1", r"fails for outputs of shape \(\d+, 2\) and .*unsupported operand"),
        (lambda o, t: int("?"), r"fails for outputs of shape \(\d+, 2\) and .*invalid literal"),
    ],
)
def test_a_run_names_the_metric_that_fails(metric, words):
    run = fit()
    with pytest.raises(UserError, match=f"^metric 'mine' {words}"):
        run.evaluate({"all": lambda o, t: len(t), "mine": metric})


@pytest.mark.filterwarnings("error")
def test_a_loss_that_compares_all_with_all_is_refused_without_warnings():
    with pytest.raises(UserError, match=r"^loss compares every output with every target"):
        federation(NUMBERS, loss=nn.MSELoss())


def test_evaluate_refuses_a_metric_that_compares_all_with_all():
    run = fit(NUMBERS)
    flat = run.evaluate({"mine": lambda o, t: (o.squeeze(-1) - t).abs().mean()})
    assert np.isfinite(flat["mine"]).all()
    with pytest.raises(UserError, match=r"^metric 'mine' compares every .*o\.squeeze\(-1\)"):
        run.evaluate({"mine": lambda o, t: (o - t).abs().mean()})


def test_predict_does_not_guess_what_one_output_means():
    run = fit(
        model=lambda: nn.Linear(4, 1),
        loss=lambda o, t: nn.functional.binary_cross_entropy_with_logits(o[:, 0], t.float()),
        metric=lambda o, t: ((o[:, 0] > 0) == t).float().mean(),
    )
    with pytest.raises(UserError, match=r"one output for 2 classes.*raw=True"):
        run.predict(X[:5])
    assert run.predict(X[:5], raw=True).shape == (5, 1)


def test_predict_refuses_what_is_no_number():
    samples = X[:3].copy()
    samples[1, 2] = np.nan
    with pytest.raises(UserError, match="x of the new samples has nan in sample 1"):
        fit().predict(samples)


def test_predict_takes_sequences_of_one_length():
    run = fit(TEXTS, model=Reader)
    several = run.predict(WORDS[:4], raw=True)
    for number in range(4):
        alone = run.predict([WORDS[number]], raw=True)
        np.testing.assert_allclose(alone, several[number : number + 1], atol=1e-6)
    assert run.predict(np.ones((2, 14), int)).shape == (2,)


class Tied(nn.Module):
    """The head has the weights of the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(12, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(self.embedding(x).mean(1))))


@pytest.mark.parametrize("engine", ["serial", "batched"])
@pytest.mark.parametrize("method", ["fedproto", "fedpac", "gpfl", "fedcp", "feddbe", "fedper"])
def test_a_head_may_share_its_weights(method, engine):
    x = np.random.default_rng(0).integers(0, 12, (80, 6))
    run = fit(from_arrays(x, x[:, 0], classes=12), model=Tied, method=method, engine=engine)
    assert run.federation.layers.head == ("embedding.weight",)
    outputs = run.predict(x[:4], client=0, raw=True)
    assert outputs.shape == (4, 12) and np.isfinite(outputs).all()


class Shifted(nn.Module):
    """A loss with a parameter."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(2))

    def forward(self, output, target):
        return nn.functional.cross_entropy(output + self.shift, target, reduction="none")


def test_parameters_of_a_loss_are_not_trained_and_that_is_said():
    with pytest.warns(UserWarning, match="the loss has parameters, and only those of the model"):
        federation(loss=Shifted())
    federation(loss=Shifted().requires_grad_(False))


CONVOLUTIONAL = nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 4))


@pytest.mark.parametrize("cast", ["double", "half", "bfloat16"])
@pytest.mark.parametrize("network", [nn.Linear(4, 2), CONVOLUTIONAL])
def test_a_network_of_other_floats_is_told_what_samples_are(network, cast):
    said = rf"samples are float32: leave \.{cast}\(\) out, or .* x\.{cast}\(\)"
    with pytest.raises(UserError, match=said):
        federation(model=lambda: getattr(network, cast)())


def test_images_of_sixteen_bits_are_told_what_they_are():
    images, labels = np.full((40, 1, 8, 8), 4000, np.uint16), np.arange(40) % 2
    with pytest.raises(UserError, match="give features as floats, and pixels as uint8 or floats"):
        Federation(from_arrays(images, labels), model="cnn", seed=0)
