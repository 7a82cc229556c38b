"""FedAvg and its relatives against numbers by hand, and against Flower's own strategies."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedhelix import FedAvg, FedAvgM, FedOpt, Upload
from helpers import small


def uploads(fed, *states: dict, samples: list[int]) -> list[Upload]:
    return [
        Upload(client, count, {"model": state})
        for client, (state, count) in enumerate(zip(states, samples, strict=True))
    ]


def random_state(fed, seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(value.shape, generator=draw) for name, value in fed.initial.items()}


def aggregate(method, server: dict, some: list[Upload], ctx) -> dict:
    return method.aggregate(server, some, method.weights(server, some, ctx), ctx)


# FedOpt by hand: one weight, two clients of equal size whose mean lies `delta` away from the
# server's weight


def rounds_of(method: FedOpt, deltas: list[float]) -> list[float]:
    fed = small(method, torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)))
    name = fed.layers.parameters[1]
    server, _ = method.server_init({}, fed.context(0, len(deltas)))
    server["model"] = {key: torch.zeros_like(value) for key, value in server["model"].items()}
    found = []
    for t, delta in enumerate(deltas):
        away = [
            {key: value + delta + side for key, value in server["model"].items()}
            for side in (-0.5, 0.5)
        ]
        server = aggregate(
            method, server, uploads(fed, *away, samples=[5, 5]), fed.context(t, len(deltas))
        )
        assert server["model"][name].unique().numel() == 1
        found.append(server["model"][name][0].item())
    return found


def test_fedavgm_by_hand():
    # Steps: 1, then 0.5 + 0.8 of that, then -1 + 0.8 of that.
    assert rounds_of(FedAvgM(server_momentum=0.8), [1.0, 0.5, -1.0]) == pytest.approx(
        [1.0, 2.3, 2.34]
    )
    assert rounds_of(FedAvgM(server_momentum=0), [1.0, 0.5]) == pytest.approx([1.0, 1.5])  # FedAvg


def adaptive_step(update, last, present=10, there=10, staleness=0, before=None, since=0, round=1):
    """The first two values of the server's step after its last one, with momentum 0.5 at most;
    `before` is the update of the round before.
    """
    method = FedAvgM(server_momentum=0.5, adaptive=True)
    fed = small(method, clients=present, cohort=there, partition="iid")
    ctx = replace(fed.context(round, 99), since=since)
    name = fed.layers.parameters[0]

    def two(values):
        state = {key: torch.zeros_like(value) for key, value in fed.initial.items()}
        state[name].view(-1)[:2] = torch.tensor(values)
        return state

    some = uploads(fed, *[two(update)] * there, samples=[5] * there)
    some[0] = some[0]._replace(staleness=staleness)
    server = {"model": two([0.0, 0.0]), "step": two(last)}
    if before is not None:
        server["update"] = two(before)
    after = aggregate(method, server, some, ctx)
    torch.testing.assert_close(after["update"][name], two(update)[name])
    for part in ("model", "step"):
        assert torch.equal(after["step"][name], after[part][name])  # it started from zero
    return after["step"][name].flatten()[:2].tolist()


def test_adaptive_momentum_by_hand():
    # All are there, and the update points back: nothing of the last step stays.
    assert adaptive_step([-1.0, 0], [2.0, 0]) == pytest.approx([-1, 0])
    # Straight on: half of the last step stays, as without adaptation.
    assert adaptive_step([1.0, 0], [2.0, 0]) == pytest.approx([2, 0])
    # At 60°, whose cosine is 0.5, a quarter of that half.
    assert adaptive_step([0.5, 0.75**0.5], [2.0, 0]) == pytest.approx([0.75, 0.75**0.5])
    # At a right angle nothing.
    assert adaptive_step([0.0, 1], [2.0, 0]) == pytest.approx([0, 1], abs=1e-6)


def test_adaptive_momentum_goes_by_two_updates_together():
    # To the left, and to the right in the round before: together they point straight on.
    assert adaptive_step([1.0, 3], [2.0, 0], before=[1.0, -3]) == pytest.approx([2, 3])
    # One on, one farther back: together they point back.
    assert adaptive_step([1.0, 0], [2.0, 0], before=[-2.0, 0]) == pytest.approx([1, 0])


def test_newcomers_momentum_grows_from_nothing():
    """In their first round there is none, in the second 1/10, in the tenth the 0.5 that was set."""
    steps = [adaptive_step([1.0, 0], [2.0, 0], since=1, round=t)[0] for t in (1, 2, 10, 30)]
    assert steps == pytest.approx([1, 1.2, 2, 2])


def test_the_last_step_stands_in_for_absent_clients():
    # 2 of 10 are there: 0.8 · 0.5 of the last step stay wherever the update points,
    assert adaptive_step([-1.0, 0], [2.0, 0], there=2) == pytest.approx([-0.2, 0])
    assert adaptive_step([0.0, 1], [2.0, 0], there=2) == pytest.approx([0.8, 1])
    # but for straight on, where it is all of 0.5.
    assert adaptive_step([1.0, 0], [2.0, 0], there=2) == pytest.approx([2, 0])
    # Of 5 present 4 are there: 0.2 absent are less than the square of a cosine of 0.5.
    sixty = [0.5, 0.75**0.5]
    assert adaptive_step(sixty, [2.0, 0], present=5, there=4) == pytest.approx([0.75, 0.75**0.5])


def test_late_updates_need_no_stand_in():
    # 2 of 10 are there, one of them late: the cosine alone counts, as if all were there.
    assert adaptive_step([-1.0, 0], [2.0, 0], there=2, staleness=1) == pytest.approx([-1, 0])
    sixty = [0.5, 0.75**0.5]
    assert adaptive_step(sixty, [2.0, 0], there=2, staleness=3) == pytest.approx([0.75, 0.75**0.5])


def test_from_a_standstill_the_update_is_the_step():
    assert adaptive_step([1.0, 0], [0.0, 0], there=2) == pytest.approx([1, 0])


@pytest.mark.parametrize(
    ("optimizer", "second_moments"),
    [
        ("adam", [0.01 * 1, 0.99 * 0.01 + 0.01 * 0.05**2]),
        (
            "yogi",
            [0.01 * 1, 0.01 - 0.01 * 0.05**2],
        ),  # 0.05² lies below the old value, so it shrinks, but slowly
        ("adagrad", [1.0, 1.0 + 0.05**2]),
    ],
)
def test_fedopt_by_hand(optimizer, second_moments):
    found = rounds_of(
        FedOpt(server_optimizer=optimizer, server_lr=0.1, beta1=0.9, beta2=0.99, tau=0.1),
        [1.0, 0.05],
    )
    first = [0.1 * 1, 0.9 * 0.1 + 0.1 * 0.05]
    steps = [0.1 * m / (v**0.5 + 0.1) for m, v in zip(first, second_moments, strict=True)]
    assert found == pytest.approx([steps[0], sum(steps)], rel=1e-5)


def test_the_bias_correction_by_hand():
    plain, corrected = (
        rounds_of(FedOpt(bias_correction=on, tau=1e-12, server_lr=0.1), [1.0, 1.0])
        for on in (False, True)
    )
    # With equal updates the corrected moments are 1, and every step is the learning rate: that is
    # what it is for.
    assert corrected == pytest.approx([0.1, 0.2], rel=1e-4)
    assert plain[0] == pytest.approx(0.1 * 0.1 / 0.01**0.5, rel=1e-4)
    adagrad = [
        rounds_of(FedOpt(server_optimizer="adagrad", bias_correction=on), [1.0])
        for on in (False, True)
    ]
    assert adagrad[0] == adagrad[1]


def test_fedopt_averages_batchnorm_statistics_plainly():
    fed = small(FedOpt(), "digits-bn-cnn")
    server, _ = fed.method.server_init({}, fed.context(0, 1))
    states = [
        {name: torch.full_like(value, number) for name, value in fed.initial.items()}
        for number in (2, 4)
    ]
    merged = aggregate(fed.method, server, uploads(fed, *states, samples=[1, 3]), fed.context(0, 1))
    assert merged["model"]["bn1.running_mean"].unique().tolist() == [3.5]
    assert merged["model"]["bn1.num_batches_tracked"].item() == 4
    assert set(merged["first"]) == set(fed.layers.parameters)


# Against Flower


@pytest.fixture(scope="module")
def flower():
    return pytest.importorskip("flwr.server.strategy")


def flower_results(fed, states: list[dict], samples: list[int]) -> list:
    from flwr.common import Code, FitRes, Status, ndarrays_to_parameters

    return [
        (
            None,
            FitRes(
                Status(Code.OK, ""),
                ndarrays_to_parameters([state[name].numpy() for name in state]),
                count,
                {},
            ),
        )
        for state, count in zip(states, samples, strict=True)
    ]


def arrays(parameters) -> list[np.ndarray]:
    from flwr.common import parameters_to_ndarrays

    return parameters_to_ndarrays(parameters)


SAMPLES = [[17, 240, 3], [80, 80, 1], [5, 6, 7]]


def test_fedavg_agrees_with_flower(flower):
    fed = small(model="mlp")
    ctx = fed.context(0, 1)
    states = [random_state(fed, seed) for seed in range(3)]
    ours = aggregate(
        FedAvg(), {"model": fed.initial}, uploads(fed, *states, samples=SAMPLES[0]), ctx
    )["model"]
    theirs, _ = flower.FedAvg().aggregate_fit(1, flower_results(fed, states, SAMPLES[0]), [])
    for mine, other in zip(ours.values(), arrays(theirs), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


def agree_round_by_round(fed, theirs, first: int = 1) -> None:
    """The same uploads to our method and to Flower's strategy, which may count
    rounds from 0 or 1.
    """
    method = fed.method
    server, _ = method.server_init({}, fed.context(0, 3))
    for t, samples in enumerate(SAMPLES):
        states = [random_state(fed, 10 * t + client) for client in range(3)]
        server = aggregate(
            method, server, uploads(fed, *states, samples=samples), fed.context(t, 3)
        )
        other, _ = theirs.aggregate_fit(t + first, flower_results(fed, states, samples), [])
        for mine, their in zip(server["model"].values(), arrays(other), strict=True):
            np.testing.assert_allclose(mine, their, rtol=1e-4, atol=1e-5)


def initial_of(fed):
    from flwr.common import ndarrays_to_parameters

    return ndarrays_to_parameters([value.numpy() for value in fed.initial.values()])


def test_fedavgm_agrees_with_flower(flower):
    fed = small(FedAvgM(server_momentum=0.7), "mlp")
    agree_round_by_round(
        fed, flower.FedAvgM(initial_parameters=initial_of(fed), server_momentum=0.7)
    )


def flower_options(fed, method: FedOpt) -> dict:
    return {"initial_parameters": initial_of(fed), "eta": method.server_lr, "tau": method.tau}


def test_fedadam_agrees_with_flower(flower):
    """Flower always corrects the bias of the moments; the paper, and our default, do not."""
    method = FedOpt(server_optimizer="adam", server_lr=0.05, tau=1e-2, bias_correction=True)
    fed = small(method, "mlp")
    theirs = flower.FedAdam(beta_1=method.beta1, beta_2=method.beta2, **flower_options(fed, method))
    agree_round_by_round(fed, theirs, first=0)


def test_without_the_correction_a_step_is_flowers_divided_by_it(flower):
    method = FedOpt(server_optimizer="adam", server_lr=0.05, tau=1e-2)
    fed = small(method, "mlp")
    theirs = flower.FedAdam(beta_1=method.beta1, beta_2=method.beta2, **flower_options(fed, method))
    states = [random_state(fed, client) for client in range(3)]
    server, _ = method.server_init({}, fed.context(0, 1))
    merged = aggregate(method, server, uploads(fed, *states, samples=SAMPLES[0]), fed.context(0, 1))
    other, _ = theirs.aggregate_fit(0, flower_results(fed, states, SAMPLES[0]), [])
    correction = (1 - method.beta2) ** 0.5 / (1 - method.beta1)
    for (name, mine), their in zip(merged["model"].items(), arrays(other), strict=True):
        step = mine - fed.initial[name]
        np.testing.assert_allclose(
            step, (their - fed.initial[name].numpy()) / correction, rtol=1e-3, atol=1e-5
        )


def test_fedadagrad_agrees_with_flower(flower):
    """Flower's FedAdagrad has no first moment."""
    method = FedOpt(server_optimizer="adagrad", server_lr=0.05, tau=1e-2, beta1=0)
    fed = small(method, "mlp")
    agree_round_by_round(fed, flower.FedAdagrad(**flower_options(fed, method)))
