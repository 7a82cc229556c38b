"""Ancestors: what is used is a moving mean of the server's models, worked out by hand."""

from dataclasses import dataclass

import pytest
import torch

from fedhelix import Ancestors, Clustered, Compact, FedAvg, FedPer, Method, Upload, Wrapper
from helpers import close, same, small, two_quadratics


def one_value(tree):
    (value,) = tree.values()
    return float(value)


def test_three_rounds_by_hand():
    """Rounds 0, 1, 2 keep 0, 1/10 and 2/11 of the mean, as long as that is less than `kept`."""
    method = Ancestors(kept=0.15)
    fed = two_quadratics(method)
    name = fed.layers.names[0]
    server, _ = method.server_init({}, fed.context(0, 3))
    assert one_value(server["ancestors"]) == one_value(server["model"]) == 0
    # Models 4, 8, 2: the mean is 4, then 0.1 · 4 + 0.9 · 8 = 7.6, then 0.15 · 7.6 + 0.85 · 2.
    for t, (model, mean) in enumerate([(4.0, 4.0), (8.0, 7.6), (2.0, 2.84)]):
        uploads = [Upload(0, 2, {"model": {name: torch.tensor([[model]])}})]
        server = method.aggregate(server, uploads, [1.0], fed.context(t, 3))
        assert one_value(server["model"]) == model
        assert one_value(server["ancestors"]) == pytest.approx(mean)


def test_the_mean_grows_longer_until_it_keeps_what_was_asked():
    method, fed = Ancestors(kept=0.5), two_quadratics(Ancestors())
    name = fed.layers.names[0]

    def kept(t):
        """The mean of a one that was kept and a zero that is new."""
        server = {"model": {name: torch.ones(1, 1)}, "ancestors": {name: torch.ones(1, 1)}}
        uploads = [Upload(0, 2, {"model": {name: torch.zeros(1, 1)}})]
        return one_value(method.aggregate(server, uploads, [1.0], fed.context(t, 99))["ancestors"])

    # t / (t + 9) reaches one half with t = 9.
    expected = [0, 1 / 10, 2 / 11, 8 / 17, 1 / 2, 1 / 2]
    assert [kept(t) for t in (0, 1, 2, 8, 9, 50)] == pytest.approx(expected)


def test_newcomers_begin_a_mean_of_their_own():
    """Five rounds with newcomers from the third on: the mean is as after one and two rounds."""
    method, fed = Ancestors(kept=0.5), small(Ancestors(), "linear", newcomers=2, newcomers_after=3)
    contexts = [fed.context(t, 5) for t in range(5)]
    assert [ctx.since for ctx in contexts] == [0, 0, 0, 3, 3]
    one = {name: torch.ones_like(value) for name, value in fed.initial.items()}
    none = {name: torch.zeros_like(value) for name, value in fed.initial.items()}
    uploads = [Upload(0, 2, {"model": none})]
    kept = [
        method.aggregate({"model": one, "ancestors": one}, uploads, [1.0], ctx)["ancestors"]
        for ctx in contexts
    ]
    expected = [0, 1 / 10, 2 / 11, 0, 1 / 10]
    assert [float(mean["fc.bias"][0]) for mean in kept] == pytest.approx(expected)


def test_clients_train_the_last_model_but_use_the_mean():
    fed = small(Ancestors(), "digits-bn-cnn")
    *_, (_, state) = fed.run_rounds(3)
    plain = small(FedAvg(), "digits-bn-cnn")
    *_, (_, its) = plain.run_rounds(3)
    assert same(state.server["model"], its.server["model"])
    ctx = fed.context(3, 3)
    mean = state.server["ancestors"]
    assert not close(mean, state.server["model"], 1e-4)
    assert same(fed.method.download(state.server, 0, ctx)["model"], state.server["model"])
    assert same(fed.method.deliver(state.server, 0, ctx)["model"], mean)
    assert same(fed.method.model(state.server, ctx), mean)


def test_records_and_models_of_a_run_are_those_of_the_mean():
    run = small(Ancestors()).fit(3, quiet=True)
    fed, mean = run.federation, run.state.server["ancestors"]
    for module in (run.model(), run.personal(0)):
        assert same(module.state_dict(), mean)
    assert run.records[-1]["accuracy"] == fed.engine.score([mean], "test")[0][0]


def test_the_counters_of_batchnorm_are_not_averaged():
    method = Ancestors(kept=0.5)
    fed = small(method, "digits-bn-cnn")
    name = "bn1.num_batches_tracked"
    server, _ = method.server_init({}, fed.context(0, 1))
    for t in range(3):
        model = {**fed.initial, name: torch.tensor(10 * t + 5)}
        server = method.aggregate(
            server, [Upload(0, 2, {"model": model})], [1.0], fed.context(t, 3)
        )
        assert server["ancestors"][name].dtype == torch.int64
        assert int(server["ancestors"][name]) == 10 * t + 5


def test_without_ancestors_it_is_the_inner_method():
    one, other = (small(method).fit(3, quiet=True) for method in (FedAvg(), Ancestors(kept=0)))
    assert same(one.state.server["model"], other.state.server["ancestors"])
    assert [r["accuracy"] for r in one.records] == [r["accuracy"] for r in other.records]


def test_newcomers_start_from_the_mean():
    run = small(Ancestors()).fit(3, quiet=True)
    fed = run.federation
    ctx = fed.context(3, 3)
    _, payload, done = fed.method.onboard_server(run.state.server, {}, ctx)
    assert done and same(payload["model"], run.state.server["ancestors"])
    number = run.onboard((fed.data.x[:30], fed.data.y[:30]))
    assert same(run.personal(number).state_dict(), run.state.server["ancestors"])


@pytest.mark.parametrize("bits", [8, 32])
def test_what_is_delivered_is_packed_like_a_download(bits):
    run = small(Compact(Ancestors(), download_bits=bits)).fit(3, quiet=True)
    method, ctx = run.federation.method, run.federation.context(3, 3)
    delivered = method.deliver(run.state.server, 0, ctx)
    assert ("packed" in delivered) == (bits == 8)
    opened = method._opened(delivered, ctx)["model"]
    assert close(opened, run.state.server["ancestors"], 0.02)
    assert not close(opened, run.state.server["model"], 1e-4)


def test_every_cluster_has_its_own_mean():
    run = small(Clustered(Ancestors(), clusters=2), cohort=6).fit(3, quiet=True)
    fed, server = run.federation, run.state.server
    for client in range(6):
        part = server["parts"][str(int(server["member"][client]))]
        assert not same(part["ancestors"], part["model"])
        assert same(run.personal(client).state_dict(), part["ancestors"])
        payload = fed.method.download(server, client, fed.context(3, 3))
        assert same(payload["model"], part["model"])


def test_around_a_method_whose_clients_keep_their_heads():
    run = small(Ancestors(FedPer()), "digits-cnn").fit(3, quiet=True)
    fed = run.federation
    body = run.state.server["ancestors"]
    assert set(body) == set(fed.layers.body) and run.model() is None
    assert same(fed.method.deliver(run.state.server, 0, fed.context(3, 3))["model"], body)


@dataclass(frozen=True)
class Marked(Wrapper):
    """A wrapper that adds something to what clients receive."""

    inner: Method

    def download(self, server, client, ctx):
        return {**self.inner.download(server, client, ctx), "mark": torch.ones(1)}


def test_what_a_wrapper_inside_adds_to_a_download_is_delivered_too():
    method = Ancestors(Marked(FedAvg()))
    fed = small(method)
    state = fed.initialize(1)
    assert "mark" in method.deliver(state.server, 0, fed.context(0, 1))
