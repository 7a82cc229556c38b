"""What one client sends never costs the others their round."""

import math
from types import SimpleNamespace

import pytest
import torch

from fedhelix import FedAvg
from fedhelix.core.method import Upload
from fedhelix.federation import guard

BEFORE = {"w": torch.zeros(2)}


def total(parts):
    return {"w": torch.stack(list(parts.values())).sum(0)}


def test_the_result_is_the_one_without_the_culprit():
    parts = {i: torch.ones(2) for i in range(4)}
    assert guard.without_culprit(total, parts, True)[1] == {}
    parts[2] = torch.ones(3)
    tree, blamed = guard.without_culprit(total, parts, True)
    assert tree["w"].tolist() == [3, 3] and list(blamed) == [2]
    assert blamed[2].startswith("cannot be used: RuntimeError: stack expects")
    with pytest.raises(RuntimeError, match="stack expects"):  # a mistake of the method's
        guard.without_culprit(total, parts, False)


def test_a_sum_that_overflows_is_blamed_on_the_one_whose_share_it_needs():
    parts = {i: torch.ones(2) for i in range(3)}
    parts[1] = torch.full((2,), 3.4e38)
    parts[2] = torch.full((2,), 1e38)
    tree, blamed = guard.without_culprit(
        total, {**parts, 0: torch.full((2,), -1e38)}, False, BEFORE
    )
    assert blamed == {} and tree["w"].isfinite().all()
    tree, blamed = guard.without_culprit(total, parts, False, BEFORE)
    assert blamed == {1: "makes the server's state not finite"}
    assert tree["w"].tolist() == pytest.approx([1e38, 1e38])


def test_what_a_method_did_not_know_before_it_may_not_know_after():
    parts = {0: torch.tensor([math.nan])}
    assert guard.without_culprit(total, parts, False, {"w": torch.tensor([math.nan])})[1] == {}


def test_if_nobody_alone_is_to_blame_all_are_named():
    parts = {i: torch.full((1,), 3e38) for i in range(4)}
    tree, blamed = guard.without_culprit(total, parts, False, BEFORE)
    assert tree is None and list(blamed) == [0, 1, 2, 3]
    tree, blamed = guard.without_culprit(lambda parts: 1 / 0, {7: 0}, True)
    assert tree is None and list(blamed) == [7]


def test_several_who_do_harm_alone_are_left_out_together():
    parts = {i: torch.ones(2) for i in range(4)}
    parts |= {1: torch.full((2,), math.inf), 3: torch.full((2,), -math.inf)}
    for strangers in (True, False):
        tree, blamed = guard.without_culprit(total, parts, strangers, BEFORE)
        assert tree["w"].tolist() == [2, 2] and list(blamed) == [1, 3]
    odd = {0: torch.ones(2), 1: torch.ones(2), 2: torch.ones(3), 3: torch.ones(3)}
    tree, blamed = guard.without_culprit(total, odd, True, BEFORE)  # who is right cannot be known
    assert tree is None and list(blamed) == [0, 1, 2, 3]


class Growing(FedAvg):
    """Adds up what is uploaded; ones that are too large overflow."""

    name = "growing"

    def aggregate(self, server, uploads, weights, ctx):
        ctx.metadata["uploads"] = ctx.metadata.get("uploads", 0) + len(uploads)
        total = sum(upload.tree["model"]["w"] for upload in uploads)
        return {"model": {"w": 10 * total}}


def test_the_old_state_stays_and_what_failed_is_not_recorded():
    ctx = SimpleNamespace(metadata={"before": 1}, layers=None, initial={"w": torch.ones(1)})
    before = {"model": {"w": torch.ones(1)}}
    uploads = [
        Upload(i, 1, {"model": {"w": torch.full((1,), v)}}) for i, v in ((0, 1.0), (3, 1e38))
    ]
    method = Growing()
    server, named, _ = guard.aggregate(method, before, uploads, ctx, False)
    assert server["model"]["w"].tolist() == [10.0]
    assert named == {"3": "makes the server's state not finite"}
    assert ctx.metadata == {"before": 1, "uploads": 1}
    server, named, _ = guard.aggregate(method, before, uploads[1:], ctx, False)
    assert server is before and list(named) == ["3"]


def test_a_client_without_a_first_message_is_like_another():
    def server_init(inits, ctx):
        return {"sum": torch.stack([init["x"] for init in inits.values()]).sum(0)}, {}

    method = SimpleNamespace(server_init=server_init, label="one", overrides=lambda hook: True)
    ctx = SimpleNamespace(clients=3)
    inits = {0: {"x": torch.ones(1)}, 2: {"x": torch.ones(2)}}
    server, replies, blamed = guard.server_init(
        method, inits | {1: {"x": torch.ones(1)}}, ctx, True
    )
    assert server["sum"].tolist() == [3.0] and list(blamed) == [2] and replies == {}
