"""Denoised heads: what a client's head is, by hand, and that groups that disagree find theirs."""

import pytest
import torch

from fedhelix import (
    METHODS,
    DenoisedHeads,
    FedBuff,
    FedPer,
    Helix,
    Secure,
    Upload,
)  # fmt: skip
from fedhelix.core.errors import UserError
from fedhelix.methods import denoised_heads
from helpers import small, two_quadratics


@pytest.fixture
def noiseless(monkeypatch):
    """As if there were no noise: everybody's deviation counts."""
    monkeypatch.setattr(denoised_heads, "denoised", lambda rows: rows - rows.mean(0))


def scene(method):
    """A server at 0 whose only entry is the head, and how it aggregates uploads of two clients."""
    fed = two_quadratics(method)
    (name,) = fed.layers.names
    ctx = fed.context(0, 3)
    server, _ = method.server_init({}, ctx)

    def step(server, *values, weights=(0.5, 0.5)):
        trees = [{"model": {name: torch.tensor([[value]])}} for value in values]
        uploads = [Upload(client, 2, tree) for client, tree in enumerate(trees)]
        return method.aggregate(server, uploads, weights, ctx)

    def sent(server, client):
        return float(method.download(server, client, ctx)["model"][name])

    return server, step, sent


def test_two_rounds_by_hand(noiseless):
    server, step, sent = scene(DenoisedHeads())
    assert [sent(server, client) for client in (0, 1, 2)] == [0, 0, 0]
    # 4 and 8 are 2 away from their mean; a client that nobody knows gets the mean.
    server = step(server, 4.0, 8.0)
    assert [sent(server, client) for client in (0, 1, 2)] == [4, 8, 6]
    # From 4 to 5 and from 8 to 9: both say that the mean moves by 1, and stay apart as they are.
    server = step(server, 5.0, 9.0)
    assert [sent(server, client) for client in (0, 1, 2)] == [5, 9, 7]
    # From 5 to 5 and from 9 to 11: the mean moves by 1, and each head by 1 from the other.
    server = step(server, 5.0, 11.0)
    assert [sent(server, client) for client in (0, 1, 2)] == [5, 11, 8]


def test_weights_count_in_the_mean_head(noiseless):
    server, step, sent = scene(DenoisedHeads())
    server = step(server, 4.0, 8.0, weights=(0.75, 0.25))
    # The mean is 5; the deviations -1 and 3 lie around 1, which is nobody's own.
    assert server["own_heads"]["deviations"].flatten().tolist() == [-1, 3]
    assert [sent(server, client) for client in (0, 1, 2)] == [3, 7, 5]


def test_whoever_is_left_out_keeps_the_head(noiseless):
    server, step, sent = scene(DenoisedHeads())
    server = step(server, 4.0, 8.0)
    after = step(server, 4.0, 1000.0, weights=(1.0, 0.0))
    assert [sent(after, client) for client in (0, 1, 2)] == [4, 8, 6]


def test_two_clients_alone_have_no_head_of_their_own():
    server, step, sent = scene(DenoisedHeads())
    server = step(server, 4.0, 8.0)
    assert [sent(server, client) for client in (0, 1, 2)] == [6, 6, 6]


def test_a_late_upload_counts_from_the_head_that_its_client_had(noiseless):
    """Client 1 began at its head 8, came to 10, and its update of 2 counts half."""
    method = FedBuff(DenoisedHeads(), exponent=1.0)
    fed = two_quadratics(method)
    (name,) = fed.layers.names
    server, step, _ = scene(DenoisedHeads())
    server = step(server, 4.0, 8.0)
    ctx = fed.context(1, 3)
    tree, payload = ({"model": {name: torch.tensor([[value]])}} for value in (10.0, 8.0))
    late = Upload(1, 2, tree, payload, staleness=1)
    after = method.aggregate(server, [late], [1.0], ctx)
    assert float(after["model"][name]) == pytest.approx(6 + 2 / 2)


def groups_agree(method, rounds=15):
    """The accuracy of personal models where two groups number the classes differently."""
    fed = small(
        method, "linear", data="digits", clients=12, cohort=6, shift="concept:2", lr=0.1,
        partition="iid", epochs=2, batch_size=16,
    )  # fmt: skip
    *_, (record, state) = fed.run_rounds(rounds)
    return record["personal_accuracy"], record["metadata"], state


def test_groups_that_disagree_find_their_heads():
    plain, _, _ = groups_agree(METHODS["fedavg"]())
    own, metadata, state = groups_agree(DenoisedHeads())
    assert plain < 0.6 and own > 0.85
    assert 0.5 < metadata["own_heads"] <= 1
    signals = state.server["own_heads"]["signals"]
    clients = state.server["own_heads"]["clients"]
    assert sorted(clients.tolist()) == list(range(12))
    # Who is in which group: the sign of the first component of the heads.
    _, _, vectors = torch.linalg.svd(signals, full_matrices=False)
    assert int((signals @ vectors[0] > 0).sum()) == 6


def test_helix_takes_them_as_an_option():
    plain, _, _ = groups_agree(Helix(warm_epochs=0, finish=False))
    own, _, _ = groups_agree(Helix(warm_epochs=0, finish=False, heads="denoised"))
    assert own > plain + 0.2


@pytest.mark.parametrize("inner", [FedPer(), METHODS["local"](), METHODS["pfedhn"]()], ids=str)
def test_who_uploads_no_head_is_refused(inner):
    with pytest.raises(UserError, match=f"denoised-heads needs heads, which {inner.label} does"):
        small(DenoisedHeads(inner))


def test_sums_of_uploads_do_not_do():
    with pytest.raises(UserError, match="its server looks at single uploads"):
        small(Secure(DenoisedHeads()))


def test_the_heads_of_a_method_inside_stay_its_own():
    """FedPAC keeps heads on the server, too."""
    *_, (_, state) = small(DenoisedHeads(METHODS["fedpac"]()), "mlp", data="digits").run_rounds(2)
    assert "clients" in state.server["own_heads"] and "clients" not in state.server["heads"]
    assert all(client.isdigit() for client in state.server["heads"])
