"""Methods that share a part of the model: which part, who trains what, and what it weighs."""

import pytest
import torch
from torch import nn

from fedhelix import (
    FedAvg,
    FedBABU,
    FedBN,
    FedFina,
    FedLG,
    FedLP,
    FedPer,
    FedRep,
    LGFedAvg,
    LocalOnly,
    PartialFed,
    models,
)
from fedhelix.core.errors import UserError
from fedhelix.core.layers import Layers
from fedhelix.core.registry import make
from fedhelix.engines.local import ClientTask, make_client, run_client
from helpers import close, same, small

# Golden numbers of ResNet-18


@pytest.fixture(scope="module")
def resnet18() -> Layers:
    return Layers.of(models.build("resnet18", (3, 32, 32), 10), torch.zeros(2, 3, 32, 32))


@pytest.mark.parametrize(
    ("method", "mib", "gib"),
    [
        (FedAvg(), 42.662, 41.662),
        (FedBN(bn_filter="name"), 42.602, 41.604),
        (FedBN(bn_filter="type"), 42.589, None),
        (PartialFed(), 11.953, 11.673),
        (FedFina(), 31.500, 30.762),
        (FedLG(), 18.281, 17.853),
    ],
)
def test_payloads_of_the_paper(resnet18, method, mib, gib):
    values = sum(resnet18.sizes[name] for name in method.shared_params(resnet18))
    assert 4 * values / 2**20 == pytest.approx(mib, abs=5e-4)
    if gib is not None:  # 100 rounds with 10 clients
        assert 100 * 10 * 4 * values / 2**30 == pytest.approx(gib, abs=5e-4)


@pytest.mark.parametrize(
    ("method", "layers"),
    [
        (PartialFed(), ["layer1.1.conv2", "layer2.1.conv2", "layer3.1.conv2", "layer4.1.conv2"]),
        (FedFina(), ["layer4.0.conv1", "layer4.0.conv2", "layer4.1.conv1", "layer4.1.conv2"]),
        (FedLG(), ["layer2.0.conv1", "layer4.1.conv1", "layer4.1.conv2"]),
    ],
)
def test_layers_of_the_paper(resnet18, method, layers):
    assert sorted(method.shared_params(resnet18)) == [f"{layer}.weight" for layer in layers]


def test_fedbn_keeps_all_of_batchnorm_or_what_is_called_so(resnet18):
    by_type = set(resnet18.names) - set(FedBN().shared_params(resnet18))
    by_name = set(resnet18.names) - set(FedBN(bn_filter="name").shared_params(resnet18))
    assert by_type == set(resnet18.norm) and by_name == {
        name for name in resnet18.norm if "bn" in name
    }
    assert (
        len(by_type) == 5 * 20 and len(by_name) == 5 * 17
    )  # three shortcuts have a BatchNorm without a name
    for kind in ("running_mean", "running_var", "num_batches_tracked"):
        assert f"layer1.0.bn1.{kind}" in by_type


def test_the_structural_rules_on_a_small_network():
    layers = small(model="digits-cnn").layers
    assert PartialFed().shared_params(layers) == [
        "conv1.weight",
        "conv1.bias",
        "conv2.weight",
        "conv2.bias",
    ]
    assert FedFina().shared_params(layers) == ["conv2.weight", "conv2.bias"]  # the last half
    assert set(FedLG().shared_params(layers)) == {
        "conv1.weight",
        "conv1.bias",
        "conv2.weight",
        "conv2.bias",
    }
    assert FedFina(layers=1).shared_params(layers) == ["conv2.weight", "conv2.bias"]


@pytest.mark.parametrize("kind", [FedPer, FedRep, FedBABU, PartialFed, FedFina, FedLG])
def test_a_network_of_one_layer_has_nothing_to_share_in_part(kind):
    with pytest.raises(
        UserError, match="would share no layer of this model; choose a model with more layers"
    ):
        small(kind(), "linear")


@pytest.mark.parametrize("wrapper", ["secure", "private", "median", "compact", "fedbuff"])
def test_wrappers_refuse_a_network_of_one_layer_in_the_words_of_the_method(wrapper):
    with pytest.raises(UserError, match=r"^fedper would share no layer of this model; choose"):
        small(make(f"{wrapper}+fedper"), "linear")


def test_fedbn_by_name_needs_such_names():
    nameless = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10)
    )
    small(FedBN(), nameless)
    with pytest.raises(UserError, match="fedbn needs a model with BatchNorm"):
        small(FedBN(bn_filter="name"), nameless)


# Heads and bodies


def states_of(run, client: int) -> dict:
    return run.state.client_states[client]["model"]


def test_fedper_and_lg_fedavg_are_mirror_images():
    layers = small(model="digits-cnn").layers
    head = {"fc2.weight", "fc2.bias"}
    assert set(FedPer().shared_params(layers)) == set(layers.names) - head
    assert set(LGFedAvg().shared_params(layers)) == head
    for count in (1, 2, 3):
        shared = set(LGFedAvg(shared_layers=count).shared_params(layers))
        assert (
            set(FedPer(personal_layers=count).shared_params(layers)) == set(layers.names) - shared
        )
        assert len(shared) == 2 * count


def test_personal_heads_differ_and_stay_with_their_clients():
    run = small(FedPer(), "mlp", cohort=6).fit(2, quiet=True)
    heads = [states_of(run, client)["fc3.weight"] for client in range(6)]
    assert all(not torch.equal(heads[0], head) for head in heads[1:])
    assert set(run.state.server["model"]) == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}


def test_fedrep_trains_the_head_on_the_old_body_and_the_body_under_the_new_head():
    trained = {}
    for phases in ((1, 0), (0, 1), (1, 1)):
        fed = small(FedRep(head_epochs=phases[0], body_epochs=phases[1]), "mlp")
        server, _ = fed.method.server_init({}, fed.context(0, 1))
        result = run_client(fed.engine.setup, ClientTask(0, 0, server, {}))
        trained[phases] = {**result.upload["model"], **result.client_state["model"]}
    initial, layers = fed.initial, fed.layers
    for name in layers.head:
        assert not torch.equal(trained[1, 0][name], initial[name])
        assert torch.equal(trained[0, 1][name], initial[name])
        assert torch.equal(
            trained[1, 1][name], trained[1, 0][name]
        )  # what the head learned, the body phase keeps
    for name in layers.body:
        assert torch.equal(trained[1, 0][name], initial[name])
        assert not torch.equal(
            trained[1, 1][name], trained[0, 1][name]
        )  # the body learned under another head


def test_fedbabus_head_stays_as_it_was_drawn_until_the_model_is_used():
    run = small(FedBABU(), "mlp", cohort=6).fit(2, quiet=True)
    initial = run.federation.initial
    for client in range(6):
        assert torch.equal(states_of(run, client)["fc3.weight"], initial["fc3.weight"])
        assert not torch.equal(run.personal(client).fc3.weight, initial["fc3.weight"])
    assert not torch.equal(run.state.server["model"]["fc1.weight"], initial["fc1.weight"])


@pytest.mark.parametrize(
    ("part", "changed"),
    [("head", {"fc3"}), ("body", {"fc1", "fc2"}), ("all", {"fc1", "fc2", "fc3"})],
)
def test_fedbabu_fine_tunes_the_part_that_is_asked_for(part, changed):
    run = small(FedBABU(ft_part=part, ft_epochs=1), "mlp").fit(1, quiet=True)
    before = {**run.federation.initial, **run.state.server["model"]}
    after = run.personal(0).state_dict()
    assert {
        name.split(".")[0] for name in before if not torch.equal(before[name], after[name])
    } == changed


# LG-FedAvg's warm start


def test_a_warm_start_is_fedavg_first():
    warm, plain = (
        small(method, "mlp").fit(2, quiet=True) for method in (LGFedAvg(warm_start=2), FedAvg())
    )
    assert same(warm.state.server["model"], plain.state.server["model"])
    assert [record["accuracy"] for record in warm.records] == [
        record["accuracy"] for record in plain.records
    ]
    assert warm.records[1]["uplink_bytes"] == plain.records[1]["uplink_bytes"]


def test_after_a_warm_start_everybody_receives_the_model_once_and_then_the_head():
    fed = small(LGFedAvg(warm_start=1), "mlp", cohort=6)
    (warm, after_warm), (first, after_first), (second, after_second) = fed.run_rounds(3)
    whole = sum(fed.layers.sizes.values())
    head = sum(fed.layers.sizes[name] for name in fed.layers.head)
    assert [record["downlink_bytes"] for record in (warm, first, second)] == [
        24 * whole,
        24 * whole,
        24 * head,
    ]
    assert [record["uplink_bytes"] for record in (warm, first, second)] == [
        24 * whole,
        24 * head,
        24 * head,
    ]
    assert not after_warm.client_states.get(0)  # nothing personal yet
    assert set(after_first.client_states[0]["model"]) == set(fed.layers.body)
    assert "accuracy" in warm and "accuracy" not in first  # then there is no one model for all
    body = "fc1.weight"
    assert torch.equal(after_second.server["model"][body], after_warm.server["model"][body])
    assert not torch.equal(
        after_second.client_states[0]["model"][body], after_first.client_states[0]["model"][body]
    )


# Local-only


def test_local_clients_train_alone_and_all_of_them():
    run = small(LocalOnly(), "mlp").fit(2, quiet=True)
    assert [record["participants"] for record in run.records] == [[0, 1, 2, 3, 4, 5]] * 2
    assert run.summary["uplink_bytes"] == run.summary["downlink_bytes"] == 0
    fed = run.federation
    state = fed.initial
    for t in range(2):
        state = run_client(fed.engine.setup, ClientTask(3, t, {}, {"model": state})).client_state[
            "model"
        ]
    assert same(run.state.client_states[3]["model"], state)
    sampled = small(LocalOnly(follow_sampling=True), "mlp").fit(2, quiet=True)
    assert [record["participants"] for record in sampled.records] == [fed.cohort(0), fed.cohort(1)]


# FedLP


def kept_layers(method: FedLP, rounds: int = 1, clients: int = 40) -> list[list[tuple[str, ...]]]:
    """The layers that each client uploads in each round, without training them."""
    fed = small(method, "digits-bn-cnn", clients=clients, epochs=0, partition="iid")
    payload = {"model": fed.initial}
    return [
        [
            tuple(run_client(fed.engine.setup, ClientTask(client, t, payload, {})).upload["model"])
            for client in range(clients)
        ]
        for t in range(rounds)
    ]


def test_fedlp_sends_everything_nothing_or_about_half():
    names = small(model="digits-bn-cnn").layers.names
    assert {frozenset(sent) for sent in kept_layers(FedLP(keep=1))[0]} == {frozenset(names)}
    assert set(kept_layers(FedLP(keep=0))[0]) == {()}
    sent = [client for t in kept_layers(FedLP(keep=0.5), rounds=5) for client in t]
    layers = {
        "conv1": ["conv1.weight", "bn1.running_mean"],
        "conv2": ["conv2.weight", "bn2.bias"],
        "fc1": ["fc1.bias"],
    }
    for entries in layers.values():  # 200 draws with p = 1/2: s.d. 7
        counts = [sum(entry in client for client in sent) for entry in entries]
        assert 70 < counts[0] < 130 and len(set(counts)) == 1  # BatchNorm goes with its convolution
    both = sum("conv1.weight" in client and "fc1.weight" in client for client in sent)
    assert 28 < both < 72  # layers are drawn independently: 50 expected, s.d. 6


def test_fedlp_draws_in_every_round_or_once_per_run():
    first, second = kept_layers(FedLP(redraw="round"), rounds=2)
    assert first != second
    first, second = kept_layers(FedLP(redraw="run"), rounds=2)
    assert first == second and len(set(first)) > 5


def test_fedlp_that_keeps_everything_is_fedavg_and_that_keeps_nothing_stands_still():
    run = small(FedLP(keep=1), "mlp").fit(2, quiet=True)
    assert close(
        run.state.server["model"], small(FedAvg(), "mlp").fit(2, quiet=True).state.server["model"]
    )
    idle = small(FedLP(keep=0), "mlp").fit(1, quiet=True)
    assert same(idle.state.server["model"], idle.federation.initial)
    worker = idle.records[0]["participants"][0]
    assert same(
        dict(idle.personal(worker).state_dict()), idle.state.client_states[worker]["trained"]
    )


# FedLG's gradient rule


class Still(nn.Module):
    """The first convolution gets no gradient, the second one half of one, the
    third one a full one.
    """

    def __init__(self):
        super().__init__()
        self.dead, self.calm, self.live = nn.Conv2d(1, 2, 3), nn.Conv2d(1, 2, 3), nn.Conv2d(1, 2, 3)
        self.fc = nn.Linear(6 * 36, 10)

    def forward(self, x):
        parts = [
            self.dead(x) * 0,
            self.calm(x) * torch.tensor([1.0, 0.0]).view(2, 1, 1),
            self.live(x),
        ]
        return self.fc(torch.cat(parts, 1).flatten(1))


def test_fedlg_shares_the_layers_whose_gradients_are_stillest():
    fed = small(FedLG(select="gradient", layers=1), Still, cohort=6)
    after_first, after_second = (state for _, state in fed.run_rounds(2))
    shares = after_first.server["moving"]
    assert shares.tolist() == pytest.approx([0.0, 0.5, 1.0], abs=0.02)
    # Before anything is known the last layer is shared, then the stillest one.
    ctx = fed.context(1, 2)
    start, _ = fed.method.server_init({}, ctx)
    assert set(fed.method.download(start, 0, ctx)["model"]) == {"live.weight", "live.bias"}
    assert set(fed.method.download(after_first.server, 0, ctx)["model"]) == {
        "dead.weight",
        "dead.bias",
    }
    assert set(after_second.client_states[0]["model"]) == set(
        fed.layers.names
    )  # what is not received next is not lost
    two = FedLG(select="gradient", layers=2).download(after_first.server, 0, ctx)["model"]
    assert {name.split(".")[0] for name in two} == {"dead", "calm"}


def test_the_share_of_moving_gradients_by_hand():
    fed = small(FedLG(select="gradient"), "digits-cnn", batch_size=10_000)
    server, _ = fed.method.server_init({}, fed.context(0, 1))
    task = ClientTask(0, 0, fed.method.download(server, 0, fed.context(0, 1)), {})
    result = run_client(fed.engine.setup, task)
    trained = {**result.client_state["model"], **result.upload["model"]}
    (gradient,) = make_client(fed.engine.setup, task).gradients(
        {name: trained[name] for name in fed.layers.names}
    )
    by_hand = [
        (gradient[f"{name}.weight"].abs() > 5e-10).float().mean().item()
        for name in ("conv1", "conv2")
    ]
    assert result.upload["moving"].tolist() == pytest.approx(by_hand)
