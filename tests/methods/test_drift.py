"""FedProx, SCAFFOLD and Ditto: methods that correct or exploit how clients drift apart."""

import numpy as np
import pytest
import torch
from torch import nn

from fedhelix import Ditto, FedAvg, FedProx, Scaffold, Upload, partition
from fedhelix.core.method import Local, Phase
from fedhelix.core.tree import clone
from fedhelix.data import Dataset
from fedhelix.engines.local import ClientTask, batch_schedule, run_client
from helpers import close, same, small


def test_the_gradient_of_fedprox_is_g_plus_mu_times_the_drift():
    fed = small(FedProx(mu=0.3), "mlp")
    start = clone(fed.initial)
    here = {
        name: (value + torch.randn_like(value)).requires_grad_() for name, value in start.items()
    }

    def base_loss(params, batch):
        return sum((value**3).sum() for value in params.values())

    local = Local(
        context=start,
        phase=Phase(),
        layers=fed.layers,
        base_loss=base_loss,
        outputs=None,
        features=None,
    )
    found = torch.autograd.grad(fed.method.loss(here, None, local), list(here.values()))
    for grad, value, name in zip(found, here.values(), here, strict=True):
        by_hand = 3 * value.detach() ** 2 + 0.3 * (value.detach() - start[name])
        assert torch.allclose(grad, by_hand, rtol=1e-4, atol=1e-5)


def test_fedprox_without_a_leash_is_fedavg():
    loose, plain = (small(method, "mlp").fit(2, quiet=True) for method in (FedProx(mu=0), FedAvg()))
    assert close(loose.state.server["model"], plain.state.server["model"])


def test_a_short_leash_keeps_clients_near_the_received_model():
    drift = []
    for mu in (0, 1, 5):
        fed = small(FedProx(mu=mu), "mlp", epochs=3)
        trained = run_client(fed.engine.setup, ClientTask(0, 0, {"model": fed.initial}, {})).upload[
            "model"
        ]
        drift.append(
            sum((trained[name] - fed.initial[name]).square().sum().item() for name in trained)
        )
    assert drift[0] > drift[1] > drift[2]


# SCAFFOLD by hand: f_1 = (w - 1)², f_2 = (w - 3)², two steps of 0.1 each round


def quadratics(method, **more):
    """Two clients with 2 and 3 equal samples x = 1 and y = 1 or 3, and the model w
    · x with w = 0.
    """
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    x, y = torch.ones(5, 1), torch.tensor([1.0, 1, 3, 3, 3])
    data = Dataset(
        "quadratics", x, y, x, y, classes=None, owners=torch.tensor([0, 0, 1, 1, 1]).numpy()
    )
    usual = {"cohort": 2, "epochs": 2, "batch_size": 10, "lr": 0.1, "momentum": 0}
    return small(method, model, data=data, partition=partition.natural(valid=0), **usual | more)


def values(state) -> tuple[float, ...]:
    server, client_state = state.server, state.client_states
    return (
        server["model"]["weight"].item(),
        server["control"]["weight"].item(),
        *(client_state[client]["control"]["weight"].item() for client in (0, 1)),
    )


def test_two_rounds_of_scaffold_by_hand():
    first, second = (state for _, state in quadratics(Scaffold(control="steps")).run_rounds(2))
    # Client 1: 0 → 0.2 → 0.36 and client 2: 0 → 0.6 → 1.08; controls (0 - trained) / (2 · 0.1).
    assert values(first) == pytest.approx((0.72, -3.6, -1.8, -5.4))
    # Corrections c - c_i are -1.8 and +1.8. Client 1: 0.72 → 0.956 → 1.1448; client 2: 0.72 → 0.996
    # → 1.2168.
    # c_i ← c_i - c + (0.72 - trained) / 0.2; the server's control moves by their mean change.
    assert values(second) == pytest.approx((1.1808, -2.304, -0.324, -4.284), rel=1e-5)


def test_two_rounds_of_scaffold_with_gradients_at_the_received_model():
    first, second = (state for _, state in quadratics(Scaffold()).run_rounds(2))
    # The gradients at 0 are -2 and -6; the trained models as above.
    assert values(first) == pytest.approx((0.72, -4, -2, -6))
    # Corrections -2 and +2. Client 1: 0.72 → 0.976 → 1.1808; client 2: the same gradients, hence
    # the same way.
    # Gradients at 0.72: -0.56 and -4.56.
    assert values(second) == pytest.approx((1.1808, -2.56, -0.56, -4.56), rel=1e-5)


def test_the_servers_step_of_scaffold():
    ((_, state),) = quadratics(Scaffold(control="steps", server_lr=0.5)).run_rounds(1)
    assert values(state) == pytest.approx((0.36, -3.6, -1.8, -5.4))


def test_scaffold_uses_this_rounds_learning_rate():
    _, second = (
        state
        for _, state in quadratics(Scaffold(control="steps"), lr_decay=0.5, epochs=1).run_rounds(2)
    )
    # Round 0, one step of 0.1: 0.2 and 0.6, controls -2 and -6, model 0.4, control -4.
    # Round 1, one step of 0.05: gradients -1.2 - 2 and -5.2 + 2, so both clients go to 0.4 + 0.05 ·
    # 3.2 = 0.56,
    # and their controls become c_i - c + (0.4 - 0.56) / 0.05, that is -1.2 and -5.2: the true
    # gradients.
    assert values(second) == pytest.approx((0.56, -3.2, -1.2, -5.2), rel=1e-5)


def test_with_few_participants_the_control_moves_by_their_share():
    fed = small(Scaffold(), "mlp")
    ctx = fed.context(0, 1)
    server, _ = fed.method.server_init({}, ctx)
    change = {name: torch.ones_like(value) for name, value in server["control"].items()}
    some = [
        Upload(client, 10 + client, {"model": fed.initial, "control": change})
        for client in (1, 2, 4)
    ]
    merged = fed.method.aggregate(server, some, fed.method.weights(server, some, ctx), ctx)
    assert all(value.unique().tolist() == [0.5] for value in merged["control"].values())


def test_scaffold_finds_the_minimum_of_the_mean_whatever_the_clients_weigh():
    """FedAvg, which counts samples (2 and 3), ends at 2.2."""
    ends = [
        quadratics(method, epochs=5).fit(40, quiet=True).state.server["model"]["weight"].item()
        for method in (Scaffold(), Scaffold(control="steps"), FedAvg())
    ]
    assert ends == pytest.approx([2.0, 2.0, 2.2], abs=1e-3)


def scaffold_in_numpy(fed, control, rounds):
    """SCAFFOLD as Algorithm 1 of its paper has it, for softmax regression; only the order of the
    batches is the federation's.
    """
    setup = fed.engine.setup
    x = setup.data.prepare(setup.data.x).flatten(1).double().numpy()
    y = np.eye(10)[setup.data.y.numpy()]
    start = [fed.initial[name].double().numpy() for name in ("fc.weight", "fc.bias")]
    model, server = start, [np.zeros_like(value) for value in start]
    own = dict.fromkeys(range(fed.clients), server)

    def loss_and_gradient(weights, rows):
        outputs = x[rows] @ weights[0].T + weights[1]
        outputs -= outputs.max(1, keepdims=True)
        shares = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
        error = (shares - y[rows]) / len(rows)
        loss = -np.log((shares * y[rows]).sum(1)).mean()
        return loss, [error.T @ x[rows], error.sum(0)]

    states, lr = [], setup.training.lr
    for t in range(rounds):
        moved, changed, losses = [], [], []
        for client in fed.cohort(t):
            task, local, trained = ClientTask(client, t, {}, {}), [], model
            for rows, *_ in batch_schedule(setup, task, Phase(), "batches").steps():
                loss, gradient = loss_and_gradient(trained, rows.numpy())
                local.append(loss)
                trained = [
                    w - lr * (g - ci + c)
                    for w, g, ci, c in zip(trained, gradient, own[client], server, strict=True)
                ]
            losses.append(np.mean(local))
            if control == "steps":
                after = [
                    ci - c + (old - new) / (len(local) * lr)
                    for ci, c, old, new in zip(own[client], server, model, trained, strict=True)
                ]
            else:
                at_start = batch_schedule(setup, task, Phase(epochs=1), "gradients").steps()
                gradients = [loss_and_gradient(model, rows.numpy())[1] for rows, *_ in at_start]
                after = [np.mean(parts, axis=0) for parts in zip(*gradients, strict=True)]
            moved.append([new - old for new, old in zip(trained, model, strict=True)])
            changed.append([new - old for new, old in zip(after, own[client], strict=True)])
            own[client] = after
        model = [w + np.mean(parts, axis=0) for w, *parts in zip(model, *moved, strict=True)]
        server = [
            c + np.sum(parts, axis=0) / fed.clients
            for c, *parts in zip(server, *changed, strict=True)
        ]
        states.append((model, server, np.mean(losses)))
    return states


@pytest.mark.parametrize("control", ["gradient", "steps"])
def test_scaffold_step_by_step_against_a_plain_loop(control):
    """The recorded loss is that on the samples: the correction is no part of it."""
    settings = {"partition": "dirichlet:0.1", "clients": 10, "lr": 0.05, "momentum": 0, "epochs": 2}
    fed = small(Scaffold(control=control), batch_size=16, **settings)
    expected = scaffold_in_numpy(fed, control, 8)
    for (record, state), (model, server, loss) in zip(fed.run_rounds(8), expected, strict=True):
        for tree, values in ((state.server["model"], model), (state.server["control"], server)):
            for name, value in zip(("fc.weight", "fc.bias"), values, strict=True):
                assert np.allclose(tree[name].numpy(), value, rtol=1e-3, atol=1e-4)
        assert record["train_loss"] == pytest.approx(loss, rel=1e-3)


def test_a_loss_that_jumps_while_models_get_better_is_not_reported(recwarn):
    fed = small(Scaffold(control="steps"), partition="dirichlet:0.1", lr=2.0, epochs=5)
    run = fed.fit(8, quiet=True)
    losses = [record["train_loss"] for record in run.records]
    assert max(losses) > 2 * losses[0]
    assert not [one for one in recwarn if "loss" in str(one.message)]


def test_a_loss_that_falls_is_not_reported(recwarn):
    small(partition="dirichlet:0.1").fit(8, quiet=True)
    assert not [one for one in recwarn if "diverge" in str(one.message)]


# Ditto


def test_ditto_trains_a_global_and_a_personal_model():
    # Global as FedAvg with equal steps: 0.36 and 1.08, weighted by 2 and 3 samples.
    (_, first), (_, second) = quadratics(Ditto(mu=1.0)).run_rounds(2)
    one = (2 * 0.36 + 3 * 1.08) / 5
    assert first.server["model"]["weight"].item() == pytest.approx(one)
    # Personal: v ← v - 0.1 · (2 (v - y) + mu · (v - w)) with w = 0 and v = 0: 0.2, 0.34 and 0.6,
    # 1.02.
    personal = [first.client_states[client]["personal"]["weight"].item() for client in (0, 1)]
    assert personal == pytest.approx([0.34, 1.02])
    by_hand = []
    for v, y in zip(personal, (1, 3), strict=True):
        for _ in range(2):
            v = v - 0.1 * (2 * (v - y) + (v - one))
        by_hand.append(v)
    assert [
        second.client_states[client]["personal"]["weight"].item() for client in (0, 1)
    ] == pytest.approx(by_hand)


def test_dittos_global_model_is_fedavgs():
    ditto, plain = (small(method, "mlp").fit(2, quiet=True) for method in (Ditto(), FedAvg()))
    assert same(ditto.state.server, plain.state.server)
    assert ditto.records[-1]["accuracy"] == plain.records[-1]["accuracy"]
    assert ditto.records[-1]["uplink_bytes"] == plain.records[-1]["uplink_bytes"]
    assert ditto.records[-1]["personal_accuracy"] != plain.records[-1]["personal_accuracy"]


def test_whoever_has_not_worked_yet_uses_the_global_model():
    run = small(Ditto(), "mlp", cohort=1).fit(1, quiet=True)
    (worker,) = run.state.client_states
    idle = (worker + 1) % 6
    assert same(dict(run.personal(idle).state_dict()), run.state.server["model"])
    assert same(
        dict(run.personal(worker).state_dict()), run.state.client_states[worker]["personal"]
    )
