"""Helix: a chain of parts that can be switched off, good at everything for few bytes."""

import pytest
import torch

from fedhelix import (
    Ancestors,
    Calibrated,
    Compact,
    Cull,
    FedAvg,
    FedAvgM,
    Finish,
    Helix,
    UserError,
    WarmStart,
    load,
)
from fedhelix.core.registry import is_wrapper, make, resolve
from fedhelix.runs.spec import make_spec, read_spec
from fedhelix.store import RunFolder
from helpers import check_resumed, close, on_disk, same, small

DIGITS = load("digits").subsample(300, 100)


def build(method=None, **more):
    usual = {"model": "digits-bn-cnn", "data": DIGITS, "clients": 4, "validation_size": 40}
    return small(method or Helix(), **usual | more)


def chain(method):
    """The names of the parts, the outermost first."""
    names = []
    while hasattr(method, "inner"):
        method = method.inner
        names.append(method.name)
    return names


OFF = {
    "tau": 0, "bits": 32, "cull": False, "ancestors": 0, "finish": False, "server_momentum": 0,
    "warm_epochs": 0,
}  # fmt: skip
WHOLE = ["compact", "warm-start", "cull", "calibrated", "finish", "ancestors", "fedavgm"]


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({}, None),
        ({"bits": 32}, "compact"),
        ({"warm_epochs": 0}, "warm-start"),
        ({"cull": False}, "cull"),
        ({"finish": False}, "finish"),
        ({"tau": 0.0}, "calibrated"),
        ({"ancestors": 0.0}, "ancestors"),
    ],
    ids=str,
)
def test_each_part_can_be_switched_off(options, missing):
    assert chain(Helix(**options)) == [name for name in WHOLE if name != missing]


def test_heads_of_their_own_stand_around_the_cull():
    """It sees updates as if all had begun at one head."""
    parts = chain(Helix(heads="denoised"))
    assert parts == [*WHOLE[:2], "denoised-heads", *WHOLE[2:]]


def test_options_in_words_mean_the_same():
    """As they come from a command line."""
    off = {"tau": "0", "bits": "32", "cull": "false", "ancestors": "0", "finish": "false"}
    off["warm_epochs"] = "0"
    assert chain(make("helix", off)) == chain(Helix(**off)) == ["fedavgm"]


def test_its_options_are_those_of_its_parts():
    method = Helix(
        tau=0.5, smooth=2.0, bits=4, margin=0.1, rho_min=3, server_momentum=0.3, ancestors=0.7,
        ft_rate=0.4, sharpen=2.0, warm_epochs=3,
    )  # fmt: skip
    server = Ancestors(FedAvgM(server_momentum=0.3, adaptive=True), kept=0.7)
    client = Calibrated(Finish(server, ft_rate=0.4), tau=0.5, smooth=2.0, sharpen=2.0)
    cull = Cull(client, margin=0.1, rho_min=3)
    assert method.inner == Compact(WarmStart(cull, warm_epochs=3, required=False), bits=4)
    bare = Helix(**OFF)
    assert bare.inner == FedAvgM(server_momentum=0.0, adaptive=True)


@pytest.mark.parametrize(
    "method", [Helix(), Helix(bits=32, cull=False, tau=0.25, ancestors=0.0, rho_min=2)], ids=str
)
def test_options_make_the_method_again(method):
    assert "inner" not in method.options()
    assert make("helix", method.options()) == method
    spec = make_spec("helix", {f"method.{key}": value for key, value in method.options().items()})
    assert spec.method == method and method.label == "helix"


def test_it_is_put_around_nothing():
    with pytest.raises(
        UserError, match=r"^helix cannot be put around fedprox; of 'helix\+fedprox'"
    ):
        make("helix+fedprox")
    with pytest.raises(UserError, match="unknown key of the method helix 'inner'"):
        make("helix", {"inner": 1})
    assert not is_wrapper(Helix) and is_wrapper(Cull) and not is_wrapper(FedAvg)
    # But others are put around it, as far as they can be.
    assert [kind.name for kind in resolve("clustered+helix")] == ["clustered", "helix"]
    with pytest.raises(UserError, match="smooth must be greater than 0"):
        Helix(smooth=0.0)
    with pytest.raises(UserError, match="bits must be one of 1, 2, 4, 8, 32"):
        Helix(bits=3)


def test_without_any_part_it_is_fedavg():
    bare = Helix(**OFF)
    one, other = (build(method).fit(2, quiet=True) for method in (FedAvg(), bare))
    assert close(one.state.server["model"], other.state.server["model"], 1e-5)


def test_clients_are_better_off_than_with_fedavg_for_a_tenth_of_the_bytes():
    """And the global model is about as good, in the mean over seeds: in a single short run it may
    go either way.
    """
    more = {
        "data": "digits", "model": "mlp", "partition": "dirichlet:0.1", "clients": 20,
        "cohort": 10, "validation_size": 0.1, "batch_size": 16, "epochs": 2, "kernels": "native",
    }  # fmt: skip
    found = [
        [
            build(method, seed=seed, **more).fit(10, eval_every=10, quiet=True).summary
            for seed in range(2)
        ]
        for method in (FedAvg(), Helix())
    ]
    plain, mine = (sum(summary["final_accuracy"] for summary in runs) / 2 for runs in found)
    assert mine > plain - 0.03
    for its, my in zip(*found, strict=True):
        assert my["personal_accuracy"] > its["personal_accuracy"] + 0.04
        assert 10 * my["uplink_bytes"] <= its["uplink_bytes"]


def test_few_rounds_and_few_bytes_serve_every_client():
    more = {"data": "digits", "model": "linear", "partition": "dirichlet:0.1", "clients": 10}
    more |= {"cohort": 5, "validation_size": 0.1, "batch_size": 16}
    plain, mine = (
        build(method, **more).fit(4, eval_every=4, quiet=True).summary
        for method in (FedAvg(), Helix())
    )
    assert mine["personal_accuracy"] > plain["personal_accuracy"] + 0.05
    assert 10 * mine["uplink_bytes"] <= plain["uplink_bytes"]


def test_a_resumed_run_is_the_straight_one(tmp_path):
    check_resumed(build, tmp_path, 3, after=1)


@pytest.mark.parametrize("engine", ["parallel", "batched"])
def test_helix_is_equal_on_every_engine(engine):
    """With many bits, since a sign may tip by rounding."""
    method = Helix(bits=8) if engine == "batched" else Helix()
    one, other = (
        build(method, engine=name, workers=2).fit(2, quiet=True) for name in ("serial", engine)
    )
    other.federation.close()
    if engine == "parallel":
        assert same(one.state.server, other.state.server)
    assert close(one.state.server["model"], other.state.server["model"], 5e-3)
    assert one.records[-1]["used"] == other.records[-1]["used"]
    assert one.records[-1]["personal"] == pytest.approx(other.records[-1]["personal"], abs=0.05)
    dropped = [[record["metadata"]["dropped"] for record in run.records] for run in (one, other)]
    assert dropped[0] == dropped[1]


def test_a_run_folder_is_written_and_opened_again(tmp_path):
    values = {"method.bits": 2, "method.finish": False, "clients": 3, "model": "linear"}
    spec = make_spec("helix", {**values, "rounds": 2, "epochs": 1, "batch_size": 64})
    with RunFolder.create(tmp_path / "written", spec.as_dict()):
        pass
    folder = RunFolder.open(tmp_path / "written")
    assert folder.config["method"]["name"] == "helix" and folder.config["method"]["bits"] == 2
    assert "inner" not in folder.config["method"]
    assert read_spec(folder.config, tmp_path / "written") == spec
    run = build().fit(2, out=tmp_path / "run", quiet=True)
    opened = RunFolder.open(tmp_path / "run")
    assert opened.config["method"] == {"name": "helix", **Helix().options()}
    assert on_disk(tmp_path / "run")[-1]["used"] == run.records[-1]["used"]


def test_newcomers_start_from_the_mean_with_their_own_shares():
    run = build(Helix(finish=False), model="linear").fit(3, quiet=True)
    number = run.onboard((DIGITS.x[:30], DIGITS.y[:30]))
    fed = run.federation
    counts = torch.bincount(fed.data.y[fed.splits[number].train], minlength=10) + 1.0
    x = fed.data.prepare(fed.data.x_test[:9])
    expected = run.model()(x) + 1.5 * (counts / counts.sum()).log()
    torch.testing.assert_close(run.personal(number)(x), expected)
    assert same(run.model().state_dict(), run.state.server["ancestors"])


@pytest.mark.parametrize("size", [0.0, 0.2])
def test_with_and_without_data_on_the_server(size):
    more = {"validation_size": size, "attack": "sign-flip", "attack_scale": 4.0}
    more |= {"attack_share": 0.25, "clients": 8, "cohort": 8, "partition": "dirichlet:5"}
    run = build(model="linear", **more).fit(3, quiet=True)
    attackers = set(run.federation.attackers.ids)
    assert all(attackers <= set(record["metadata"]["dropped"]) for record in run.records)


def test_its_parts_need_classes():
    from fedhelix import GenFed
    from helpers import two_quadratics

    with pytest.raises(UserError, match=r"^helix needs classes, .* use tau = 0 or another"):
        two_quadratics(Helix())
    with pytest.raises(UserError, match=r"^genfed\+helix needs classes, .* use tau = 0 or another"):
        two_quadratics(GenFed(Helix()), validation_size=1)
    assert two_quadratics(Helix(tau=0)).fit(2, quiet=True).summary["complete"]
