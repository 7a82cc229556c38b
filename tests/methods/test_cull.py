"""Cull: who harms the mean is dropped, and whoever does not is none the wiser."""

import math
from dataclasses import replace

import pytest
import torch

from fedhelix import (
    Clustered,
    Compact,
    Cull,
    FedAvg,
    FedAvgM,
    FedPer,
    FedProto,
    Scaffold,
    Upload,
    UserError,
)
from helpers import same, small

SERVED = {"validation_size": 0.2, "cohort": 6}
ATTACKED = {
    "clients": 10, "cohort": 10, "partition": "dirichlet:1", "validation_size": 0.1,
    "validation_shared": False, "attack_share": 0.4, "batch_size": 16, "lr": 0.1,
}  # fmt: skip


def moved(fed, *steps):
    """Uploads that lie so far from the initial model, in each of its first two values."""
    name = fed.layers.parameters[0]
    uploads = []
    for client, step in enumerate(steps):
        value = fed.initial[name].clone()
        value.view(-1)[:2] += torch.tensor(step)
        uploads.append(Upload(client, 10 * (client + 1), {"model": {**fed.initial, name: value}}))
    return uploads


def scored_by(fed, loss):
    """A scorer that sees how far a model has moved in its first two values."""
    name = fed.layers.parameters[0]

    def score(models, count):
        at = [(model[name] - fed.initial[name]).flatten()[:2] for model in models]
        return [(0.0, loss(*place.tolist())) for place in at]

    return score


def weights(fed, uploads, loss=None):
    score = None if loss is None else scored_by(fed, loss)
    ctx = replace(fed.context(0, 1), score_on=score)
    return fed.method.weights({"model": fed.initial}, uploads, ctx), ctx.metadata


def test_an_opposing_model_is_dropped_and_the_others_share_its_weight():
    fed = small(Cull())
    uploads = moved(fed, (1.0, 0.0), (1.0, 0.2), (-5.0, 0.0))
    # The goal is (1, 0). With weights 1, 2, 3 of 6 the mean lies at (-2, 0.07); of the first two
    # it is (1, 0.13).
    found, metadata = weights(fed, uploads, lambda x, y: (x - 1) ** 2 + y**2 + 1)
    assert found == pytest.approx([1 / 3, 2 / 3, 0])
    assert metadata == {"dropped": [2]}


def test_copies_and_their_original_go():
    fed = small(Cull())
    uploads = moved(fed, (1.0, 0.0), (1.0, 0.0), (0.0, 1.0))
    found, metadata = weights(fed, uploads, lambda x, y: 1.0)
    assert found == pytest.approx([0, 0, 1]) and metadata == {"dropped": [0, 1]}


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_models_whose_loss_is_no_number(loss):
    fed = small(Cull())
    uploads = moved(fed, (1.0, 0.0), (1.0, 0.2), (1e6, 0.0))
    found, _ = weights(fed, uploads, lambda x, y: loss if x > 10 else 1.0)
    assert found == pytest.approx([1 / 3, 2 / 3, 0])
    # Where nothing has a loss, nobody is dropped.
    found, metadata = weights(fed, uploads, lambda x, y: loss)
    assert found == pytest.approx([1 / 6, 2 / 6, 3 / 6]) and metadata == {"dropped": []}


@pytest.mark.parametrize(("least", "kept"), [(1, [0]), (2, [0, 1]), (9, [0, 1, 2])])
def test_some_stay_in_any_case(least, kept):
    fed = small(Cull(rho_min=least))
    uploads = moved(fed, (0.0, 1.0), (2.0, 1.0), (8.0, 1.0))
    found, _ = weights(fed, uploads, lambda x, y: x**2 + 1)
    assert [i for i, weight in enumerate(found) if weight] == kept
    assert sum(found) == pytest.approx(1)


def test_without_validation_data_agreement_decides():
    fed = small(Cull())
    uploads = moved(fed, (1.0, 0.0), (1.0, 0.2), (1.0, -0.2), (-1.0, 0.1), (50.0, 0.0))
    found, metadata = weights(fed, uploads)
    # One points elsewhere, one is fifty times as long; the others have 1, 2, 3 of 6 parts.
    assert found == pytest.approx([1 / 6, 2 / 6, 3 / 6, 0, 0])
    assert metadata == {"dropped": [3, 4]}


@pytest.mark.parametrize("inner", [FedAvg(), FedAvgM(), Scaffold()], ids=lambda m: m.name)
def test_where_nobody_harms_it_is_the_inner_method_to_the_bit(inner):
    more = {**SERVED, "partition": "iid"}
    one, other = (
        small(method, "digits-bn-cnn", **more).fit(2, quiet=True) for method in (inner, Cull(inner))
    )
    assert [record["metadata"] for record in other.records] == [{"dropped": []}] * 2
    assert same(one.state.server, other.state.server)


def test_clusters_note_their_dropped_together():
    method = Clustered(Cull(), clusters=2)
    run = small(method, **SERVED, attack="sign-flip", attack_scale=10.0, attack_share=0.34)
    metadata = run.fit(1, quiet=True).records[0]["metadata"]
    assert metadata["dropped"] and set(metadata["dropped"]) <= set(range(6))


@pytest.mark.parametrize("inner", [FedPer(), FedProto(), Clustered()], ids=lambda m: m.name)
def test_methods_without_whole_models_are_refused(inner):
    with pytest.raises(UserError, match=r"cull needs whole models|must stand inside of clustered"):
        small(Cull(inner), "digits-cnn", validation_size=0.1)


def test_packed_updates_are_unpacked_before():
    run = small(Compact(Cull()), **SERVED).fit(2, quiet=True)
    assert all("dropped" in record["metadata"] for record in run.records)


@pytest.mark.parametrize(
    ("attack", "options"),
    [
        ("sign-flip", {"attack_scale": 4.0}),
        ("ipm", {"attack_scale": 2.0}),
        ("label-flip", {}),
    ],
    ids=["sign-flip", "ipm", "label-flip"],
)
@pytest.mark.filterwarnings("ignore:training has diverged")  # where nobody is dropped
def test_it_withstands_four_attackers_of_ten(attack, options):
    accuracies = [
        small(method, attack=attack, **ATTACKED, **options)
        .fit(6, quiet=True)
        .summary["final_accuracy"]
        for method in (FedAvg(), Cull())
    ]
    assert accuracies[1] > max(0.8, accuracies[0] + 0.1), accuracies


@pytest.mark.filterwarnings("ignore:training has diverged")  # where nobody is dropped
def test_without_validation_data_it_withstands_a_flipped_sign():
    more = {**ATTACKED, "validation_size": 0.0, "attack": "sign-flip", "attack_scale": 4.0}
    more |= {"attack_share": 0.3}
    accuracies = [
        small(method, **more).fit(6, quiet=True).summary["final_accuracy"]
        for method in (FedAvg(), Cull())
    ]
    assert accuracies[1] > max(0.8, accuracies[0] + 0.1), accuracies
