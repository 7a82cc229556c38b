"""Robust rules against hand computations, and as wrappers."""

import pytest
import torch

from fedhelix import (
    Bucketing,
    CentredClipping,
    FedAU,
    FedAvg,
    Federation,
    FedLP,
    GenFed,
    Krum,
    LocalOnly,
    Median,
    MultiKrum,
    NearestNeighbourMixing,
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
    "nnm+krum",
    "bucketing+median",
]
ROWS = torch.tensor([[1.0, 0.0], [2.0, 1.0], [3.0, 1.0], [100.0, -50.0]])


class WithBuffer(torch.nn.Sequential):
    """A network with a buffer of another type than its weights."""

    def __init__(self, dtype):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        self.register_buffer("b", torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("defence", ["median", "krum", "centred-clipping", "secure"])
def test_entries_keep_their_types(defence, dtype):
    fed = Federation(
        "digits", "iid", clients=5, model=WithBuffer(dtype), method=f"{defence}+fedavg"
    )
    run = fed.fit(1, quiet=True)
    assert run.state.server["model"]["b"].dtype == dtype
    assert run.state.server["model"]["1.weight"].dtype == torch.float32


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
    # Three times the median length, which is 1.
    assert torch.allclose(
        rules.clipped(rows, None, 3), torch.tensor([[1.8, 2.4], [0.6, 0.8], [0.0, 0.0]])
    )
    # From 0: (1 + 1 - 1) / 3 = 1/3; from 1/3: (2/3 + 1 - 1) / 3 = 2/9 further.
    line = torch.tensor([[1.0], [40.0], [-30.0]])
    assert rules.centred_clipping(line, 1.0, 1).tolist() == pytest.approx([1 / 3])
    assert rules.centred_clipping(line, 1.0, 2).tolist() == pytest.approx([1 / 3 + 2 / 9])


def test_centred_clipping_goes_on_from_where_it_was():
    # From 2: (-1 + 1 - 1) / 3 = -1/3.
    line = torch.tensor([[1.0], [40.0], [-30.0]])
    assert rules.centred_clipping(line, 1.0, 1, torch.tensor([2.0])).tolist() == pytest.approx(
        [5 / 3]
    )
    # CenteredClipping(L=3, tau=2) of byzfl 0.0.11, called with the rows and then with the rows + 1;
    # it keeps its centre too.
    rows = torch.tensor([[1.0, 0.0], [2.0, 1.0], [3.0, 1.0], [100.0, -50.0], [2.0, 3.0]])
    first = rules.centred_clipping(rows, 2.0, 3)
    assert first.tolist() == pytest.approx([2.4071, 0.9310], abs=1e-4)
    second = rules.centred_clipping(rows + 1, 2.0, 3, first)
    assert second.tolist() == pytest.approx([3.4419, 1.9479], abs=1e-4)


def test_nearest_neighbour_mixing():
    # The two nearest of each: the first two, the last two (1 is a tie: the first counts), and the
    # outlier takes one good neighbour.
    line = torch.tensor([[0.0], [1.0], [2.0], [100.0]])
    assert rules.nearest_mixed(line, 2).tolist() == [[0.5], [0.5], [1.5], [51.0]]
    assert rules.nearest_mixed(line, 0).tolist() == [[25.75]] * 4
    assert torch.equal(rules.nearest_mixed(line, 9), line)
    # NNM(f=2) of byzfl 0.0.11.
    rows = torch.tensor([[1.0, 0.0], [2.0, 1.0], [3.0, 1.0], [100.0, -50.0], [2.0, 3.0]])
    expected = [[2, 0.6667]] * 3 + [[35, -16], [2.3333, 1.6667]]
    assert torch.allclose(rules.nearest_mixed(rows, 2), torch.tensor(expected), atol=1e-4)


def test_buckets():
    line = torch.tensor([[0.0], [1.0], [2.0], [100.0], [7.0]])
    order = torch.tensor([3, 0, 2, 1, 4])
    assert rules.bucket_means(line, order, 2).tolist() == [[50.0], [1.5], [7.0]]
    assert torch.equal(rules.bucket_means(line, order, 1), line[order])
    assert rules.bucket_means(line, order, 9).tolist() == [[22.0]]


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
    # Twice the median is 4: only the longest is shortened.
    assert moved(small(NormBound(times=2)), values) == (1 + 4 + 9 + 16 + 10) / 15
    with pytest.raises(UserError, match="either bound or times"):
        NormBound(bound=1.0, times=2)
    # Who has no weight has no say.
    assert moved(small(Median()), values, [1, 0, 0, 0, 0]) == 1


def test_one_defence_around_another():
    values = [1.0, 2.0, 3.0, 1000.0, 2.0]
    # The four nearest of the outlier have the mean 1007 / 4, of all others 2.
    mixed = NearestNeighbourMixing(MultiKrum())
    assert moved(small(mixed), values) == 2
    # Weights 1/15 .. 5/15; the outlier has the fourth.
    assert moved(small(NearestNeighbourMixing()), values) == (2 * 11 + 4 * 1007 / 4) / 15
    # Buckets of one change nothing, one bucket of all is the mean, whatever the weights.
    assert moved(small(Bucketing(Median(), bucket_size=1)), values) == 2
    assert moved(small(Bucketing(bucket_size=5)), values) == 1008 / 5
    # Three buckets, one of them with the outlier.
    assert 1 <= moved(small(Bucketing(Median())), values).expected <= 3
    # Who has no weight has no say.
    assert moved(small(Bucketing(Median())), values, [1, 0, 0, 0, 0]) == 1
    assert moved(small(mixed), values, [1, 0, 0, 0, 0]) == 1


def test_mixing_leaves_out_what_the_defence_inside_withstands():
    line = torch.tensor([[0.0], [1.0], [2.0], [100.0]])
    inside = make("nnm+bucketing+krum", {"withstand": 0.49})
    assert torch.equal(inside.rule(line), rules.nearest_mixed(line, 2))
    assert torch.equal(make("nnm").rule(line), rules.nearest_mixed(line, 1))
    outside = make("nnm+krum", {"withstand": 0.49, "leave_out": 0.2})
    assert torch.equal(outside.rule(line), rules.nearest_mixed(line, 1))
    assert outside.label == "nnm+krum" and outside.inner == Krum(withstand=0.49)


def test_buckets_are_drawn_anew_in_every_round():
    updates, fed = torch.arange(8.0)[:, None], small(Bucketing())
    drawn = []
    for t in (0, 0, 1):
        rows, weights, kept = fed.method.change(updates, [0.125] * 8, {}, fed.context(t, 2))
        assert kept == {} and sum(weights) == 1 and weights.count(0.25) == 4
        assert float((rows[:, 0] * torch.tensor(weights)).sum()) == 3.5  # the mean of all
        drawn.append((rows[:, 0] * torch.tensor(weights)).tolist())
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_centre_is_in_the_servers_state():
    fed = small(CentredClipping(radius=0.001, iterations=1), cohort=6)
    rounds = fed.run_rounds(2, fed.initialize(2))
    centres = [state.server["centre"] for _, state in rounds]
    # Clients move much farther than 0.001, so a centre that is carried moves on in every round.
    assert float(centres[0].norm()) <= 0.001 < float(centres[1].norm())
    old = small(CentredClipping(radius=0.001, iterations=1, carry=False), cohort=6)
    assert old.fit(1, quiet=True).state.server.keys() == {"model"}


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
        (NearestNeighbourMixing(PFedGPA()), "nnm mixes uploads, but pfedgpa needs every single"),
        (Bucketing(PFedGPA()), "bucketing mixes uploads, but pfedgpa needs every single one"),
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
