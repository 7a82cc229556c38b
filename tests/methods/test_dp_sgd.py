"""DP-SGD: clipping and noise by hand and by distribution, the same on all engines, the budget."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from fedhelix import (
    DPSGD,
    METHODS,
    Batch,
    Calibrated,
    Clustered,
    Compact,
    Cull,
    FedAvg,
    FedAvgM,
    Federation,
    FedPer,
    Finish,
    Secure,
    UserError,
    from_arrays,
)
from fedhelix.components.accounting import Accounting
from fedhelix.components.sample_gradients import clipped_mean, surrogate, with_noise
from fedhelix.engines.local import ClientTask, run_client, start_round
from helpers import checkpoint, on_disk, same, small

pytest.importorskip("dp_accounting")


@pytest.fixture
def uncounted(monkeypatch):
    """Hardly any noise costs more than any budget; tests of the sums do not count it."""
    monkeypatch.setattr(Accounting, "epsilon", lambda *_: 0.0)


def flat(run):
    model = run.state.server["model"]
    return torch.cat([model[name].flatten() for name in sorted(model)])


def test_gradients_are_clipped_by_hand():
    """w·x with x = (3, 4), (0, 1): lengths 5 and 1; at a clip of 2 the first is (1.2, 1.6)."""

    def loss(params, x, y):
        return (params["w"] * x).sum() + 0 * y

    x, y = torch.tensor([[3.0, 4], [0, 1]]), torch.zeros(2)
    weights = {"w": torch.ones(2)}
    mean, value, count = clipped_mean(loss, weights, x, y, None, torch.tensor(2.0))
    assert mean["w"].tolist() == pytest.approx([0.6, 1.3])
    assert float(value) == 4.0 and float(count) == 2
    mask = torch.tensor([1.0, 0])
    mean, value, _ = clipped_mean(loss, weights, x, y, mask, torch.tensor(2.0))
    assert mean["w"].tolist() == pytest.approx([1.2, 1.6]) and float(value) == 7.0


def test_the_length_goes_over_all_entries():
    """(3, 4) in two entries is five long."""

    def loss(params, x, y):
        return 3 * params["a"].sum() + 4 * params["b"].sum() + 0 * (x + y)

    params = {"a": torch.zeros(1), "b": torch.zeros(1)}
    mean, *_ = clipped_mean(loss, params, torch.ones(1), torch.ones(1), None, torch.tensor(1.0))
    assert [float(mean[name]) for name in "ab"] == pytest.approx([0.6, 0.8])


def test_the_surrogate_has_the_given_gradient():
    params = {"w": torch.tensor([1.0, 2], requires_grad=True)}
    number = surrogate(params, {"w": torch.tensor([5.0, -7])}, torch.tensor(0.25))
    (gradient,) = torch.autograd.grad(number, [params["w"]])
    assert number.item() == 0.25 and gradient.tolist() == [5.0, -7.0]


def test_without_clipping_and_noise_it_is_the_plain_method(uncounted):
    method = DPSGD(FedAvgM(), sample_clip=1e6, noise=1e-12)
    runs = [small(one, "mlp").fit(2, quiet=True) for one in (method, FedAvgM())]
    assert torch.allclose(flat(runs[0]), flat(runs[1]), atol=1e-4)


def test_a_step_of_a_client_is_the_mean_of_clipped_gradients_one_by_one(uncounted):
    """One step on one batch, against gradients that autograd gives sample by sample."""
    fed = small(DPSGD(sample_clip=0.5, noise=1e-12), batch_size=4096, momentum=0, lr=0.1)
    server, _ = fed.method.server_init({}, fed.context(0, 1))
    task = ClientTask(0, 0, fed.method.download(server, 0, fed.context(0, 1)), {})
    result, local = run_client(fed.engine.setup, task), start_round(fed.engine.setup, task)
    names, total = fed.layers.parameters, None
    x, y = local.client.inputs(), local.client.targets()
    for place in range(len(y)):
        leaves = {name: fed.initial[name].clone().requires_grad_() for name in names}
        loss = local.base_loss(leaves, Batch(x[place : place + 1], y[place : place + 1]))
        grad = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(leaves.values()))])
        grad = grad * min(1.0, 0.5 / float(grad.norm()))
        total = grad if total is None else total + grad
    moved = torch.cat([(result.upload["model"][n] - fed.initial[n]).flatten() for n in names])
    assert torch.allclose(moved, -0.1 * total / len(y), atol=1e-6)
    assert 0 < float(total.norm()) / len(y) < 0.5


def test_noise_is_gaussian_with_the_right_deviation():
    mean = {"w": torch.zeros(20_000), "b": torch.zeros(7)}
    for secret in (False, True):
        noisy = with_noise(mean, torch.tensor(0.3), secret)
        assert stats.kstest(noisy["w"].numpy(), "norm", args=(0, 0.3)).pvalue > 1e-4
        assert stats.kstest(noisy["w"].numpy(), "norm", args=(0, 0.33)).pvalue < 1e-4


def test_the_noise_of_a_round_has_the_right_deviation(uncounted):
    """With a tiny clip an update is noise alone: lr * noise * clip / batch, over the steps."""
    method = DPSGD(sample_clip=1e-3, noise=50.0)
    fed = small(method, "mlp", batch_size=4096, momentum=0, lr=1.0, cohort=1)
    (_, state), *_ = fed.run_rounds(1)
    samples = len(fed.splits[fed.cohort(0)[0]].train)
    names = fed.layers.parameters
    moved = torch.cat([(state.server["model"][n] - fed.initial[n]).flatten() for n in names])
    deviation = 50.0 * 1e-3 / samples
    assert moved.std() == pytest.approx((deviation**2 + (1e-3) ** 2 / len(moved)) ** 0.5, rel=0.1)


@pytest.mark.parametrize("engine", ["batched"])
def test_engines_clip_alike(engine, uncounted):
    method = DPSGD(FedPer(), sample_clip=0.2, noise=1e-12)
    runs = [small(method, "mlp", engine=name).fit(2, quiet=True) for name in ("serial", engine)]
    assert torch.allclose(flat(runs[0]), flat(runs[1]), atol=1e-5)


def test_batched_noise_differs_from_client_to_client(uncounted):
    method = DPSGD(sample_clip=1e-3, noise=50.0)
    fed = small(method, "mlp", engine="batched", momentum=0, lr=1.0, cohort=3)
    server, _ = fed.method.server_init({}, fed.context(0, 1))
    payload = fed.method.download(server, 0, fed.context(0, 1))
    results = fed.engine.run_clients([ClientTask(i, 0, payload, {}) for i in range(3)])
    moved = [
        torch.cat(
            [(r.upload["model"][n] - fed.initial[n]).flatten() for n in fed.layers.parameters]
        )
        for r in results
    ]
    assert all(float(one.std()) > 1e-5 for one in moved)
    corrections = torch.corrcoef(torch.stack(moved)).fill_diagonal_(0).abs()
    assert float(corrections.max()) < 0.1


def test_epsilon_is_the_accountants_and_a_spent_budget_ends_participation():
    noise = Accounting("rdp", "public", 1e-5).noise(10.0, {1.0: 4})
    fed, worked = small(DPSGD(epsilon=10.0, noise=noise), epochs=2), []
    with (
        pytest.warns(UserWarning, match=r"epsilon = 10 of .* is spent after round 2"),
        pytest.raises(UserError, match=r"epsilon = 10 is spent: no client .* in round \d+"),
    ):
        for record, _ in fed.run_rounds(30):
            worked += record["participants"]
            assert max(record["metadata"]["epsilon"].values()) <= 10.0
            assert record["metadata"]["privacy_level"] == "sample"
    assert sorted(worked) == sorted([*range(6)] * 2)
    run = small(DPSGD(epsilon=20.0), epochs=2).fit(3, quiet=True)
    found = Accounting("rdp", "public", 1e-5).noise(20.0, {1.0: 6})
    assert run.records[0]["metadata"]["noise"] == found


@pytest.mark.filterwarnings("ignore:the budget epsilon")
def test_a_run_whose_budget_is_spent_ends_with_the_rounds_it_has(tmp_path):
    noise = Accounting("rdp", "public", 1e-5).noise(10.0, {1.0: 4})
    with pytest.warns(UserWarning, match=r"the run ends after round \d+: the budget epsilon = 10"):
        run = small(DPSGD(epsilon=10.0, noise=noise), epochs=2).fit(
            30, out=tmp_path / "run", eval_every=30, quiet=True
        )
    done = len(run.records)
    assert done < 30 and run.folder.config["rounds"] == done
    assert run.summary["final_accuracy"] == run.records[-1]["accuracy"]  # which is evaluated
    before = run.folder.summary
    with pytest.warns(UserWarning, match=f"the run ends after round {done}: the budget"):
        again = small(DPSGD(epsilon=10.0, noise=noise), epochs=2).fit(
            done + 5, out=tmp_path / "run", resume=True, eval_every=30, quiet=True
        )
    assert len(again.records) == done and again.folder.config["rounds"] == done
    assert again.folder.summary["final_accuracy"] == before["final_accuracy"]
    with pytest.warns(UserWarning, match="the run ends after round"):
        alone = small(DPSGD(epsilon=10.0, noise=noise), epochs=2).fit(30, eval_every=30, quiet=True)
    assert alone.records[-1]["accuracy"] == run.records[-1]["accuracy"]


def test_a_client_does_not_believe_a_server_that_sends_less_noise():
    fed = small(DPSGD(epsilon=5.0))
    task = ClientTask(0, 0, {"model": fed.initial, "samples": {"noise": torch.tensor(1e-3)}}, {})
    with pytest.raises(UserError, match=r"epsilon = 5 is spent: with a noise of 0\.001"):
        run_client(fed.engine.setup, task)


def test_a_client_counts_all_its_rounds_at_the_least_noise():
    """One round that costs the whole budget, then one with a thousand times the noise."""
    noise = Accounting("rdp", "public", 1e-5).noise(5.0, {1.0: 1})
    fed = small(DPSGD(epsilon=5.0))

    def task(noise, kept):
        payload = {"model": fed.initial, "samples": {"noise": torch.tensor(noise)}}
        return ClientTask(0, 0, payload, kept)

    kept = run_client(fed.engine.setup, task(noise, {})).client_state
    assert kept["samples"]["steps"] == 1 and kept["samples"]["noise"] == pytest.approx(noise)
    with pytest.raises(UserError, match="epsilon = 5 is spent"):
        run_client(fed.engine.setup, task(1000 * noise, kept))


def test_a_client_uploads_nothing_that_was_trained_without_noise():
    fed = small(DPSGD())
    with pytest.raises(UserError, match="uploads nothing that was trained without noise"):
        run_client(fed.engine.setup, ClientTask(0, 0, {"model": fed.initial}, {}))


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_training_for_own_use_gets_no_noise(engine):
    """After the last round the budget is spent, and what FedPer trains then stays at its client."""
    fed = small(DPSGD(FedPer(), epsilon=0.5), "mlp", engine=engine)
    server, _ = fed.method.server_init({}, fed.context(0, 1))
    ctx = fed.context(1, 1)
    task = ClientTask(0, 1, fed.method.deliver(server, 0, ctx), {}, final=True)
    plain = small(FedPer(), "mlp")
    expected = plain.engine.personal([ClientTask(0, 1, {"model": server["model"]}, {})])[0].state
    trained = fed.engine.personal([task])[0].state
    assert all(torch.allclose(trained[name], expected[name], atol=1e-5) for name in expected)
    small(DPSGD(FedPer(), epsilon=0.5), "mlp", engine=engine).fit(2, quiet=True)


def test_a_site_takes_its_noise_from_the_operating_system(monkeypatch):
    fed = small(DPSGD(noise=2.0, epsilon=1e4))
    task = ClientTask(0, 0, {"model": fed.initial, "samples": {"noise": torch.tensor(2.0)}}, {})
    setup = replace(fed.engine.setup, deployed=True)
    one, two = (run_client(setup, task).upload for _ in range(2))
    assert not same(one, two)
    monkeypatch.setattr(os, "urandom", lambda count: bytes(count))
    assert same(run_client(setup, task).upload, run_client(setup, task).upload)


def test_a_resumed_run_is_the_straight_run(tmp_path):
    def fresh():
        return small(DPSGD(epsilon=20.0))

    fresh().fit(2, out=tmp_path / "straight", quiet=True)

    def stop(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fresh().fit(2, out=tmp_path / "part", quiet=True, watch=stop)
    fresh().fit(2, out=tmp_path / "part", resume=True, quiet=True)
    assert on_disk(tmp_path / "part") == on_disk(tmp_path / "straight")
    assert same(checkpoint(tmp_path / "part"), checkpoint(tmp_path / "straight"))


def test_it_goes_through_secure_aggregation():
    small(Secure(DPSGD(epsilon=50.0))).fit(1, quiet=True)


@pytest.mark.parametrize(
    "name", ["scaffold", "fedrep", "gene-fl", "fedala", "calibrated", "pfedhn"]
)
def test_methods_that_use_samples_without_noise_are_refused(name):
    with pytest.raises(UserError, match=r"dp-sgd cannot protect samples of .*, whose \w+ may use"):
        small(DPSGD(METHODS[name]()))


@pytest.mark.parametrize("method", [Calibrated(DPSGD()), Clustered(DPSGD()), DPSGD(DPSGD())])
def test_nothing_around_it_may_use_samples_without_noise(method):
    with pytest.raises(UserError, match=r"dp-sgd.* samples.* without noise"):
        small(method)


@pytest.mark.parametrize(
    "method", [Calibrated(DPSGD(), trained=False), Compact(DPSGD()), Finish(DPSGD()), Cull(DPSGD())]
)
def test_what_uses_no_samples_may_stand_around_it(method):
    small(method)


def test_a_loss_in_which_samples_weigh_differently_is_refused():
    """Class weights cancel in the mean of one sample: 2 l / 2."""
    x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
    y = np.repeat([0, 1], 20)  # the first samples are of one class
    weight = torch.tensor([1.0, 5.0])

    def made(loss, method="dp-sgd+fedavg"):
        return Federation(
            from_arrays(x, y), "iid", clients=2, model="mlp", method=method, loss=loss
        )

    with pytest.raises(UserError, match=r"dp-sgd takes the loss of each sample alone, .*'none'"):
        made(nn.CrossEntropyLoss(weight=weight))
    made(nn.CrossEntropyLoss(weight=weight), "fedavg")
    made(nn.CrossEntropyLoss())
    made(nn.CrossEntropyLoss(weight=weight, reduction="none"))


def test_bad_input():
    with pytest.raises(UserError, match="BatchNorm mixes samples"):
        small(DPSGD(), "digits-bn-cnn")
    for options, said in (
        ({"epsilon": 0}, "epsilon must be greater than 0"),
        ({"delta": 1.0}, "delta must be less than 1"),
        ({"sample_clip": 0}, "sample_clip must be greater than 0"),
    ):
        with pytest.raises(UserError, match=said):
            DPSGD(FedAvg(), **options)
