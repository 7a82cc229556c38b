import inspect
import math
import time
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import Dataset as TorchDataset

from fedhelix import (
    METHODS,
    FedAU,
    FedAvg,
    FedAvgFT,
    Federation,
    FedPer,
    FedRep,
    GenFed,
    LocalOnly,
    Scaffold,
    from_arrays,
    partition,
)
from fedhelix.core.errors import UserError
from fedhelix.core.tree import flatten, payload_bytes
from fedhelix.engines import Serial
from fedhelix.engines.local import ClientTask, run_client
from fedhelix.store import RunFolder
from helpers import NETWORKS, close, same, small, timeless, unseal

# One round

REFUSING = ("private", "dp-sgd")  # BatchNorm


def test_a_round_of_fedavg_is_the_weighted_mean_of_its_clients_models():
    fed = small(model="digits-bn-cnn")
    trained = [
        run_client(fed.engine.setup, ClientTask(client, 0, {"model": fed.initial}, {}))
        for client in fed.cohort(0)
    ]
    sizes = torch.tensor(
        [len(fed.splits[client].train) for client in fed.cohort(0)], dtype=torch.float64
    )
    by_hand = {}
    for name in fed.layers.names:
        values = torch.stack([result.upload["model"][name] for result in trained])
        if values.is_floating_point():
            by_hand[name] = torch.einsum(
                "c...,c->...", values.double(), sizes / sizes.sum()
            ).float()
        else:
            by_hand[name] = values.amax(0)
    run = fed.fit(1, quiet=True)
    assert close(run.state.server["model"], by_hand)
    record = run.records[0]
    assert record["train_loss"] == pytest.approx(np.mean([result.loss for result in trained]))
    assert record["participants"] == fed.cohort(0)
    assert record["uplink_bytes"] == record["downlink_bytes"] == 3 * payload_bytes(fed.initial)
    assert record["other_bytes"] == 0 and record["refused"] == {}


def test_the_round_loop_fits_on_one_screen():
    assert len(inspect.getsource(Federation.run_rounds).splitlines()) <= 45


# Randomness


def test_cohorts_are_the_same_for_every_method():
    kinds = [
        kind
        for name, kind in METHODS.items()
        if name not in REFUSING and NETWORKS.get(name) != "lora-mlp"
    ]
    feds = [small(kind(), "digits-bn-cnn", seed=3, validation_size=50) for kind in kinds]
    for t in range(5):
        assert len({tuple(fed.cohort(t)) for fed in feds}) == 1
    assert len({tuple(feds[0].cohort(t)) for t in range(20)}) > 5
    splits = [np.concatenate([split.train for split in fed.splits]) for fed in feds]
    assert all(np.array_equal(splits[0], split) for split in splits)
    assert all(same(feds[0].initial, fed.initial) for fed in feds)


def test_everybody_is_sampled_about_equally_often():
    fed = small()
    counts = np.bincount(np.concatenate([fed.cohort(t) for t in range(400)]), minlength=6)
    assert (
        counts.sum() == 1200 and counts.min() > 160 and counts.max() < 240
    )  # 200 expected, s.d. 10


def test_one_seed_gives_one_result_and_another_seed_another():
    first, second, third = (
        small(FedRep(), "mlp", seed=seed).fit(2, quiet=True) for seed in (1, 1, 2)
    )
    assert timeless(first.records) == timeless(second.records)
    assert same(first.state.server, second.state.server)
    assert timeless(first.records) != timeless(third.records)


# Records


def test_an_evaluated_record_by_hand():
    run = small(model="digits-cnn").fit(2, quiet=True)
    fed, record = run.federation, run.records[-1]
    model = run.model()
    outputs = model(fed.data.prepare(fed.data.x_test))
    assert record["accuracy"] == pytest.approx(
        (outputs.argmax(1) == fed.data.y_test).float().mean().item()
    )
    assert record["loss"] == pytest.approx(
        F.cross_entropy(outputs, fed.data.y_test).item(), rel=1e-5
    )
    personal, valid = [], []
    for split in fed.splits:
        right = (
            model(fed.data.prepare(fed.data.x_test[split.test])).argmax(1)
            == fed.data.y_test[split.test]
        )
        personal.append(right.float().mean().item())
        right = (
            model(fed.data.prepare(fed.data.x[split.valid])).argmax(1) == fed.data.y[split.valid]
        )
        valid.append(right.float().mean().item())
    assert record["personal"] == pytest.approx(personal)
    assert record["personal_accuracy"] == pytest.approx(np.mean(personal))
    assert record["personal_p10"] == pytest.approx(np.percentile(personal, 10))
    assert record["valid_accuracy"] == pytest.approx(np.mean(valid)) and record["seconds"] > 0


def test_the_start_of_processes_is_not_in_the_time_of_a_round(monkeypatch):
    now = [0.0]

    class Starting(Serial):
        def run_clients(self, tasks):
            if not self.start_seconds:
                with self.starting():
                    now[0] += 60
            now[0] += 1
            return super().run_clients(tasks)

    fed = small(engine=Starting)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    run = fed.fit(2, quiet=True)
    first, second = run.records
    assert (first["seconds"], first["start_seconds"]) == (1, 60)
    assert second["seconds"] == 1 and "start_seconds" not in second
    assert run.summary["seconds"] == 2


def test_without_validation_samples_there_is_no_validation_figure():
    run = small(partition=partition.iid(6, valid=0)).fit(1, quiet=True)
    assert "valid_accuracy" not in run.records[0] and run.summary["best_round"] == 1


@pytest.mark.parametrize("shared", [False, True])
def test_the_servers_validation_set_stands_in_unless_clients_train_on_it(shared):
    supplied = {
        "validation_size": 0.2,
        "supplement_size": 20,
        "supplement_below": 1,
        "validation_shared": shared,
    }
    fed = small(partition=partition.iid(6, valid=0), **supplied)
    run = fed.fit(1, quiet=True)
    (expected,) = fed.engine.score(
        [run.state.server["model"]], "train", torch.from_numpy(fed.reserve.scoring)
    )
    assert run.records[0].get("valid_accuracy") == (None if shared else pytest.approx(expected[0]))


@pytest.mark.parametrize(
    "method", [FedPer(), LocalOnly(), FedRep()], ids=lambda method: method.name
)
def test_without_a_global_model_there_is_no_accuracy(method):
    run = small(method, "mlp").fit(1, quiet=True)
    assert "accuracy" not in run.records[0] and "personal_accuracy" in run.records[0]
    assert run.model() is None and run.summary["final_accuracy"] is None


def test_evaluation_happens_when_due_and_at_the_end():
    run = small().fit(5, quiet=True, eval_every=2)
    assert [record["round"] for record in run.records if "accuracy" in record] == [2, 4, 5]
    assert run.metrics.index.tolist() == [1, 2, 3, 4, 5]
    assert run.metrics["accuracy"].notna().tolist() == [False, True, False, True, True]


def test_some_clients_may_stand_for_all_and_are_always_the_same():
    methods = [FedAvg(), FedPer()]
    everybody, few, again = (
        small(methods[0], "mlp", eval_clients=count).fit(1, quiet=True) for count in (None, 2, 2)
    )
    evaluated = few.federation.evaluated
    assert (
        len(evaluated) == 2
        and evaluated
        == again.federation.evaluated
        == small(methods[1], "mlp", eval_clients=2).evaluated
    )
    assert few.records[0]["personal"] == pytest.approx(
        [everybody.records[0]["personal"][i] for i in evaluated]
    )
    assert few.records[0]["accuracy"] == everybody.records[0]["accuracy"]
    nobody = small(model="mlp", eval_clients=0).fit(1, quiet=True)
    assert (
        "personal_accuracy" not in nobody.records[0]
        and nobody.summary["final_accuracy"] is not None
    )


def test_evaluation_does_not_disturb_training():
    often, once = (
        small(FedAvgFT(), "digits-bn-cnn").fit(3, quiet=True, eval_every=every) for every in (1, 3)
    )
    assert same(often.state.server, once.state.server)


def test_learning_happens():
    run = small(model="digits-cnn", partition="iid", batch_size=16, epochs=3).fit(4, quiet=True)
    assert run.records[-1]["accuracy"] > 0.9
    assert run.records[-1]["train_loss"] < run.records[0]["train_loss"] / 2


# What comes out


def test_models_are_usable_copies():
    run = small(FedAvgFT(ft_epochs=1), "mlp").fit(1, quiet=True)
    shared, client_state = run.model(), run.personal(2)
    x = run.federation.data.prepare(run.federation.data.x_test)
    assert shared(x).shape == client_state(x).shape == (len(x), 10) and not shared.training
    assert not torch.equal(shared(x), client_state(x))
    assert same(shared.state_dict(), run.state.server["model"])
    with torch.no_grad():
        shared.fc1.weight.zero_()
    assert not same(shared.state_dict(), run.model().state_dict())
    with pytest.raises(UserError, match=r"a client is a whole number or a name, not 1\.5"):
        run.personal(1.5)
    with pytest.raises(UserError, match="there is no client 6; clients are numbered from 0 to 5"):
        run.personal(6)


# Other tasks and other people's things


def test_tabular_regression():
    x, y = load_diabetes(return_X_y=True)
    x, y = x / x.std(0), (y - y.mean()) / y.std()
    data = from_arrays(x.astype("float32"), y.astype("float32"), name="diabetes")
    run = small(
        data=data, partition="iid", model="mlp", clients=5, cohort=5, lr=0.02, batch_size=16
    ).fit(8, quiet=True)
    assert (
        run.records[-1]["score"] > 0.3
    )  # r2 on the test pool; about 0.45 is the best that anybody gets
    assert run.summary["final_score"] == run.records[-1]["score"]


def test_your_own_module_loss_and_metric():
    class Net(nn.Module):
        def __init__(self, outputs: int):
            super().__init__()
            self.out = nn.Linear(64, outputs)

        def forward(self, x):
            return self.out(x.flatten(1)).log_softmax(1)

    fed = small(
        model=Net,
        loss=lambda output, target: F.nll_loss(output, target),
        metric=lambda output, target: (
            (output.topk(3).indices == target[:, None]).any(1).float().mean()
        ),
    )
    run = fed.fit(2, quiet=True)
    assert isinstance(run.model(), Net)
    assert run.records[-1]["score"] > 0.6 and "accuracy" not in run.records[-1]


def test_your_own_data_set_per_client():
    class Numbers(TorchDataset):
        def __init__(self, seed: int, size: int):
            draw = np.random.default_rng(seed)
            self.x = draw.normal(size=(size, 4)).astype("float32")
            self.y = (self.x.sum(1) > 0).astype("int64")

        def __len__(self):
            return len(self.x)

        def __getitem__(self, index):
            return self.x[index], self.y[index]

    fed = Federation(
        [Numbers(seed, 30 + 10 * seed) for seed in range(4)],
        engine="serial",
        model="linear",
        lr=0.5,
    )
    assert fed.clients == 4 and fed.cohort_size == 4
    # 20 % are held out for testing, and a tenth of the rest for validation.
    assert [len(split.train) + len(split.valid) for split in fed.splits] == [24, 32, 40, 48]
    assert fed.fit(10, quiet=True).records[-1]["accuracy"] > 0.9


def test_a_trained_module_is_where_training_starts_and_is_not_touched():
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    fed = small(model=module)
    assert same(fed.initial, before)
    fed.fit(1, quiet=True)
    assert same(dict(module.state_dict()), before)


# Uploads that cannot be used


@dataclass(frozen=True)
class Poisoned(FedAvg):
    victims: tuple = (0,)

    def upload(self, local):
        tree, client_state = super().upload(local)
        if local.client.id in self.victims:
            tree = {"model": {name: value * math.nan for name, value in tree["model"].items()}}
        return tree, client_state


def test_a_bad_upload_is_refused_and_counted_and_the_round_goes_on():
    bad = small(Poisoned(), cohort=6).fit(2, quiet=True)
    assert [record["refused"] for record in bad.records] == [
        {"0": "holds values that are not finite"}
    ] * 2
    assert bad.summary["refused"] == 2
    one_less = [
        run_client(
            bad.federation.engine.setup,
            ClientTask(client, 0, {"model": bad.federation.initial}, {}),
        )
        for client in range(1, 6)
    ]
    mean = small(Poisoned(), cohort=6).fit(1, quiet=True).state.server["model"]
    sizes = np.array([result.samples for result in one_less])
    name = bad.federation.layers.names[0]
    by_hand = sum(
        out.upload["model"][name] * weight
        for out, weight in zip(one_less, sizes / sizes.sum(), strict=True)
    )
    assert torch.allclose(mean[name], by_hand.float(), atol=1e-6)
    assert all(bool(value.isfinite().all()) for value in bad.state.server["model"].values())


def test_when_all_uploads_are_refused_the_server_stays_as_it_was():
    with pytest.warns(UserWarning, match="every upload was refused"):
        run = small(Poisoned(tuple(range(6)))).fit(1, quiet=True)
    assert len(run.records[0]["refused"]) == 3
    assert same(run.state.server["model"], run.federation.initial)
    assert run.records[0]["uplink_bytes"] == 3 * payload_bytes(
        run.federation.initial
    )  # it was sent all the same


# Run folders from Python


def test_a_run_from_python_can_be_resumed_from_python(tmp_path, capsys):
    straight = small(Scaffold()).fit(3, out=tmp_path / "straight", quiet=True)
    small(Scaffold()).fit(2, out=tmp_path / "stopped", quiet=True)
    resumed = small(Scaffold()).fit(3, out=tmp_path / "stopped", resume=True, quiet=True)
    assert timeless(resumed.records) == timeless(straight.records)
    assert RunFolder.open(tmp_path / "stopped").config["rounds"] == 3, "dashboards show 3 / 3"
    with pytest.raises(UserError, match="has 3 rounds already"):
        small(Scaffold()).fit(1, out=tmp_path / "stopped", resume=True, quiet=True)
    written = RunFolder.open(tmp_path / "stopped").config
    assert written["rounds"] == 3 and written["versions"]["torch"] == torch.__version__
    assert same(resumed.state.server, straight.state.server)
    assert resumed.folder.summary["rounds"] == 3
    assert not capsys.readouterr().err
    again = small(Scaffold()).fit(3, out=tmp_path / "stopped", resume=True)
    assert "was finished already, so nothing was trained" in capsys.readouterr().err
    assert same(again.state.server, straight.state.server)
    with pytest.raises(UserError, match=r"holds a run already; .*resume=True"):
        small().fit(1, out=tmp_path / "straight", quiet=True)
    with pytest.raises(UserError, match=r"holds a run already; .*resume=True"):
        RunFolder.create(tmp_path / "straight", {"method": {"name": "fedavg"}})  # as a command does


@pytest.mark.parametrize(
    ("stop_at", "problem"),
    [(1, KeyboardInterrupt), (2, RuntimeError("a mistake in a method")), (3, KeyboardInterrupt)],
)
def test_what_ends_a_run_between_checkpoints_loses_no_complete_round(
    tmp_path, monkeypatch, stop_at, problem
):
    straight = small(FedPer(), "mlp").fit(4, out=tmp_path / "straight", quiet=True)
    fed = small(FedPer(), "mlp")
    work_once = fed.engine.run_clients

    def interrupted(tasks):
        if tasks[0].round == stop_at:
            raise problem
        return work_once(tasks)

    monkeypatch.setattr(fed.engine, "run_clients", interrupted)
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        fed.fit(4, out=tmp_path / "run", quiet=True, checkpoint_every=3)
    assert RunFolder.open(tmp_path / "run").rounds_saved == stop_at
    resumed = small(FedPer(), "mlp").fit(
        4, out=tmp_path / "run", resume=True, quiet=True, checkpoint_every=3
    )
    assert timeless(resumed.records) == timeless(straight.records)
    assert all(
        same(resumed.state.client_states[i], straight.state.client_states[i])
        for i in straight.state.client_states
    )


# Bad input


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"cohort": 7}, r"cohort must lie between 1 and the number of clients \(6\), not 7"),
        ({"cohort": 0}, "cohort must lie between 1"),
        ({"cohort": 2.5}, "cohort must be a whole number, not '?2.5"),
        ({"eval_clients": -1}, "eval_clients must be at least 0, not -1"),
        (
            {"clients": 5000},
            "5000 clients cannot share 1438 samples; lower clients to at most 1438",
        ),
        ({"partition": "dirichlet:0"}, "alpha must be greater than 0"),
        ({"partition": "dirichlt:1"}, "unknown partition 'dirichlt'; did you mean 'dirichlet'?"),
        ({"data": "digit"}, "unknown data set 'digit'; did you mean 'digits'?"),
        ({"model": "resnt18"}, "unknown model 'resnt18'; did you mean 'resnet18'?"),
        ({"model": nn.Linear(64, 10)}, "the model does not fit the data"),
        (
            {"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 7))},
            "output does not fit the targets: .*needed",
        ),
        ({"model": nn.Flatten()}, "no trainable parameters"),
        ({"lr": -1}, "lr must be greater than 0, not -1.0"),
        ({"momentm": 0.5}, "unknown key of a federation 'momentm'; did you mean 'momentum'?"),
        ({"device": "toaster"}, "there is no device 'toaster' here"),
        ({"engine": "steam"}, "unknown engine 'steam'"),
        (
            {"partition": [[0, 1], [2, 3]]},
            r"partition is text or a value such as partition.iid\(10\), not \[\[0",
        ),
        (
            {"partition": [list(range(500)), list(range(500, 999))]},
            r"16, \.\.\.; to assign samples yourself, .* from_arrays\(x, y, owners=ids\)",
        ),
        ({"workers": "two"}, "workers must be a whole number, not 'two'"),
        (
            {"kernels": "fast"},
            "kernels must be one of auto, onednn, native, tuned, compiled, not 'fast'",
        ),
        ({"seed": "x"}, "seed must be a whole number, not 'x'"),
        ({"seed": 1.7}, "seed must be a whole number, not '1.7'"),
        ({"method": FedAvg}, r"method is a name or a value such as FedAvg\(\), not <class"),
        ({"method": "genfd"}, "unknown method 'genfd'; did you mean 'genfed'"),
        (
            {"method": METHODS["fedbn"]()},
            "fedbn needs a model with BatchNorm and this one has none",
        ),
        ({"method": METHODS["fedrep"]()}, "fedrep would share no layer of this model"),
        (
            {"method": FedPer(personal_layers=4), "model": "mlp"},
            "3 weighted layers, so its last 4 cannot be taken",
        ),
    ],
)
def test_a_federation_that_cannot_be(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        small(**settings)


def test_a_method_by_its_name():
    assert small("genfed+fedau").method == GenFed(FedAU())


@pytest.mark.parametrize("setting", ["rounds", "eval_every", "checkpoint_every"])
def test_a_fit_that_cannot_be(setting, tmp_path):
    with pytest.raises(UserError, match=f"{setting} must be at least 1, not 0"):
        small().fit(**{"rounds": 1, "out": tmp_path / "run", "quiet": True} | {setting: 0})
    assert not (tmp_path / "run").exists()


def test_clients_keep_their_state_in_one_of_two_places():
    with pytest.raises(UserError, match="client_state must be one of memory, disk, not 'dsk'"):
        small().fit(1, client_state="dsk")


X = np.zeros((20, 3), dtype="float32")
Y = np.arange(20) % 2


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            lambda: from_arrays(X + np.nan, Y),
            "x of 'data' has nan in sample 0; every value must be finite",
        ),
        (lambda: from_arrays(X, Y, classes=1), "labels outside the classes: 1 at index"),
        (lambda: from_arrays(X, -Y), "labels outside the classes: -1"),
        (
            lambda: [(X, Y), (X[:0], Y[:0])],
            "client 1 of 'data' is empty; at least one sample is needed",
        ),
        (lambda: [], "has no clients"),
    ],
)
def test_data_that_cannot_be(data, sentence):
    with pytest.raises(UserError, match=sentence):
        Federation(data(), engine="serial")


def test_records_that_do_not_cover_the_checkpoint_are_refused(tmp_path):
    small().fit(3, out=tmp_path / "run", quiet=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:1]))
    unseal(tmp_path / "run")
    with pytest.raises(UserError, match="lacks rounds that its checkpoint has"):
        small().fit(5, out=tmp_path / "run", resume=True, quiet=True)


def test_a_run_is_not_continued_with_other_clients_or_another_network(tmp_path):
    small(partition="dirichlet:0.1").fit(1, out=tmp_path / "run", quiet=True)
    kept = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="had other samples than they have now"):
        small(partition="iid").fit(3, out=tmp_path / "run", resume=True, quiet=True)
    with pytest.raises(UserError, match="it was run with, linear"):
        small(model="mlp", partition="dirichlet:0.1").fit(
            3, out=tmp_path / "run", resume=True, quiet=True
        )
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == kept


@pytest.mark.parametrize(
    ("variant", "arguments"),
    [
        ("fedprox@mu=0.1", "method=FedProx(mu=0.1)."),
        ("fedavg@epochs=2,lr=0.07", "method=FedAvg(), epochs=2, lr=0.07."),
        ("genfed+fedau@rho_max=3", "method=GenFed(FedAU(), rho_max=3)."),
    ],
)
def test_a_variant_of_the_command_line_is_translated(variant, arguments):
    with pytest.raises(UserError) as problem:
        small(variant)
    assert str(problem.value).endswith(f"in Python give {arguments}")


def test_nothing_is_resumed_without_its_folder():
    with pytest.raises(UserError, match="resume needs the folder of the run"):
        small().fit(2, resume=True)


@pytest.mark.parametrize(
    "option",
    [
        {"attack_share": 0.4},
        {"attack_scale": 2.0},
        {"newcomers_after": 2},
        {"newcomers_classes": 0.3},
        {"device_speed": 5.0},
        {"supplement_below": 0.5},
        {"validation_shared": True},
        {"participation_alpha": 0.1},
    ],
)
def test_a_setting_that_does_nothing_says_what_it_needs(option):
    (name,) = option
    words = {"device": "devices", "supplement": "supplement_size", "validation": "supplement_size"}
    first = name.partition("_")[0]
    needed = words.get(first, first)
    with pytest.warns(UserWarning, match=f"{name} = .* does nothing without {needed};"):
        small(**option)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"late": "keep", "devices": "uniform"}, "late = keep .* without deadline or over_select;"),
        ({"momentum": 0.9, "optimizer": "adam"}, "momentum = 0.9 .* with optimizer = adam;"),
        ({"attack_scale": 2.0, "attack": "label-flip"}, "attack_scale = 2.0 .* with attack = lab"),
        ({"supplement_size": 0.5, "server_only": True}, "supplement_size = 0.5 .* server_only = T"),
        ({"eval_trained": True, "eval_clients": 0}, "eval_trained does nothing with eval_clients"),
    ],
)
def test_a_setting_that_another_one_makes_idle_says_so(options, said):
    with pytest.warns(UserWarning, match=said):
        small(**options)


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_workers_of_an_engine_without_any_do_nothing(engine):
    said = f"workers = 2 does nothing with engine = {engine};"
    with pytest.warns(UserWarning, match=said):
        Federation("digits", clients=4, model="linear", engine=engine, workers=2)


def test_settings_with_what_they_need_give_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small(devices="uniform", late="keep", over_select=1.5, participation="bernoulli",
              participation_alpha=0.5, momentum=0.9, workers=2, engine="auto")  # fmt: skip


def test_clients_state_on_disk_is_that_in_memory(tmp_path):
    straight = small(method=FedPer(), model="mlp").fit(4, quiet=True)
    fed = small(method=FedPer(), model="mlp")
    fed.fit(2, out=tmp_path / "run", client_state="disk", quiet=True)
    run = fed.fit(4, out=tmp_path / "run", resume=True, client_state="disk", quiet=True)
    assert not run.state.client_states.maps[0]  # nothing is held in memory
    assert set(run.state.client_states) == set(straight.state.client_states)
    for client, kept in straight.state.client_states.items():
        assert all(
            torch.equal(value, run.state.client_states[client]["model"][name])
            for name, value in kept["model"].items()
        )
    assert run.records[-1]["personal"] == straight.records[-1]["personal"]
    with pytest.raises(UserError, match="needs a run folder"):
        fed.fit(1, client_state="disk")


@pytest.mark.filterwarnings("ignore:training has diverged")
@pytest.mark.parametrize("name", ["fedper", "fedrep", "ditto", "fedfina"])
def test_a_client_recovers_from_a_round_that_diverged(name):
    # The first round overflows, the second has a learning rate of 0.1.
    run = small(METHODS[name](), model="digits-cnn", lr=1e20, lr_decay=1e-21, cohort=6).fit(
        2, quiet=True
    )
    assert run.records[0]["refused"] and not run.records[1]["refused"]
    assert all(
        torch.isfinite(value).all()
        for client_state in run.state.client_states.values()
        for value in flatten(client_state).values()
    )


def test_samples_without_a_metric_have_no_say():
    draw = np.random.default_rng(0)
    owners = [
        draw.normal(size=(size, 4)).astype("float32") for size in (40, 40, 6)
    ]  # 6: one to be tested by, no spread
    run = Federation([(x, x.sum(1)) for x in owners], seed=0, lr=0.01).fit(1, quiet=True)
    one, other, third = run.records[0]["personal"]
    assert math.isnan(third) and run.records[0]["personal_score"] == pytest.approx(
        (one + other) / 2
    )
    assert math.isfinite(run.records[0]["valid_score"])
