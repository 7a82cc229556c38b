import pytest
import torch

from fedhelix import FedRep
from fedhelix.core.errors import UserError
from fedhelix.data import Dataset
from fedhelix.engines import ENGINES, Serial, engine_for
from fedhelix.engines.local import ClientTask, run_client
from helpers import same, small


def test_tasks_run_one_by_one_in_order():
    fed = small(FedRep(), "mlp")
    server, _ = fed.method.server_init({}, fed.context(0, 1))
    tasks = [
        ClientTask(client, 0, fed.method.download(server, client, fed.context(0, 1)), {})
        for client in (4, 0, 2)
    ]
    results = Serial(fed.engine.setup).run_clients(tasks)
    assert [result.client for result in results] == [4, 0, 2]
    for result, task in zip(results, tasks, strict=True):
        alone = run_client(fed.engine.setup, task)
        assert (
            same(result.upload, alone.upload)
            and same(result.client_state, alone.client_state)
            and result.loss == alone.loss
        )


def test_the_order_of_clients_does_not_matter():
    fed = small(model="digits-bn-cnn")
    tasks = [ClientTask(client, 0, {"model": fed.initial}, {}) for client in (0, 1, 2)]
    there, back = fed.engine.run_clients(tasks), fed.engine.run_clients(tasks[::-1])[::-1]
    assert all(same(one.upload, other.upload) for one, other in zip(there, back, strict=True))


def test_engines_by_name():
    setup = small().engine.setup
    assert type(engine_for("serial", setup)) is Serial and ENGINES["serial"] is Serial
    with pytest.raises(UserError, match="unknown engine 'serail'; did you mean 'serial'"):
        engine_for("serail", setup)


def test_samples_are_prepared_once_for_all_scored_models(monkeypatch):
    fed = small(model="mlp")
    prepared, prepare = [], Dataset.prepare
    monkeypatch.setattr(
        Dataset, "prepare", lambda data, x: (prepared.append(len(x)), prepare(data, x))[1]
    )
    scores = fed.engine.score([fed.initial] * 3, "train", torch.arange(7))
    assert prepared == [7] and len(scores) == 3 and scores[0] == scores[1] == scores[2]
