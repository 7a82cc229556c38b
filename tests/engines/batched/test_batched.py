"""The stacked engine against the serial one. The network has no corners, so that only rounding can
differ.
"""

import json
import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fedhelix import METHODS, FedAvg, FedRep, GeneFL, HeteroFL, Phase, load
from fedhelix.core.means import means_by_group
from fedhelix.core.tree import flatten
from fedhelix.engines.batched.engine import Batched
from fedhelix.engines.batched.multirun import run_together
from fedhelix.engines.local import ClientTask, predict_all
from fedhelix.models.resnet import ResNet
from helpers import NETWORKS, cheap, small, unseal

DIGITS = load("digits").subsample(300, 100)


def smooth(norm: bool = False) -> nn.Module:
    layers = [
        nn.Conv2d(1, 4, 3),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 8),
        nn.Tanh(),
        nn.Linear(8, 10),
    ]
    if norm:
        layers.insert(1, nn.BatchNorm2d(4))
    return nn.Sequential(*layers)


def build(method, engine, norm=False, **more):
    settings = {
        "model": lambda: smooth(norm),
        "data": DIGITS,
        "clients": 5,
        "batch_size": 16,
    } | more
    return small(method, engine=engine, **settings)


def distance(left: dict, right: dict) -> float:
    left, right = flatten(left), flatten(right)
    assert list(left) == list(right)
    pairs = [(left[name], right[name]) for name in left if isinstance(left[name], torch.Tensor)]
    return max(
        (float((one.double() - other.double()).abs().max()) for one, other in pairs if one.numel()),
        default=0,
    )


class Exact(ResNet):
    """A ResNet that computes with twice the digits."""

    def forward(self, x):
        return super().forward(x.double())


def test_sizes_of_a_resnet_agree_with_serial_but_for_rounding():
    """Its corners and statistics magnify rounding: with single precision accuracies may differ by
    some percent, with double precision nothing does.
    """
    method = HeteroFL(widths="1/0.5/0.25", depths="1/0.5")
    more = {"data": DIGITS.subsample(120, 40), "clients": 3, "cohort": 3, "batch_size": 20}
    runs = [
        build(method, engine, model=lambda: Exact(1, 10, (4, 6), 2).double(), **more)
        .fit(2, quiet=True)
        for engine in ("serial", "batched")
    ]  # fmt: skip
    assert distance(*(run.state.server for run in runs)) < 1e-9
    personal = [run.records[-1]["personal"] for run in runs]
    assert personal[0] == pytest.approx(personal[1])


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_agrees_with_serial(name, norm):
    if name == "fedbn" and not norm:
        pytest.skip("fedbn needs BatchNorm")
    if NETWORKS.get(name) == "lora-mlp":
        pytest.skip("it needs adapters; test_adapters.py compares the engines")
    if name in ("private", "dp-sgd"):
        pytest.skip("it refuses BatchNorm; its own tests compare the engines")
    if name == "compact":
        pytest.skip("few bits magnify rounding; test_compact.py compares the engines")
    # Training a generator would magnify rounding; without it everything else of the method is the
    # same.
    method = cheap(name, **({"generate": "own_mean"} if name == "pfedgpa" else {}))
    one, other = (
        build(method, engine, norm).fit(2, quiet=True) for engine in ("serial", "batched")
    )
    assert distance(one.state.server, other.state.server) < 1e-5
    assert one.state.client_states.keys() == other.state.client_states.keys()
    assert all(
        distance(one.state.client_states[i], other.state.client_states[i]) < 1e-5
        for i in one.state.client_states
    )
    for mine, its in zip(one.records, other.records, strict=True):
        for key in ("participants", "uplink_bytes", "downlink_bytes"):
            assert mine[key] == its[key]
        assert mine["train_loss"] == pytest.approx(its["train_loss"], abs=1e-5)
        assert mine["personal"] == pytest.approx(its["personal"], abs=0.021), (
            "a sample on the edge may change sides"
        )


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_the_number_of_slots_changes_nothing(slots):
    reference, engine = (
        build(FedAvg(), "serial"),
        build(FedAvg(), lambda setup: Batched(setup, slots)),
    )
    tasks = [ClientTask(client, 0, {"model": reference.initial}, {}) for client in range(5)]
    for one, other in zip(
        reference.engine.run_clients(tasks), engine.engine.run_clients(tasks), strict=True
    ):
        assert one.client == other.client and one.samples == other.samples
        assert distance(one.upload, other.upload) < 1e-5
        assert one.loss == pytest.approx(other.loss, abs=1e-5)


def test_slots_are_refilled_so_that_few_steps_are_wasted():
    fed = build(FedAvg(), lambda setup: Batched(setup, 2), batch_size=4, epochs=2)
    fed.engine.run_clients(
        [ClientTask(client, 0, {"model": fed.initial}, {}) for client in range(5)]
    )
    longest = max(2 * math.ceil(len(split.train) / 4) for split in fed.splits)
    needed = sum(2 * math.ceil(len(split.train) / 4) for split in fed.splits)
    assert fed.engine.scheduler.steps_needed == needed
    assert needed <= fed.engine.scheduler.steps_taken <= needed + longest


def test_momentum_decay_and_augmentation_agree_with_serial():
    more = {"momentum": 0.9, "weight_decay": 0.01, "augment": True, "lr_decay": 0.5}
    one, other = (
        build(FedRep(), engine, **more).fit(2, quiet=True) for engine in ("serial", "batched")
    )
    assert distance(one.state.server, other.state.server) < 1e-5


def test_dropout_follows_from_the_seed_and_not_from_the_callers_generator():
    network, states = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10)), []
    for number in (1, 2):
        torch.manual_seed(number)
        before = torch.get_rng_state()
        states.append(build(FedAvg(), "batched", model=network).fit(1, quiet=True).state.server)
        assert torch.equal(torch.get_rng_state(), before)
    assert distance(*states) == 0


@pytest.mark.parametrize(
    ("layer", "loss"),
    [
        (nn.Identity(), nn.functional.cross_entropy),  # one number for a whole batch
        (nn.InstanceNorm2d(1, affine=True, track_running_stats=True), None),
    ],
    ids=["scalar loss", "statistics"],
)
def test_batches_are_filled_up_only_where_that_changes_nothing(layer, loss):
    network = nn.Sequential(layer, nn.Flatten(), nn.Linear(64, 10))
    one, other = (
        build(FedAvg(), engine, model=network, loss=loss).fit(2, quiet=True)
        for engine in ("serial", "batched")
    )
    assert distance(one.state.server, other.state.server) < 1e-5


def test_models_are_scored_together_as_one_by_one():
    reference, stacked = build(FedAvg(), "serial"), build(FedAvg(), "batched")
    states = [reference.initial, {name: value * 1.5 for name, value in reference.initial.items()}]
    for indices in (None, torch.tensor([3, 1, 4])):
        for one, other in zip(
            reference.engine.score(states, "test", indices),
            stacked.engine.score(states, "test", indices),
            strict=True,
        ):
            assert one == pytest.approx(other, abs=1e-5)


def test_means_are_scored_as_models_are(monkeypatch):
    fed, some = build(FedAvg(), "batched", model="bn-cnn"), torch.tensor([3, 1, 4])
    states = [fed.initial, {name: value + 1 for name, value in fed.initial.items()}]
    means = means_by_group(states, [1, 2])([(0, 1), (1,), (0,)])
    found = fed.engine._outputs_of_means(means, "test", some)
    expected = predict_all(fed.engine.setup, list(means), "test", some)
    torch.testing.assert_close(list(found), expected, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr("fedhelix.engines.batched.engine.RECORDED", 10)
    assert fed.engine._outputs_of_means(means, "test", some) is None  # too many: 4 x 3


def test_too_little_memory_costs_slots_and_not_results(monkeypatch):
    from fedhelix.engines.batched.stack import Stack

    plain = Stack.step

    def hungry(self, *args):
        if self.width > 2:
            raise torch.cuda.OutOfMemoryError("out of memory")
        plain(self, *args)

    reference = build(FedAvg(), "serial").fit(1, quiet=True)
    monkeypatch.setattr(Stack, "step", hungry)
    fed = build(FedAvg(), "batched", cohort=5)
    with pytest.warns(UserWarning, match="out of GPU memory: going on with"):
        fed.engine.run_clients(
            [ClientTask(client, 0, {"model": fed.initial}, {}) for client in range(5)]
        )
    run = build(FedAvg(), lambda setup: Batched(setup, 2)).fit(1, quiet=True)
    assert distance(reference.state.server, run.state.server) < 1e-5


def test_runs_that_share_a_stack_give_what_they_give_alone():
    settings = [{"seed": seed, "lr": lr} for seed in (0, 1) for lr in (0.05, 0.2)]
    alone = [build(FedAvg(), "serial", **chosen).fit(2, quiet=True) for chosen in settings]
    together = run_together(
        [
            lambda maker, chosen=chosen: build(FedAvg(), maker, **chosen).fit(2, quiet=True)
            for chosen in settings
        ]
    )
    for one, other in zip(alone, together, strict=True):
        assert distance(one.state.server, other.state.server) < 1e-5
        assert one.records[-1]["train_loss"] == pytest.approx(
            other.records[-1]["train_loss"], abs=1e-5
        )


def test_runs_with_fisher_values_and_batch_norm_share_a_stack_too():
    """Fisher values put a module into evaluation mode; the stack may train with that very module
    afterwards.
    """
    method = GeneFL(clusters=1)
    alone = [build(method, "serial", norm=True, seed=seed).fit(2, quiet=True) for seed in (0, 1)]
    runs = [
        lambda maker, seed=seed: build(method, maker, norm=True, seed=seed).fit(2, quiet=True)
        for seed in (0, 1)
    ]
    for one, other in zip(alone, run_together(runs), strict=True):
        assert distance(one.state.server, other.state.server) < 1e-5
        assert all(
            distance(one.state.client_states[i], other.state.client_states[i]) < 1e-5
            for i in one.state.client_states
        )


def test_a_loss_sees_the_phase_that_is_trained():
    class Halves(FedAvg):
        def phases(self, client):
            return Phase(epochs=1), Phase(epochs=1, rate=0.5)

        def loss(self, params, batch, local):
            return local.phase.rate**4 * local.base_loss(params, batch)

    one, other = (
        build(Halves(), engine, model="linear").fit(1, quiet=True)
        for engine in ("serial", "batched")
    )
    assert distance(one.state.server, other.state.server) < 1e-5


def test_runs_share_no_stack_where_a_class_of_its_own_looks_at_other_options():
    @dataclass(frozen=True)
    class Louder(GeneFL):
        factor: float = 1.0

        def loss(self, params, batch, local):
            return self.factor * super().loss(params, batch, local)

    def run(factor: float, engine):
        method = Louder(clusters=1, factor=factor)
        return build(method, engine).fit(1, quiet=True).state.client_states

    factors = (1.0, 0.0)
    runs = [lambda maker, factor=factor: run(factor, maker) for factor in factors]
    for factor, client_states in zip(factors, run_together(runs), strict=True):
        alone = run(factor, "serial")
        assert all(distance(client_states[i], alone[i]) < 1e-5 for i in alone)
    assert (
        GeneFL(clusters=1).capabilities.loss_key
        == GeneFL(clusters=2).capabilities.loss_key
        != GeneFL(lambda_gen=1).capabilities.loss_key
    )


def double(whole: bool) -> nn.Module:
    """A network whose weights are of a wider type, or some of them."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(64, 10), nn.Linear(10, 10).double()
            if whole:
                self.double()

        def forward(self, x):
            return self.last(self.first(x.flatten(1).to(self.first.weight.dtype)).double())

    return Wide()


def test_weights_of_any_one_type_are_trained_as_such():
    one, other = (
        build(FedAvg(), engine, model=lambda: double(True)).fit(1, quiet=True)
        for engine in ("serial", "batched")
    )
    assert {value.dtype for value in other.state.server["model"].values()} == {torch.float64}
    assert distance(one.state.server, other.state.server) < 1e-7
    mixed = build(FedAvg(), "batched", model=lambda: double(False)).fit(1, quiet=True)
    assert mixed.records[0]["accuracy"] > 0  # trained in the wider type


def test_runs_of_different_length_do_not_wait_for_each_other():
    runs = run_together(
        [
            lambda maker, rounds=rounds: build(FedAvg(), maker).fit(rounds, quiet=True)
            for rounds in (1, 3)
        ]
    )
    assert [len(run.records) for run in runs] == [1, 3]


def test_a_failing_run_ends_all_runs_with_its_error():
    def broken(maker):
        raise ValueError("this one fails")

    with pytest.raises(ValueError, match="this one fails"):
        run_together([broken, lambda maker: build(FedAvg(), maker).fit(1, quiet=True)])


def test_what_was_chosen_by_timing_is_kept_with_the_run(tmp_path):
    build(FedAvg(), "batched").fit(1, out=tmp_path / "run", quiet=True)
    written = tmp_path / "run" / "choices.json"
    ((description, mode),) = json.loads(written.read_text()).items()
    assert mode == "grouped"
    kept = {description: "apart"}
    written.write_text(json.dumps(kept))
    unseal(tmp_path / "run")
    fed = build(FedAvg(), "batched")
    fed.fit(2, out=tmp_path / "run", resume=True, quiet=True)
    assert {cache.mode for cache in fed.engine.scheduler.caches.values()} <= {"apart"}
    assert fed.engine.choices == kept
