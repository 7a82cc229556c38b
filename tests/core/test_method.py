"""The hooks' defaults, which are FedAvg's, one by one."""

import pytest
import torch

from fedhelix import FedAvg, FedPer, Method, Upload
from fedhelix.engines.local import ClientTask, make_client, start_round
from helpers import same, small


@pytest.fixture(scope="module")
def fed():
    return small(model="mlp")


@pytest.fixture(scope="module")
def client(fed):
    return make_client(fed.engine.setup, ClientTask(2, 0, {}, {}))


def test_fedavg_adds_nothing_to_the_hooks():
    hooks = {name for name in vars(FedAvg) if not name.startswith("_")} - {"name", "paper", "check"}
    assert hooks == set()


def test_everything_is_shared_and_downloaded(fed):
    ctx = fed.context(0, 5)
    server, replies = Method().server_init({}, ctx)
    assert same(server, {"model": fed.initial}) and replies == {}
    assert same(Method().download(server, 3, ctx), server)
    assert Method().model(server, ctx) is server["model"]
    assert Method().select_clients({}, [4, 1], ctx) == [4, 1]


def test_what_was_received_replaces_what_was_kept_replaces_what_was_drawn(client, fed):
    names = fed.layers.names
    kept = {name: torch.full_like(fed.initial[name], 1.0) for name in names[:4]}
    received = {name: torch.full_like(fed.initial[name], 2.0) for name in names[2:5]}
    (model,) = Method().start({"model": received}, {"model": kept}, client).values()
    assert list(model) == list(names)
    found = [
        model[name].unique().tolist() if name in {*kept, *received} else "drawn" for name in names
    ]
    assert found == [[1.0], [1.0], [2.0], [2.0], [2.0], "drawn"]
    assert torch.equal(model[names[5]], fed.initial[names[5]])


def test_uploads_count_by_their_samples(fed):
    uploads = [Upload(client, samples, {}) for client, samples in ((0, 10), (1, 30))]
    assert Method().weights({}, uploads, fed.context(0, 1)) == [0.25, 0.75]


def test_personal_entries_stay_and_other_state_is_kept(fed, client):
    method = FedPer()
    payload = method.download(method.server_init({}, fed.context(0, 1))[0], 2, fed.context(0, 1))
    local = start_round(
        small(method, "mlp").engine.setup, ClientTask(2, 0, payload, {"note": torch.ones(1)})
    )
    upload, client_state = method.upload(local)
    assert set(upload["model"]) == set(fed.layers.body)
    assert set(client_state["model"]) == set(fed.layers.head) and client_state["note"].item() == 1


def test_a_method_with_a_personal_part_has_no_global_model(fed):
    ctx = fed.context(0, 1)
    assert FedPer().model(FedPer().server_init({}, ctx)[0], ctx) is None


def test_draws_differ_by_round_and_client_or_by_client_alone(fed):
    def drawn(round: int, id: int, every_round: bool) -> float:
        who = make_client(fed.engine.setup, ClientTask(id, round, {}, {}))
        return torch.rand(1, generator=who.draw("x", every_round)).item()

    assert len({drawn(round, id, True) for round in (0, 1) for id in (0, 1)}) == 4
    assert drawn(0, 1, False) == drawn(5, 1, False) != drawn(0, 2, False)
    server = [torch.rand(1, generator=fed.context(t, 9).draw("x")).item() for t in (0, 0, 1)]
    assert server[0] == server[1] != server[2]
