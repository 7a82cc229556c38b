"""FedAU's bookkeeping and FedUmf's stored updates, by hand."""

import numpy as np
import pytest
import torch

from fedhelix import Clustered, FedAU, FedAvg, FedUmf, GenFed, Upload, from_arrays
from fedhelix.core.errors import UserError
from fedhelix.core.seeds import numpy_draw
from fedhelix.core.tree import add, subtract, take
from fedhelix.deploy.remote_data import RemotePartition
from fedhelix.engines.local import ClientTask, make_client, run_client
from helpers import close, same, small


def histories(method, rounds, clients=6):
    """Play `rounds` (who is there in each) with uploads that change nothing; yields server state
    and weights.
    """
    fed = small(method, clients=clients)
    server, _ = method.server_init({}, fed.context(0, len(rounds)))
    for t, present in enumerate(rounds):
        ctx = fed.context(t, len(rounds))
        uploads = [Upload(client, 1, {"model": fed.initial}) for client in present]
        weights = method.weights(server, uploads, ctx)
        server = method.aggregate(server, uploads, weights, ctx)
        yield server, weights


def test_intervals_of_participations_at_rounds_0_3_4():
    *_, (server, _) = states = list(histories(FedAU(), [[0], [1], [1], [0], [0]]))
    assert [int(state["total"][0]) for state, _ in states] == [1, 1, 1, 4, 5]
    assert [int(state["intervals"][0]) for state, _ in states] == [1, 1, 1, 2, 3]
    # In round 3 the weight still comes from the interval before, in round 4 from both: (1 + 3) / 2.
    assert states[3][1] == [1 / 6] and states[4][1] == [2 / 6]
    assert int(server["missed"][5]) == 5 and int(server["intervals"][5]) == 0


def test_absences_are_cut():
    *_, (server, _) = histories(FedAU(cutoff=2), [[0], [0], [0], [0], [0]])
    assert (int(server["total"][1]), int(server["intervals"][1]), int(server["missed"][1])) == (
        4,
        2,
        1,
    )
    *_, (server, _) = histories(FedAU(cutoff=None), [[0]] * 5)
    assert (int(server["intervals"][1]), int(server["missed"][1])) == (0, 5)


def test_uniform_sampling_gives_a_mean_weight_of_clients_per_cohort():
    draw = np.random.default_rng(0)
    rounds = [draw.choice(100, 10, replace=False).tolist() for _ in range(600)]
    *_, (server, _) = histories(FedAU(cutoff=None), rounds, clients=100)
    assert float((server["total"] / server["intervals"]).mean()) == pytest.approx(10, abs=0.3)


def settled_at(method, wishes, rates, rounds=900):
    """Where a model settles, on average, if everybody who comes by his own rate draws it towards a
    number.
    """
    fed = small(method, "linear", clients=len(wishes))
    name, draw, seen = fed.layers.parameters[0], np.random.default_rng(0), []
    server, _ = method.server_init({}, fed.context(0, rounds))
    for t in range(rounds):
        present, old = np.flatnonzero(draw.random(len(rates)) < rates).tolist(), server["model"]
        moved = [
            {**old, name: old[name] + 0.02 * (wishes[client] - old[name])} for client in present
        ]
        uploads = [
            Upload(client, 1, {"model": model})
            for client, model in zip(present, moved, strict=True)
        ]
        if uploads:
            ctx = fed.context(t, rounds)
            server = method.aggregate(server, uploads, method.weights(server, uploads, ctx), ctx)
        seen.append(float(server["model"][name].mean()))
    return np.mean(seen[rounds // 2 :])


def test_whoever_comes_seldom_is_heard_as_much():
    wishes, rates = [0.0, 1.0, 5.0], np.array([0.9, 0.4, 0.2])
    assert settled_at(FedAU(), wishes, rates) == pytest.approx(np.mean(wishes), abs=0.3)
    assert settled_at(FedAvg(), wishes, rates) < 1.2  # those who are there, on average


def test_the_step_is_the_weighted_sum_over_all_clients():
    fed = small(FedAU(global_lr=0.5))
    ctx = fed.context(0, 1)
    server, _ = fed.method.server_init({}, ctx)
    server = {
        **server,
        "intervals": server["intervals"] + 1,
        "total": server["total"] + torch.arange(6),
    }
    ones = {name: torch.ones_like(value) for name, value in fed.initial.items()}
    uploads = [
        Upload(2, 9, {"model": add(fed.initial, ones)}),
        Upload(3, 1, {"model": add(fed.initial, ones, -1)}),
    ]
    weights = fed.method.weights(server, uploads, ctx)
    assert weights == [2 / 6, 3 / 6]
    merged = fed.method.aggregate(server, uploads, weights, ctx)["model"]
    assert close(merged, add(fed.initial, ones, 0.5 * (2 - 3) / 6))


@pytest.mark.parametrize(("count", "counted"), [("sampled", [1, 1, 1]), ("selected", [1, 0, 0])])
def test_around_it_genfed_normalises_and_counts_as_asked(count, counted):
    method = GenFed(FedAU(count=count), schedule="constant", rho_max=1)
    fed = small(method, validation_size=0.1)
    ctx = fed.context(0, 1)
    server, _ = method.server_init({}, ctx)
    server["intervals"], server["total"] = (
        torch.zeros(6, dtype=torch.int64),
        torch.zeros(6, dtype=torch.int64),
    )
    ones = {name: torch.ones_like(value) for name, value in fed.initial.items()}
    uploads = [Upload(client, 5, {"model": add(fed.initial, ones)}) for client in range(3)]
    weights = method.weights(server, uploads, ctx)
    merged = method.aggregate(server, uploads, weights, ctx)
    assert weights == [1, 0, 0] and close(merged["model"], add(fed.initial, ones))
    assert merged["intervals"][:3].tolist() == counted


def test_around_it_genfed_normalises_even_when_it_takes_everybody():
    fed = small(GenFed(FedAU(), schedule="constant", rho_max=3, twins=True), validation_size=0.1)
    ctx = fed.context(0, 1)
    server, _ = fed.method.server_init({}, ctx)
    server["intervals"], server["total"] = (
        torch.ones(6, dtype=torch.int64),
        torch.tensor([1, 2, 5, 1, 1, 1]),
    )
    uploads = [Upload(client, 5, {"model": fed.initial}) for client in range(3)]
    # Mean intervals 1, 2 and 5; FedAU alone would divide them by its six clients.
    assert fed.method.weights(server, uploads, ctx) == pytest.approx([1 / 8, 2 / 8, 5 / 8])
    assert FedAU().weights(server, uploads, ctx) == pytest.approx([1 / 6, 2 / 6, 5 / 6])


# FedUmf


def test_the_broadcast_of_all_clusters_counts():
    plain, clustered = (
        small(method, clients=9) for method in (FedUmf(), Clustered(FedUmf(), clusters=2))
    )
    one, other = (next(fed.run_rounds(3))[0]["other_bytes"] for fed in (plain, clustered))
    assert other - clustered.initialize(3).setup_bytes == one


def test_who_will_be_sampled_next_trains_in_advance():
    fed = small(FedUmf(), clients=9)
    server, _ = fed.method.server_init({}, fed.context(0, 4))
    for (record, state), t in zip(fed.run_rounds(4), range(3), strict=False):
        now, then = fed.cohort(t), fed.cohort(t + 1)
        assert record["participants"] == sorted({*now, *then})
        stored = {
            client
            for client, client_state in state.client_states.items()
            if client_state.get("round") == t
        }
        assert stored == set(then) - set(now)
        assert all(not state.client_states[client] for client in now)
        weight, early = 4 * sum(fed.layers.sizes.values()), len({*now, *then}) - 3
        assert record["uplink_bytes"] == weight * 3 and record["downlink_bytes"] == (weight + 4) * 3
        assert (
            record["other_bytes"] == weight * 6 + 4 * early
        )  # the broadcast, and who is told to train in advance
    assert server.keys() == state.server.keys()


@pytest.mark.parametrize("mu", [1.0, 0.5])
def test_a_stored_update_is_used_once_and_in_the_next_round_only(mu):
    fed, free = small(FedUmf(mu=mu), clients=9), small(FedAvg(), clients=9)
    later = sorted(set(fed.cohort(1)) - set(fed.cohort(0)))[0]
    ctx = [fed.context(t, 5) for t in range(3)]
    server, _ = fed.method.server_init({}, ctx[0])
    waiting = ClientTask(later, 0, fed.method.download(server, later, ctx[0]), {})
    upload, client_state = fed.engine.run_clients([waiting])[0][2:4]
    trained = free.engine.run_clients([ClientTask(later, 0, {"model": fed.initial}, {})])[0].upload[
        "model"
    ]
    update = subtract(trained, fed.initial)
    assert upload == {} and client_state["round"] == 0 and close(client_state["update"], update)
    payload = fed.method.download(server, later, ctx[1])
    begun = fed.method.start(
        payload, client_state, make_client(fed.engine.setup, ClientTask(later, 1, {}, {}))
    )
    assert close(begun["model"], add(fed.initial, update, mu))
    assert same(begun[fed.method.personal(begun)], fed.initial)
    late = fed.method.start(
        payload, client_state, make_client(fed.engine.setup, ClientTask(later, 2, {}, {}))
    )
    assert same(late["model"], fed.initial)
    assert (
        fed.engine.run_clients([ClientTask(later, 1, payload, client_state)])[0].client_state == {}
    )


@pytest.mark.parametrize("inner", [FedAU(), FedUmf()], ids=lambda method: method.name)
def test_genfed_around_them(inner):
    run = small(
        GenFed(inner, schedule="constant", rho_max=2),
        "digits-bn-cnn",
        clients=9,
        validation_size=0.1,
    )
    for record in run.fit(2, quiet=True).records:
        assert len(record["metadata"]["fitness"]) == 3 and len(record["metadata"]["selected"]) == 2


# Participation


def test_rates_by_class_follow_fedaus_code():
    """A client's rate: its class shares times rates of the classes, whose mean is cohort /
    clients.
    """
    more = {"clients": 20, "cohort": 5, "partition": "dirichlet:0.1", "seed": 1}
    fed = small(participation="classes", participation_alpha=0.1, **more)
    census = np.array(fed.census()["classes"], dtype=float)
    shares = census / census.sum(1, keepdims=True)
    per_class = numpy_draw(1, "participation").dirichlet(np.full(10, 0.1))
    expected = np.clip(shares @ per_class * 10 * 5 / 20, 0.02, 1)
    assert np.allclose(fed.samplers[0].rates, expected)
    there = np.zeros(20)
    for t in range(400):
        there[fed.cohort(t)] += 1 / 400
    assert np.abs(there - expected).max() < 0.1


def test_clients_of_one_kind_have_one_rate_and_newcomers_too():
    fed = small(
        participation="classes", participation_alpha=5, clients=10, cohort=5, partition="shard:1"
    )
    kinds = [int(np.argmax(row)) for row in fed.census()["classes"]]
    rates = dict(zip(kinds, fed.samplers[0].rates, strict=True))
    run = fed.fit(1, quiet=True)
    data = fed.data
    newcomer = torch.nonzero(data.y == 3).flatten()[:20]
    number, _ = fed.onboard((data.x[newcomer], data.y[newcomer]), run.state)
    assert fed.samplers[0].rates[number] == pytest.approx(rates[3] * 10 / 11)


def test_rates_by_class_need_classes():
    x = torch.rand(40, 3)
    data = from_arrays(x, x.sum(1), x, x.sum(1))
    with pytest.raises(UserError, match="participation = classes needs classes"):
        small(data=data, partition="iid", participation="classes")
    for wanted in ({"participation": "classes"}, {"server_only": True, "validation_size": 10}):
        with pytest.raises(UserError, match="sites keep theirs"):
            small(partition=RemotePartition([(10, 5)] * 3, 0.1), cohort=2, **wanted)


def test_clients_may_count_alike():
    """A mean of uploads, whatever the clients' numbers of samples."""
    fed = small(client_weights="equal", partition="dirichlet:0.1")
    ((record, state),) = fed.run_rounds(1)
    setup, payload = fed.engine.setup, {"model": fed.initial}
    models = [
        run_client(setup, ClientTask(client, 0, payload, {})).upload["model"]
        for client in record["participants"]
    ]
    for name, value in state.server["model"].items():
        mean = torch.stack([model[name] for model in models]).mean(0)
        assert torch.allclose(value, mean, atol=1e-6)
    assert not close(
        small(partition="dirichlet:0.1").fit(1, quiet=True).state.server["model"],
        state.server["model"],
    )


def test_bernoulli_participation_follows_its_rates():
    fed = small(clients=20, cohort=5, participation="bernoulli", participation_alpha=0.5, seed=1)
    rates, rounds = fed.samplers[0].rates, 2000
    assert rates.min() >= 0.02 and rates.max() > 3 * np.median(rates)
    seen = (
        np.bincount(np.concatenate([fed.cohort(t) for t in range(rounds)]), minlength=20) / rounds
    )
    assert np.abs(seen - rates).max() < 0.05
    assert fed.cohort(3) == fed.cohort(3)
    assert take(fed.initial, []) == {} and len(fed.fit(1, quiet=True).records) == 1


def test_whoever_takes_part_by_rates_does_not_stand_in_for_nobody():
    """An accountant of privacy builds on the rates: here a third of all rounds is empty."""
    settings = {"participation": "bernoulli", "participation_alpha": 100.0}
    fed = small(clients=5, cohort=1, seed=1, **settings)
    rates, rounds = fed.samplers[0].rates, 4000
    cohorts = [fed.cohort(t) for t in range(rounds)]
    seen = np.bincount(np.concatenate(cohorts).astype(int), minlength=5) / rounds
    assert np.abs(seen - rates).max() < 4 * np.sqrt(0.2 * 0.8 / rounds)
    empty = np.mean([not cohort for cohort in cohorts])
    assert abs(empty - np.prod(1 - rates)) < 4 * np.sqrt(0.33 * 0.67 / rounds)
    t = next(t for t, cohort in enumerate(cohorts) if not cohort)
    assert t < 20 and fed.fit(t + 1, quiet=True).records[t]["participants"] == []


def test_nobody_trains_for_a_round_that_will_not_come():
    run = small(FedUmf(), cohort=2).fit(3, quiet=True)
    worked = [len(record["participants"]) for record in run.records]
    assert worked[0] > 2 and worked[-1] == 2
