"""MOON: the contrastive term by hand, and where it vanishes."""

import math

import pytest
import torch

from fedhelix import Batch, FedAvg, Local, Moon, Phase, UserError
from fedhelix.engines.local import ClientTask, make_client
from helpers import close, same, small

# Rows are features of samples. The first sample agrees with the received model, the second with the
# previous one; the third fills the batch up.
FEATURES = {
    "here": [[2.0, 0.0], [0.0, 5.0], [1.0, 1.0]],
    "received": [[1.0, 0.0], [3.0, 0.0], [1.0, 0.0]],
    "previous": [[0.0, 1.0], [0.0, 1.0], [-1.0, 1.0]],
}


def loss(mask=None, **options) -> float:
    """The loss of a client whose base loss is 0.5 and whose models have the features above."""
    states = {name: {"features": torch.tensor(rows)} for name, rows in FEATURES.items()}
    local = Local(
        context={name: states[name] for name in ("received", "previous")},
        phase=Phase(),
        layers=small("fedavg", "mlp").layers,
        base_loss=lambda params, batch: torch.tensor(0.5),
        outputs=None,
        features=lambda state, x: state["features"],
    )
    batch = Batch(torch.zeros(3, 1), torch.zeros(3).long(), mask)
    return Moon(**options).loss(states["here"], batch, local).item()


def test_the_contrastive_term_by_hand():
    # Cosines (received, previous): (1, 0), (0, 1); with a temperature of 0.5 the terms are
    # -log(e² / (e² + 1)) = 0.126928 and -log(1 / (1 + e²)) = 2.126928, their mean 1.126928.
    assert loss(torch.tensor([1.0, 1, 0]), mu=2.0, temperature=0.5) == pytest.approx(2.753856)
    # The third sample has cosines 1/√2 and 0: -log(e^√2 / (e^√2 + 1)) = 0.217617.
    third = math.log(1 + math.exp(-math.sqrt(2)))
    mean = (0.126928 + 2.126928 + third) / 3
    assert loss(mu=2.0, temperature=0.5) == pytest.approx(0.5 + 2 * mean, abs=1e-5)
    # With a temperature of 1: log(1 + 1/e) and log(1 + e), mean 0.813262.
    assert loss(torch.tensor([1.0, 1, 0]), mu=1.0, temperature=1.0) == pytest.approx(1.313262)


def test_the_term_does_not_overflow():
    assert loss(mu=1.0, temperature=1e-3) == pytest.approx(0.5 + 1000 / 3, rel=1e-4)


@pytest.mark.parametrize("model", ["mlp", "digits-bn-cnn"])
def test_without_the_term_it_is_fedavg(model):
    """Also in BatchNorm's statistics, although features need passes of their own."""
    moon, plain = (small(method, model).fit(2, quiet=True) for method in (Moon(mu=0), FedAvg()))
    assert same(moon.state.server, plain.state.server)


def test_the_first_round_is_fedavgs():
    """Received and previous model are the same, and the term is the constant mu log 2."""
    moon, plain = (
        small(method, "mlp", cohort=6).fit(2, quiet=True) for method in (Moon(mu=1.0), FedAvg())
    )
    difference = moon.records[0]["train_loss"] - plain.records[0]["train_loss"]
    assert difference == pytest.approx(math.log(2), abs=1e-5)
    assert moon.records[0]["accuracy"] == plain.records[0]["accuracy"]
    assert not close(moon.state.server["model"], plain.state.server["model"])


def test_a_client_keeps_its_last_model_and_compares_with_it():
    run = small(Moon(), "mlp", clients=2, cohort=1).fit(1, quiet=True)
    (worker,) = run.state.client_states
    kept = run.state.client_states[worker]["previous"]
    assert same(kept, run.state.server["model"])  # it worked alone
    client = make_client(run.federation.engine.setup, ClientTask(worker, 1, {}, {}))
    context = Moon().loss_context({"model": run.federation.initial}, {"previous": kept}, client)
    assert same(context["previous"], kept)
    assert same(context["received"], run.federation.initial)


def test_a_model_that_is_only_a_head_is_refused():
    with pytest.raises(UserError, match="moon needs a model with a layer below its head"):
        small(Moon(), "linear")
