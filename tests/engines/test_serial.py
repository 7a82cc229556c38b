import pytest

from fedhelix import FedRep
from fedhelix.client import Job, work
from fedhelix.engines import ENGINES, Serial, engine_for
from fedhelix.errors import BadInput
from helpers import same, small


def test_jobs_are_done_one_by_one_in_their_order():
    fed = small(FedRep(), "mlp")
    server, _ = fed.method.begin({}, fed.context(0, 1))
    jobs = [Job(client, 0, fed.method.download(server, client, fed.context(0, 1)), {}) for client in (4, 0, 2)]
    outcomes = Serial(fed.engine.setup).work(jobs)
    assert [outcome.client for outcome in outcomes] == [4, 0, 2]
    for outcome, job in zip(outcomes, jobs, strict=True):
        alone = work(fed.engine.setup, job)
        assert same(outcome.upload, alone.upload) and same(outcome.own, alone.own) and outcome.loss == alone.loss


def test_the_order_of_clients_does_not_matter():
    fed = small(model="digits-bn-cnn")
    jobs = [Job(client, 0, {"model": fed.initial}, {}) for client in (0, 1, 2)]
    there, back = fed.engine.work(jobs), fed.engine.work(jobs[::-1])[::-1]
    assert all(same(one.upload, other.upload) for one, other in zip(there, back, strict=True))


def test_engines_by_name():
    setup = small().engine.setup
    assert type(engine_for("serial", setup)) is Serial and ENGINES["serial"] is Serial
    with pytest.raises(BadInput, match="unknown engine 'serail'; did you mean 'serial'"):
        engine_for("serail", setup)
