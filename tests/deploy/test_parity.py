"""Every method gives the same across sites as in the simulation: the hooks, the loop and the
client's work are one.
"""

import numpy as np
import pytest
import torch

from fedhelix import METHODS, load
from fedhelix.core.errors import UserError
from fedhelix.deploy import messages
from fedhelix.deploy.site_state import MODEL
from fedhelix.engines.local import ClientTask
from fedhelix.runs.spec import make_spec
from helpers import CHEAP as QUICK
from helpers import NETWORKS, same
from in_process import InProcessDeployment

OPTIONS = {**QUICK, "clustered": {"clusters": 2}, "gene-fl": {"clusters": 2}}
CHEAP = {
    "clients": 3,
    "rounds": 3,
    "epochs": 1,
    "batch_size": 128,
    "kernels": "onednn",
    "eval_every": 3,
}


def spec_for(spec, **more):
    options = {f"method.{key}": value for key, value in OPTIONS.get(spec, {}).items()}
    return make_spec(spec, {**CHEAP, **options, "model": NETWORKS.get(spec, "digits-cnn"), **more})


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> str:
    """A file with some of the digits."""
    path, digits = tmp_path_factory.mktemp("data") / "few.npz", load("digits")
    np.savez(path, x=digits.x[:300].numpy(), y=digits.y[:300].numpy())
    return str(path)


def in_simulation(spec):
    fed = spec.config.federation(spec.method, engine="serial")
    return fed.fit(spec.config.rounds, eval_every=spec.config.eval_every, quiet=True)


IN_ROUNDS = [
    name
    for name, kind in METHODS.items()
    if kind().capabilities.buffer is None
    and name not in ("private", "dp-sgd")  # whose noise nobody can repeat
]


@pytest.mark.parametrize("spec", [*IN_ROUNDS, "genfed+fedau"])
def test_sites_and_simulation_agree(spec, few, tmp_path):
    spec = spec_for(spec, data=few, batch_size=32)
    deployment = InProcessDeployment(tmp_path, 3, few, common=True)
    across, here = deployment.fit(spec), in_simulation(spec)
    assert same(across.state.server, here.state.server)
    for one, other in zip(across.records, here.records, strict=True):
        for key, value in other.items():
            if key != "seconds":
                # The simulation evaluates clients that share a model together, so sums differ in
                # their order.
                assert one[key] == (
                    pytest.approx(value) if isinstance(value, float | list) else value
                ), key


def test_a_server_with_samples_starts_helix_warm(few, tmp_path):
    spec = spec_for("helix", data=few, batch_size=32, validation_size=0.2, rounds=1)
    deployment = InProcessDeployment(tmp_path, 3, few, common=True)
    across, here = deployment.fit(spec), in_simulation(spec)
    assert across.federation.context(0, 1).train is not None
    assert same(across.state.server, here.state.server)


@pytest.mark.parametrize("spec", ["fedavg", "fedper", "gene-fl", "pfedgpa", "pfedhn"])
def test_newcomers_are_onboarded_alike(spec, tmp_path):
    spec = spec_for(spec, newcomers=1, newcomers_after=1)
    across, here = InProcessDeployment(tmp_path, 4).fit(spec), in_simulation(spec)
    assert same(across.state.server, here.state.server)
    for key in ("arrival_bytes", "arrival_accuracy"):
        assert across.records[1][key] == pytest.approx(here.records[1][key])
    assert across.records[-1]["personal"] == pytest.approx(here.records[-1]["personal"])


def test_the_server_waits_for_a_newcomer(tmp_path):
    deployment = InProcessDeployment(tmp_path, 3)
    node, late = deployment.grid.answers.popitem()
    spec = spec_for("fedper", clients=2, newcomers=1, newcomers_after=2)
    look = deployment.grid.get_nodes

    def connects_in_time():
        if fed.engine.transport.descriptions and records:
            deployment.grid.answers[node] = late
        return look()

    fed, records = deployment.federation(spec), []
    deployment.grid.get_nodes = connects_in_time
    states = [(records.append(record), state.server)[1] for record, state in fed.run_rounds(3)]
    assert same(states[-1], in_simulation(spec).state.server)


@pytest.mark.parametrize("attack", ["label-flip", "ipm"])
def test_attacks_are_simulated_on_the_server(attack, tmp_path):
    spec = spec_for("fedavg", attack=attack, attack_share=0.34)
    across = InProcessDeployment(tmp_path, 3).fit(spec)
    assert same(across.state.server, in_simulation(spec).state.server)


def test_bytes_are_counted_as_they_are_sent(tmp_path):
    deployment = InProcessDeployment(tmp_path, 2)
    seen = {"sent": 0, "received": 0}
    for node, answer in list(deployment.grid.answers.items()):

        def counted(content, answer=answer):
            reply = answer(content)
            seen["sent"] += len(content)
            seen["received"] += len(reply)
            return reply

        deployment.grid.answers[node] = counted
    run = deployment.fit(spec_for("fedavg", clients=2))
    assert {key: sum(record["wire"][key] for record in run.records) for key in seen} == seen
    # A message is the payload and little else: its header names the entries and holds the spec.
    record = run.records[0]
    assert record["uplink_bytes"] < record["wire"]["received"] < record["uplink_bytes"] + 2 * 4096


def test_personal_models_stay_at_their_sites(tmp_path):
    run = InProcessDeployment(tmp_path, 2).fit(spec_for("fedper", clients=2))
    assert run.state.client_states == {0: {"after": 2}, 1: {"after": 2}}  # and nothing else
    with pytest.raises(UserError, match="are at its sites"):
        run.personal(0)
    assert (
        sorted(path.parent.name for path in tmp_path.rglob("own-*.safetensors"))
        == ["site-0"] * 2 + ["site-1"] * 2
    )


@pytest.mark.parametrize("code", [{}, {"method.bits": 4, "method.download_bits": 8}], ids=str)
def test_packed_updates_are_packed_on_the_wire(code, tmp_path):
    # A million and a half weights, so that headers do not count.
    y = np.arange(90) % 3
    x = np.random.default_rng(0).normal(y[:, None], 1, (90, 12_000)).astype(np.float32)
    source = str(tmp_path / "wide.npz")
    np.savez(source, x=x, y=y)
    spec = spec_for("compact", data=source, model="mlp", partition="iid", lr=0.001, **code)
    across = InProcessDeployment(tmp_path, 3, source, common=True).fit(spec)
    here = in_simulation(spec)
    assert across.summary["final_accuracy"] == here.summary["final_accuracy"]
    assert same(across.state.server, here.state.server)
    record, counted = across.records[0], here.records[0]  # a round without evaluation
    assert record["refused"] == {} and record["uplink_bytes"] == counted["uplink_bytes"]
    # An answer is what was counted and little else: its header names the entries.
    size, header = counted["uplink_bytes"], 3 * 2048
    assert size < record["wire"]["received"] < 1.05 * size + header
    assert size < 1.1 * 3 * spec.method.bits / 8 * sum(here.federation.layers.sizes.values())
    if spec.method.download_bits < 32:
        assert record["wire"]["sent"] < 1.05 * counted["downlink_bytes"] + header


@pytest.mark.parametrize("spec", ["calibrated", "helix"])
def test_class_shares_stay_at_their_sites(spec, tmp_path):
    """Nothing on the wire or on a disk is called a shift, and nothing has its values."""
    deployment = InProcessDeployment(tmp_path, 3)
    wire = []
    for node, answer in list(deployment.grid.answers.items()):

        def heard(content, answer=answer):
            wire.extend([content, answer(content)])
            return wire[-1]

        deployment.grid.answers[node] = heard
    run = deployment.fit(spec_for(spec))
    own = (MODEL, "used.safetensors")  # at the site, for its own use
    files = [path for path in tmp_path.rglob("*.safetensors") if path.name not in own]
    kept = [path.read_bytes() for path in files]
    assert wire and bool(kept) == (spec == "helix")  # whose clients keep what a code lost
    shares = []
    here = in_simulation(spec_for(spec)).federation
    for split in here.splits:
        counts = torch.bincount(here.data.y[split.train], minlength=10) + 1.0
        shares += [(counts / counts.sum()).log().numpy().tobytes(), counts.numpy().tobytes()]
    for content in (*wire, *kept):
        assert b"(shift)" not in content and not any(share in content for share in shares)
    assert run.records[-1]["personal_accuracy"] > 0


def test_what_sites_use_is_recorded_and_nonsense_is_refused(tmp_path):
    deployment = InProcessDeployment(tmp_path, 3)
    node, answer = next(iter(deployment.grid.answers.items()))

    def forged(content):
        reply = messages.read(answer(content))
        more = {"used": "no name"} if reply.header["kind"] == "evaluate" else {}
        return messages.write({**reply.header, **more}, reply.body)

    deployment.grid.answers[node] = forged
    record = deployment.fit(spec_for("finish", rounds=1, eval_every=1)).records[-1]
    ((_, why),) = record["unevaluated"].items()
    assert "'no name' for used, which must be a name" in why
    # Whom nobody heard of uses nothing.
    assert set(record["used"]) <= {"tuned", "received"} and sum(record["used"].values()) == 2


@pytest.mark.parametrize("code", ["bits", "top-k", "units"])
def test_a_site_that_forges_a_code_is_refused(code, tmp_path):
    deployment = InProcessDeployment(tmp_path, 3)
    node, answer = next(iter(deployment.grid.answers.items()))

    def forged(content):
        reply = messages.read(answer(content))
        if reply.header["kind"] == "train":
            reply.body["packed"]["values"] = reply.body["packed"]["values"][:-1]
        return messages.write(reply.header, reply.body)

    deployment.grid.answers[node] = forged
    run = deployment.fit(spec_for("compact", rounds=1, **{"method.code": code}))
    ((_, why),) = run.records[0]["refused"].items()
    assert "for 'values' instead of" in why
    assert run.records[0]["missing"] == {}


def test_the_noise_of_sites_is_no_function_of_the_seed_and_is_drawn_once(tmp_path):
    pytest.importorskip("dp_accounting")
    spec = spec_for("private", **{"method.noise_by": "clients"})
    fed = InProcessDeployment(tmp_path, 3).federation(spec)
    ctx = fed.context(0, 2)
    state = fed.initialize(2)
    payload = fed.method.download(state.server, 0, ctx)
    tasks = [ClientTask(0, 0, payload, {})]
    (one,), (again,) = fed.engine.run_clients(tasks), fed.engine.run_clients(tasks)
    assert same(one.upload, again.upload)
    simulated = spec.config.federation(spec.method)
    (seeded,) = simulated.engine.run_clients(tasks)
    assert not same(one.upload, seeded.upload)
    newer = fed.method.download(state.server, 0, fed.context(1, 2))
    (_later,) = fed.engine.run_clients([ClientTask(0, 1, newer, {})])
    assert fed.engine.run_clients(tasks) == []
    assert "round 1 is over" in fed.engine.missing[0]
