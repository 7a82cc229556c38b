"""pfl's simulation as a contestant of the CPU race; `cpu.py` starts it inside pfl's environment.

FederatedAveraging on a SimulatedBackend, weighted by samples, in one process or several
(torch.distributed). Only the sampling of users is replaced by the cohorts of the workload, so that
all contestants train the same clients.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

SETTINGS: dict[str, Any] = json.loads(sys.argv[1])
RANK = int(os.environ.get("PFL_WORKER_RANK", "0"))
if (
    SETTINGS["processes"] > 1 and "PFL_WORKER_ADDRESSES" not in os.environ
):  # pfl reads these when it is imported
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    os.environ |= {
        "PFL_WORKER_ADDRESSES": ",".join([address] * SETTINGS["processes"]),
        "PFL_WORKER_RANK": "0",
    }
    for rank in range(1, SETTINGS["processes"]):
        environment = {**os.environ, "PFL_WORKER_RANK": str(rank)}
        subprocess.Popen(
            [sys.executable, *sys.argv], env=environment, stdin=subprocess.DEVNULL, stdout=2
        )

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from common import RaceClient, Workload, apply, workload  # noqa: E402
from pfl.aggregate.simulate import SimulatedBackend  # noqa: E402
from pfl.aggregate.weighting import WeightByDatapoints  # noqa: E402
from pfl.algorithm.base import NNAlgorithmParams  # noqa: E402
from pfl.algorithm.federated_averaging import FederatedAveraging  # noqa: E402
from pfl.callback.base import TrainingProcessCallback  # noqa: E402
from pfl.callback.central_evaluation import CentralEvaluationCallback  # noqa: E402
from pfl.data.dataset import Dataset  # noqa: E402
from pfl.data.federated_dataset import FederatedDatasetBase  # noqa: E402
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams  # noqa: E402
from pfl.metrics import Metrics, Weighted  # noqa: E402
from pfl.model.pytorch import PyTorchModel  # noqa: E402


class User(Dataset):
    """A client's samples in the order of a round."""

    def __init__(self, work: Workload, t: int, client: int):
        super().__init__((), user_id=str(client))
        self.work, self.t, self.client, self.epoch = work, t, client, 0

    def __len__(self) -> int:
        return self.work.samples(self.t, self.client)

    def iter(self, batch_size: int | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """One epoch; the next call for training gives the next one."""
        epoch = self.epoch % self.work.epochs
        if batch_size == self.work.batch_size:
            self.epoch += 1
        return self.work.batches(self.t, self.client, epoch)


class Users(FederatedDatasetBase):
    """The cohorts of the workload, shared evenly by processes as in pfl: the largest first."""

    def __init__(self, work: Workload):
        super().__init__()
        self.work, self.t = work, 0

    def __next__(self) -> Any:
        raise NotImplementedError

    def get_cohort(self, cohort_size: int) -> Iterator[tuple[User, int]]:
        """The next cohort."""
        t, self.t, size = self.t, self.t + 1, self.work.samples
        loads: list[list[int]] = [[] for _ in range(SETTINGS["processes"])]
        for client in sorted(self.work.cohorts[t], key=lambda client: -size(t, client)):
            min(loads, key=lambda load: sum(size(t, other) for other in load)).append(client)
        for client in loads[RANK]:
            yield User(self.work, t, client), 0


class Net(torch.nn.Module):
    """The network with pfl's interface."""

    def __init__(self, work: Workload):
        super().__init__()
        self.work, self.net = work, work.network()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The training objective."""
        self.train()
        return F.cross_entropy(self.net(self.work.prepare(x)), y)

    @torch.no_grad()
    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Weighted]:
        """The accuracy on a batch."""
        self.eval()
        predicted = self.net(self.work.prepare(x)).argmax(1)
        return {"accuracy": Weighted(int((predicted == y).sum()), len(y))}


class Clock(TrainingProcessCallback):
    """Ends a round and waits for the next; runs after the evaluation."""

    def __init__(self, evaluation: CentralEvaluationCallback):
        self.evaluation = evaluation
        self.race = None
        if not RANK:
            self.race = RaceClient(
                versions={
                    name: importlib.metadata.version(name) for name in ("pfl", "torch", "numpy")
                }
            )

    def wait(self) -> None:
        """All processes start together."""
        if self.race is not None:
            self.race.begin_round()
        if SETTINGS["processes"] > 1:
            torch.distributed.barrier()

    def on_train_begin(self, *, model: Any) -> Metrics:
        """Before the first round."""
        self.wait()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> Any:
        """After each round. pfl does not evaluate after the first one, so that happens here."""
        metrics = self.evaluation.metrics or self.evaluation._eval(model)[1]
        if self.race is not None:
            accuracy = next(value for name, value in metrics if "accuracy" in str(name))
            self.race.end_round(float(accuracy.overall_value))
        self.wait()
        return False, Metrics()


class Evaluation(CentralEvaluationCallback):
    """Keeps the metrics of the last evaluation."""

    metrics: Metrics | None = None

    def after_central_iteration(self, *words: Any, **more: Any) -> Any:
        """As pfl does it."""
        stop, metrics = super().after_central_iteration(*words, **more)
        self.metrics = metrics if len(metrics) else None
        return stop, metrics


def main() -> None:
    """Run the rounds."""
    apply(SETTINGS)
    work = workload(SETTINGS["folder"])
    net = Net(work)
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    users, evaluating = Users(work), NNEvalHyperParams(local_batch_size=1000)
    evaluation = Evaluation(Dataset((work.x_test, work.y_test)), evaluating)
    training = NNTrainHyperParams(
        local_batch_size=work.batch_size, local_num_epochs=work.epochs, local_learning_rate=work.lr
    )
    rounds, cohort = SETTINGS["rounds"], len(work.cohorts[0])
    # Users' models are not evaluated (but for the first round, which pfl insists on).
    params = NNAlgorithmParams(
        central_num_iterations=rounds,
        evaluation_frequency=10**9,
        train_cohort_size=cohort,
        val_cohort_size=0,
    )
    asyncio.set_event_loop(asyncio.new_event_loop())
    FederatedAveraging().run(
        params,
        SimulatedBackend(users, users, postprocessors=[WeightByDatapoints()]),
        model,
        training,
        evaluating,
        [evaluation, Clock(evaluation)],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
