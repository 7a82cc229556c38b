"""GENE-FL: what travels, what newcomers inherit, and that its penalties do what they say."""

import pytest
import torch

from fedhelix import FedLPS, GeneFL, UserError, load
from fedhelix.components.pruning import (
    channels,
    coordinate_mean,
    encoder,
    mask_of,
    prunable,
    strongest,
    unpacked,
)
from fedhelix.core.layers import Layers
from fedhelix.core.tree import payload_bytes
from fedhelix.engines.local import ClientTask, start_round
from fedhelix.models import build as network
from helpers import same, small

DIGITS = load("digits").subsample(400, 200)


def build(method, **more):
    return small(method, **{"data": DIGITS, "partition": "shard:3", "model": "digits-cnn"} | more)


def test_a_gene_is_at_most_a_quarter_of_the_model_by_the_runs_own_count():
    run = build(GeneFL(clusters=2)).fit(3, quiet=True)
    whole = payload_bytes(run.federation.initial)
    for record in run.records:
        assert record["uplink_bytes"] <= len(record["participants"]) * (0.25 * whole + 8)
        assert set(record["metadata"]["units"]) == {
            str(client) for client in record["participants"]
        }
        assert 0 < record["metadata"]["mask_density"] <= 1


def test_the_clusters_model_moves_only_where_genes_were_sent():
    run = build(GeneFL(clusters=1)).fit(1, quiet=True)
    sent = {unit for units in run.records[0]["metadata"]["units"].values() for unit in units}
    model = run.state.server["parts"]["0"]["model"]
    for name, value in model.items():
        assert torch.equal(value, run.federation.initial[name]) == (
            name.rpartition(".")[0] not in sent
        )


def test_a_newcomer_inherits_the_majority_and_nothing_else():
    run = build(GeneFL(clusters=1, gene_budget=0, gene_gamma0=2, gene_gamma_min=2), cohort=6).fit(
        3, quiet=True
    )
    number = run.onboard((DIGITS.x[:40], DIGITS.y[:40]))
    counts: dict[str, int] = {}
    for record in run.records:
        for units in record["metadata"]["units"].values():
            for unit in units:
                counts[unit] = counts.get(unit, 0) + 1
    most = sorted(counts, key=lambda unit: -counts[unit])[:2]
    inherited = run.state.client_states[number]["model"]
    assert {name.rpartition(".")[0] for name in inherited} == set(most)
    server = run.state.server["parts"]["0"]["model"]
    assert all(torch.equal(value, server[name]) for name, value in inherited.items())


def test_the_personal_model_is_the_one_that_was_trained():
    run = build(GeneFL(clusters=1), cohort=6).fit(2, quiet=True)
    mine = dict(run.personal(3).state_dict())
    assert same(
        run.state.client_states[3]["model"],
        {name: mine[name] for name in run.state.client_states[3]["model"]},
    )


def test_a_strong_pull_holds_a_client_at_its_clusters_model():
    def moved(**options):
        fed = build(GeneFL(clusters=1, **options), epochs=2, lr=0.02)
        run = fed.fit(1, quiet=True)
        client = run.records[0]["participants"][0]
        kept = run.state.client_states[client]["model"]
        return sum(
            float((kept[name] - fed.initial[name]).square().sum()) for name in fed.layers.parameters
        )

    free = moved(lambda_gen=0.0, lambda_elg=0.0)
    assert (
        moved(lambda_gen=0.5, lambda_elg=0.0) < free
        and moved(lambda_gen=0.0, lambda_elg=0.5) < free
    )


def test_hard_masks_hold_what_is_not_elastic():
    method = GeneFL(clusters=1, elg_hard=True, fisher_norm="layer_rank", lambda_gen=0.0)
    fed = build(method)
    state = fed.initialize(1)
    client = fed.cohort(0)[0]
    task = ClientTask(client, 0, method.download(state.server, client, fed.context(0, 1)), {})
    mask = start_round(fed.engine.setup, task).context["mask"]
    ((_, after),) = fed.run_rounds(1)
    kept = after.client_states[client]["model"]
    for name, elastic in mask.items():
        assert abs(float(elastic.mean()) - 0.5) < 0.51 / elastic.numel()
        assert torch.equal(kept[name][elastic == 0], fed.initial[name][elastic == 0])


def test_channels_by_hand():
    weight = torch.tensor([[1.0, -1.0], [3.0, 0.0], [0.0, 0.5], [-2.0, -2.0]])
    assert strongest(weight, 0.5).tolist() == [0, 1, 0, 1]
    assert strongest(weight, 0.9).tolist() == [0, 0, 0, 1]  # never all
    following = torch.tensor([[1.0, 2.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.1]])
    kept = channels({"a": weight, "b": following}, ["a", "b"], 0.5)
    assert kept["b"]["inputs"].tolist() == [0, 1, 0, 1]  # as the outputs before
    mask = mask_of(kept["b"], following)
    assert mask.tolist() == [[0, 1, 0, 1], [0, 0, 0, 0]]
    assert unpacked(following[mask > 0], mask).tolist() == [[0, 2, 0, 1], [0, 0, 0, 0]]


def test_coordinates_are_averaged_over_those_who_kept_them():
    values = [torch.tensor([1.0, 2.0, 0.0]), torch.tensor([5.0, 0.0, 0.0])]
    masks = [torch.tensor([1.0, 1.0, 0.0]), torch.tensor([1.0, 0.0, 0.0])]
    found = coordinate_mean(values, masks, [0.75, 0.25], torch.tensor([9.0, 9.0, 9.0]))
    assert found.tolist() == [2.0, 2.0, 9.0]


def test_fedlps_on_resnet18():
    units = Layers.of(network("resnet18", (3, 32, 32), 10), torch.zeros(2, 3, 32, 32))
    assert prunable(units)[0] == "layer2.0.conv1.weight" and len(prunable(units)) == 12
    assert {name.split(".")[0] for name in encoder(units)} == {"conv1", "bn1", "layer1"}
    with pytest.raises(UserError, match="fedlps prunes hidden layers"):
        build(FedLPS(), model="linear")


def test_not_even_weight_decay_moves_a_frozen_encoder():
    run = build(FedLPS(), cohort=6, weight_decay=0.05).fit(2, quiet=True)
    server, units = run.state.server["model"], run.federation.layers
    for client_state in run.state.client_states.values():
        assert all(
            torch.equal(client_state["trained"][name], server[name])
            for name in set(encoder(units)) & set(units.parameters)
        )


def test_fedlps_freezes_its_encoder_after_the_first_round():
    run = build(FedLPS(), cohort=6).fit(3, quiet=True)
    first, *later = [
        build(FedLPS(), cohort=6).fit(rounds, quiet=True).state.server["model"] for rounds in (1, 3)
    ]
    names = encoder(run.federation.layers)
    assert all(torch.equal(first[name], model[name]) for model in later for name in names)
    sizes = [record["uplink_bytes"] for record in run.records]
    assert (
        sizes[1]
        == sizes[2]
        == sizes[0] - 6 * 4 * sum(run.federation.layers.sizes[name] for name in names)
    )
    for client_state in run.state.client_states.values():
        for name, kept in client_state["channels"].items():
            trained = client_state["trained"][name]
            assert torch.equal(trained * (1 - mask_of(kept, trained)), torch.zeros_like(trained))
