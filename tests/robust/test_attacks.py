"""Attacks by hand: what the forged uploads are, and who forges them."""

import numpy as np
import pytest
import torch

from fedhelix import (
    METHODS,
    Compact,
    FedAvg,
    Federation,
    FedLP,
    FedPer,
    FedUmf,
    GenFed,
    Scaffold,
    from_arrays,
    load,
)
from fedhelix.core.errors import UserError
from fedhelix.core.tree import add, masked_mean, subtract
from fedhelix.engines.local import ClientTask
from fedhelix.federation.uploads import validate_uploads
from helpers import close, same, small, timeless

DIGITS = load("digits")


def round_of(attack, clients=10, method=None, score=None, **more):
    """Uploads of a round with everybody, honest and forged."""
    fed = small(method, clients=clients, cohort=clients, partition="iid", attack=attack, **more)
    server, _ = fed.method.server_init({}, fed.context(0, 1))
    tasks = [
        ClientTask(i, 0, fed.method.download(server, i, fed.context(0, 1)), {})
        for i in range(clients)
    ]
    honest = fed.engine.run_clients(tasks)
    forged = fed.attackers.forge(honest, tasks, score)
    for one, other in zip(honest, forged, strict=True):
        if one.client not in fed.attackers.ids:
            assert one is other
    return fed, [o.upload["model"] for o in honest], [o.upload["model"] for o in forged]


def test_two_of_ten_attackers_by_ipm_leave_six_tenths_of_the_step():
    fed, honest, forged = round_of("ipm")
    assert len(fed.attackers.ids) == 2
    benign = [model for client, model in enumerate(honest) if client not in fed.attackers.ids]
    step = subtract(masked_mean(benign, [1] * 8, fed.initial), fed.initial)
    assert close(masked_mean(forged, [1] * 10, fed.initial), add(fed.initial, step, 0.6))


def test_sign_flip_and_noise():
    fed, honest, forged = round_of("sign-flip", attack_scale=3)
    for client in fed.attackers.ids:
        assert close(forged[client], add(fed.initial, subtract(honest[client], fed.initial), -3))
    fed, honest, forged = round_of("noise", attack_scale=0.5, attack_share=0.4)
    weight = fed.layers.parameters[0]
    noise = [
        subtract(forged[client], honest[client])[weight] for client in sorted(fed.attackers.ids)
    ]
    assert len(noise) == 4 and float(torch.stack(noise).std()) == pytest.approx(0.5, abs=0.03)
    assert not torch.equal(noise[0], noise[1])


def test_mimics_copy_one_benign_client():
    fed, honest, forged = round_of("mimic")
    assert fed.attackers.target not in fed.attackers.ids
    for client in fed.attackers.ids:
        assert close(forged[client], honest[fed.attackers.target])


def test_a_forged_model_has_the_types_of_an_honest_one():
    run = small(model="digits-bn-cnn", cohort=6, attack="mimic", attack_share=0.4).fit(
        1, quiet=True
    )
    before, after = run.federation.initial, run.state.server["model"]
    assert {name: value.dtype for name, value in after.items()} == {
        name: value.dtype for name, value in before.items()
    }


def test_without_anybody_benign_the_received_model_comes_back():
    fed = small(clients=10, cohort=10, attack="ipm")
    tasks = [ClientTask(client, 0, {"model": fed.initial}, {}) for client in fed.attackers.ids]
    for result in fed.attackers.forge(fed.engine.run_clients(tasks), tasks):
        assert same(result.upload["model"], fed.initial)


def test_the_adaptive_go_as_far_as_their_fitness_allows():
    plain = round_of("ipm", attack_scale=1)  # sends origin - mean, so the mean can be read from it
    fed, _, minus = plain
    mean = subtract(fed.initial, minus[min(fed.attackers.ids)])
    weight = fed.layers.parameters[0]

    def far(model):
        """How many times the benign mean a model lies from its origin."""
        return float(
            ((model[weight] - fed.initial[weight]) * mean[weight]).sum()
            / mean[weight].square().sum()
        )

    def as_fit_until(limit):
        return lambda models: [(float(far(model) >= limit), 0.0) for model in models]

    # From +1 in steps of 10 / 20: the last one that is not below -2.3 is -2.
    for limit, expected in ((-2.3, -2.0), (0.2, 0.5), (-99, -9.0)):
        fed, _, forged = round_of("adaptive", score=as_fit_until(limit))
        for client in fed.attackers.ids:
            assert close(forged[client], add(fed.initial, mean, expected), tolerance=1e-5)
    # Nothing on the way is as fit as the benign ones: they send the benign mean.
    fed, _, forged = round_of(
        "adaptive", score=lambda models: [(float(i < 8), 0.0) for i in range(len(models))]
    )
    assert close(forged[min(fed.attackers.ids)], add(fed.initial, mean), tolerance=1e-5)


@pytest.mark.parametrize(("attack", "expected"), [("adaptive", -6.5), ("adaptive-top", -0.5)])
def test_the_adaptive_reach_the_median_or_the_best_benign_client(attack, expected):
    # Eight benign clients score 0.1 ... 0.8. Step k of 20 scores 0.91 - 0.03 k: at least the median
    # 0.45 until k = 15, that is 7.5 beyond the mean, and at least 0.8 until k = 3.
    scores = [(0.1 * k, 0.0) for k in range(1, 9)] + [(0.91 - 0.03 * k, 0.0) for k in range(21)]
    fed, _, minus = round_of("ipm", attack_scale=1)
    mean = subtract(fed.initial, minus[min(fed.attackers.ids)])
    fed, _, forged = round_of(attack, score=lambda models: scores)
    for client in fed.attackers.ids:
        assert close(forged[client], add(fed.initial, mean, expected), tolerance=1e-5)


def test_the_adaptive_study_other_samples_than_the_server_scores_on():
    fed = small(GenFed(), validation_size=100, attack="adaptive")
    assert len(fed.studied) == 100 and not set(fed.studied) & set(fed.reserve.all)
    assert set(fed.data.y[fed.studied].bincount().tolist()) == {10}
    assert len(small(attack="ipm").studied) == 0
    assert len(small(attack="adaptive").studied) == 1000
    assert len(small(attack="adaptive-top").studied) == 1000


def test_flipping_twice_is_the_identity():
    once = DIGITS.with_flipped()
    size = len(DIGITS.y)
    assert torch.equal(once.y[size:], 9 - DIGITS.y) and torch.equal(once.x[size:], DIGITS.x)
    assert torch.equal(once.with_flipped().y[-size:], DIGITS.y)
    assert DIGITS.with_flipped() is once


def test_flippers_train_on_flipped_labels_and_are_evaluated_on_true_ones():
    more = {"validation_size": 0.1, "supplement_size": 10, "supplement_below": 1}
    plain, fed = small(**more), small(**more, attack="label-flip", attack_share=0.4)
    for client, (one, other) in enumerate(zip(plain.splits, fed.splits, strict=True)):
        assert np.array_equal(one.valid, other.valid) and np.array_equal(one.test, other.test)
        labels, given = DIGITS.y[one.train], fed.data.y[other.train]
        assert torch.equal(given, 9 - labels if client in fed.attackers.ids else labels)
        assert torch.equal(fed.data.x[other.train], DIGITS.x[one.train])
    assert len(fed.attackers.ids) == 2


def test_a_trigger_is_a_bright_corner():
    data, size, tests = DIGITS.with_trigger(), len(DIGITS.y), len(DIGITS.y_test)
    assert len(data.y) == 2 * size + tests and not data.y[size:].any()
    assert torch.equal(data.x[:size], DIGITS.x) and torch.equal(data.y[:size], DIGITS.y)
    marked = torch.cat([DIGITS.x, DIGITS.x_test])  # a view would change the data themselves
    marked[:, :, 6:, 6:] = 255
    assert torch.equal(data.x[size:], marked) and torch.equal(data.x_test, DIGITS.x_test)
    assert DIGITS.with_trigger() is data


def test_half_of_an_attackers_samples_have_a_trigger():
    plain, fed = small(), small(attack="backdoor", attack_share=0.4)
    size = len(DIGITS.y)
    for client, (one, other) in enumerate(zip(plain.splits, fed.splits, strict=True)):
        assert np.array_equal(one.test, other.test)
        moved = other.train - one.train
        malicious = client in fed.attackers.ids
        assert set(moved[::2]) == {size * malicious} and set(moved[1::2]) == {0}
    # Success is measured on test samples of the other classes.
    assert torch.equal(fed.data.y[fed.triggered], torch.zeros(len(fed.triggered)).long())
    assert len(fed.triggered) == int((DIGITS.y_test > 0).sum())
    assert not len(plain.triggered)


def test_a_backdoor_opens_and_leaves_the_accuracy_alone():
    more = {"partition": "iid", "clients": 10, "cohort": 10, "lr": 0.1}
    hit = (
        small(model="mlp", attack="backdoor", attack_share=0.3, **more)
        .fit(10, quiet=True)
        .records[-1]
    )
    plain = small(model="mlp", **more).fit(10, quiet=True).records[-1]
    assert hit["attack_success"] > 0.8 and hit["accuracy"] > plain["accuracy"] - 0.1
    assert "attack_success" not in plain


def test_model_replacement_multiplies_the_update():
    fed, honest, forged = round_of("backdoor", attack_scale=5)
    for client in fed.attackers.ids:
        assert close(forged[client], add(fed.initial, subtract(honest[client], fed.initial), 5))
    fed, honest, forged = round_of("backdoor", attack_scale=1)
    assert all(one is other for one, other in zip(honest, forged, strict=True))
    assert small(METHODS["local"](), attack="backdoor").attackers.ids  # trains on a trigger


ON_UPLOADS = ["mimic", "ipm", "alie", "min-max", "sign-flip", "noise", "adaptive", "adaptive-top"]


@pytest.mark.parametrize("attack", ["label-flip", "backdoor", *ON_UPLOADS])
def test_attacks_on_any_engine(attack):
    runs = [
        small(attack=attack, attack_share=0.5, engine=engine).fit(1, quiet=True)
        for engine in ("serial", "batched")
    ]
    assert close(*(run.state.server["model"] for run in runs), tolerance=1e-4)


@pytest.mark.filterwarnings("ignore:models get no better")
@pytest.mark.filterwarnings("ignore:training has diverged")
@pytest.mark.parametrize("attack", ON_UPLOADS)
@pytest.mark.parametrize(
    "method", [Scaffold(), FedLP(), FedUmf(), GenFed(), FedPer()], ids=lambda method: method.name
)
def test_attacks_on_any_method(attack, method):
    fed = small(method, "digits-bn-cnn", attack=attack, attack_share=0.5, validation_size=100)
    one, other = (timeless(fed.fit(2, quiet=True).records) for _ in range(2))
    assert one == other and all(record["refused"] == {} for record in one)


def test_nobody_attacks_by_default():
    fed = small(FedAvg())
    tasks = [ClientTask(client, 0, {"model": fed.initial}, {}) for client in range(3)]
    results = fed.engine.run_clients(tasks)
    assert (
        validate_uploads(fed.attackers.forge(results, tasks), fed.initial)[0]
        == validate_uploads(results, fed.initial)[0]
    )
    assert fed.attackers.ids == frozenset()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"attack": "ipm", "attack_share": 0.95},
            r"attack_share = 0\.95 leaves no benign client among 6; lower it",
        ),
        ({"attack": "ipm", "attack_share": 1}, "attack_share must be less than 1"),
        ({"attack": "smile"}, "attack must be one of none, label-flip"),
        ({"attack": "noise", "attack_scale": 0}, "attack_scale must be greater than 0"),
    ],
)
def test_bad_input(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        small(**settings)


def test_samples_that_cannot_be_poisoned():
    table = from_arrays(np.eye(40, dtype=np.float32), np.arange(40) % 2, name="table")
    with pytest.raises(UserError, match="a trigger is a patch in the corner of an image, and 'tab"):
        small(data=table, partition="iid", clients=2, cohort=2, attack="backdoor")
    curve = from_arrays(np.eye(40, dtype=np.float32), np.linspace(0, 1, 40), name="curve")
    for attack, word in (("label-flip", "flipped"), ("backdoor", "forged")):
        with pytest.raises(UserError, match=f"can be {word} in a classification only, and 'curve'"):
            small(data=curve, partition="iid", clients=2, cohort=2, attack=attack)


def test_attacks_without_effect_give_a_warning():
    with pytest.warns(
        UserWarning, match="attack = ipm has nothing to forge: local uploads no model"
    ) as said:
        Federation("digits", clients=4, method="local", model="linear", attack="ipm")
    assert said[0].filename == __file__, "it names the user's line"


def test_a_forged_upload_travels_in_the_code_of_the_method(monkeypatch):
    """With one bit per value, a forger sends signs and a scale per row like everybody else."""
    seen = []
    watched = FedAvg.aggregate

    def aggregate(self, server, uploads, weights, ctx):
        name = next(name for name in server["model"] if server["model"][name].dim() > 1)
        seen.extend(subtract(upload.tree["model"], server["model"])[name] for upload in uploads)
        return watched(self, server, uploads, weights, ctx)

    monkeypatch.setattr(FedAvg, "aggregate", aggregate)
    fed = small(Compact(FedAvg(), bits=1), cohort=5, clients=5, attack="noise", attack_share=0.4)
    for _ in fed.run_rounds(1):
        pass
    assert len(seen) == 5
    for update in seen:
        size = update.flatten(1).abs()
        assert (size.amax(1) - size.amin(1) <= 1e-5 * size.amax()).all()
