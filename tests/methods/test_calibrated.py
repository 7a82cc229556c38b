"""Calibrated training: class shares as a shift of the outputs, which stays with its client."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedhelix import (
    Calibrated,
    Ditto,
    FedAvg,
    FedDyn,
    FedPer,
    FedProx,
    GenFed,
    Moon,
    Scaffold,
    UserError,
    load,
    metrics,
    partition,
)
from fedhelix.core.shift import SHIFT
from fedhelix.core.tree import flatten
from fedhelix.data import Dataset
from fedhelix.engines.local import ClientTask, make_client
from fedhelix.federation import loop
from fedhelix.methods.calibrated import log_shares
from helpers import checkpoint, close, same, small, timeless, two_quadratics

DIGITS = load("digits").subsample(300, 100)


def build(method, **more):
    return small(method, **{"data": DIGITS, "clients": 4, "model": "digits-cnn"} | more)


def three_classes(method, **more):
    """One client with classes 0, 0, 0, 1 of three; a linear model of two inputs, all zeros."""
    model = nn.Linear(2, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    x = torch.tensor([[1.0, 0], [1, 0], [1, 0], [0, 1]])
    y = torch.tensor([0, 0, 0, 1])
    data = Dataset("three", x, y, x, y, classes=3, owners=np.zeros(4, dtype=int))
    usual = {"cohort": 1, "batch_size": 4, "lr": 0.5, "momentum": 0}
    return small(method, model, data=data, partition=partition.natural(valid=0), **usual | more)


def test_what_the_initial_network_knows_is_not_added_again():
    fed = three_classes(Calibrated(prior="initial", smooth=1e-9))
    client = make_client(fed.engine.setup, ClientTask(0, 0, {}, {}))
    shift = fed.method.start({"model": fed.initial}, {}, client)["model"][SHIFT]
    uniform = Calibrated(smooth=1e-9).start({"model": fed.initial}, {}, client)["model"][SHIFT]
    assert torch.allclose(shift - uniform, torch.tensor(math.log(3)))  # zeros predict thirds
    # A network that predicts the shares of its client gets no shift at all.
    knows = {**client.initial, "bias": torch.tensor([0.75, 0.25, 1e-9]).log()}
    client = replace(client, initial=knows)
    assert torch.allclose(
        fed.method.start({"model": knows}, {}, client)["model"][SHIFT][:2],
        torch.zeros(2),
        atol=1e-5,
    )


def test_shares_that_are_only_used_leave_training_alone():
    plain, shifted = (build(method) for method in (FedAvg(), Calibrated(trained=False)))
    ends = [fed.fit(2, quiet=True) for fed in (plain, shifted)]
    assert same(ends[0].state.server, ends[1].state.server)
    # Bayes' rule: outputs of the shared model plus the logarithms of the client's shares.
    client = make_client(shifted.engine.setup, ClientTask(1, 2, {}, {}))
    models = shifted.method.start({"model": ends[1].state.server["model"]}, {}, client)
    used = models[shifted.method.personal(models)]
    assert SHIFT not in models["model"]
    assert torch.equal(used[SHIFT], log_shares(client.targets(), 10, 1.0))
    assert ends[0].records[-1]["personal_accuracy"] < ends[1].records[-1]["personal_accuracy"]


def test_sharper_shares_change_the_models_in_use_alone():
    plain, sharp = (build(Calibrated(sharpen=factor)).fit(2, quiet=True) for factor in (1.0, 1.5))
    assert same(plain.state.server, sharp.state.server)
    x = DIGITS.prepare(DIGITS.x_test[:5])
    fed = plain.federation
    shares = log_shares(fed.data.y[fed.splits[1].train], 10, 1.0)
    difference = sharp.personal(1)(x) - plain.personal(1)(x)
    torch.testing.assert_close(difference, (0.5 * shares).expand_as(difference))


def test_probabilities_are_never_sharpened():
    """Perplexity looks at probabilities, which sharper shares would spoil."""
    plain, sharp = (
        build(Calibrated(sharpen=factor), metric=metrics.neg_perplexity).fit(1, quiet=True)
        for factor in (1.0, 1.5)
    )
    assert plain.records[-1]["personal"] == sharp.records[-1]["personal"]
    x = DIGITS.prepare(DIGITS.x_test[:5])
    assert torch.equal(plain.personal(1)(x), sharp.personal(1)(x))


def test_log_shares_by_hand():
    # Counts 3, 1, 0 and one more each: 4, 2, 1 of 7.
    found = log_shares(torch.tensor([0, 0, 1, 0]), 3, 1.0)
    assert found.tolist() == pytest.approx([math.log(4 / 7), math.log(2 / 7), math.log(1 / 7)])
    # Half of one more each: 3.5, 1.5, 0.5 of 5.5.
    found = log_shares(torch.tensor([0, 0, 1, 0]), 3, 0.5)
    assert found.exp().tolist() == pytest.approx([3.5 / 5.5, 1.5 / 5.5, 0.5 / 5.5])
    # Who has nothing knows nothing.
    assert log_shares(torch.zeros(0, dtype=torch.int64), 4, 1.0).exp().tolist() == [0.25] * 4


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=30), st.floats(0.01, 10), st.randoms())
def test_shares_sum_to_one_and_know_no_order(targets, smooth, random):
    shares = log_shares(torch.tensor(targets, dtype=torch.int64), 5, smooth).exp()
    assert float(shares.sum()) == pytest.approx(1, rel=1e-5) and bool((shares > 0).all())
    shuffled = random.sample(targets, len(targets))
    assert torch.equal(
        log_shares(torch.tensor(shuffled, dtype=torch.int64), 5, smooth).exp(), shares
    )


def test_a_step_by_hand():
    """All outputs are zero, so the shift alone decides: the softmax of log shares are the shares
    4/7, 2/7, 1/7 themselves. The gradient of a bias is the mean of softmax - target.
    """
    run = three_classes(Calibrated()).fit(1, quiet=True)
    model = run.state.server["model"]
    # Targets are three times class 0 and once class 1.
    gradient = [4 / 7 - 3 / 4, 2 / 7 - 1 / 4, 1 / 7]
    assert model["bias"].tolist() == pytest.approx([-0.5 * g for g in gradient])
    # A weight's gradient counts the samples with that input: three of class 0, one of class 1.
    first = [3 / 4 * (4 / 7 - 1), 3 / 4 * 2 / 7, 3 / 4 * 1 / 7]
    second = [1 / 4 * 4 / 7, 1 / 4 * (2 / 7 - 1), 1 / 4 * 1 / 7]
    assert model["weight"][:, 0].tolist() == pytest.approx([-0.5 * g for g in first])
    assert model["weight"][:, 1].tolist() == pytest.approx([-0.5 * g for g in second])
    assert run.records[0]["train_loss"] == pytest.approx(
        -(3 * math.log(4 / 7) + math.log(2 / 7)) / 4
    )


def test_half_the_strength_by_hand():
    # Half of the logarithms: shares are proportional to the square roots of 4, 2 and 1.
    run = three_classes(Calibrated(tau=0.5)).fit(1, quiet=True)
    total = 2 + 2**0.5 + 1
    gradient = [2 / total - 3 / 4, 2**0.5 / total - 1 / 4, 1 / total]
    bias = run.state.server["model"]["bias"]
    assert bias.tolist() == pytest.approx([-0.5 * g for g in gradient])


def test_a_personal_model_is_the_received_one_plus_the_shares():
    run = three_classes(Calibrated()).fit(1, quiet=True)
    model, x = run.state.server["model"], torch.tensor([[2.0, 1]])
    shares = torch.tensor([4 / 7, 2 / 7, 1 / 7]).log()
    expected = x @ model["weight"].T + model["bias"] + shares
    assert run.personal(0)(x).tolist() == [pytest.approx(expected[0].tolist(), rel=1e-5)]
    # The server's model has no shares.
    assert run.model()(x).tolist() == [pytest.approx((expected - shares)[0].tolist(), abs=1e-6)]


def test_newcomers_use_their_own_shares_before_any_training():
    run = build(Calibrated(), model="linear").fit(1, quiet=True)
    server, fed = run.state.server["model"], run.federation
    number = run.onboard((DIGITS.x[:12], torch.tensor([7] * 8 + [1] * 4)))
    y = fed.data.y[fed.splits[number].train]
    counts = torch.bincount(y, minlength=10) + 1.0
    assert set(y.tolist()) == {1, 7}
    x = fed.data.prepare(fed.data.x_test[:9])
    shares = (counts / counts.sum()).log()
    torch.testing.assert_close(run.personal(number)(x), run.model()(x) + shares)
    assert same(run.state.server["model"], server)


def words_of(tree):
    return [name for name in flatten(tree) if SHIFT in name]


AROUND = [
    Calibrated(),
    Calibrated(FedProx(mu=0.1)),
    Calibrated(Scaffold()),
    Calibrated(Ditto()),
    Calibrated(FedPer()),
    Calibrated(Moon()),
    Calibrated(FedDyn()),
    GenFed(Calibrated()),
    Calibrated(GenFed()),
]


@pytest.mark.parametrize("method", AROUND, ids=lambda method: method.label)
def test_nothing_that_leaves_or_stays_holds_the_shares(method, tmp_path, monkeypatch):
    fed, seen = build(method, validation_size=40), []
    validate = loop.validate_uploads

    def spy(results, *args):
        seen.extend(results)
        return validate(results, *args)

    monkeypatch.setattr(loop, "validate_uploads", spy)
    run = fed.fit(2, out=tmp_path / "run", quiet=True)
    assert len(seen) == 6
    for result in seen:
        assert not words_of(result.upload) and not words_of(result.client_state)
        assert set(result.upload["model"]) <= set(fed.layers.names)
    assert not words_of(run.state.server)
    assert not any(words_of(kept) for kept in run.state.client_states.values())
    assert not any(words_of(tree) for tree in checkpoint(tmp_path / "run").values())
    ctx = fed.context(2, 2)
    for hook in (fed.method.download, fed.method.deliver):
        assert not words_of(hook(run.state.server, 0, ctx))
    # It is there all the same: the model that is used has it.
    used = fed.engine.personal(fed.tasks(run.state, [0], ctx))[0].state
    assert SHIFT in used and all(record["refused"] == {} for record in run.records)


@pytest.mark.parametrize("method", AROUND[:7], ids=lambda method: method.label)
def test_what_is_uploaded_depends_on_training_alone(method):
    """Another shift after the training changes nothing of what is sent and kept."""
    fed = build(method)
    state = fed.initialize(1)
    payload = fed.method.download(state.server, 0, fed.context(0, 1))
    trees = []
    for shift in (torch.zeros(10), torch.full((10,), 1e3)):

        def spoilt(local, shift=shift):
            models = {name: {**model, SHIFT: shift} for name, model in local.models.items()}
            return type(fed.method).upload(fed.method, replace(local, models=models))

        setup = fed.engine.setup
        hooks = setup.hooks
        object.__setattr__(hooks, "upload", spoilt)
        (result,) = fed.engine.run_clients([ClientTask(0, 0, payload, {})])
        del hooks.__dict__["upload"]
        trees.append({"upload": result.upload, "kept": result.client_state})
    assert same(*trees)


@pytest.mark.parametrize(
    "inner", [FedAvg(), Scaffold(), Ditto(), FedPer()], ids=lambda method: method.name
)
def test_without_strength_it_is_the_inner_method_to_the_bit(inner):
    one, other = (
        build(method, model="digits-bn-cnn").fit(2, quiet=True)
        for method in (inner, Calibrated(inner, tau=0.0))
    )
    assert same(one.state.server, other.state.server)
    assert timeless(one.records) == timeless(other.records)


def test_every_model_of_a_client_is_calibrated():
    fed = build(Calibrated(Ditto()))
    client = make_client(fed.engine.setup, ClientTask(0, 0, {}, {}))
    models = fed.method.start({"model": fed.initial}, {}, client)
    assert len(models) > 1
    expected = log_shares(client.targets(), 10, 1.0)
    assert all(torch.equal(model[SHIFT], expected) for model in models.values())


def test_it_needs_classes():
    with pytest.raises(UserError, match=r"^calibrated needs classes, and 'quadratics' is no class"):
        two_quadratics(Calibrated())
    with pytest.raises(UserError, match=r"^genfed\+calibrated needs classes"):
        two_quadratics(GenFed(Calibrated()), validation_size=1)


@pytest.mark.parametrize("model", ["no-bias", "digits-bn-cnn"])
@pytest.mark.parametrize("engine", ["parallel", "batched"])
def test_calibrated_clients_are_equal_on_every_engine(engine, model):
    if model == "no-bias":
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False))
    one, other = (
        build(Calibrated(Ditto()), engine=name, model=model, workers=2).fit(2, quiet=True)
        for name in ("serial", engine)
    )
    if engine == "parallel":
        assert same(one.state.server, other.state.server)
    assert close(one.state.server["model"], other.state.server["model"], 1e-4)
    for key in ("personal", "accuracy", "loss"):
        assert one.records[-1][key] == pytest.approx(other.records[-1][key], abs=0.02)
    x = one.federation.data.prepare(one.federation.data.x_test[:9])
    for client in range(4):
        mine, its = (run.personal(client)(x) for run in (one, other))
        torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-3)
    other.federation.close()


@pytest.mark.parametrize("seed", [0, 1])
def test_clients_are_better_off_with_their_own_shares(seed):
    more = {"data": "digits", "partition": "dirichlet:0.1", "clients": 10, "cohort": 5}
    plain, mine = (
        build(method, model="linear", batch_size=16, seed=seed, **more).fit(5, quiet=True).summary
        for method in (FedAvg(), Calibrated())
    )
    assert mine["personal_accuracy"] > plain["personal_accuracy"] + 0.05
