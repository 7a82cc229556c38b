"""GenFed: only the fittest are merged, and a GenFed that takes everybody is the method that it
wraps.
"""

import json
import math
from dataclasses import replace

import pytest

from fedhelix import FedAvg, FedProx, GenFed, Scaffold, Upload
from fedhelix.core.errors import UserError
from fedhelix.core.registry import make, resolve
from fedhelix.core.tree import masked_mean
from fedhelix.runs.config import layered
from fedhelix.runs.spec import make_spec, read_spec
from fedhelix.store import RunFolder
from helpers import on_disk, same, small, unseal

SERVED = {"validation_size": 0.2, "supplement_size": 20, "supplement_below": 1}


@pytest.mark.parametrize(
    "inner", [FedAvg(), FedProx(mu=0.1), Scaffold()], ids=lambda method: method.name
)
def test_whoever_takes_everybody_is_the_inner_method_to_the_bit(inner):
    everybody = GenFed(inner, schedule="constant", rho_max=3)
    one, other = (
        small(method, "digits-bn-cnn", **SERVED).fit(2, quiet=True) for method in (inner, everybody)
    )
    assert same(one.state.server, other.state.server)
    assert [record["accuracy"] for record in one.records] == [
        record["accuracy"] for record in other.records
    ]


@pytest.mark.parametrize("engine", ["serial", "parallel", "batched"])
def test_only_the_fittest_are_merged(engine):
    fed = small(GenFed(schedule="constant", rho_max=2), engine=engine, validation_size=0.2)
    tasks = fed.engine.run_clients([_job(fed, client) for client in fed.cohort(0)])
    (record, state), *_ = fed.run_rounds(1)
    fed.close()
    evaluated = fed.engine.score([task.upload["model"] for task in tasks], "train", _scoring(fed))
    order = sorted(range(3), key=lambda i: (-evaluated[i][0], evaluated[i][1], tasks[i].client))[:2]
    best = [tasks[i] for i in sorted(order)]
    assert record["metadata"]["rho"] == 2
    assert record["metadata"]["selected"] == [task.client for task in best]
    assert record["metadata"]["fitness"] == {
        str(task.client): pytest.approx(m) for task, (m, _) in zip(tasks, evaluated, strict=True)
    }
    expected = masked_mean(
        [task.upload["model"] for task in best], [task.samples for task in best], fed.initial
    )
    for name, value in state.server["model"].items():
        assert value.allclose(expected[name], atol=1e-6)


@pytest.mark.parametrize(
    ("twins", "weights"), [(False, [0.0, 0.5, 0.0, 0.5]), (True, [0.5, 0.5, 0.0, 0.0])]
)
def test_copies_of_one_model_are_chosen_once(twins, weights):
    """The attackers of IPM all send the same model; by their number they would push out who is less
    fit.
    """
    method = GenFed(schedule="constant", rho_max=2, twins=twins)
    fed = small(method, validation_size=0.2)
    evaluated = [(0.8, 0.2), (0.9, 0.1), (0.7, 0.1), (0.75, 0.2)]
    ctx = replace(fed.context(0, 1), score=lambda models: evaluated)
    moved = [
        {name: value + by for name, value in fed.initial.items()} for by in (0.1, 0.1, 0.1, 10.0)
    ]
    uploads = [Upload(client, 10, {"model": model}) for client, model in enumerate(moved)]
    assert (
        method.weights({"model": fed.initial}, uploads, ctx) == weights
    )  # the fittest copy; far along is no copy
    assert ctx.metadata["fitness"] == {
        str(client): metric for client, (metric, _) in enumerate(evaluated)
    }


def _job(fed, client):
    from fedhelix.engines.local import ClientTask

    return ClientTask(client, 0, {"model": fed.initial}, {})


def _scoring(fed):
    import torch

    return torch.from_numpy(fed.reserve.scoring)


@pytest.mark.parametrize(
    "options", [{"schedule": "adaptive"}, {"schedule": "constant", "diversity": 1.0}]
)
def test_other_rules_of_selection(options):
    record = (
        small(GenFed(rho_max=2, **options), "digits-bn-cnn", validation_size=0.2)
        .fit(1, quiet=True)
        .records[0]
    )
    assert 1 <= len(record["metadata"]["selected"]) == record["metadata"]["rho"] <= 2


def test_weights_of_the_chosen_sum_to_one():
    fed = small(GenFed(schedule="constant", rho_max=2, twins=True), validation_size=0.2)
    server, _ = fed.method.server_init({}, fed.context(0, 1))
    uploads = [Upload(client, 10 + client, {"model": fed.initial}) for client in range(4)]
    # Equal models: ties go to the smaller ids.
    assert fed.method.weights(server, uploads, fed.context(0, 1)) == [
        10 / 21,
        pytest.approx(11 / 21),
        0,
        0,
    ]


def test_bad_input():
    with pytest.raises(
        UserError, match=r"genfed scores models on validation data; set validation_size above 0"
    ):
        small(GenFed(), validation_size=0)
    with pytest.raises(UserError, match="rho_max must be at least 1, not 0"):
        GenFed(rho_max=0)
    with pytest.raises(UserError, match="genfed works around a method such as FedAvg"):
        GenFed("fedavg")


# Wrappers by name


def test_a_wrapper_by_name():
    assert make("genfed") == make("genfed+fedavg") == GenFed()
    method = make("genfed+fedprox", {"mu": 0.5, "rho_max": "3"})
    assert method == GenFed(FedProx(mu=0.5), rho_max=3)
    assert method.label == "genfed+fedprox" and GenFed().label == "genfed"
    assert method.options() == {
        **{k: v for k, v in vars(method).items() if k != "inner"},
        "mu": 0.5,
    }
    assert [kind.name for kind in resolve("genfed+fedprox")] == ["genfed", "fedprox"]


@pytest.mark.parametrize(
    ("spec", "options", "sentence"),
    [
        ("genfd+fedavg", {}, "unknown method 'genfd'; did you mean 'genfed'"),
        ("genfed+fedprx", {}, "unknown method 'fedprx'; did you mean 'fedprox'"),
        ("fedprox+genfed", {}, "fedprox cannot be put around genfed"),
        ("genfed+genfed", {}, "'genfed.genfed' has the option b twice"),
        (
            "genfed+fedprox",
            {"rhomax": 1},
            r"unknown key of the method genfed\+fedprox 'rhomax'; did you mean 'rho_max'",
        ),
        ("genfed", {"inner": 1}, "unknown key of the method genfed 'inner'"),
    ],
)
def test_wrong_names(spec, options, sentence):
    with pytest.raises(UserError, match=sentence):
        make(spec, options)


def test_plans_of_wrapped_methods(tmp_path):
    values = {"genfed.rho_max": 3, "fedprox.mu": 0.5, "genfed+fedprox.c": 9, "validation.size": 50}
    plan = make_spec("genfed+fedprox", values)
    assert (
        plan.method == GenFed(FedProx(mu=0.5), rho_max=3, c=9.0)
        and plan.config.validation_size == 50
    )
    assert make_spec("genfed", values).method == GenFed(rho_max=3)
    assert make_spec("fedprox", values).method == FedProx(mu=0.5)
    RunFolder.create(tmp_path, plan.as_dict())
    assert RunFolder.open(tmp_path).config["method"]["name"] == "genfed+fedprox"
    assert read_spec(RunFolder.open(tmp_path).config, tmp_path) == plan
    again = layered(file=tmp_path / "config.toml")
    assert make_spec("genfed+fedprox", again).method == plan.method
    assert make_spec("fedavg", again).method == FedAvg()


def test_wrapped_methods_on_the_command_line(cli, tmp_path):
    few = [
        "--rounds",
        2,
        "--clients",
        5,
        "--model",
        "linear",
        "--epochs",
        1,
        "--engine",
        "serial",
        "--kernels",
        "native",
        "-q",
    ]
    done = cli("compare", "fedavg", "genfed", "genfed+fedprox", *few, "--out", "both")
    assert done.code == 0 and "genfed+fedprox" in done.out
    configs = [
        RunFolder.open(tmp_path / "both" / f"{name}-seed0").config
        for name in ("fedavg", "genfed+fedprox")
    ]
    assert [config["validation_size"] for config in configs] == [
        0.1,
        0.1,
    ]  # the same samples for all
    assert cli("run", "genfed+fedprox", *few, "--rounds", 1, "--out", "part").code == 0
    shown = json.loads(cli("methods", "genfed+fedprox", "--json").out)
    assert shown.keys() == {"genfed", "fedprox"} and "inner" not in shown["genfed"]["options"]
    twice = cli("compare", "genfed", "genfed+fedavg", *few)
    assert twice.code == 2 and "'genfed' is named twice" in twice.err


def test_a_wrapped_run_resumes(cli, tmp_path):
    few = [
        "--clients",
        5,
        "--model",
        "linear",
        "--epochs",
        1,
        "--engine",
        "serial",
        "-q",
        "--set",
        "method.c=2",
    ]
    cli("run", "genfed+fedprox", *few, "--rounds", 3, "--out", "straight")
    cli("run", "genfed+fedprox", *few, "--rounds", 2, "--out", "stopped")
    folder = tmp_path / "stopped"
    config = folder / "config.toml"
    config.write_text(
        config.read_text().replace("rounds = 2", "rounds = 3")
    )  # as if it had been stopped after two
    (folder / "summary.json").unlink()
    unseal(folder)
    assert cli("resume", "stopped", "-q").code == 0
    assert on_disk(folder) == on_disk(tmp_path / "straight")


@pytest.mark.parametrize("options", [{}, {"twins": True}, {"diversity": 0.5}], ids=str)
def test_a_model_that_has_diverged_is_never_chosen_while_there_is_another(options):
    """Weights of 1e25 are finite, but the outputs are not numbers: argmax says class 0."""
    fed = small(
        GenFed(schedule="constant", rho_max=4, **options),
        "digits-cnn",
        clients=6,
        cohort=6,
        partition="iid",
        validation_size=50,
        seed=1,
        attack="sign-flip",
        attack_scale=1e25,
        attack_share=0.5,
    )
    for record in fed.fit(2, quiet=True).records:
        # There are four places, but only three models.
        chosen, fitness = record["metadata"]["selected"], record["metadata"]["fitness"]
        assert set(chosen) == set(range(6)) - fed.attackers.ids and record["refused"] == {}
        assert all(fitness[str(client)] == -math.inf for client in fed.attackers.ids)


def test_finite_but_absurd_weights_are_never_chosen_while_there_is_another():
    """Weights of 1e6 give finite outputs and losses, and some labels by chance."""
    fed = small(
        GenFed(schedule="constant", rho_max=4),
        "digits-cnn",
        clients=6,
        cohort=6,
        partition="iid",
        validation_size=50,
        seed=1,
        attack="sign-flip",
        attack_scale=1e6,
        attack_share=0.5,
    )
    for record in fed.fit(2, quiet=True).records:
        assert set(record["metadata"]["selected"]) == set(range(6)) - fed.attackers.ids
