"""FedALA: shares and what they make of two models, by hand."""

import pytest
import torch

from fedhelix import FedALA, FedAvg, UserError, load
from fedhelix.engines.local import ClientTask, make_client
from helpers import same, small, two_quadratics

DIGITS = load("digits").subsample(300, 100)


def used(run) -> list[float]:
    return [run.personal(client).weight.item() for client in (0, 1)]


def test_shares_by_hand():
    run = two_quadratics(FedALA(share_lr=0.1, first_epochs=2)).fit(1, quiet=True)
    # Round 0 is FedAvg's: 0.36 and 1.08, mean 0.72.
    assert run.state.server["model"]["weight"].item() == pytest.approx(0.72)
    # Client 1 is on its way to 1: the gradient 2 (0.72 - 1) times the way 0.36 would make its share
    # larger than 1, so it starts from 0.72.
    # Client 2: gradient 2 (0.72 - 3) = -4.56, way -0.36: share 1 - 0.16416, model 1.08 - 0.36 ·
    # 0.83584 = 0.7790976; gradient -4.4418048: share 0.675935, model 0.836663.
    assert used(run) == pytest.approx([0.72, 0.836663])


def test_the_next_round_starts_from_the_aggregate_and_keeps_the_shares():
    fed = two_quadratics(FedALA(share_lr=0.1, first_epochs=2))
    first, second = (state.client_states for _, state in fed.run_rounds(2))
    assert "aggregation" not in first[1]
    assert second[1]["aggregation"]["weight"].item() == pytest.approx(0.675935)
    # Two steps leave 0.64 of the distance to 3.
    trained = second[1]["trained"]["weight"].item()
    assert trained == pytest.approx(3 - 0.64 * (3 - 0.836663))


def test_shares_follow_every_batch():
    """Two batches of one sample are two steps, and the second is taken at the new shares."""
    method = FedALA(share_lr=0.1, first_epochs=1)
    run = two_quadratics(method, batch_size=1, epochs=1).fit(1, quiet=True)
    assert used(run) == pytest.approx([0.72, 0.836663])


def test_shares_stay_between_0_and_1():
    # With a rate of 1 client 2 would step to 1 - 1.6416: it keeps its own model.
    assert used(two_quadratics(FedALA()).fit(1, quiet=True)) == pytest.approx([0.72, 1.08])


def test_once_they_are_known_shares_are_trained_for_one_epoch():
    fed = two_quadratics(FedALA(share_lr=0.1, first_epochs=50))
    kept = {"trained": {"weight": torch.tensor([[1.08]])}}
    kept["aggregation"] = {"weight": torch.ones(1, 1)}
    client = make_client(fed.engine.setup, ClientTask(1, 1, {}, {}))
    payload = {"model": {"weight": torch.tensor([[0.72]])}}
    models = fed.method.start(payload, kept, client)
    assert models["aggregation"]["weight"].item() == pytest.approx(0.83584)
    assert models["model"]["weight"].item() == pytest.approx(0.7790976)
    assert kept["aggregation"]["weight"].item() == 1  # what a client keeps is not changed


def test_the_layers_below_are_the_received_ones():
    fed = small(FedALA(share_lr=10.0, first_epochs=1), "digits-bn-cnn", cohort=6, data=DIGITS)
    run = fed.fit(2, quiet=True)
    server, head = run.state.server["model"], set(fed.layers.head)
    mixed = 0
    for client, kept in run.state.client_states.items():
        assert set(kept["aggregation"]) == head
        assert all(v.min() >= 0 and v.max() <= 1 for v in kept["aggregation"].values())
        state = run.personal(client).state_dict()
        for name in fed.layers.names:
            if name in head:
                mixed += not torch.equal(state[name], server[name])
            else:
                assert torch.equal(state[name], server[name])
    assert mixed


def test_who_has_trained_nothing_uses_the_global_model():
    ala, plain = (
        small(method, "mlp", cohort=1).fit(1, quiet=True) for method in (FedALA(), FedAvg())
    )
    assert same(ala.state.server, plain.state.server)
    (worker,) = ala.state.client_states
    idle = (worker + 1) % 6
    assert same(dict(ala.personal(idle).state_dict()), ala.state.server["model"])
    assert ala.records[0]["uplink_bytes"] == plain.records[0]["uplink_bytes"]


def test_more_layers_than_there_are_are_refused():
    with pytest.raises(UserError, match="the model has 1 weighted layers"):
        small(FedALA(adaptive_layers=2), "linear")
