from dataclasses import replace

import pytest
import torch

from fedhelix import Federation, GenFed, Helix, UserError, WarmStart, load
from fedhelix.core.method import Phase
from fedhelix.core.tree import take
from fedhelix.data import Split
from fedhelix.engines.local import ClientTask, batch_schedule
from helpers import same

DIGITS = load("digits").subsample(300, 100)


def federation(method, **settings):
    return Federation(
        DIGITS, "dirichlet:0.3", clients=5, method=method, validation_size=80, **settings
    )


def by_hand(fed, epochs: int) -> list[torch.Tensor]:
    """SGD with momentum on the server's samples, in the order that they are drawn for one client
    who has them all.
    """
    mine = fed.reserve.all
    split = Split(train=mine, valid=mine[:0], test=mine[:0])
    setup = replace(fed.engine.setup, splits=[split])
    plan = batch_schedule(setup, ClientTask(0, 0, {}, {}), Phase(epochs=epochs), "server", 0)
    module = fed.engine.setup.module
    module.load_state_dict(fed.initial)
    module.train()
    steps = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
    for drawn in plan.steps():
        steps.zero_grad()
        x, y = fed.data.prepare(fed.data.x[drawn[0]]), fed.data.y[drawn[0]]
        torch.nn.functional.cross_entropy(module(x), y).backward()
        steps.step()
    return [value.detach().clone() for value in module.parameters()]


def test_the_first_model_is_trained_on_the_servers_samples():
    fed = federation(WarmStart(warm_epochs=2))
    server = fed.initialize(1).server["model"]
    for mine, other in zip(server.values(), by_hand(fed, 2), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_everything_else_goes_on_from_there():
    fed = federation(WarmStart(warm_epochs=3))
    warm = fed.initialize(1).server["model"]
    later = federation("fedavg")
    later.initial = {**later.initial, **warm}
    one = [record["accuracy"] for record, _ in fed.run_rounds(2)]
    assert one == [record["accuracy"] for record, _ in later.run_rounds(2)]


def test_all_engines_agree():
    models = [
        federation(WarmStart(warm_epochs=1), engine=engine).fit(1, quiet=True).state.server["model"]
        for engine in ("serial", "batched")
    ]
    for name, value in models[0].items():
        torch.testing.assert_close(value, models[1][name], rtol=1e-4, atol=1e-5)


def test_helix_starts_warm_where_the_server_has_samples():
    fed = federation(Helix(warm_epochs=2))
    server = fed.initialize(1).server
    warm = federation(WarmStart(warm_epochs=2)).initialize(1).server["model"]
    assert same(take(server["model"], fed.layers.parameters), warm)
    assert same(server["ancestors"], server["model"]), "the mean begins there, too"
    assert Helix().warm_epochs == 10


def test_helix_starts_cold_where_it_must_or_should():
    alone = Federation(DIGITS, clients=5, method=Helix())  # nothing is reserved for it
    assert not len(alone.reserve.all)
    for fed in (alone, federation(Helix(warm_epochs=0))):
        model = fed.initialize(1).server["model"]
        assert same(model, take(fed.initial, list(model)))
    assert alone.fit(1, quiet=True).summary["complete"]


def test_samples_may_be_optional():
    method = WarmStart(required=False)
    assert not method.capabilities.server_validation and WarmStart().capabilities.server_validation
    assert WarmStart(GenFed(), required=False).capabilities.server_validation
    cold, plain = (
        Federation(DIGITS, clients=5, method=one, validation_size=0).fit(1, quiet=True)
        for one in (method, "fedavg")
    )
    assert same(cold.state.server, plain.state.server)


def test_it_helps():
    cold, warm = (federation(method).fit(1, quiet=True) for method in ("fedavg", "warm-start"))
    assert warm.records[-1]["accuracy"] > cold.records[-1]["accuracy"] + 0.1


def test_refusals():
    with pytest.raises(UserError, match="warm-start needs a method with a model at the server"):
        federation("warm-start+local")
    with pytest.raises(UserError, match="validation"):
        Federation(DIGITS, clients=5, method="warm-start", validation_size=0)
    with pytest.raises(UserError, match="warm_epochs"):
        WarmStart(warm_epochs=0)
