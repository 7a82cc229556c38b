"""pFedMe: its steps by hand, and the optimum of the Moreau envelopes."""

import pytest

from fedhelix import LocalOnly, PFedMe
from helpers import same, small, two_quadratics


def thetas(state) -> list[float]:
    return [state.client_states[client]["trained"]["weight"].item() for client in (0, 1)]


def test_two_rounds_by_hand():
    fed = two_quadratics(PFedMe(mu=1.0, step=0.5))
    (record, first), (_, second) = fed.run_rounds(2)
    # Two steps along 2 (theta - y) + (theta - 0): 0.2, 0.2 + 0.1 · 1.4 and 0.6, 0.6 + 0.1 · 4.2.
    assert thetas(first) == pytest.approx([0.34, 1.02])
    # Half of the way from 0 to each: 0.17 and 0.51.
    assert first.server["model"]["weight"].item() == pytest.approx(0.34)
    # They go on. Client 1 is at 0.34 = w: 0.34 + 0.1 · 1.32 = 0.472, then + 0.1 (1.056 - 0.132).
    # Client 2: 1.02 + 0.1 (3.96 - 0.68) = 1.348, then + 0.1 (3.304 - 1.008).
    assert thetas(second) == pytest.approx([0.5644, 1.5776])
    # 0.34 + (0.2244 + 1.2376) / 4.
    assert second.server["model"]["weight"].item() == pytest.approx(0.7055)
    assert record["uplink_bytes"] == record["downlink_bytes"] == 2 * 4


def test_beta_is_the_step_of_the_server():
    ((_, state),) = two_quadratics(PFedMe(mu=1.0, step=0.5, beta=2.0)).run_rounds(1)
    assert state.server["model"]["weight"].item() == pytest.approx(0.68)


@pytest.mark.parametrize("mu", [0.5, 2.0])
def test_it_ends_at_the_optimum_of_the_envelopes(mu):
    # theta = (2 y + mu w) / (2 + mu), and w is the mean of both: 2.
    run = two_quadratics(PFedMe(mu=mu, step=0.5)).fit(60, eval_every=60, quiet=True)
    assert run.state.server["model"]["weight"].item() == pytest.approx(2, abs=1e-2)
    near = [(2 * y + 2 * mu) / (2 + mu) for y in (1, 3)]
    assert thetas(run.state) == pytest.approx(near, abs=1e-2)


def test_a_client_uses_theta():
    run = small(PFedMe(), "digits-bn-cnn", cohort=1).fit(1, quiet=True)
    ((worker, kept),) = run.state.client_states.items()
    assert same(dict(run.personal(worker).state_dict()), kept["trained"])
    idle = (worker + 1) % 6
    assert same(dict(run.personal(idle).state_dict()), run.state.server["model"])


def test_hardly_attracted_it_is_local_training():
    alone = LocalOnly(follow_sampling=True)
    me, local = (two_quadratics(method).fit(2, quiet=True) for method in (PFedMe(mu=1e-9), alone))
    assert thetas(me.state) == pytest.approx([local.personal(i).weight.item() for i in (0, 1)])
