"""Robust rules against hand computations, and as wrappers."""

import pytest
import torch

from fedhelix import (
    FedAU,
    FedAvg,
    FedLP,
    GenFed,
    Krum,
    LocalOnly,
    Median,
    NormBound,
    PFedGPA,
    TrimmedMean,
    Upload,
    UserError,
)
from fedhelix.core.registry import make
from fedhelix.robust.defences import filled, rules
from helpers import close, same, small

DEFENCES = [
    "median",
    "trimmed-mean",
    "krum",
    "multi-krum",
    "geometric-median",
    "centred-clipping",
    "norm-bound",
]
ROWS = torch.tensor([[1.0, 0.0], [2.0, 1.0], [3.0, 1.0], [100.0, -50.0]])


def test_medians_and_trimmed_means():
    assert rules.median(ROWS).tolist() == [2.5, 0.5]
    assert rules.median(ROWS[:3]).tolist() == [2.0, 1.0]
    assert rules.median(ROWS[:1]).tolist() == [1.0, 0.0]
    assert rules.trimmed_mean(ROWS, 1).tolist() == [2.5, 0.5]
    assert rules.trimmed_mean(ROWS, 0).tolist() == [26.5, -12.0]
    assert rules.trimmed_mean(ROWS[:3], 9).tolist() == [2.0, 1.0]


def test_krum():
    # One attacker of four: one nearest neighbour counts; squared distances 2, 1, 1 and far away.
    assert rules.krum_scores(ROWS, 1).tolist() == pytest.approx([2, 1, 1, 97**2 + 51**2])
    assert rules.multi_krum(ROWS, 1, 1).tolist() == [2.0, 1.0]
    assert rules.multi_krum(ROWS, 1, 3).tolist() == pytest.approx([2.0, 2 / 3])
    # Nobody malicious: the two nearest count.
    assert rules.krum_scores(ROWS[:3], 0)[:1].tolist() == pytest.approx([2.0])


def test_the_geometric_median_of_a_cross_is_its_centre():
    cross = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 3.0], [0.0, -9.0]])
    assert rules.geometric_median(cross, steps=500).tolist() == pytest.approx([0, 0], abs=1e-3)
    line = torch.tensor([[0.0], [1.0], [50.0]])
    assert rules.geometric_median(line).tolist() == pytest.approx([1.0], abs=1e-2)


def test_clipping():
    rows = torch.tensor([[3.0, 4.0], [0.6, 0.8], [0.0, 0.0]])
    assert torch.allclose(
        rules.clipped(rows, 2.5), torch.tensor([[1.5, 2.0], [0.6, 0.8], [0.0, 0.0]])
    )
    assert torch.allclose(
        rules.clipped(rows, None), torch.tensor([[0.6, 0.8], [0.6, 0.8], [0.0, 0.0]])
    )
    # From 0: (1 + 1 - 1) / 3 = 1/3; from 1/3: (2/3 + 1 - 1) / 3 = 2/9 further.
    line = torch.tensor([[1.0], [40.0], [-30.0]])
    assert rules.centred_clipping(line, 1.0, 1).tolist() == pytest.approx([1 / 3])
    assert rules.centred_clipping(line, 1.0, 2).tolist() == pytest.approx([1 / 3 + 2 / 9])


def uploads_of(fed, values):
    models = [{name: old + value for name, old in fed.initial.items()} for value in values]
    return [Upload(client, 1 + client, {"model": model}) for client, model in enumerate(models)]


def moved(fed, values, weights=None):
    ctx = fed.context(0, 1)
    server, _ = fed.method.server_init({}, ctx)
    uploads = uploads_of(fed, values)
    aggregated = fed.method.aggregate(
        server, uploads, weights or fed.method.weights(server, uploads, ctx), ctx
    )["model"]
    steps = {float((aggregated[name] - fed.initial[name]).mean()) for name in aggregated}
    return pytest.approx(sum(steps) / len(steps), abs=1e-4)


def test_as_wrappers_they_replace_the_updates():
    values = [1.0, 2.0, 3.0, 1000.0, 2.0]
    assert moved(small(Median()), values) == 2
    assert moved(small(TrimmedMean()), values) == 7 / 3
    assert moved(small(Krum()), values) == 2
    # Weights 1/15 .. 5/15 on updates that are not longer than the median one.
    assert moved(small(NormBound()), values) == (1 + 2 * 14) / 15
    # Who has no weight has no say.
    assert moved(small(Median()), values, [1, 0, 0, 0, 0]) == 1


@pytest.mark.parametrize("name", DEFENCES)
def test_if_all_agree_nothing_changes(name):
    plain, defended = (small(method) for method in (FedAvg(), make(name)))
    server, _ = plain.method.server_init({}, plain.context(0, 1))
    uploads = uploads_of(plain, [0.5, 0.5, 0.5, 0.5])
    aggregated = [
        fed.method.aggregate(server, uploads, [0.25] * 4, fed.context(0, 1))["model"]
        for fed in (plain, defended)
    ]
    assert close(*aggregated, tolerance=1e-5)


@pytest.mark.parametrize("name", DEFENCES)
def test_a_few_attackers_do_little_harm(name):
    fed = small(
        make(name),
        partition="iid",
        clients=10,
        cohort=10,
        attack="sign-flip",
        attack_scale=20,
        lr=0.05,
    )
    undefended = small(
        FedAvg(),
        partition="iid",
        clients=10,
        cohort=10,
        attack="sign-flip",
        attack_scale=20,
        lr=0.05,
    )
    assert (
        fed.fit(3, quiet=True).records[-1]["accuracy"]
        > undefended.fit(3, quiet=True).records[-1]["accuracy"] + 0.1
    )


def test_a_client_that_sends_less_has_less_influence():
    names = ["a", "b"]
    origin = {name: torch.zeros(2) for name in names}
    full = [{name: torch.full((2,), value) for name in names} for value in (1.0, 2.0, 6.0)]
    whole = filled([*full, {"a": torch.ones(2)}, {}], origin)
    assert all(same(one, other) for one, other in zip(whole[:3], full, strict=True))
    assert [state["b"].tolist() for state in whole[3:]] == [
        [2.0, 2.0]
    ] * 2  # the median of the three who sent it
    assert whole[4]["a"].tolist() == [1.5, 1.5]
    settings = {"model": "mlp", "partition": "iid", "clients": 8, "cohort": 8, "lr": 0.1}
    assert small(Krum(FedLP(keep=0.3)), **settings).fit(6, quiet=True).records[-1]["accuracy"] > 0.4


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (Median(LocalOnly()), "median sees no updates of a common model around local"),
        (Krum(PFedGPA()), "krum makes one of all uploads, but pfedgpa needs every single one"),
        (Krum(NormBound(PFedGPA())), "needs every single one"),
    ],
)
def test_around_what_they_would_spoil(method, sentence):
    with pytest.raises(UserError, match=sentence):
        small(method)
    small(NormBound(PFedGPA()))


@pytest.mark.parametrize("inner", [FedAU(), FedLP()], ids=lambda method: method.name)
def test_around_and_inside_other_methods(inner):
    assert len(small(Median(inner), "digits-bn-cnn").fit(2, quiet=True).records) == 2
    both = make("genfed+median+fedau", {"rho_max": 2, "schedule": "constant"})
    assert (
        both == GenFed(Median(FedAU()), schedule="constant", rho_max=2)
        and both.label == "genfed+median+fedau"
    )
    assert small(both, validation_size=0.1).fit(1, quiet=True).records[0]["metadata"]["rho"] == 2
