"""APFL: mixture and mixing weight by hand, and its two limits."""

import pytest
import torch

from fedhelix import APFL, FedAvg, LocalOnly
from helpers import same, small, two_quadratics


def weights(states, *path) -> list[float]:
    """One number of each client's state."""
    found = []
    for client in sorted(states):
        value = states[client]
        for key in path:
            value = value[key]
        found.append(value.item())
    return found


def test_a_round_by_hand():
    ((_, state),) = two_quadratics(APFL(alpha=0.5)).run_rounds(1)
    # w: two steps along 2 (w - y): 0.2, 0.36 and 0.6, 1.08; their mean is 0.72.
    assert state.server["model"]["weight"].item() == pytest.approx(0.72)
    # v: two steps along alpha · 2 (mixture - y) where the mixture is v / 2 + 0 / 2.
    # Client 1: 0 → 0.1 → 0.1 + 0.1 · 0.95; client 2: 0 → 0.3 → 0.3 + 0.1 · 2.85.
    assert weights(state.client_states, "local", "weight") == pytest.approx([0.195, 0.585])
    # Alpha steps along (v - 0) · 2 (mixture - y) with mixtures 0.0975 and 0.2925:
    # 0.5 - 0.1 · (0.195 · -1.805) and 0.5 - 0.1 · (0.585 · -5.415).
    assert weights(state.client_states, "alpha") == pytest.approx([0.5351975, 0.8167775])


def test_a_client_uses_the_mixture_with_the_new_global_model():
    run = two_quadratics(APFL(alpha=0.5)).fit(1, quiet=True)
    # 0.5351975 · 0.195 + 0.4648025 · 0.72 and 0.8167775 · 0.585 + 0.1832225 · 0.72.
    used = [run.personal(client).weight.item() for client in (0, 1)]
    assert used == pytest.approx([0.4390213, 0.6097350])


def test_with_one_step_a_round_it_is_the_papers_algorithm():
    fed = two_quadratics(APFL(alpha=0.5, adaptive=False), epochs=1)
    _, second = (state for _, state in fed.run_rounds(2))
    # Round 0: w 0.2 and 0.6, mean 0.4; v 0.1 and 0.3.
    # Round 1: mixtures 0.25 and 0.35, so v 0.1 + 0.1 · 0.75 and 0.3 + 0.1 · 2.65.
    assert weights(second.client_states, "local", "weight") == pytest.approx([0.175, 0.565])
    assert weights(second.client_states, "alpha") == [0.5, 0.5]
    assert second.server["model"]["weight"].item() == pytest.approx(0.72)


def test_alpha_stays_between_0_and_1():
    # Client 2 with alpha 0.9: v goes to 0.54 and 0.99252, the mixture is 0.893268, and the slope
    # 0.99252 · 2 (0.893268 - 3) = -4.18, so alpha would become 1.32.
    ((_, state),) = two_quadratics(APFL(alpha=0.9)).run_rounds(1)
    assert weights(state.client_states, "alpha")[1] == 1


def test_alpha_0_is_fedavg():
    apfl, plain = (
        small(method, "mlp").fit(2, quiet=True)
        for method in (APFL(alpha=0.0, adaptive=False), FedAvg())
    )
    assert same(apfl.state.server, plain.state.server)
    assert apfl.records[-1]["personal"] == plain.records[-1]["personal"]
    # Nothing ever pulls at the local models: they are what their clients received first.
    initial = apfl.federation.initial
    assert any(same(kept["local"], initial) for kept in apfl.state.client_states.values())


def test_alpha_1_is_local_training():
    apfl, alone = (
        two_quadratics(method).fit(2, quiet=True)
        for method in (APFL(alpha=1.0, adaptive=False), LocalOnly())
    )
    # Four steps leave 0.8⁴ = 0.4096 of the distances to 1 and 3.
    for run in (apfl, alone):
        used = [run.personal(client).weight.item() for client in (0, 1)]
        assert used == pytest.approx([0.5904, 1.7712])


def test_the_global_model_is_fedavgs_whatever_alpha_does():
    apfl, plain = (small(method, "mlp").fit(2, quiet=True) for method in (APFL(), FedAvg()))
    assert same(apfl.state.server, plain.state.server)
    assert apfl.records[-1]["uplink_bytes"] == plain.records[-1]["uplink_bytes"]


def test_who_has_not_worked_yet_uses_the_global_model():
    run = small(APFL(alpha=0.3), "digits-bn-cnn", cohort=1).fit(1, quiet=True)
    (worker,) = run.state.client_states
    idle = (worker + 1) % 6
    assert same(dict(run.personal(idle).state_dict()), run.state.server["model"])


def test_the_mixture_has_the_statistics_of_the_local_model():
    """BatchNorm's statistics were gathered with the mixture's parameters."""
    run = small(APFL(), "digits-bn-cnn", cohort=1).fit(1, quiet=True)
    ((worker, kept),) = run.state.client_states.items()
    used = run.personal(worker).state_dict()
    for name in run.federation.layers.buffers:
        assert torch.equal(used[name], kept["local"][name])
