"""Trackers, read back by the real libraries."""

import builtins

import pytest

from fedhelix.core.errors import UserError
from fedhelix.methods import GenFed
from fedhelix.store.trackers import numbers, tracker
from helpers import fit_and_stop, small


def test_tensorboard_reads_what_was_written_and_resumed(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    fit_and_stop(small(GenFed()), 3, 2, tmp_path / "run", track="tensorboard")
    run = small(GenFed()).fit(3, out=tmp_path / "run", resume=True, track="tensorboard", quiet=True)
    logged = events.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    for key in ("personal_accuracy", "uplink_bytes", "train_loss", "metadata/rho"):
        assert [event.step for event in logged.Scalars(key)] == [1, 2, 3]
    assert logged.Scalars("personal_accuracy")[-1].value == pytest.approx(
        run.records[-1]["personal_accuracy"]
    )
    assert logged.Histograms("clients")[-1].histogram_value.num == 6
    assert (
        'name = "genfed"'
        in logged.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    )


def test_mlflow_reads_what_was_written_and_resumed(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    # Files are quicker to set up than a database.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "trial")
    mlflow.set_tracking_uri(None)
    fit_and_stop(small(), 3, 1, tmp_path / "run", track="mlflow")
    client = mlflow.MlflowClient()
    identity = (tmp_path / "run" / "mlflow.txt").read_text()
    assert client.get_run(identity).info.status == "KILLED"
    run = small().fit(3, out=tmp_path / "run", resume=True, track="mlflow", quiet=True)
    (tracked,) = client.search_runs([client.get_experiment_by_name("trial").experiment_id])
    assert (tracked.info.run_id, tracked.info.run_name, tracked.info.status) == (
        identity,
        "run",
        "FINISHED",
    )
    assert (
        tracked.data.params["method.name"] == "fedavg"
        and tracked.data.params["training.epochs"] == "1"
    )
    steps = {
        metric.step: metric.value for metric in client.get_metric_history(identity, "accuracy")
    }
    assert steps == {record["round"]: record["accuracy"] for record in run.records}


def offline_records(content):
    """The records of an offline file: a log of blocks as LevelDB writes it, after seven bytes."""
    at, parts = 7, b""
    while len(content) - at >= 7:
        left = 32768 - at % 32768
        if left < 7:  # too short for another header
            at += left
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last of its parts
            yield parts
            parts = b""


def test_weights_and_biases_has_what_was_written_and_resumed(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "trial")
    fit_and_stop(small(), 3, 1, tmp_path / "run", track="wandb")
    identity = (tmp_path / "run" / "wandb.txt").read_text()
    run = small().fit(3, out=tmp_path / "run", resume=True, track="wandb", quiet=True)
    assert (tmp_path / "run" / "wandb.txt").read_text() == identity
    wandb.teardown()  # its service has written everything
    found, names = {}, set()
    for file in sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{identity}.wandb")):
        for content in offline_records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(content)
            names.add((record.run.project, record.run.display_name))
            items = {(*item.nested_key, item.key)[0]: item for item in record.history.item}
            if "accuracy" in items:
                found[record.history.step.num] = float(items["accuracy"].value_json)
    assert found == pytest.approx({one["round"]: one["accuracy"] for one in run.records})
    assert ("trial", "run") in names


def test_only_finite_numbers_are_written():
    record = {
        "round": 3,
        "a": 1,
        "b": float("nan"),
        "c": None,
        "d": [1],
        "e": True,
        "metadata": {"rho": 2, "f": {}},
    }
    assert numbers(record) == {"a": 1.0, "metadata/rho": 2.0}


def test_a_store_that_mlflow_refuses_is_one_sentence(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlflow")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    mlflow.set_tracking_uri(None)
    with pytest.raises(UserError, match="MLflow does not take this run: The filesystem tracking"):
        tracker("mlflow", tmp_path, {}, 0)


def test_what_cannot_be_tracked_is_refused_before_the_first_round(cli, tmp_path, monkeypatch):
    with pytest.raises(
        UserError, match=r"unknown tracker 'comet'; there are: mlflow, tensorboard, wandb"
    ):
        small().fit(1, out=tmp_path / "run", track="comet")
    with pytest.raises(UserError, match="tracking needs a run folder"):
        small().fit(1, track="tensorboard")
    original = builtins.__import__
    missing = {"tensorboard"}

    def without(name, *more, **rest):
        if name.partition(".")[0] in missing:
            raise ImportError(name)
        return original(name, *more, **rest)

    monkeypatch.setattr("fedhelix.core.imports.importlib.import_module", without)
    done = cli(
        "compare", "fedavg", "local", "--rounds", 1, "--track", "tensorboard", "--out", "mine"
    )
    assert done.code == 2 and "pip install 'fedhelix[track]'" in done.err
    assert not (tmp_path / "mine").exists()
    with pytest.raises(UserError, match="this needs tensorboard"):
        tracker("tensorboard", tmp_path, {}, 0)
