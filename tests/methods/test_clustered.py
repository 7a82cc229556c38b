"""Clusters around methods: each is a federation of its own."""

import itertools

import pytest
import torch

from fedhelix import (
    Clustered,
    FedAU,
    FedAvg,
    FedPer,
    GeneFL,
    GenFed,
    LGFedAvg,
    Median,
    PFedHN,
    UserError,
    from_clients,
    load,
)
from helpers import close, same, small

DIGITS = load("digits").subsample(400, 200)


def build(method, **more):
    return small(method, **{"data": DIGITS, "partition": "shard:3", "model": "digits-cnn"} | more)


def test_one_cluster_is_the_method_itself():
    plain, one = (
        build(method).fit(2, quiet=True) for method in (FedAvg(), Clustered(FedAvg(), clusters=1))
    )
    assert same(plain.state.server, one.state.server["parts"]["0"])
    assert plain.records[-1]["accuracy"] == one.records[-1]["accuracy"]


def test_every_cluster_is_the_mean_of_its_own_members():
    run = build(Clustered(FedAvg(), clusters=3), cohort=6).fit(1, quiet=True)
    fed, server = run.federation, run.state.server
    members = server["member"].tolist()
    assert sorted(set(members)) == [0, 1, 2]
    for k in range(3):
        mine = [i for i in range(6) if members[i] == k]
        alone = build(FedAvg(), cohort=6)
        tasks = alone.tasks(alone.initialize(1), mine, alone.context(0, 1))
        results = alone.engine.run_clients([task._replace(round=0) for task in tasks])
        sizes = torch.tensor([float(result.samples) for result in results])
        mean = {
            name: sum(
                size * result.upload["model"][name]
                for size, result in zip(sizes / sizes.sum(), results, strict=True)
            )
            for name in fed.layers.names
        }
        assert close(server["parts"][str(k)]["model"], mean, 1e-5)


def test_a_cluster_without_participants_keeps_its_model():
    run = build(Clustered(FedAvg(), clusters=3), cohort=1).fit(1, quiet=True)
    fed, server = run.federation, run.state.server
    busy = str(int(server["member"][run.records[0]["participants"][0]]))
    for k, part in server["parts"].items():
        assert same(part["model"], fed.initial) == (k != busy)


def test_what_clients_tell_is_counted_and_noted():
    run = build(Clustered(FedPer(), clusters=2, vectors=3)).fit(2, quiet=True)
    first, second = run.records
    assert first["other_bytes"] == 6 * 64 * 3 * 4 and second["other_bytes"] == 0
    assert (
        first["metadata"]["clusters"].keys()
        == first["metadata"]["positions"].keys()
        == {str(i) for i in range(6)}
    )
    assert second["metadata"]["clusters"].keys() == {str(i) for i in second["participants"]}
    assert "positions" not in second["metadata"]


def rand_index(one, other):
    """Adjusted Rand index by counting pairs that are together in both groupings."""
    pairs = list(itertools.combinations(range(len(one)), 2))
    in_one, in_other = ([labels[i] == labels[j] for i, j in pairs] for labels in (one, other))
    both = sum(a and b for a, b in zip(in_one, in_other, strict=True))
    expected = sum(in_one) * sum(in_other) / len(pairs)
    return (both - expected) / ((sum(in_one) + sum(in_other)) / 2 - expected)


def test_a_run_says_how_well_its_clusters_fit_the_classes():
    run = build(Clustered(FedAvg(), clusters=3)).fit(1, quiet=True)
    labels, splits = run.federation.data.y, run.federation.splits
    held = [frozenset(labels[split.train].tolist()) for split in splits]
    member = run.state.server["member"].tolist()
    assert run.summary["cluster_agreement"] == pytest.approx(rand_index(held, member))
    assert "cluster_agreement" not in build(FedAvg()).fit(1, quiet=True).summary


def test_clusters_of_clients_that_share_classes_agree_with_them():
    generator = torch.Generator().manual_seed(0)
    parts = []
    for client in range(6):  # three clients have classes 0 and 1, three have 2 and 3
        kind = client % 2
        bright = torch.zeros(1, 8, 8)
        bright[:, 4 * kind : 4 * kind + 4] = 1.0
        noise = 0.1 * torch.rand(30, 1, 8, 8, generator=generator)
        parts.append((bright + noise, torch.arange(30) % 2 + 2 * kind))
    data = from_clients(parts, classes=4)
    fed = small(Clustered(FedAvg(), clusters=2), data=data, partition="natural", cohort=6)
    assert fed.fit(1, quiet=True).summary["cluster_agreement"] == 1


def test_newcomers_join_a_cluster():
    run = build(Clustered(FedAvg(), clusters=2), newcomers=3, newcomers_after=1).fit(2, quiet=True)
    server = run.state.server
    assert len(server["member"]) == len(server["prints"]) == 9
    assert run.records[1]["metadata"]["clusters"].keys() >= {"6", "7", "8"}


@pytest.mark.parametrize(
    "inner",
    [FedAU(), LGFedAvg(warm_start=1), PFedHN(newcomer_turns=1)],
    ids=lambda method: method.name,
)
def test_books_about_clients_grow_where_newcomers_join_other_clusters(inner):
    late = {
        "newcomers": 4,
        "newcomers_after": 1,
        "newcomers_classes": 0,
        "model": "linear",
        "partition": "shard:2",
    }
    run = build(Clustered(inner, clusters=2), cohort=4, seed=4, **late).fit(2, quiet=True)
    assert (
        run.records[-1]["participants"] == [6, 7, 8, 9]
        and len(set(run.state.server["member"][6:].tolist())) == 2
    )


def test_any_seed_will_do():
    assert (
        build(Clustered(clusters=2), model="linear", seed=2**40)
        .fit(1, quiet=True)
        .summary["complete"]
    )


def test_a_run_that_cannot_begin_leaves_no_folder(tmp_path):
    (tmp_path / "mine").mkdir()
    for folder in (tmp_path / "new", tmp_path / "mine"):
        with pytest.raises(UserError, match="6 clients cannot form 7 clusters"):
            build(Clustered(FedAvg(), clusters=7)).fit(1, out=folder, quiet=True)
        assert not folder.exists()
        build(Clustered(FedAvg(), clusters=2)).fit(
            1, out=folder, quiet=True
        )  # the same folder, now without mistake


def test_mistakes():
    with pytest.raises(UserError, match="singular vectors"):
        build(GeneFL(clusters=2, vectors=60)).fit(1, quiet=True)
    with pytest.raises(
        UserError, match="gene-fl needs a convolution or a linear layer below the last one"
    ):
        build(GeneFL(), model="linear")
    with pytest.raises(UserError, match="gene_gamma_min is 9"):
        build(GeneFL(gene_budget=0, gene_gamma_min=9))
    with pytest.raises(
        UserError, match=r"genfed must stand inside of clustered, as in clustered\+genfed"
    ):
        build(GenFed(Clustered(FedAvg())), validation_size=0.1)
    with pytest.raises(
        UserError, match="median cannot be put around gene-fl, which keeps a model for each cluster"
    ):
        build(Median(GeneFL()))
