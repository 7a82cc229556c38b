"""FedDyn: its steps by hand, and the optimum that it reaches."""

import pytest
import torch

from fedhelix import FedAvg, FedDyn, Upload
from fedhelix.core.tree import add
from helpers import small, two_quadratics


def values(state) -> tuple[float, ...]:
    """The server's model and h, and the two duals."""
    server, clients = state.server, state.client_states
    return (
        server["model"]["weight"].item(),
        server["h"]["weight"].item(),
        *(clients[client]["dual"]["weight"].item() for client in (0, 1)),
    )


def end_of(method, rounds):
    """The last state of two clients with the losses (w - 1)² and 4 (w - 3)², five steps a round."""
    fed = two_quadratics(method, (1.0, 2.0), epochs=5)
    return fed.fit(rounds, quiet=True, eval_every=rounds).state


def test_two_rounds_by_hand():
    first, second = (state for _, state in two_quadratics(FedDyn(alpha=1.0)).run_rounds(2))
    # Two steps along 2 (w - y) + (w - 0). Client 1: 0 → 0.2 → 0.2 + 0.14; client 2: 0 → 0.6 → 1.02.
    # Duals -(0.34 - 0) and -1.02; h is their mean; the model 0.68 - h / 1.
    assert values(first) == pytest.approx((1.36, -0.68, -0.34, -1.02))
    # Two steps along 2 (w - y) - dual + (w - 1.36).
    # Client 1: 1.36 → 1.36 - 0.106 = 1.254 → 1.254 - 0.0742 = 1.1798, dual -0.34 + 0.1802.
    # Client 2: 1.36 → 1.36 + 0.226 = 1.586 → 1.586 + 0.1582 = 1.7442, dual -1.02 - 0.3842.
    # h = -0.68 - (1.462 - 1.36) = -0.782, which is the mean of the duals; model 1.462 + 0.782.
    assert values(second) == pytest.approx((2.244, -0.782, -0.1598, -1.4042))


def test_alpha_scales_dual_and_h_but_not_the_correction():
    ((_, state),) = two_quadratics(FedDyn(alpha=0.5), epochs=1).run_rounds(1)
    # One step: 0.2 and 0.6. Duals -0.1 and -0.3, h = -0.2, model 0.4 + 0.2 / 0.5.
    assert values(state) == pytest.approx((0.8, -0.2, -0.1, -0.3))


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_it_ends_at_the_optimum_of_the_mean_where_fedavg_does_not(alpha):
    # (w - 1)² and 4 (w - 3)²: 2 (w - 1) + 8 (w - 3) = 0 at w = 2.6.
    # FedAvg's five steps leave 0.8⁵ = 0.32768 and 0.2⁵ = 0.00032 of the distances to 1 and 3, so
    # its fixed point is (4 - 0.32768 - 3 · 0.00032) / (2 - 0.32768 - 0.00032) = 2.19579.
    ends = [
        end_of(method, rounds).server["model"]["weight"].item()
        for method, rounds in ((FedDyn(alpha=alpha), 120), (FedAvg(), 20))
    ]
    assert ends == pytest.approx([2.6, 2.19579], abs=1e-4)


def test_at_the_optimum_the_duals_are_the_clients_gradients():
    state = end_of(FedDyn(alpha=1.0), 60)
    # 2 (2.6 - 1) and 8 (2.6 - 3): they cancel, so h is zero.
    assert values(state) == pytest.approx((2.6, 0, 3.2, -3.2), abs=1e-3)


def test_with_few_participants_h_moves_by_their_share():
    fed = small(FedDyn(alpha=0.5), "mlp")
    ctx = fed.context(0, 1)
    server, _ = fed.method.server_init({}, ctx)
    ones = {name: torch.ones_like(value) for name, value in fed.initial.items()}
    moved = [Upload(i, 10 + i, {"model": add(fed.initial, ones)}) for i in (1, 2, 4)]
    weights = fed.method.weights(server, moved, ctx)
    assert weights == pytest.approx([1 / 3] * 3)
    after = fed.method.aggregate(server, moved, weights, ctx)
    # h = -0.5 · 3/6 · 1; the model moves by 1 + 0.25 / 0.5.
    for name in fed.layers.parameters:
        assert torch.allclose(after["h"][name], torch.tensor(-0.25))
        assert torch.allclose(after["model"][name], fed.initial[name] + 1.5)


def test_h_counts_clients_whose_models_are_left_out():
    fed = two_quadratics(FedDyn(alpha=1.0))
    ctx = fed.context(0, 1)
    server, _ = fed.method.server_init({}, ctx)
    uploads = [
        Upload(i, 2, {"model": {"weight": torch.tensor([[w]])}}) for i, w in ((0, 1.0), (1, 3.0))
    ]
    after = fed.method.aggregate(server, uploads, [1.0, 0.0], ctx)
    # Both clients changed their duals, to -1 and -3; the model is the first one's, minus h.
    assert after["h"]["weight"].item() == -2 and after["model"]["weight"].item() == 3


def test_it_sends_what_fedavg_sends():
    dyn, plain = (small(method, "mlp").fit(1, quiet=True) for method in (FedDyn(), FedAvg()))
    for key in ("uplink_bytes", "downlink_bytes"):
        assert dyn.records[0][key] == plain.records[0][key]


def test_statistics_of_batchnorm_are_averaged():
    run = small(FedDyn(), "digits-bn-cnn").fit(1, quiet=True)
    assert set(run.state.server["h"]) == set(run.federation.layers.parameters)
    assert set(run.state.server["model"]) == set(run.federation.layers.names)
