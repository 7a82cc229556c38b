"""pFedGPA in small federations: what is kept, what is generated, who gets what, and what is
refused.
"""

import pytest
import torch

from fedhelix import FedAvg, PFedGPA, UserError, load
from fedhelix.components.generative import Buffer, Generator
from fedhelix.components.generative.buffer import neighbourhoods
from fedhelix.core.tree import take
from fedhelix.engines.local import ClientResult, ClientTask
from fedhelix.federation.newcomers import onboard_all
from fedhelix.federation.uploads import validate_uploads
from helpers import same, small

DIGITS = load("digits").subsample(300, 100)
QUICK = {"fit_steps": 5, "newcomer": "model"}


def build(method, **more):
    return small(method, **{"data": DIGITS, "clients": 4, "cohort": 3, "model": "linear"} | more)


def last_uploads(state):
    return Buffer(**state.server["buffer"]).latest()


def test_until_the_end_it_is_fedavg():
    mine, its = (build(method, cohort=4) for method in (PFedGPA(**QUICK), FedAvg()))
    for (_, one), (_, other) in zip(mine.run_rounds(3), its.run_rounds(3), strict=True):
        assert same(take(one.server, ["model"]), take(other.server, ["model"]))
    assert set(one.server["personal"]) == {"0", "1", "2", "3"} and "generator" in one.server


def test_a_client_gets_its_own_upload_back():
    run = build(PFedGPA(generate="own")).fit(2, quiet=True)
    fed, server = run.federation, run.state.server
    ctx = fed.context(2, 2)
    for row, owner in zip(last_uploads(run.state), Buffer(**server["buffer"]).owners, strict=True):
        got = fed.method.download(server, owner, ctx)["model"]
        assert torch.allclose(
            torch.cat([value.flatten() for value in got.values()]), row, atol=1e-6
        )


def test_clients_that_were_not_sampled_while_uploads_were_kept_train_in_the_last_round():
    method = PFedGPA(generate="own", buffer_rounds=1)
    records = build(method, cohort=2).fit(3, quiet=True).records
    assert [len(record["participants"]) for record in records] == [2, 2, 4]
    assert len(records[-1]["metadata"]["distances"]["generated_to_nearest"]) == 4


def test_the_slice_is_generated_and_the_rest_averaged():
    run = build(PFedGPA(slice="fc2", generate="own", buffer_rounds=2), model="digits-cnn").fit(
        2, quiet=True
    )
    server = run.state.server
    personal = server["personal"]["0"]
    assert set(personal) == {"fc2.weight", "fc2.bias"}
    got = run.federation.method.download(server, 0, run.federation.context(2, 2))["model"]
    assert torch.equal(got["fc1.weight"], server["model"]["fc1.weight"])
    assert torch.equal(got["fc2.weight"], personal["fc2.weight"])
    assert not torch.equal(personal["fc2.weight"], server["model"]["fc2.weight"])


def test_updates_are_added_to_the_average_that_the_last_round_began_with():
    """So the mean of a client's one update is its upload, while other layers are of the newer
    average, which the last round made.
    """
    method = PFedGPA(slice="fc2", generate="own_mean", buffer_rounds=1)
    fed = build(method, model="digits-cnn")
    (_, before), (_, after) = fed.run_rounds(2)
    upload = after.server["buffer"]["vectors"][0]
    client = str(int(after.server["buffer"]["clients"][0]))
    personal = after.server["personal"][client]
    made = torch.cat([personal[name].flatten() for name in personal])
    torch.testing.assert_close(made, upload)
    got = fed.method.download(after.server, int(client), fed.context(2, 2))["model"]
    assert torch.equal(got["fc1.weight"], after.server["model"]["fc1.weight"])
    assert not torch.equal(got["fc1.weight"], before.server["model"]["fc1.weight"])


def test_the_record_says_how_new_the_vectors_are_and_how_good_before_fine_tuning():
    record = build(PFedGPA(**QUICK)).fit(2, quiet=True).records[-1]
    metadata = record["metadata"]
    assert (
        list(metadata) == ["reconstruction", "distances"] and 0.9 < metadata["reconstruction"] <= 1
    )
    assert all(len(values) == 4 for values in metadata["distances"].values())
    assert len(record["untuned"]) == 4 and 0 <= record["untuned_accuracy"] <= 1
    assert "untuned" not in build(PFedGPA(**QUICK, ft_epochs=None)).fit(2, quiet=True).records[0]


def test_own_uploads_are_no_news():
    metadata = (
        build(PFedGPA(generate="own")).fit(2, quiet=True).records[-1]["metadata"]["distances"]
    )
    assert max(metadata["generated_to_nearest"]) < 1e-4 < min(metadata["nearest_upload"])


def test_without_fine_tuning_both_accuracies_are_one():
    tuned = build(PFedGPA(generate="own_mean")).fit(2, quiet=True).records[-1]
    plain = build(PFedGPA(generate="own_mean", ft_epochs=0)).fit(2, quiet=True).records[-1]
    assert plain["personal"] == tuned["untuned"] == plain["untuned"]


@pytest.mark.parametrize(
    "way", ["reconstruct", "direct", "neighbours", "shrink", "noise", "own_mean"]
)
def test_every_way_makes_finite_models(way):
    state = build(PFedGPA(**QUICK, generate=way)).fit(2, quiet=True).state
    for model in state.server["personal"].values():
        assert all(bool(value.isfinite().all()) for value in model.values())


def test_the_online_mode_generates_in_every_round_after_the_warm_up():
    method = PFedGPA(**QUICK, mode="online", warmup=1, online_steps=3)
    records = build(method).fit(3, quiet=True).records
    assert ["distances" in record["metadata"] for record in records] == [False, True, True]


def test_a_broken_upload_never_reaches_the_buffer():
    fed = build(PFedGPA(generate="own"))
    state, ctx = fed.initialize(2), fed.context(0, 2)
    broken = {name: torch.full_like(value, torch.nan) for name, value in fed.initial.items()}
    results = [
        ClientResult(0, 5, {"model": fed.initial}, {}, 0.0),
        ClientResult(1, 5, {"model": broken}, {}, 0.0),
    ]
    uploads, refused = validate_uploads(results, fed.initial)
    assert refused == {"1": "holds values that are not finite"}
    server = fed.method.aggregate(state.server, uploads, [1.0], ctx)
    assert Buffer(**server["buffer"]).owners == [0]


def test_too_few_uploads_are_refused_before_the_first_round():
    with pytest.raises(UserError, match="fitted to 2 uploads, but it needs at least 3"):
        build(PFedGPA(buffer_rounds=1), cohort=2).fit(1, quiet=True)


def test_too_few_sound_uploads_leave_clients_with_their_own():
    fed = build(PFedGPA(buffer_rounds=1))
    uploads = validate_uploads([ClientResult(2, 5, {"model": fed.initial}, {}, 0.0)], fed.initial)[
        0
    ]
    server = fed.method.aggregate(fed.initialize(1).server, uploads, [1.0], fed.context(0, 1))
    assert same(server["personal"]["2"], take(fed.initial, fed.layers.parameters))


def test_a_slice_without_layers_is_refused():
    with pytest.raises(UserError, match="slice names no layer 'fc7'"):
        build(PFedGPA(slice="fc7"))


# Newcomers
# ------------------------------------------------------------------------------------------

LATE = {"newcomers": 2, "newcomers_after": 2, "newcomers_classes": 0.0}


def test_a_guided_newcomer_talks_as_often_as_asked():
    run = build(PFedGPA(fit_steps=5, guide_turns=3, generate="own"), **LATE).fit(3, quiet=True)
    model = 4 * sum(run.federation.layers.sizes.values())
    assert run.summary["arrival_bytes"] == 4 * model  # the first model, and three after guidance
    assert "guest" not in run.state.server and "generator" in run.state.server


@pytest.mark.parametrize(("start", "models"), [("model", 1), ("random", 1), ("nearest", 2)])
def test_other_starts_of_newcomers(start, models):
    fed = build(PFedGPA(newcomer=start, generate="own"), **LATE)
    *_, (_, state) = fed.run_rounds(2)
    ctx = fed.context(2, 3)
    arrived, record = onboard_all(fed, state, ctx)
    assert record["arrival_bytes"] == models * 4 * sum(fed.layers.sizes.values())
    got = fed.method.download(arrived.server, 4, ctx)["model"]
    if start == "random":
        assert same(got, fed.initial)
    elif start == "model":
        assert same(got, state.server["model"])
    else:
        mine = torch.cat([value.flatten() for value in got.values()])
        assert float((last_uploads(state) - mine).norm(dim=1).min()) < 1e-4


def test_training_alone_is_the_dialogue_without_the_server():
    fed = build(PFedGPA(newcomer="alone", guide_turns=2, generate="own"), **LATE)
    *_, (_, state) = fed.run_rounds(2)
    ctx = fed.context(2, 3)
    arrived, _ = onboard_all(fed, state, ctx)
    expected = state.server["model"]
    for turn in (1, 2):
        expected = fed.engine.onboard_client(
            ClientTask(4, 2, {"model": expected, "turn": turn}, {})
        )["model"]
    got = fed.method.download(arrived.server, 4, ctx)["model"]
    assert same(got, expected) and "generator" not in arrived.server


def test_inversion_of_neighbours_starts_from_their_mean():
    run = build(PFedGPA(**QUICK, inverted="near", near=2, inversion_start=1)).fit(2, quiet=True)
    client_state = last_uploads(run.state)
    made = torch.stack([
        torch.cat([value.flatten() for value in run.state.server["personal"][str(owner)].values()])
        for owner in Buffer(**run.state.server["buffer"]).owners
    ])  # fmt: skip
    assert float((made - neighbourhoods(client_state, 2)).norm()) < 0.1 * float(
        (made - client_state).norm()
    )


def test_guidance_without_any_upload_is_the_first_model():
    fed = build(PFedGPA())
    _, payload, done = fed.method.onboard_server(fed.initialize(2).server, {}, fed.context(0, 2))
    assert done and same(payload["model"], fed.initial)


def test_a_newcomer_who_comes_before_there_is_enough_to_learn_from_gets_the_nearest():
    fed = build(PFedGPA(fit_steps=5, guide_turns=1), cohort=1, newcomers=1, newcomers_after=1)
    run = fed.fit(4, quiet=True)  # one upload is there when the newcomer arrives
    assert run.records[1]["arrival_bytes"] > 0


def test_a_newcomer_with_another_architecture_is_refused():
    fed = build(PFedGPA(fit_steps=3, generate="own"))
    *_, (_, state) = fed.run_rounds(2)
    ctx = fed.context(2, 2)
    server, payload, done = fed.method.onboard_server(state.server, {}, ctx)
    assert not done
    name = fed.layers.parameters[0]
    wrong = {**payload["model"], name: torch.zeros(3, 3)}
    with pytest.raises(UserError, match=f"for '{name}' instead of .* same architecture"):
        fed.method.onboard_server(server, {"model": wrong}, ctx)
    with pytest.raises(UserError, match="must answer"):
        fed.method.onboard_server(server, {}, ctx)


def test_a_newcomer_whose_training_diverged_keeps_what_it_was_sent():
    fed = build(PFedGPA(fit_steps=3, generate="own"))
    *_, (_, state) = fed.run_rounds(2)
    ctx = fed.context(2, 2)
    server, payload, _ = fed.method.onboard_server(state.server, {}, ctx)
    broken = {name: torch.full_like(value, torch.nan) for name, value in payload["model"].items()}
    server, last, done = fed.method.onboard_server(server, {"model": broken}, ctx)
    assert done and same(last["model"], payload["model"]) and "guest" not in server


def test_the_generator_in_the_checkpoint_is_the_one_that_was_fitted(tmp_path):
    run = build(PFedGPA(**QUICK)).fit(2, out=tmp_path / "run", quiet=True)
    kept = run.folder.restore("cpu")[1]
    method, client_state = run.federation.method, last_uploads(run.state)
    known, _ = method.material(Buffer(**kept["buffer"]))
    generator = Generator.of(kept["generator"])
    assert generator.reconstruct(known.latest()).shape == client_state.shape
    assert same(kept["personal"], run.state.server["personal"])
