"""GENE-FL: what travels, what newcomers inherit, and that its penalties do what they say."""

import pytest
import torch

from fedhelix import FedLPS, GeneFL, UserError, load
from fedhelix.components.genes.book import gene_units
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
from fedhelix.core.method import Upload
from fedhelix.core.tree import payload_bytes
from fedhelix.engines.local import ClientTask, gather, run_client, start_round
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
    sent = sent_units(run.records[0])
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


def sent_units(record):
    return {unit for units in record["metadata"]["units"].values() for unit in units}


def states(fed, rounds):
    return [state for _, state in fed.run_rounds(rounds)]


def first_task(fed, state, client=0):
    """A client's task in the round after a state."""
    payload = fed.method.download(state.server, client, fed.context(state.round, 9))
    return ClientTask(client, state.round, payload, state.client_states.get(client, {}))


def test_a_strong_pull_holds_a_client_at_what_its_cluster_has_learnt():
    def moved(**options):
        fed = build(GeneFL(clusters=1, **options), cohort=6, epochs=2, lr=0.02)
        before, after = states(fed, 2)
        centre = first_task(fed, before).payload["model"]
        kept = after.client_states[0]["model"]
        far = sum(float((kept[name] - centre[name]).square().sum()) for name in centre)
        return before.server["parts"]["0"]["model"], far

    start, free = moved(lambda_gen=0.0, lambda_elg=0.0)
    for options in (
        {"lambda_gen": 5.0, "lambda_elg": 0.0},
        {"lambda_gen": 0.0, "lambda_elg": 5.0},
        {"lambda_gen": 0.5, "lambda_elg": 0.0, "gen_norm": "whole", "gen_squared": False},
    ):
        model, far = moved(**options)
        assert far < free
        assert same(model, start)  # in the first round nothing has been learnt yet


@pytest.mark.parametrize("norm", ["relative", "whole"])
def test_penalties_touch_neither_the_head_nor_what_was_never_sent(norm):
    method = GeneFL(clusters=1, lambda_gen=3.0, lambda_elg=3.0, gen_norm=norm, gen_squared=False)
    fed = build(method, cohort=6)
    state = states(fed, 1)[0]
    task = first_task(fed, state)
    local = start_round(fed.engine.setup, task)
    model = {name: value + 0.1 for name, value in local.models["model"].items()}
    batch = gather(fed.engine.setup, torch.arange(8), None)

    def slopes(loss):
        leaves = {name: value.clone().requires_grad_() for name, value in model.items()}
        return dict(zip(leaves, torch.autograd.grad(loss(leaves), leaves.values()), strict=True))

    base = slopes(lambda params: local.base_loss(params, batch))
    both = slopes(lambda params: method.loss(params, batch, local))
    learnt = set(task.payload["model"])
    assert learnt and not learnt & set(fed.layers.head) and len(learnt) < len(fed.layers.names) - 2
    for name in fed.layers.names:
        assert torch.equal(base[name], both[name]) == (name not in learnt)


def test_the_clusters_model_travels_as_far_as_it_has_changed():
    run = build(GeneFL(clusters=1), cohort=6).fit(3, quiet=True)
    first, *later = run.records
    sent = sent_units(first)
    size = 4 * sum(
        run.federation.layers.sizes[name]
        for name in run.federation.layers.names
        if name.rpartition(".")[0] in sent
    )
    little = 6 * 100  # marks of units, and how many to send
    assert first["downlink_bytes"] <= little
    for record in later:
        assert 6 * size < record["downlink_bytes"] <= 6 * size + little
    whole = 6 * payload_bytes(run.federation.initial)
    assert later[0]["downlink_bytes"] < 0.3 * whole


def test_with_one_cluster_nobody_needs_fingerprints():
    one, two = (build(GeneFL(clusters=count)).fit(1, quiet=True) for count in (1, 2))
    assert one.records[0]["other_bytes"] == 0
    assert two.records[0]["other_bytes"] == 6 * 4 * 64 * 5  # five vectors of 64 pixels each
    number = one.onboard((DIGITS.x[:40], DIGITS.y[:40]))
    assert one.state.server["member"].tolist() == [0] * (number + 1)
    one.personal(number)


def test_a_gene_with_a_budget_shrinks_when_told_to():
    many = {"gene_budget": 0.9, "gene_shrink_every": 1, "gene_shrink_tolerance": 1.0}
    gammas = {
        name: [
            record["metadata"]["gamma"]
            for record in build(GeneFL(clusters=1, **many, **options)).fit(4, quiet=True).records
        ]
        for name, options in {
            "budget alone": {},
            "from three": {"gene_gamma0": 3},
            "down to two": {"gene_gamma_min": 2},
        }.items()
    }
    whole = gammas["budget alone"][0]
    assert whole > 2 and gammas["budget alone"] == [whole] * 4
    assert gammas["from three"] == [3, 2, 1, 1]
    assert gammas["down to two"][0] == whole and gammas["down to two"][-1] == 2


def test_a_gene_that_rotates_sends_every_unit_in_turn():
    options = {"clusters": 1, "gene_budget": 0, "gene_gamma0": 1, "gene_gamma_min": 1}
    fed = build(GeneFL(**options, gene_rotate=True), cohort=6)
    run = fed.fit(4, quiet=True)
    units = list(gene_units(fed.layers, "conv"))
    sent = [sent_units(record) for record in run.records]
    assert all(len(one) <= 6 for one in sent)
    for round, one in enumerate(sent[1:], start=1):
        waited = [unit for unit in units if unit not in set().union(*sent[:round])]
        assert one <= set(waited or units)
    assert set().union(*sent) == set(units)
    still = build(GeneFL(**options), cohort=6).fit(4, quiet=True)
    assert len(set().union(*map(sent_units, still.records))) == 1


def test_newcomers_may_inherit_the_body_without_the_head():
    shrinking = {"gene_budget": 0, "gene_gamma0": 3, "gene_gamma_min": 1, "gene_shrink_every": 1}
    sizes = {}
    for inherit in ("gene", "body"):
        method = GeneFL(clusters=1, gene_inherit=inherit, gene_shrink_tolerance=1.0, **shrinking)
        run = build(method, cohort=6).fit(3, quiet=True)
        number = run.onboard((DIGITS.x[:40], DIGITS.y[:40]))
        inherited = run.state.client_states[number]["model"]
        assert not set(inherited) & set(run.federation.layers.head)
        sizes[inherit] = len({name.rpartition(".")[0] for name in inherited})
    assert sizes["gene"] == 1 and sizes["body"] >= 3


def test_hard_masks_hold_what_is_not_elastic_of_what_was_learnt():
    method = GeneFL(clusters=1, elg_hard=True, fisher_norm="layer_rank", lambda_gen=0.0)
    fed = build(method, cohort=6)
    before, after = states(fed, 2)
    task = first_task(fed, before)
    kept = after.client_states[0]["model"]
    mask = start_round(fed.engine.setup, task).context["mask"]
    assert mask.keys() > task.payload["model"].keys()
    for name, elastic in mask.items():
        if name in task.payload["model"]:
            assert abs(float(elastic.mean()) - 0.5) < 0.51 / elastic.numel()
            centre = task.payload["model"][name]
            assert torch.equal(kept[name][elastic == 0], centre[elastic == 0])
        else:
            assert bool((elastic == 1).all())


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


def test_every_client_trains_the_encoder_once():
    fed = build(FedLPS(), cohort=2)
    entries, met, seen = encoder(fed.layers), set(), []
    size = 4 * sum(fed.layers.sizes[name] for name in entries)
    model = fed.initial
    for record, state in fed.run_rounds(5):
        fresh = set(record["participants"]) - met
        moved = any(not torch.equal(state.server["model"][name], model[name]) for name in entries)
        assert moved == bool(fresh)
        seen.append((len(fresh), record["uplink_bytes"]))
        met, model = met | fresh, state.server["model"]
    assert len(met) > 2  # more than the clients of the first round
    smallest = min(sent - fresh * size for fresh, sent in seen)
    assert all(0 <= sent - fresh * size - smallest < size for fresh, sent in seen)


def test_a_frozen_encoder_votes_for_the_one_that_is_there():
    """One client of two trains the encoder: it moves by half of that client's step."""
    fed = build(FedLPS(), cohort=6)
    ctx, name = fed.context(1, 2), encoder(fed.layers)[0]
    server, _ = fed.method.server_init({}, ctx)
    uploads = []
    for client, kept in (
        (0, {}),
        (1, {"channels": channels(fed.initial, prunable(fed.layers), 0)}),
    ):
        sent = run_client(fed.engine.setup, ClientTask(client, 1, server, kept)).upload
        uploads.append(Upload(client, 10, sent))
    assert name in uploads[0].tree["model"] and name not in uploads[1].tree["model"]
    after = fed.method.aggregate(server, uploads, [0.5, 0.5], ctx)["model"][name]
    halfway = (server["model"][name] + uploads[0].tree["model"][name]) / 2
    assert torch.allclose(after, halfway, atol=1e-6)


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
