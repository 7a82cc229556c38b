"""What a user of PyTorch, pandas or Flower brings along: it works, or a sentence says how."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from fedhelix import (
    Augmentation,
    FedAvg,
    Federation,
    UserError,
    from_arrays,
    from_clients,
    from_table,
    partition,
)
from fedhelix.core.method import Phase
from fedhelix.engines.local import ClientTask, Training, batch_schedule, gather
from fedhelix.report import diagnostics, results, sections
from fedhelix.runs.config import Config

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(60, 4)).astype("float32")
Y = (X[:, 0] > 0).astype(int)
TOWNS = np.array(["metz", "ulm", "bern"])[np.arange(60) % 3]


def federation(data, split=None, **more):
    usual = {"engine": "serial", "model": "linear", "kernels": "onednn", "epochs": 1, "cohort": 2}
    return Federation(data, split, **usual | more)


def fit(data, split=None, rounds=1, **more):
    return federation(data, split, **more).fit(rounds, quiet=True)


def frame(rows=slice(None)):
    table = pd.DataFrame(X[rows], columns=list("abcd"))
    return table.assign(label=np.where(Y[rows], "sick", "well"))


class Dictionaries(TorchDataset):
    """Samples as `flwr_datasets` gives them."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return {"img": torch.from_numpy(X[index]), "label": int(Y[index])}


# Clients with names


def test_clients_are_called_by_the_names_of_their_owners():
    run = fit(frame().assign(town=TOWNS), partition.natural("town"))
    assert run.federation.names == ("bern", "metz", "ulm")
    assert run.predict(X, client="ulm").tolist() == run.predict(X, client=2).tolist()
    table = run.evaluate({"sick": lambda o, t: (o.argmax(1) == 0).float().mean()})
    assert table.index.tolist() == ["bern", "metz", "ulm"]
    assert run.federation.census()["names"] == ["bern", "metz", "ulm"]
    with pytest.raises(UserError, match="unknown client 'um'; did you mean 'ulm'"):
        run.personal("um")


@pytest.mark.parametrize(
    ("data", "split"),
    [
        ([(X, Y), (X, Y)], None),
        (from_arrays(X, Y, owners=np.arange(60) % 2), None),
        (from_arrays(X, Y), partition.iid(2)),
    ],
)
def test_another_number_of_clients_than_there_are_is_refused(data, split):
    with pytest.raises(UserError, match=r"clients = 7, but the partition or the owners .* make 2"):
        federation(data, split, clients=7)
    assert federation(data, split, clients=2).clients == 2
    assert federation(data, split).clients == 2
    assert federation(data, "iid", clients=3).clients == 3


def test_the_command_refuses_another_number_than_that_of_the_owners(tmp_path):
    np.savez(tmp_path / "mine.npz", x=X, y=Y, owners=np.arange(60) % 2)
    common = {"data": str(tmp_path / "mine.npz"), "engine": "serial", "model": "linear"}
    assert Config(**common).federation(FedAvg()).clients == 2
    for count in (7, 20):  # 20 is the usual number where nobody owns the samples
        with pytest.raises(UserError, match=f"clients = {count}, but .* owners .* make 2"):
            Config(**common, clients=count).federation(FedAvg())


def test_numbered_clients_have_no_names():
    run = fit([(X, Y), (X, Y)])
    assert run.federation.names is None and "names" not in run.federation.census()
    with pytest.raises(UserError, match="have no names, only numbers from 0 to 1"):
        run.personal("ulm")


def test_a_dictionary_names_the_clients():
    run = fit({"ulm": (X, Y), "bern": TensorDataset(*map(torch.from_numpy, (X[:20], Y[:20])))})
    assert run.federation.names == ("bern", "ulm")
    assert [len(split.train) for split in run.federation.splits] == [14, 43]
    with pytest.raises(UserError, match="client ulm of 'data' has samples of 3 float32"):
        federation({"bern": (X, Y), "ulm": (X[:, :3], Y)})


def test_a_report_calls_clients_by_their_names(tmp_path):
    fed = federation(frame().assign(town=TOWNS), partition.natural("town"))
    run = fed.fit(1, out=tmp_path / "run", quiet=True)
    rows = sections.clients(results.grouped([results.read(run.folder)]))["rows"]
    assert {row[0]["text"] for row in rows} == {"bern", "metz", "ulm"}
    counts = run.federation.census()["classes"]
    figure = diagnostics.partition(counts, names=["bern", "metz", "$ulm$"])
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels == ["bern", "metz", r"\$ulm\$"]


def test_rows_without_an_owner_and_columns_of_dates_are_named():
    table = frame().assign(town=TOWNS)
    table.loc[3:4, "town"] = None
    with pytest.raises(UserError, match=r"column 'town' of .* has a missing value in row 3 "):
        federation(table, partition.natural("town"))
    with pytest.raises(UserError, match=r"column 'day' of .* holds values of type Timestamp"):
        federation(frame().assign(day=pd.Timestamp("2020-01-01")))


def test_a_run_without_names_in_its_folder_is_resumed(tmp_path):
    fed = federation(frame().assign(town=TOWNS), partition.natural("town"))
    names, fed.names = fed.names, None  # as a version that knew none
    fed.fit(1, out=tmp_path, quiet=True)
    fed.names = names
    assert fed.fit(2, out=tmp_path, resume=True, quiet=True).summary["rounds"] == 2


# Forms of data


def test_samples_may_be_dictionaries_and_clients_tables():
    assert fit(Dictionaries(), partition.iid(3)).federation.clients == 3
    assert fit([Dictionaries(), Dictionaries()]).federation.data.shape == (4,)
    run = fit([frame(slice(0, 30)), frame(slice(30, 60))])
    assert set(run.predict(X)) <= {"sick", "well"}


def test_predictions_find_the_columns_of_a_frame_by_name():
    table = frame().assign(town=TOWNS)
    for run in (fit(table, partition.natural("town")), fit([frame(), frame()])):
        known = run.predict(X, client=1).tolist()
        assert run.predict(table, client=1).tolist() == known
        assert run.predict(table[["d", "b", "town", "c", "a"]], client=1).tolist() == known
        assert run.predict(pd.DataFrame(X), client=1).tolist() == known
        with pytest.raises(
            UserError, match=r"lacks the column 'c', .* with the columns a, b, c, d\."
        ):
            run.predict(table[["a", "b", "d"]], client=1)


def test_one_row_of_a_frame_is_a_frame():
    table = frame()
    run = fit(table, partition.iid(3))
    assert run.predict(table.iloc[[0]]).tolist() == run.predict(X[:1]).tolist()
    for row in (table.iloc[0], table["a"]):
        with pytest.raises(
            UserError, match=r"a Series .* columns a, b, c, d, .*: df\.iloc\[\[0\]\]"
        ):
            run.predict(row)
    with pytest.raises(UserError, match=r"list of dictionaries; give pandas\.DataFrame\(x\)"):
        run.predict(table.to_dict("records"))
    nameless = fit(from_arrays(X, [0, 1] * (len(X) // 2)), partition.iid(3))
    with pytest.raises(
        UserError, match=r"one sample, of shape \(4,\), .* such as df\.iloc\[\[0\]\]"
    ):
        nameless.predict(pd.DataFrame(X).iloc[0])


def test_one_sample_of_a_list_is_a_list_of_one():
    with pytest.raises(UserError, match=r"one sample, of shape .*; give a list .* for one: \[x\]"):
        fit(from_arrays(X, Y), partition.iid(3)).predict(X[0].tolist())


def test_one_sample_by_name_is_a_list_of_one():
    run = fit(frame(), partition.iid(3))
    row = {name: [float(value)] for name, value in zip("abcd", X[0], strict=True)}
    assert run.predict(row).tolist() == run.predict(X[:1]).tolist()
    picture = Image.new("L", (2, 2))
    for value in (0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5), "half", picture):
        with pytest.raises(UserError, match=r"'b' is a single value; .*: \{\"b\": \[...\]\}"):
            run.predict({**row, "b": value})


def test_what_is_no_table_and_no_array_says_how_to_make_one():
    with pytest.raises(UserError, match=r"not a file; .*: pandas\.read_csv\('stations\.csv'\)"):
        from_table("stations.csv", target="state")
    pairs = TensorDataset(torch.as_tensor(X), torch.as_tensor(Y))
    run = fit([pairs, pairs])
    for given in (pairs, DataLoader(pairs)):
        with pytest.raises(UserError, match=r"x is a \w+ of torch; give the inputs alone"):
            run.predict(given, client=0)


def test_several_columns_may_be_targets():
    table = frame().drop(columns="label").assign(one=Y, two=1 - Y)
    data = from_table(table, ["one", "two"])
    assert data.y.dtype == torch.bool and data.y.shape[1:] == (2,) and data.shape == (4,)


def test_splits_called_train_and_test_are_taken():
    tables = {"train": frame(slice(0, 40)), "test": frame(slice(40, 60))}
    data = from_table(tables)
    assert (len(data.x), len(data.x_test)) == (40, 20)
    with pytest.raises(UserError, match="the tables validation and none called train"):
        from_table({"validation": frame()})


def test_masks_with_a_channel_are_classes_of_pixels():
    images = DRAW.normal(size=(20, 1, 4, 4)).astype("float32")
    data = from_arrays(images, (images > 0).astype(int) + (images > 1))
    assert data.y.shape[1:] == (4, 4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: federation(DataLoader(Dictionaries())), "is a DataLoader; give its data set"),
        (lambda: federation([DataLoader(Dictionaries())]), "client 0 of 'data' is a DataLoader"),
        (lambda: federation((Dictionaries(), Dictionaries())), r"from_clients\(\[train\], test="),
        (lambda: federation(frame().assign(town=TOWNS)), r"name it: partition\.natural\('town'\)"),
        (lambda: from_arrays(X[:3], [["a"], ["a", "b"], ["c"]]), "MultiLabelBinarizer"),
        (lambda: from_arrays(np.zeros((400, 2)), range(400)), "in from_arrays, .* classes=None"),
        (
            lambda: federation(
                from_arrays([[1], [1, 2]] * 20, [0, 1] * 20),
                partition.iid(2),
                model=lambda: nn.Linear(2, 2),
            ),
            "come with a mask as the last one",
        ),
        (
            lambda: federation(from_arrays(X.astype(int), Y), partition.iid(2)),
            "whole numbers are tokens: give features as floats",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(make, words):
    with pytest.raises(UserError, match=words):
        make()


def test_a_softmax_before_cross_entropy_is_noticed():
    with pytest.warns(UserWarning, match="outputs are probabilities"):
        federation([(X, Y)], model=lambda: nn.Sequential(nn.Linear(4, 2), nn.Softmax(1)), cohort=1)


# Settings


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"client": 3}, "did you mean 'clients'"),
        ({"metrics": []}, "did you mean 'metric'"),
        ({"metric": {"a": max}}, "not dict; run.evaluate"),
        ({"learning_rate": 0.1}, "has no 'learning_rate'; lr is the learning rate"),
        ({"method": "fedprox", "mu": 0.1}, r"option of fedprox; give method=FedProx\(mu=0\.1\)\."),
        ({"method": "secure+fedprox", "mu": 1}, r"give method=Secure\(FedProx\(mu=1\)\)\."),
        ({"num_rounds": 3}, r"fit\(rounds=N\) takes it"),
        ({"fraction_fit": 0.1}, "cohort is the number of clients in a round"),
        ({"strategy": "fedavg"}, "method is the method"),
        ({"scheduler": "cosine"}, "lr_decay takes a list"),
        ({"transforms": []}, "augment takes an Augmentation"),
        ({"early_stopping": 3}, r"fit\(\.\.\., patience=N\) ends"),
        ({"optimizer": torch.optim.Adam}, "adamw or an OptimizerRule"),
        ({"sampler": "weighted"}, "sampler must be one of shuffle, balanced"),
        ({"lr_decay": []}, "lr_decay is an empty list"),
        ({"lr_decay": 1.01}, r"lr_decay must be at most 1, not 1\.01; .* a list"),
        ({"lr_decay": [1.0, 0.0]}, "lr_decay must be greater than 0"),
        ({"augment": True}, "crops and flips images, and a sample of 'data' has the shape"),
    ],
)
def test_settings_of_other_libraries_are_refused_with_those_of_this_one(options, words):
    with pytest.raises(UserError, match=words):
        federation([(X, Y)], cohort=1, **options)


@pytest.mark.parametrize("data", [None, 3, lambda: X])
def test_what_holds_no_data_is_refused(data):
    with pytest.raises(UserError, match=r"data is of type .*; give the name of a data set"):
        Federation(data)


def test_labels_below_zero_and_rounds_as_text_are_refused():
    with pytest.raises(
        UserError, match=r"outside the classes: -1 .* classes=None if these are numbers"
    ):
        from_arrays(X, np.where(Y > 0, 1, -1))
    with pytest.raises(UserError, match="rounds must be a whole number, not the text '3'"):
        federation([(X, Y)], cohort=1).fit("3")


def test_wrong_arguments_of_fit_and_evaluate_have_their_sentences():
    fed = federation([(X, Y)], cohort=1)
    for given, said in (
        ({"wach": print}, "unknown option of fit 'wach'; did you mean 'watch'"),
        ({"watch": 3}, "watch is a function of a record, not 3"),
        ({"quiet": "very"}, "quiet must be true or false, not 'very'"),
    ):
        with pytest.raises(UserError, match=said):
            fed.fit(1, **given)
    run = fed.fit(1, quiet=True)
    for metrics, said in (
        ({"a": "auc"}, "metric 'a' is a function .* did you mean fedhelix.metrics.auc?"),
        ({"a": lambda o, t: o}, "metric must return one number for all samples, not Tensor"),
        ("auc", "metrics is a dictionary such as .*, not 'auc'"),
        ({}, "metrics is a dictionary such as"),
    ):
        with pytest.raises(UserError, match=said):
            run.evaluate(metrics)


def test_a_network_that_cannot_be_made_is_named():
    def broken(shape):
        raise ValueError("no such width")

    with pytest.raises(UserError, match="broken fails with ValueError: no such width"):
        federation([(X, Y)], cohort=1, model=broken)


def test_resuming_with_another_setting_names_only_that_one(tmp_path):
    fit([(X, Y)], cohort=1).federation.fit(1, out=tmp_path, quiet=True)
    with pytest.raises(UserError, match=r"was run with lr = 0\.1, not 0\.3\.$"):
        federation([(X, Y)], cohort=1, lr=0.3).fit(2, out=tmp_path, resume=True)


def test_a_schedule_has_a_factor_for_each_round():
    training = Training(lr=0.4, lr_decay=[1, 0.5, 0.25])
    rates = [training.rate(t, Phase(rate=0.5)) for t in range(5)]
    assert rates == [0.2, 0.1, 0.05, 0.05, 0.05]
    assert Training(lr_decay="1,0.5").lr_decay == (1.0, 0.5)
    assert Training(lr=0.1, lr_decay=[0.5, 2.0]).rate(1, Phase()) == 0.2
    assert Training(lr_decay="0.5").rate(2, Phase()) == 0.1 * 0.25


def test_a_balanced_sampler_draws_all_classes_alike():
    labels = np.array([0] * 90 + [1] * 10)
    data = from_arrays(np.zeros((100, 2)), labels, np.zeros((2, 2)), [0, 1])
    fed = federation(data, partition.iid(1, valid=0), sampler="balanced", epochs=20, cohort=1)
    schedule = batch_schedule(fed.engine.setup, ClientTask(0, 0, {}, {}), Phase(), "batches")
    drawn = np.concatenate([labels[samples] for samples, *_ in schedule.steps()])
    assert len(drawn) == 2000
    assert abs(drawn.mean() - 0.5) < 4 * 0.5 / np.sqrt(2000)  # four standard deviations


def test_balance_needs_classes():
    with pytest.raises(UserError, match="sampler = balanced needs classes"):
        federation([(X, X[:, 0])], sampler="balanced", cohort=1)


@dataclass(frozen=True)
class Noise(Augmentation):
    """Adds a draw to every feature of a sample."""

    scale: float = 1.0

    def apply(self, x, drawn):
        return x + self.scale * drawn


def test_an_augmentation_is_drawn_anew_in_every_epoch():
    fed = federation([(X, Y)], augment=Noise(2.0), epochs=2, batch_size=100, cohort=1)
    setup = fed.engine.setup
    steps = list(batch_schedule(setup, ClientTask(0, 0, {}, {}), Phase(), "batches").steps())
    moved = []
    for samples, draws, _ in steps:
        assert draws.shape == (len(samples), 1) and draws.min() >= 0 and draws.max() < 1
        added = gather(setup, samples, draws).x - setup.data.x[samples]
        torch.testing.assert_close(added, 2 * draws.expand(-1, 4))
        moved.append(draws[samples.argsort()])
    assert len(moved) == 2 and not torch.equal(*moved)


def test_engines_agree_with_augmentation_sampler_and_schedule():
    more = {"augment": Noise(), "sampler": "balanced", "lr_decay": (1, 0.5), "batch_size": 7}
    runs = [fit([(X, Y), (X[:20], Y[:20])], None, 3, engine=engine, **more)
            for engine in ("serial", "batched")]  # fmt: skip
    ours, theirs = (run.model().state_dict() for run in runs)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5)
    plain = fit([(X, Y), (X[:20], Y[:20])], None, 3, batch_size=7).model().state_dict()
    assert any(not torch.allclose(value, plain[name]) for name, value in ours.items())


def test_an_augmentation_keeps_the_form_of_samples():
    @dataclass(frozen=True)
    class Shorter(Augmentation):
        def apply(self, x, drawn):
            return x[:, :2]

    with pytest.raises(UserError, match=r"into \(3, 2\) and torch.float32; both must stay"):
        federation([(X, Y)], augment=Shorter(), cohort=1)

    class Forgetful(Augmentation):
        def apply(self, x, drawn):
            x + drawn

    with pytest.raises(UserError, match="apply must return the changed samples, not a NoneType"):
        federation([(X, Y)], augment=Forgetful(), cohort=1)
    with pytest.raises(UserError, match="Augmentation must define apply"):
        federation([(X, Y)], augment=Augmentation(), cohort=1)


def test_options_of_an_augmentation_are_fields():
    class Made(Augmentation):
        def __init__(self, scale):
            self.scale = scale

        def apply(self, x, drawn):
            return self.scale * x

    class Undecorated(Augmentation):
        scale: float = 1.0

        def apply(self, x, drawn):
            return x

    class Plain(Noise):
        """Inherits all of it."""

        numbers: ClassVar[int] = 4

    for wrong in (Made(2.0), Undecorated(), type("Heir", (Undecorated,), {})()):
        with pytest.raises(UserError, match=r"augment has options of (Made|Undec).* frozen"):
            federation([(X, Y)], augment=wrong, cohort=1)
    federation([(X, Y)], augment=Plain(2.0), cohort=1)


def test_a_run_ends_when_validation_stalls_and_stays_there(tmp_path):
    labels = np.arange(60) % 2  # noise: nothing can be learnt, so validation stalls
    fed = federation([(X, labels), (X[:30], labels[:30])], lr=0.01)
    run = fed.fit(40, patience=2, out=tmp_path, checkpoint_every=7, quiet=True)
    values, last = run.metrics["valid_accuracy"].tolist(), run.summary["rounds"]
    assert last < 40 and run.summary["best_round"] == last - 2
    assert max(values[-2:]) <= values[-3] == max(values)
    again = fed.fit(40, patience=2, out=tmp_path, resume=True, quiet=True)
    assert again.summary["rounds"] == last
    straight = fed.fit(last + 1, quiet=True).metrics["accuracy"].tolist()
    longer = fed.fit(last + 1, out=tmp_path, resume=True, quiet=True)
    assert longer.metrics["accuracy"].tolist() == straight


@pytest.mark.parametrize(
    ("method", "split", "patience", "words"),
    [
        ("fedavg", partition.iid(2), 0, "patience must be at least 1, not 0"),
        ("fedavg", partition.iid(2, valid=0), 2, "patience needs validation samples"),
        ("pfedgpa", partition.iid(2), 2, "pfedgpa needs its last round"),
    ],
)
def test_patience_that_cannot_be(method, split, patience, words):
    with pytest.raises(UserError, match=words):
        federation(from_arrays(X, Y), split, method=method).fit(3, patience=patience)


@pytest.mark.parametrize("named", [False, True])
def test_a_test_part_may_be_none(named):
    parts = [(np.random.default_rng(i).normal(size=(9, 2)), np.arange(9) % 2) for i in range(3)]
    tests = [None, parts[1], None]
    names = ("a", "b", "c")
    data = from_clients(
        dict(zip(names, parts, strict=True)) if named else parts,
        test=dict(zip(names, tests, strict=True)) if named else tests,
    )
    assert set(data.owners_test.tolist()) == {"b" if named else 1} and len(data.y_test) == 9
    with pytest.warns(
        UserWarning, match=r"^2 of the 3 clients of 'data' have no test samples of t"
    ):
        assert [len(split.test) for split in Federation(data).splits] == [0, 9, 0]
    with pytest.raises(UserError, match=r"^no client of 'data' has a test part; give one to some"):
        from_clients(parts, test=[None] * 3)
