"""What stands around a method, or attacks it, changes what it learns in every method, or refuses
it.
"""

from dataclasses import dataclass
from functools import cache

import pytest
import torch

from fedhelix import (
    METHODS,
    Clustered,
    FedAU,
    FedAvg,
    FedAvgM,
    FedLP,
    GenFed,
    NormBound,
    Scaffold,
    Upload,
    Wrapper,
    load,
)
from fedhelix.core.errors import UserError
from fedhelix.core.registry import make
from fedhelix.core.tree import flatten
from fedhelix.engines.local import ClientTask
from helpers import close, same, small

INNER = sorted(
    name for name, kind in METHODS.items() if not issubclass(kind, Wrapper) and name != "local"
)
NARROW = {
    "data": load("digits").subsample(300, 100),
    "validation_size": 50,
    "clients": 4,
    "cohort": 4,
    "partition": "iid",
}
# One cluster, no generator, and every layer from everybody: what one client alone sends cannot be
# chosen among.
FEW = {"gene-fl": {"clusters": 1}, "pfedgpa": {"generate": "own"}, "fedlp": {"keep": 1.0}}


@cache
def learnt(method, attack="none"):
    """The parameters that the server has moved, or what it keeps instead of a model, by name."""
    attacked = {} if attack == "none" else {"attack": attack, "attack_share": 0.5}
    fed = small(method, "digits-bn-cnn", **attacked, **NARROW)
    server = flatten(fed.fit(1, quiet=True).state.server)
    first = {name: fed.initial[name] for name in fed.layers.parameters}
    models = {
        name: value
        for name, value in server.items()
        if name.rpartition("/")[2] in first and "model" in name
    }
    moved = {
        name: value
        for name, value in models.items()
        if not torch.equal(value, first[name.rpartition("/")[2]])
    }
    return moved or {name: value for name, value in server.items() if name.startswith("weights/")}


def all_differ(one, other):
    return bool(one) and not any(
        torch.equal(value, other[name]) for name, value in one.items() if name in other
    )


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("around", ["genfed", "median"])
def test_a_wrapper_counts_in_every_method_or_refuses_it(around, name):
    inner = make(name, FEW.get(name, {}))
    options = {"schedule": "constant", "rho_max": 1} if around == "genfed" else {}
    try:
        wrapped = learnt(METHODS[around](inner, **options))
    except UserError as refusal:
        assert name in str(refusal)
    else:
        assert all_differ(learnt(inner), wrapped)


# Attacks forge models, and FedProto uploads none.
@pytest.mark.parametrize("name", [name for name in INNER if name != "fedproto"])
def test_an_attack_counts_in_every_method_or_is_refused(name):
    inner = make(name, FEW.get(name, {}))
    try:
        attacked = learnt(inner, "sign-flip")
    except UserError as refusal:
        assert name in str(refusal)
    else:
        assert all_differ(learnt(inner), attacked)


def test_who_did_not_send_a_layer_has_no_vote_on_it():
    """A bound that nobody reaches changes nothing, also where clients send a part."""
    methods = FedLP(), NormBound(FedLP(), bound=1e9)
    plain, bounded = (small(method, "digits-bn-cnn").fit(2, quiet=True) for method in methods)
    assert close(plain.state.server["model"], bounded.state.server["model"], tolerance=1e-5)


def test_a_cluster_is_a_federation_of_its_own():
    """Weights and controls count its members, not everybody."""
    fed = small(Clustered(FedAU(), clusters=2), cohort=6)
    state = fed.initialize(2)
    ctx = fed.context(0, 2)
    uploads = [Upload(client, 10, {"model": fed.initial}) for client in range(6)]
    weights = fed.method.weights(state.server, uploads, ctx)
    members = state.server["member"].tolist()
    for k in set(members):
        assert sum(
            weight for client, weight in enumerate(weights) if members[client] == k
        ) == pytest.approx(1)


def test_the_control_of_a_cluster_is_the_mean_of_its_members():
    run = small(Clustered(Scaffold(), clusters=2), cohort=6).fit(1, quiet=True)
    server, client_state = run.state.server, run.state.client_states
    for k, part in server["parts"].items():
        mine = [
            client_state[client]["control"]
            for client in range(6)
            if str(int(server["member"][client])) == k
        ]
        for name, value in part["control"].items():
            assert torch.allclose(
                value, torch.stack([control[name] for control in mine]).mean(0), atol=1e-6
            )


def test_genfed_in_clusters_notes_everybody():
    method = Clustered(GenFed(schedule="constant", rho_max=1), clusters=2)
    metadata = (
        small(method, cohort=6, validation_size=100).fit(1, quiet=True).records[0]["metadata"]
    )
    assert metadata["fitness"].keys() == {str(client) for client in range(6)}
    assert metadata["rho"] == len(metadata["selected"]) == 2


def test_newcomers_who_are_alone_share_all_of_fedaus_weight():
    fed = small(FedAU(), newcomers=2, newcomers_after=1)
    run = fed.fit(2, quiet=True)
    newcomers = [Upload(client, 10, {"model": fed.initial}) for client in (6, 7)]
    assert fed.method.weights(run.state.server, newcomers, fed.context(1, 2)) == pytest.approx(
        [0.5, 0.5]
    )


def test_genfed_around_momentum():
    """The server goes on in the direction of the chosen."""
    everybody = GenFed(FedAvgM(server_momentum=0.5), schedule="constant", rho_max=3)
    one, other = (
        small(method, validation_size=100).fit(2, quiet=True)
        for method in (FedAvgM(0.5), everybody)
    )
    assert same(one.state.server, other.state.server)


def test_a_selection_leaves_scaffolds_control_the_mean_of_the_clients():
    run = small(GenFed(Scaffold(), rho_max=1), **NARROW).fit(3, quiet=True)
    client_state = [run.state.client_states[client]["control"] for client in range(4)]
    mean = {
        name: torch.stack([control[name] for control in client_state]).mean(0)
        for name in client_state[0]
    }
    assert close(run.state.server["control"], mean)


def test_in_clusters_everybody_gets_parameters_of_his_own():
    method = make("clustered+pfedgpa", {"clusters": 3, "generate": "own"})
    # After 16 rounds everybody has been there, and two clients cannot be from three clusters in the
    # last one.
    run = small(method, clients=8, cohort=2, validation_size=0).fit(16, eval_every=16, quiet=True)
    parts = run.state.server["parts"].values()
    assert sorted(int(client) for part in parts for client in part["personal"]) == list(range(8))


@dataclass(frozen=True)
class Talking(Wrapper):
    """Clients tell a number, and all of them receive one."""

    def client_init(self, client):
        return {**self.inner.client_init(client), "told": torch.tensor(client.id)}

    def server_init(self, client_inits, ctx):
        server, replies = self.inner.server_init(client_inits, ctx)
        return {
            **server,
            "told": {
                str(client): client_init["told"] for client, client_init in client_inits.items()
            },
        }, replies

    def download(self, server, client, ctx):
        return {**self.inner.download(server, client, ctx), "from": torch.tensor(client)}


AROUND = Talking(FedAvg()), Talking(NormBound()), NormBound(Talking(FedAvg()))


@pytest.mark.parametrize("method", AROUND, ids=["alone", "around", "inside"])
def test_what_a_wrapper_says_is_heard_at_the_beginning_and_by_newcomers(method):
    fed = small(method, data=NARROW["data"])
    server, ctx = fed.initialize(1).server, fed.context(0, 1)
    assert {name: int(value) for name, value in server["told"].items()} == {
        str(client): client for client in range(6)
    }
    assert int(fed.engine.onboard_client(ClientTask(2, 0, {}, {}))["told"]) == 2
    _, payload, done = fed.method.onboard_server(server, {}, ctx)
    assert int(payload["from"]) == 6 and done


def test_a_wrapper_cannot_choose_what_another_method_uploads():
    with pytest.raises(
        UserError,
        match="Narrow overrides shared_params, but the method inside uploads what it shares itself",
    ):

        class Narrow(Wrapper):
            def shared_params(self, layers):
                return layers.head
