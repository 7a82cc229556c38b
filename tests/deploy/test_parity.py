"""Every method gives the same across sites as in the simulation: the hooks, the loop and the client's work are one."""

import pytest

from fedhelix import METHODS
from fedhelix.errors import BadInput
from fedhelix.runs.config import make_plan
from helpers import same
from nearby import Neighbourhood

NETWORKS = {"fedbn": "digits-bn-cnn"}
CHEAP = {"clients": 3, "rounds": 3, "epochs": 1, "batch_size": 128, "kernels": "onednn", "eval_every": 3}


def plan_for(spec, **more):
    return make_plan(spec, {**CHEAP, "model": NETWORKS.get(spec, "digits-cnn"), **more})


def in_simulation(plan):
    fed = plan.config.federation(plan.method, engine="serial")
    return fed.fit(plan.config.rounds, eval_every=plan.config.eval_every, quiet=True)


@pytest.mark.parametrize("spec", [*METHODS, "genfed+fedau"])
def test_sites_and_simulation_agree(spec, tmp_path):
    plan = plan_for(spec)
    across, here = Neighbourhood(tmp_path, 3).play(plan), in_simulation(plan)
    assert same(across.standing.server, here.standing.server)
    for one, other in zip(across.records, here.records, strict=True):
        for key, value in other.items():
            if key != "seconds":
                # Where clients share a model, the simulation judges them together: sums in another order.
                assert one[key] == (pytest.approx(value) if isinstance(value, float | list) else value), key


@pytest.mark.parametrize("attack", ["label-flip", "ipm"])
def test_attacks_are_simulated_on_the_server(attack, tmp_path):
    plan = plan_for("fedavg", attack=attack, attack_share=0.34)
    across = Neighbourhood(tmp_path, 3).play(plan)
    assert same(across.standing.server, in_simulation(plan).standing.server)


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
    # A letter is the payload and little else: its header names the entries and says what the run is.
    record = run.records[0]
    assert record["uplink_bytes"] < record["wire"]["received"] < record["uplink_bytes"] + 2 * 4096


def test_personal_models_stay_at_their_sites(tmp_path):
    run = Neighbourhood(tmp_path, 2).play(plan_for("fedper", clients=2))
    assert run.standing.own == {0: {}, 1: {}}
    with pytest.raises(BadInput, match="are at its sites"):
        run.personal(0)
    assert sorted(path.parent.name for path in tmp_path.rglob("own-*.safetensors")) == ["site-0"] * 2 + ["site-1"] * 2
