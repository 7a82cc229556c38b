"""Every method gives the same across sites as in the simulation: the hooks, the loop and the
client's work are one.
"""

import pytest

from fedhelix import METHODS
from fedhelix.core.errors import UserError
from fedhelix.runs.spec import make_spec
from helpers import CHEAP as QUICK
from helpers import same
from nearby import Neighbourhood

NETWORKS = {"fedbn": "digits-bn-cnn"}
OPTIONS = {**QUICK, "clustered": {"clusters": 2}, "gene-fl": {"clusters": 2}}
CHEAP = {
    "clients": 3,
    "rounds": 3,
    "epochs": 1,
    "batch_size": 128,
    "kernels": "onednn",
    "eval_every": 3,
}


def plan_for(spec, **more):
    options = {f"method.{key}": value for key, value in OPTIONS.get(spec, {}).items()}
    return make_spec(spec, {**CHEAP, **options, "model": NETWORKS.get(spec, "digits-cnn"), **more})


def in_simulation(spec):
    fed = spec.config.federation(spec.method, engine="serial")
    return fed.fit(spec.config.rounds, eval_every=spec.config.eval_every, quiet=True)


@pytest.mark.parametrize("spec", [*METHODS, "genfed+fedau"])
def test_sites_and_simulation_agree(spec, tmp_path):
    spec = plan_for(spec)
    across, here = Neighbourhood(tmp_path, 3).play(spec), in_simulation(spec)
    assert same(across.state.server, here.state.server)
    for one, other in zip(across.records, here.records, strict=True):
        for key, value in other.items():
            if key != "seconds":
                # Where clients share a model, the simulation judges them together: sums in another
                # order.
                assert one[key] == (
                    pytest.approx(value) if isinstance(value, float | list) else value
                ), key


@pytest.mark.parametrize("spec", ["fedavg", "fedper", "gene-fl", "pfedgpa", "pfedhn"])
def test_newcomers_are_welcomed_alike(spec, tmp_path):
    spec = plan_for(spec, newcomers=1, newcomers_after=1)
    across, here = Neighbourhood(tmp_path, 4).play(spec), in_simulation(spec)
    assert same(across.state.server, here.state.server)
    for key in ("arrival_bytes", "arrival_accuracy"):
        assert across.records[1][key] == pytest.approx(here.records[1][key])
    assert across.records[-1]["personal"] == pytest.approx(here.records[-1]["personal"])


def test_the_server_waits_for_a_newcomer(tmp_path):
    near = Neighbourhood(tmp_path, 3)
    node, late = near.grid.answers.popitem()
    spec = plan_for("fedper", clients=2, newcomers=1, newcomers_after=2)
    look = near.grid.get_nodes

    def connects_in_time():
        if fed.engine.transport.cards and records:
            near.grid.answers[node] = late
        return look()

    fed, records = near.federation(spec), []
    near.grid.get_nodes = connects_in_time
    states = [(records.append(record), state.server)[1] for record, state in fed.play(3)]
    assert same(states[-1], in_simulation(spec).state.server)


@pytest.mark.parametrize("attack", ["label-flip", "ipm"])
def test_attacks_are_simulated_on_the_server(attack, tmp_path):
    spec = plan_for("fedavg", attack=attack, attack_share=0.34)
    across = Neighbourhood(tmp_path, 3).play(spec)
    assert same(across.state.server, in_simulation(spec).state.server)


def test_bytes_are_counted_as_they_are_sent(tmp_path):
    near = Neighbourhood(tmp_path, 2)
    seen = {"sent": 0, "received": 0}
    for node, answer in list(near.grid.answers.items()):

        def counted(content, answer=answer):
            reply = answer(content)
            seen["sent"] += len(content)
            seen["received"] += len(reply)
            return reply

        near.grid.answers[node] = counted
    run = near.play(plan_for("fedavg", clients=2))
    assert {key: sum(record["wire"][key] for record in run.records) for key in seen} == seen
    # A letter is the payload and little else: its header names the entries and says what the run
    # is.
    record = run.records[0]
    assert record["uplink_bytes"] < record["wire"]["received"] < record["uplink_bytes"] + 2 * 4096


def test_personal_models_stay_at_their_sites(tmp_path):
    run = Neighbourhood(tmp_path, 2).play(plan_for("fedper", clients=2))
    assert run.state.client_states == {0: {}, 1: {}}
    with pytest.raises(UserError, match="are at its sites"):
        run.personal(0)
    assert (
        sorted(path.parent.name for path in tmp_path.rglob("own-*.safetensors"))
        == ["site-0"] * 2 + ["site-1"] * 2
    )
