"""Newcomers: unseen clients with classes that nobody has seen arrive, are
welcomed, and take over.
"""

import dataclasses

import numpy as np
import pytest
import torch

from fedhelix import (
    METHODS,
    FedAU,
    FedAvg,
    FedAvgFT,
    FedBN,
    FedPer,
    GeneFL,
    LGFedAvg,
    LocalOnly,
    Method,
    PFedHN,
    UserError,
    from_arrays,
    load,
)
from fedhelix.core.tree import take
from fedhelix.engines.local import make_client, personal_model, received_model
from fedhelix.federation.newcomers import onboard_all, onboard_one
from fedhelix.store.records import newcomers
from helpers import NETWORKS, cheap, check_resumed, same, small, timeless

DIGITS = load("digits").subsample(400, 200)
LATE = {"newcomers": 4, "newcomers_after": 2, "data": DIGITS, "partition": "shard:3", "clients": 5}


def build(method=None, **more):
    return small(method, **LATE | more)


def test_newcomers_hold_the_other_classes_and_are_alone_after_they_came():
    fed = build()
    labels = [set(DIGITS.y[split.train].tolist()) for split in fed.splits]
    known, new = set.union(*labels[:5]), set.union(*labels[5:])
    assert len(known) == len(new) == 5 and not known & new
    for split, held in zip(fed.splits, labels, strict=True):
        assert set(DIGITS.y_test[split.test].tolist()) <= held
    records = fed.fit(4, quiet=True).records
    for record in records:
        ids = range(5) if record["round"] <= 2 else range(5, 9)
        assert set(record["participants"]) <= set(ids) and len(record["personal"]) == len(ids)
    assert ["arrival_bytes" in record for record in records] == [False, False, True, False]


def test_after_training_fedavg_is_fedavg_ft_and_the_training_leaves_no_trace():
    plain, trained, tuned = (
        build(method, eval_trained=yes).fit(4, quiet=True)
        for method, yes in ((FedAvg(), False), (FedAvg(), True), (FedAvgFT(), True))
    )
    assert same(plain.state.server, trained.state.server)
    for without, other, ft in zip(plain.records, trained.records, tuned.records, strict=True):
        assert "trained_accuracy" not in without
        assert other["personal"] == without["personal"]
        # FedAvg-FT trains once and not twice.
        assert other["trained_accuracy"] == ft["trained_accuracy"] == ft["personal_accuracy"]
    summary = trained.summary
    assert summary["newcomer_trained_accuracy"] == pytest.approx(
        np.mean([record["trained_accuracy"] for record in trained.records[2:]])
    )
    assert summary["known_trained_accuracy"] == pytest.approx(
        np.mean([record["trained_accuracy"] for record in trained.records[:2]])
    )


def test_newcomers_that_were_never_sampled_do_not_count_as_random_guesses():
    """A client of its own classes is far above chance after one training, sampled or not."""
    more = {"model": "digits-cnn", "epochs": 4, "batch_size": 16, "cohort": 1, "eval_trained": True}
    run = build(FedPer(ft_epochs=0), **more).fit(3, quiet=True)
    asleep = [client - 5 for client in range(5, 9) if client not in run.records[2]["participants"]]
    assert np.mean([run.records[2]["personal"][client] for client in asleep]) < 0.3
    assert run.records[2]["trained_accuracy"] > 0.5


def test_of_fedavgs_model_only_the_head_is_a_bad_start_for_unseen_classes():
    """At arrival, after one local training: the body helps, its head takes that away again."""
    fed = small(
        FedAvg(), "digits-cnn", data=load("digits").subsample(900, 300), partition="shard:4",
        clients=8, cohort=4, newcomers=8, newcomers_after=5, epochs=3, batch_size=32, lr=0.05,
        momentum=0.9, seed=1,
    )  # fmt: skip
    *_, (_, state) = fed.run_rounds(5)
    reached = {}
    for start, entries in (("all", fed.layers.names), ("body", fed.layers.body), ("none", ())):
        model = {**fed.initial, **take(state.server["model"], entries)}
        tasks = fed.tasks(state, range(8, 16), fed.context(5, 6))
        tasks = [task._replace(trained=True, payload={"model": model}) for task in tasks]
        reached[start] = np.mean([score.test for score in fed.engine.evaluate(tasks)[0]])
    assert reached["body"] > reached["none"] + 0.1 and reached["body"] > reached["all"] + 0.1


@pytest.mark.parametrize("name", ["apfl", "ditto", "fedlp", "fedlps", "fedumf", "gene-fl"])
def test_methods_with_several_models_use_the_one_that_a_round_trains(name):
    fed = build(cheap(name), model="digits-bn-cnn", cohort=5)
    ctx, ((_, state),) = fed.context(1, 2), fed.run_rounds(1)
    (task,) = fed.tasks(state, [0], ctx)
    before = received_model(fed.engine.setup, task).state
    after = personal_model(fed.engine.setup, task._replace(trained=True)).state
    assert all(not torch.equal(after[entry], before[entry]) for entry in fed.layers.head)


def test_a_client_of_gene_fl_trains_with_its_clusters_gene():
    fed = build(GeneFL(clusters=1), model="digits-cnn", cohort=5, epochs=0)
    ((_, state),) = build(GeneFL(clusters=1), model="digits-cnn", cohort=5).run_rounds(1)
    (task,) = fed.tasks(state, [0], fed.context(1, 2))
    client = make_client(fed.engine.setup, task)
    start = fed.method.start(task.payload, task.client_state, client)
    assert not same(start["model"], start["kept"])
    assert same(personal_model(fed.engine.setup, task._replace(trained=True)).state, start["model"])


def test_engines_agree_on_clients_after_training():
    serial, batched = (
        build(GeneFL(clusters=1), model="digits-cnn", engine=engine, eval_trained=True)
        .fit(3, quiet=True)
        .metrics["trained_accuracy"]
        for engine in ("serial", "batched")
    )
    assert np.allclose(serial, batched, atol=0.02)


def test_without_a_share_of_classes_newcomers_are_like_the_others():
    fed = build(newcomers_classes=0.0)
    assert len(fed.splits) == 9 and fed.known == 5
    assert len(set(np.concatenate([split.train for split in fed.splits[5:]]))) > 0
    assert set(DIGITS.y[np.concatenate([split.train for split in fed.splits[:5]])].tolist()) == set(
        range(10)
    )


def test_the_known_phase_is_that_of_a_federation_without_newcomers():
    known = [
        int(c) for c in np.unique(DIGITS.y[np.concatenate([s.train for s in build().splits[:5]])])
    ]
    from fedhelix import partition

    alone = small(data=DIGITS, partition=partition.shard(5, 3, classes=known)).fit(2, quiet=True)
    both = build().fit(3, quiet=True)
    assert timeless(both.records[:2]) == timeless(alone.records)


def test_arrival_is_judged_after_one_local_training_that_nobody_keeps():
    fed = build(LocalOnly(follow_sampling=True), cohort=4)
    state = fed.initialize(3)
    ctx = fed.context(2, 3)
    arrived, record = onboard_all(fed, dataclasses.replace(state, round=2), ctx)
    assert (
        record["arrival_bytes"] == 0
        and arrived.client_states == {}
        and 0 < record["arrival_accuracy"] <= 1
    )
    untrained = fed.evaluate(dataclasses.replace(state, round=2), ctx)["personal_accuracy"]
    assert record["arrival_accuracy"] > untrained


def test_the_initial_download_is_counted():
    run = build().fit(3, quiet=True)
    model = 4 * sum(run.federation.layers.sizes.values())
    assert run.summary["arrival_bytes"] == model
    assert [record["other_bytes"] for record in run.records] == [0, 0, 4 * model]
    assert run.summary["known_uplink_bytes"] == 2 * 3 * model


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_takes_newcomers_in_and_resumes_across_their_arrival(name, tmp_path):
    if name == "fedbn":
        pytest.skip("needs BatchNorm; see below")
    model = NETWORKS.get(name, "digits-cnn")
    check_resumed(lambda: build(cheap(name), model=model), tmp_path, 3, after=2)


def test_newcomers_draw_their_own_batch_norm():
    run = build(FedBN(), model="digits-bn-cnn").fit(3, quiet=True)
    shared = 4 * sum(
        run.federation.layers.sizes[name] for name in FedBN().shared_params(run.federation.layers)
    )
    assert run.summary["arrival_bytes"] == shared


def test_a_dialogue_may_take_several_turns_and_leaves_what_the_client_keeps():
    class Talk(Method):
        def client_init(self, client):
            return {"said": torch.zeros(2)}

        def onboard_server(self, server, message, ctx):
            heard = torch.cat([server.get("heard", torch.zeros(0)), message["said"]])
            return (
                {**server, "heard": heard},
                {"note": torch.ones(3)},
                bool(message["said"].sum() > 3),
            )

        def onboard_client(self, payload, client):
            trained = client.train(client.initial, 0)
            assert any(not torch.equal(trained[name], client.initial[name]) for name in trained)
            return {"said": payload["note"] * 4} if payload else self.client_init(client)

        def onboard_state(self, payload, client):
            return {"note": payload["note"] * client.id}

    fed = build(Talk())
    state, received = onboard_one(fed, fed.initialize(2), 7, fed.context(2, 3))
    assert received == 2 * 3 * 4
    assert state.server["heard"].tolist() == [0, 0, 4, 4, 4]
    assert state.client_states[7]["note"].tolist() == [7, 7, 7] and state.changed >= {7}
    assert state.setup_bytes == fed.initialize(2).setup_bytes + 4 * (2 + 3 + 3 + 3)


@pytest.mark.parametrize("method", [FedAU(), LGFedAvg(warm_start=1)], ids=["fedau", "lg-fedavg"])
def test_books_about_clients_grow(method):
    run = build(method).fit(4, quiet=True)
    books = [
        value
        for key, value in run.state.server.items()
        if key in ("missed", "intervals", "total", "warmed")
    ]
    assert books and all(len(book) == 9 for book in books)


def test_a_newcomer_whose_training_diverges_does_not_end_the_run():
    run = build(
        PFedHN(newcomer_turns=2), newcomers=1, newcomers_classes=0, model="linear", lr=1e30
    ).fit(3, quiet=True)
    assert run.summary["complete"] and run.records[-1]["participants"] == [5]


def test_a_client_with_its_own_data_joins():
    run = small(FedAvg(), data=DIGITS).fit(1, quiet=True)
    number = run.onboard((DIGITS.x[:50].numpy(), DIGITS.y[:50].numpy()))
    fed = run.federation
    assert number == 6 and len(fed.splits[6].train) == 40 and len(fed.splits[6].test) == 10
    mine = fed.data.x[fed.splits[6].train]
    assert all((mine[at] == DIGITS.x[:50]).flatten(1).all(1).any() for at in range(40))
    model = run.personal(number)
    assert torch.equal(
        next(iter(model.state_dict().values())), next(iter(run.state.server["model"].values()))
    )
    cohorts = {client for t in range(1, 20) for client in fed.cohort(t)}
    assert cohorts == set(range(7))


def test_a_newcomer_who_is_turned_away_leaves_no_trace():
    class Closed(FedAvg):
        def onboard_server(self, server, message, ctx):
            raise UserError("no newcomers here")

    run = small(Closed(), data=DIGITS).fit(1, quiet=True)
    fed = run.federation
    before = fed.clients, fed.splits, fed.evaluated, fed.samplers, fed.engine.setup
    with pytest.raises(UserError, match="no newcomers here"):
        run.onboard((DIGITS.x[:20], DIGITS.y[:20]))
    assert (fed.clients, fed.splits, fed.evaluated, fed.samplers, fed.engine.setup) == before


def test_bad_newcomers_are_refused():
    run = small(FedAvg(), data=DIGITS).fit(1, quiet=True)
    labels = torch.zeros(9, dtype=torch.long)
    with pytest.raises(UserError, match=r"newcomer has samples of .*; give samples of that shape"):
        run.onboard((torch.zeros(9, 1, 5, 5), labels))
    with pytest.raises(UserError, match="; give pixels from 0 to 255 as uint8"):
        run.onboard((torch.zeros(9, 1, 8, 8), labels))
    with pytest.raises(UserError, match="; give them as uint8"):
        run.onboard((torch.zeros(9, 1, 8, 8, dtype=torch.int32), labels))
    with pytest.raises(UserError, match="10"):
        run.onboard((DIGITS.x[:9], torch.full((9,), 10)))
    with pytest.raises(UserError, match=r"has a single sample, and one is held out .* a second"):
        run.onboard((DIGITS.x[:1], DIGITS.y[:1]))
    assert run.federation.clients == 6
    for settings, words in [
        ({"newcomers": 3, "newcomers_after": None}, "needs newcomers_after"),
        ({"newcomers_classes": 1.0}, "less than 1"),
        ({"partition": "shard:6"}, "only 5"),
    ]:
        with pytest.raises(UserError, match=words):
            build(**settings)
    with pytest.raises(UserError, match="rounds must be more"):
        build().fit(2, quiet=True)
    owned = from_arrays(DIGITS.x, DIGITS.y, DIGITS.x_test, DIGITS.y_test, owners=np.arange(400) % 4)
    with pytest.raises(UserError, match="owners keep their classes"):
        build(data=owned, partition="natural", clients=None, newcomers=2)
    with pytest.raises(UserError, match="leave no known client"):
        build(data=owned, partition="natural", clients=None, newcomers_classes=0.0)
    assert (
        build(
            data=owned, partition="natural", clients=None, newcomers=1, newcomers_classes=0.0
        ).known
        == 3
    )


def test_figures_of_the_two_phases():
    record = {"uplink_bytes": 5, "uplink_values": 2, "downlink_bytes": 7, "other_bytes": 3}
    before = [{**record, "personal_accuracy": value} for value in (0.0, *[0.5] * 10)]
    after = [{**record, "personal_accuracy": value} for value in (0.1, 0.94, 0.96, 1.0)]
    after[0] |= {"arrival_accuracy": 0.05, "arrival_bytes": 8.0}
    found = newcomers(before, after)
    assert found["known_accuracy"] == 0.5 and found["known_uplink_bytes"] == 55
    assert found["known_uplink_values"] == 22
    assert found["known_downlink_bytes"] == 77 and found["known_other_bytes"] == 33
    assert found["known_trained_accuracy"] is None  # not evaluated after training
    old = [{**record, "uplink_values": None}, record]  # of version 0.1, and resumed by this one
    assert newcomers(old, after)["known_uplink_values"] is None
    assert (
        found["newcomer_accuracy"] == pytest.approx(0.75) and found["newcomer_peak_accuracy"] == 1.0
    )
    assert found["newcomer_rounds_to_peak"] == 3 and found["arrival_accuracy"] == 0.05


def test_a_newcomer_for_batchnorm_has_three_samples():
    run = small(model="digits-bn-cnn", data=DIGITS).fit(1, quiet=True)
    with pytest.raises(UserError, match="needs two; give at least three samples"):
        run.onboard((DIGITS.x[:2], DIGITS.y[:2]))
    assert run.onboard((DIGITS.x[:3], DIGITS.y[:3])) == 6
