"""Membership inference: the bound by hand, the threshold, and a small federation."""

import json
import math
import sys

import numpy as np
import pytest

from fedhelix.cli.app import main
from fedhelix.core.errors import UserError
from fedhelix.privacy.membership import MembershipAudit, advantage, bound, drawn, membership
from fedhelix.report.wording import percent


def test_the_bound_by_hand():
    """TPR <= e^eps FPR + delta and 1 - FPR <= e^eps (1 - TPR) + delta meet in (e - 1) / (e + 1)."""
    assert bound(0.0, 0.0) == 0 and bound(0.0, 0.1) == pytest.approx(0.1)
    assert bound(1.0, 0.0) == pytest.approx((math.e - 1) / (math.e + 1))
    assert bound(1e6, 1e-5) == 1.0
    for epsilon in (0.5, 2.0):  # the two lines cross at this difference
        fpr = (1 - 0.01) / (1 + math.exp(epsilon))
        assert bound(epsilon, 0.01) == pytest.approx(math.exp(epsilon) * fpr + 0.01 - fpr)


def test_no_mark_of_the_legend_lies_among_the_bounds():
    """FedAvg, which has none, seemed to have one."""
    rows = [{"method": "fedavg", "advantage": 0.2, "bound": None}]
    rows += [{"method": "private", "advantage": 0.0, "bound": 0.46}]
    drawing = drawn(rows)
    drawing.draw_without_rendering()
    (legend,), (axis,) = drawing.legends, drawing.axes
    assert not legend.get_window_extent().overlaps(axis.get_window_extent())


def test_the_threshold_is_measured_where_it_was_not_chosen():
    draw = np.random.default_rng(0)
    members = np.arange(400) % 2 == 0
    assert advantage(members + 0.0, members, draw) == 1.0
    noise = [advantage(draw.normal(size=400), members, draw) for _ in range(20)]
    assert abs(np.mean(noise)) < 0.05  # chosen and measured on the same half it would be above
    shifted = advantage(draw.normal(size=400) + members, members, draw)
    assert 0.2 < shifted < 0.55  # the best is 2 * Phi(1/2) - 1 = 0.38


def test_members_of_an_overtrained_model_are_told_and_not_those_of_a_noisy_one(
    tmp_path, monkeypatch, capsys
):
    pytest.importorskip("dp_accounting")
    few = {"rounds": 6, "references": 2, "trials": 1, "samples": 200, "model": "linear"}
    options = [word for key, value in few.items() for word in ("--set", f"{key}={value}")]
    out = tmp_path / "m.png"
    command = ["fedhelix", "audit", "membership", "fedavg", "private@epsilon=1", *options]
    monkeypatch.setattr(sys, "argv", [*command, "-o", str(out)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0 and out.exists()
    plain, private = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert plain["advantage"] > 0.1 and plain["bound"] is None
    shown = capsys.readouterr().out
    assert f" {percent(plain['accuracy'])}" in shown and shown.split().count("none") == 3
    assert private["delta"] == 1e-5 and plain["delta"] is None
    assert private["epsilon"] == pytest.approx(1.0, rel=0.01)
    assert private["advantage"] < private["bound"] == pytest.approx(bound(1.0, 1e-5), rel=0.01)


def test_bad_input():
    with pytest.raises(UserError, match="no 5000 training samples"):
        list(membership(["fedavg"], MembershipAudit(samples=5000)))
    with pytest.raises(UserError, match="fedper has no global model"):
        list(membership(["fedper"], MembershipAudit(rounds=1, epochs=1)))
