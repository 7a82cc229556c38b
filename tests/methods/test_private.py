"""Private: clipping and noise by hand and by distribution, the ledger, and what is refused."""

import math
import os
from dataclasses import replace

import pytest
import torch
from scipy import stats

from fedhelix import DPSGD, METHODS, FedAvg, FedAvgM, FedLG, FedPer, Private, Upload, UserError
from fedhelix.components.accounting import Accounting
from fedhelix.core.seeds import secret_normal
from fedhelix.engines.local import ClientTask, make_client
from fedhelix.federation.description import advice
from helpers import check_resumed, checkpoint, same, small, timeless

pytest.importorskip("dp_accounting")
uncounted = pytest.mark.usefixtures("uncounted_budget")


@pytest.fixture
def uncounted_budget(monkeypatch):
    """Hardly any noise costs more than any budget; tests of the sums do not count it."""
    monkeypatch.setattr(Accounting, "epsilon", lambda *_: 0.0)


def flat(state, names):
    return torch.cat([state[name].flatten() for name in names])


def moved(fed, client, *first):
    """An upload that lies so far from the initial model in its first values."""
    name = fed.layers.parameters[0]
    value = fed.initial[name].clone()
    value.view(-1)[: len(first)] += torch.tensor(first)
    return Upload(client, 10 * (client + 1), {"model": {**fed.initial, name: value}})


def aggregated(fed, uploads):
    """The update that the server makes of uploads."""
    ctx = fed.context(0, 3)
    server, _ = fed.method.server_init({}, ctx)
    weights = fed.method.weights(server, uploads, ctx)
    state = fed.method.aggregate(server, uploads, weights, ctx)
    return flat(state["model"], fed.initial) - flat(fed.initial, fed.initial), state


@uncounted
def test_long_updates_are_clipped_and_short_ones_stay():
    """(3, 4) is five long and becomes (0.6, 0.8) * 2; (0, 1) stays; the sum over a cohort of 3."""
    fed = small(Private(clip=2.0, noise=1e-9))
    update, _ = aggregated(fed, [moved(fed, 0, 3.0, 4.0), moved(fed, 1, 0.0, 1.0)])
    assert update[:2].tolist() == pytest.approx([1.2 / 3, 2.6 / 3], abs=1e-6)
    assert update[2:].abs().max() < 1e-6


@uncounted
def test_a_client_sends_no_longer_update_than_the_clip():
    fed = small(Private(clip=0.25, noise=1e-9))
    server, _ = fed.method.server_init({}, fed.context(0, 3))
    payload = fed.method.download(server, 0, fed.context(0, 3))
    (result,) = fed.engine.run_clients([ClientTask(0, 0, payload, {})])
    (plain,) = small(FedAvg()).engine.run_clients([ClientTask(0, 0, payload, {})])
    origin = flat(fed.initial, fed.initial)
    sent, trained = (flat(one.upload["model"], fed.initial) - origin for one in (result, plain))
    assert trained.norm() > 0.5
    assert sent.norm() == pytest.approx(0.25, rel=1e-4)
    assert torch.allclose(sent, trained * 0.25 / trained.norm(), atol=1e-6)


@uncounted
def test_with_hardly_any_noise_and_no_clip_it_is_the_plain_mean():
    settings = {"client_weights": "equal"}
    one = small(Private(clip=1e3, noise=1e-12), **settings).fit(2, quiet=True)
    other = small(FedAvg(), **settings).fit(2, quiet=True)
    model, plain = (flat(run.state.server["model"], run.federation.initial) for run in (one, other))
    assert torch.allclose(model, plain, atol=1e-5)


@uncounted
@pytest.mark.parametrize("noise_by", ["server", "clients"])
def test_the_noise_on_the_mean_is_gaussian_with_the_right_deviation(noise_by):
    """Clients that do not move: what the server gets is noise of noise * clip / cohort."""
    method = Private(clip=0.5, noise=2.0, noise_by=noise_by)
    fed = small(method, "mlp", epochs=0, cohort=6)
    (_, state), *_ = fed.run_rounds(1)
    update = flat(state.server["model"], fed.initial) - flat(fed.initial, fed.initial)
    deviation = 2.0 * 0.5 / 6
    assert len(update) > 2000
    assert stats.kstest(update.numpy(), "norm", args=(0, deviation)).pvalue > 0.01
    wrong = stats.kstest(update.numpy(), "norm", args=(0, 1.2 * deviation)).pvalue
    assert wrong < 1e-4  # the test would see a wrong deviation


@uncounted
def test_layers_that_a_client_leaves_out_have_its_noise_too():
    """Else the sum of a layer that few clients send would have the noise of these few only."""
    method = Private(METHODS["fedlp"](keep=0.0), clip=0.5, noise=2.0, noise_by="clients")
    fed = small(method, "mlp", epochs=0, cohort=6)
    (_, state), *_ = fed.run_rounds(1)
    update = flat(state.server["model"], fed.initial) - flat(fed.initial, fed.initial)
    assert stats.kstest(update.numpy(), "norm", args=(0, 2.0 * 0.5 / 6)).pvalue > 0.01


@uncounted
def test_the_server_adds_the_shares_of_clients_that_did_not_answer():
    fed = small(Private(clip=1.0, noise=3.0, noise_by="clients"), "mlp", cohort=6)
    silent, _ = aggregated(fed, [moved(fed, 0, 0.0), moved(fed, 1, 0.0)])
    deviation = 3.0 * math.sqrt(4 / 6) / 6  # four shares of six are missing
    assert stats.kstest(silent.numpy(), "norm", args=(0, deviation)).pvalue > 0.01


def test_the_noise_of_a_deployment_is_the_operating_systems(monkeypatch):
    one, other = secret_normal(20_000), secret_normal(20_000)
    assert stats.kstest(one.numpy(), "norm").pvalue > 1e-4
    assert not torch.equal(one, other)
    monkeypatch.setattr(os, "urandom", lambda count: bytes(count))
    assert secret_normal(3).tolist() == pytest.approx([0.0] * 3, abs=1e-12)
    fed = small(Private(noise=1.0))
    ctx = replace(fed.context(0, 1), deployed=True)
    assert ctx.normal("privacy", 2).tolist() == pytest.approx([0.0] * 2, abs=1e-12)
    client = make_client(replace(fed.engine.setup, deployed=True), ClientTask(0, 0, {}, {}))
    assert client.normal("privacy", 2).tolist() == pytest.approx([0.0] * 2, abs=1e-12)


@uncounted
def test_an_adaptive_clip_moves_towards_the_quantile():
    """With all updates shorter, the share is 1: the clip shrinks by exp(-0.2 * (1 - 0.5))."""
    fed = small(Private(clip=2.0, noise=1e-9, quantile=0.5))
    uploads = [moved(fed, client, 1.0) for client in range(3)]
    short = [
        upload._replace(tree={**upload.tree, "privacy": {"short": torch.tensor(0.5)}})
        for upload in uploads
    ]
    _, state = aggregated(fed, short)
    assert state["privacy"]["clip"].item() == pytest.approx(2 * math.exp(-0.1), rel=1e-5)
    lying = [
        upload._replace(tree={**upload.tree, "privacy": {"short": torch.tensor(1e6)}})
        for upload in uploads
    ]
    _, state = aggregated(fed, lying)
    assert state["privacy"]["clip"].item() == pytest.approx(2 * math.exp(-0.1), rel=1e-5)


@uncounted
def test_an_adaptive_clip_finds_the_median_length():
    run = small(Private(clip=50.0, noise=1e-9, quantile=0.5), cohort=6).fit(25, quiet=True)
    clips = [record["metadata"]["clip"] for record in run.records]
    assert clips[0] == 50.0 and clips[-1] < 5 and clips[:9] == sorted(clips[:9], reverse=True)


def test_epsilon_is_in_the_record_and_is_the_accountants():
    run = small(Private(epsilon=30.0), cohort=2).fit(3, quiet=True)
    noise = run.records[0]["metadata"]["noise"]
    assert noise == Accounting("rdp", "public", 1e-5).noise(30.0, {1.0: 3})
    rounds = dict.fromkeys(range(6), 0)
    for record in run.records:
        for client in record["participants"]:
            rounds[client] += 1
        expected = {
            str(client): Accounting("rdp", "public", 1e-5).epsilon(noise, {1.0: count})
            for client, count in rounds.items()
            if count
        }
        assert record["metadata"]["epsilon"] == pytest.approx(expected)
        assert max(record["metadata"]["epsilon"].values()) <= 30.0
        assert record["metadata"]["privacy_level"] == "client"


def test_secret_cohorts_charge_everybody_by_its_rate():
    settings = {"participation": "bernoulli", "participation_alpha": 1.0}
    fed = small(Private(epsilon=20.0, cohorts="secret"), **settings)
    run = fed.fit(2, quiet=True)
    noise = run.records[0]["metadata"]["noise"]
    rates = fed.context(0, 2).sampling.rates
    assert len(set(rates.values())) > 3
    poisson = Accounting("rdp", "poisson", 1e-5)
    expected = {str(client): poisson.epsilon(noise, {rate: 2}) for client, rate in rates.items()}
    assert run.records[-1]["metadata"]["epsilon"] == pytest.approx(expected)
    assert max(expected.values()) == pytest.approx(20.0, rel=0.01)


def test_secret_cohorts_of_a_fixed_size_are_drawn_without_replacement():
    run = small(Private(noise=8.0, cohorts="secret"), clients=12, cohort=1).fit(1, quiet=True)
    spent = Accounting("rdp", "fixed", 1e-5).epsilon(8.0, {1 / 12: 1})
    assert run.records[0]["metadata"]["epsilon"] == pytest.approx(
        {str(client): spent for client in range(12)}
    )


@pytest.mark.parametrize(("cohorts", "rounds"), [("public", [5, 2]), ("secret", [5, 5])])
def test_rounds_that_clients_count_themselves_are_charged(cohorts, rounds):
    """Of secret cohorts, every lost round has cost everybody, whoever took part."""
    method = Private(epsilon=1e3, noise=1.0, cohorts=cohorts)
    fed = small(method, participation="bernoulli")
    ctx = replace(fed.context(3, 9), counted={0: 4})
    books = {"noise": 1.0, "ledger": {str(i): {repr(method._rate(i, ctx)): 1} for i in (0, 1)}}
    server = {"model": fed.initial, "privacy": {**books, "clip": torch.tensor(1.0)}}
    for client, expected in enumerate(rounds):
        payload = method.download(server, client, ctx)
        assert method.counted(payload) == expected
    charged = method._charged_books(server, [0, 1], ctx)["ledger"]
    assert [sum(charged[str(i)].values()) for i in (0, 1)] == rounds


def test_a_client_whose_budget_is_spent_takes_part_no_more():
    """Noise for two rounds: nobody works in a third, and the run ends when all have spent."""
    noise = Accounting("rdp", "public", 1e-5).noise(10.0, {1.0: 2})
    fed, worked, books = small(Private(epsilon=10.0, noise=noise)), [], []
    with (
        pytest.warns(UserWarning, match=r"epsilon = 10 of .* is spent after round 2") as told,
        pytest.raises(UserError, match=r"epsilon = 10 is spent: no client .* in round \d+"),
    ):
        for record, _ in fed.run_rounds(30):
            worked.append(record["participants"])
            books.append(record["metadata"])
    assert sorted(client for clients in worked for client in clients) == sorted([*range(6)] * 2)
    assert len(told) == 1  # when the first ones leave
    assert all(max(one["epsilon"].values()) <= 10.0 for one in books)
    assert list(map(len, worked)) == [3, 3, 3, 2, 1]  # whoever has some left is drawn


@pytest.mark.filterwarnings("ignore:the budget epsilon")
def test_secret_cohorts_are_drawn_from_all_also_when_budgets_are_spent():
    """Drawing from fewer would raise the rates that the ledger counts with."""
    method = Private(epsilon=10.0, noise=1.0, cohorts="secret")
    fed, spent, empty = small(method, participation="bernoulli", seed=1), [], 0
    for t, (record, _) in enumerate(fed.run_rounds(40)):
        assert record["participants"] == [i for i in fed.cohort(t) if i not in spent]
        spent = record["metadata"].get("budget_spent", [])
        empty += not record["participants"]
    assert empty


def test_a_budget_that_lasts_for_all_rounds_needs_no_word():
    small(Private(epsilon=10.0)).fit(2, quiet=True)


@pytest.mark.parametrize(
    ("method", "clip"), [(Private(noise=9.0), "clip"), (DPSGD(noise=9.0), "sample_clip or lr")]
)
def test_where_noise_makes_losses_rise_the_advice_is_about_noise(method, clip):
    fed = small(method)
    words = "what helps then is more clients per round (cohort), less noise (noise, or a larger"
    assert words in advice(fed) and advice(fed).endswith(f"or a smaller {clip}")
    assert "standardize" in advice(small(FedAvg()))


def test_a_resumed_run_keeps_the_ledger_to_the_bit(tmp_path):
    check_resumed(lambda: small(Private(quantile=0.5, epsilon=20.0)), tmp_path, 3, after=2)
    ledger = checkpoint(tmp_path / "part")["server"]["privacy"]["ledger"]
    assert sum(sum(rounds.values()) for rounds in ledger.values()) == 6


@pytest.mark.parametrize("noise_by", ["server", "clients"])
def test_batched_equals_serial(noise_by):
    method = Private(FedPer(), noise_by=noise_by, quantile=0.5, epsilon=1000.0)
    one, other = (
        small(method, "mlp", engine=engine).fit(2, quiet=True) for engine in ("serial", "batched")
    )
    names = one.state.server["model"]
    left, right = (flat(run.state.server["model"], names) for run in (one, other))
    assert torch.allclose(left, right, atol=1e-5)
    for first, second in zip(timeless(one.records), timeless(other.records), strict=True):
        assert first["metadata"]["epsilon"] == second["metadata"]["epsilon"]


def test_the_inner_method_aggregates_the_noisy_mean():
    plain, momentum = (
        small(Private(inner, noise=1.0)).fit(2, quiet=True) for inner in (FedAvg(), FedAvgM())
    )
    assert "momentum" in str(momentum.state.server.keys()) or len(momentum.state.server) > 2
    assert not same(plain.state.server["model"], momentum.state.server["model"])


REFUSED = {
    "clustered": "send something before the first round",
    "gene-fl": "send something before the first round",
    "compact": "uploads are packed",
    "helix": "uploads are packed",
    "fedlps": "uploads are packed",
    "fedproto": "no updates of a common model",
    "pfedhn": "no updates of a common model",
    "local": "no updates of a common model",
    "genfed": "looks at single uploads",
    "cull": "looks at single uploads",
    "scaffold": "looks at single uploads",
    "feddyn": "looks at single uploads",
    "fedau": "looks at single uploads",
    "fedbuff": "looks at single uploads",
    "fedasync": "takes uploads as they arrive",
    "pfedgpa": "looks at single uploads",
    "median": "looks at single uploads",
    "fedumf": "chooses who works",
}


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_would_tell_more_are_refused(name):
    with pytest.raises(UserError, match=REFUSED[name]):
        small(Private(METHODS[name]()), "digits-cnn")


def test_more_than_a_model_is_refused_and_leaves_no_folder(tmp_path):
    fed = small(Private(FedLG(select="gradient", layers=1)), "digits-cnn")
    with pytest.raises(
        UserError, match=r"sends too: .*; have its upload .*, or leave out private.fe"
    ):
        fed.fit(1, out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_running_statistics_are_refused_unless_they_stay_at_the_clients():
    with pytest.raises(UserError, match="running statistics of BatchNorm"):
        small(Private(), "digits-bn-cnn")
    small(Private(METHODS["fedbn"]()), "digits-bn-cnn")


@pytest.mark.parametrize("name", ["genfed", "cull", "compact", "median", "clustered", "fedbuff"])
def test_nothing_may_stand_around_it(name):
    settings = {"devices": "uniform"} if name == "fedbuff" else {}
    with pytest.raises(UserError, match="must be the outermost method"):
        small(METHODS[name](Private()), **settings)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"epsilon": 0.0}, "epsilon must be greater than 0, not 0"),
        ({"epsilon": -1.0}, "epsilon must be greater than 0"),
        ({"delta": 1.0}, "delta must be less than 1"),
        ({"delta": 0.0}, "delta must be greater than 0"),
        ({"clip": 0.0}, "clip must be greater than 0"),
        ({"quantile": 1.0}, "quantile must be less than 1"),
    ],
)
def test_bad_options_are_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        Private(**options)


@pytest.mark.parametrize(
    ("options", "settings", "sentence"),
    [
        ({"noise": 0.1}, {}, r"epsilon = 8 is spent: no client can take part in round 1"),
        ({"cohorts": "secret"}, {"devices": "uniform"}, "by chance alone"),
        ({"cohorts": "secret"}, {"participation": "classes"}, "by chance alone"),
        ({"cohorts": "secret", "noise_by": "clients"}, {}, "noise_by = server"),
        ({"cohorts": "secret", "accountant": "pld"}, {}, "use accountant = rdp"),
    ],
)
def test_bad_combinations_are_refused_before_the_first_round(options, settings, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence):
        small(Private(**options), **settings).fit(2, out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
