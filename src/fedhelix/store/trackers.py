"""Writes records to TensorBoard, MLflow and Weights & Biases."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedhelix.core import toml
from fedhelix.core.errors import UserError, unknown
from fedhelix.core.files import write_atomically
from fedhelix.core.imports import from_extra
from fedhelix.store.records import is_number

DATABASES = ("sqlite", "postgresql", "mysql", "mssql")  # stores of MLflow that need more packages


class Tracker(Protocol):
    """Use it in a `with` statement and give `update` each new record."""

    def __enter__(self) -> Tracker: ...

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None: ...

    def update(self, record: Mapping[str, Any]) -> None:
        """Write the record of one round."""


class TensorBoard:
    """Scalars and histograms of the clients' metrics, in the folder `tensorboard` of the run."""

    def __init__(self, folder: Path, config: Mapping[str, Any], done: int) -> None:
        from_extra("tensorboard", "track")
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run repeats the rounds after its checkpoint: drop their old values.
        self.writer = SummaryWriter(
            str(folder / "tensorboard"), purge_step=done + 1 if done else None
        )
        if not done:
            self.writer.add_text(
                "config", "".join(f"    {line}\n" for line in toml.dumps(config).splitlines())
            )

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.close()

    def update(self, record: Mapping[str, Any]) -> None:
        """Write the record of one round."""
        for key, value in numbers(record).items():
            self.writer.add_scalar(key, value, record["round"])
        clients = [value for value in record.get("personal") or () if math.isfinite(value)]
        if clients:
            self.writer.add_histogram("clients", np.array(clients), record["round"])
        self.writer.flush()


class MLflow:
    """Parameters and metrics in MLflow's store.

    MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME name the store and the experiment.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], done: int) -> None:
        mlflow = from_extra("mlflow", "track")
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        id_file = folder / "mlflow.txt"  # by which a resumed run continues the same MLflow run
        try:
            self.entities, self.client = mlflow.entities, mlflow.MlflowClient()
            if id_file.exists():
                self.id = id_file.read_text().strip()
                self.client.update_run(self.id, status="RUNNING")
                return
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedhelix")
            known = self.client.get_experiment_by_name(name)
            experiment = known.experiment_id if known else self.client.create_experiment(name)
            self.id = self.client.create_run(experiment, run_name=folder.name).info.run_id
            options = [
                mlflow.entities.Param(key, str(value)[:500])
                for key, value in toml.flat(config).items()
            ]
            self.client.log_batch(self.id, params=options)
        except mlflow.exceptions.MlflowException as problem:
            raise UserError(
                f"MLflow does not take this run: {str(problem).splitlines()[0]}"
            ) from None
        write_atomically(id_file, self.id.encode())

    def __enter__(self) -> MLflow:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.client.set_terminated(self.id, "FINISHED" if kind is None else "KILLED")

    def update(self, record: Mapping[str, Any]) -> None:
        """Write the record of one round."""
        now = int(time.time() * 1000)
        metrics = [
            self.entities.Metric(key, value, now, record["round"])
            for key, value in numbers(record).items()
        ]
        self.client.log_batch(self.id, metrics=metrics)


class WeightsAndBiases:
    """A run of Weights & Biases; its files lie in the folder of the run.

    Its own variables apply: WANDB_PROJECT, WANDB_ENTITY, and WANDB_MODE=offline.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], done: int) -> None:
        wandb = from_extra("wandb", "track")
        id_file = folder / "wandb.txt"  # by which a resumed run continues the same one
        known = id_file.read_text().strip() if id_file.exists() else None
        try:
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "fedhelix"), name=folder.name,
                dir=str(folder), config=toml.flat(config), id=known, resume="allow",
                settings=wandb.Settings(silent=True, console="off"),
            )  # fmt: skip
        except wandb.Error as problem:
            raise UserError(
                f"Weights & Biases does not take this run: {str(problem).splitlines()[0]}"
            ) from None
        write_atomically(id_file, self.run.id.encode())

    def __enter__(self) -> WeightsAndBiases:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.run.finish(exit_code=0 if kind is None else 1)

    def update(self, record: Mapping[str, Any]) -> None:
        """Write the record of one round."""
        self.run.log(numbers(record), step=record["round"])


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any], int], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
}


def check_tracker(kind: str) -> None:
    """Refuse a tracker that does not exist or is not installed, before a run starts."""
    if kind not in TRACKERS:
        raise unknown("tracker", kind, TRACKERS)
    module = from_extra(kind, "track")
    if kind == "mlflow" and module.get_tracking_uri().startswith(DATABASES):
        for needed in ("sqlalchemy", "alembic"):
            from_extra(needed, "track")


def tracker(kind: str, folder: Path, config: Mapping[str, Any], done: int) -> Tracker:
    """The tracker of a run that has `done` rounds already."""
    check_tracker(kind)
    return TRACKERS[kind](folder, config, done)


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a record, including those of the method's metadata."""
    metadata = record.get("metadata")
    values = {key: value for key, value in record.items() if key != "round"}
    if isinstance(metadata, Mapping):
        values |= {f"metadata/{key}": value for key, value in metadata.items()}
    return {key: float(value) for key, value in values.items() if is_number(value)}
