"""FedAMP: attention and means by hand."""

import math

import pytest
import torch

from fedhelix import FedAMP, FedAvg, Upload
from fedhelix.methods.fedamp import attention
from helpers import same, small, two_quadratics

MODELS = {
    "0": {"weight": torch.tensor([[1.0, 0]])},
    "1": {"weight": torch.tensor([[2.0, 0]])},
    "2": {"weight": torch.tensor([[0.0, 3]])},
}


def test_attention_by_hand():
    # The cosines of client 0 are 1 and 0: with a sharpness of log 3 the others share three to one.
    found = attention("0", MODELS, 0.2, math.log(3))
    assert found == pytest.approx({"0": 0.2, "1": 0.6, "2": 0.2})
    # Those of client 2 are both 0.
    found = attention("2", MODELS, 0.2, math.log(3))
    assert found == pytest.approx({"2": 0.2, "0": 0.4, "1": 0.4})
    assert attention("1", {"1": MODELS["1"]}, 0.2, 1.0) == {"1": 1}


def test_what_a_client_receives():
    fed = two_quadratics(FedAMP(own_weight=0.2, sharpness=math.log(3)))
    ctx, server = fed.context(0, 1), {"model": {"weight": torch.zeros(1, 2)}, "clients": MODELS}
    # 0.2 (1, 0) + 0.6 (2, 0) + 0.2 (0, 3).
    sent = fed.method.download(server, 0, ctx)["model"]["weight"]
    assert sent.flatten().tolist() == pytest.approx([1.4, 0.6])
    # Nobody knows client 3: it gets the mean of the last round.
    assert torch.equal(fed.method.download(server, 3, ctx)["model"]["weight"], torch.zeros(1, 2))


def test_two_rounds_by_hand():
    fed = two_quadratics(FedAMP(mu=1.0, own_weight=0.75))
    first, second = (state for _, state in fed.run_rounds(2))
    # Two steps along 2 (w - y) + (w - 0): 0.34 and 1.02; their mean is 0.68.
    assert first.server["model"]["weight"].item() == pytest.approx(0.68)
    # Messages: 0.75 · 0.34 + 0.25 · 1.02 = 0.51 and 0.85.
    # Client 1: 0.51 + 0.098 = 0.608, then 0.608 + 0.1 (0.784 - 0.098) = 0.6766.
    # Client 2: 0.85 + 0.43 = 1.28, then 1.28 + 0.1 (3.44 - 0.43) = 1.581.
    kept = [second.client_states[client]["trained"]["weight"].item() for client in (0, 1)]
    assert kept == pytest.approx([0.6766, 1.581])
    assert [second.server["clients"][key]["weight"].item() for key in "01"] == pytest.approx(kept)


def test_an_upload_of_weight_zero_changes_nothing():
    fed = two_quadratics(FedAMP())
    server = {"model": {"weight": torch.zeros(1, 1)}, "clients": {}}
    uploads = [Upload(i, 1, {"model": {"weight": torch.full((1, 1), 5.0 + i)}}) for i in (0, 1)]
    after = fed.method.aggregate(server, uploads, [0.0, 1.0], fed.context(0, 1))
    assert list(after["clients"]) == ["1"] and after["model"]["weight"].item() == 6


def test_a_client_uses_what_it_trained():
    run = small(FedAMP(), "digits-bn-cnn", cohort=1).fit(1, quiet=True)
    ((worker, kept),) = run.state.client_states.items()
    assert same(dict(run.personal(worker).state_dict()), kept["trained"])
    idle = (worker + 1) % 6
    assert same(dict(run.personal(idle).state_dict()), run.state.server["model"])


def test_the_first_round_is_fedavgs_without_the_pull():
    amp, plain = (small(method, "mlp").fit(1, quiet=True) for method in (FedAMP(mu=0), FedAvg()))
    assert same(amp.state.server["model"], plain.state.server["model"])
