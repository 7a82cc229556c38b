"""One evil site out of four, which may send what it likes, never stops a run of any method."""

import random

import numpy as np
import pytest
import torch

from fedhelix import METHODS
from fedhelix.core.tree import flatten, unflatten
from fedhelix.deploy import messages
from fedhelix.runs.spec import make_spec
from fedhelix.store.json import json_line
from fuzz.mutations import mutated
from helpers import CHEAP, NETWORKS
from in_process import InProcessDeployment, small_images

EVIL, SITES, ROUNDS = 2, 4, 4

CLUSTERS = {name: {"clusters": 2} for name in ("clustered", "clustered+feddbe", "gene-fl")}
OPTIONS = {**CHEAP, **CLUSTERS}
SMALL = {
    "clients": SITES, "rounds": ROUNDS, "epochs": 1, "batch_size": 16, "kernels": "onednn",
    "eval_every": 2, "lr": 0.01,
}  # fmt: skip
IN_ROUNDS = [name for name, kind in METHODS.items() if kind().capabilities.buffer is None]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A file with few samples, of which sites take their parts."""
    return small_images(tmp_path_factory.mktemp("data"))


def evil(honest, seed):
    """An honest site's answers, spoilt: each in one of many ways."""
    draw = random.Random(seed)
    earlier = []

    def answer(content):
        said = honest(content)
        earlier.append(said)
        if messages.read(content).header["kind"] == "describe":
            return said
        if draw.random() < 0.15:
            return draw.choice(earlier)  # replies to other rounds and requests
        return mutated(said, draw)

    return answer


def deploy(tmp_path, spec, images, seed):
    model = NETWORKS.get(spec, "mlp")
    options = {f"method.{key}": value for key, value in OPTIONS.get(spec, {}).items()}
    deployment = InProcessDeployment(tmp_path, SITES, images, common=True, deadline=1.0)
    names = [f"site-{n}" for n in range(SITES)]
    nodes = list(deployment.grid.answers)
    deployment.grid.names = dict(zip(nodes, names, strict=True))
    node = nodes[EVIL]
    deployment.grid.answers[node] = evil(deployment.grid.answers[node], seed)
    more = {"model": model, "data": images, "partition": "iid", **options}
    return deployment.fit(make_spec(spec, {**SMALL, **more}))


@pytest.mark.filterwarnings("ignore")  # of models that diverge
@pytest.mark.parametrize("spec", [*IN_ROUNDS, "genfed+fedau", "compact+scaffold", "median+fedavg"])
def test_one_evil_site_stops_no_run(spec, tmp_path, images):
    run = deploy(tmp_path, spec, images, spec)
    assert len(run.records) == ROUNDS
    for record in run.records:
        assert json_line(record)
        troubles = record["missing"] | record["refused"] | record.get("unevaluated", {})
        # Values that are huge, but finite, may spoil what the others train on.
        assert all("finite" in why for client, why in troubles.items() if client != str(EVIL))
    before = flatten(run.federation.initialize(ROUNDS).server)
    for path, value in flatten(run.state.server).items():
        if torch.is_tensor(value) and path in before and before[path].isfinite().all():
            assert value.isfinite().all(), path


def test_an_evil_site_that_is_left_out_does_not_keep_the_others_waiting(tmp_path, images):
    spec = make_spec("fedavg", {**SMALL, "rounds": 1, "data": images, "partition": "iid"})
    for said in ({"site": "site-0"}, {"site": None}, {"seconds": 10**400}):
        deployment = InProcessDeployment(tmp_path, SITES, images, common=True)
        nodes = list(deployment.grid.answers)
        deployment.grid.names = {node: f"site-{n}" for n, node in enumerate(nodes)}
        honest = deployment.grid.answers[nodes[EVIL]]

        def lie(content, honest=honest, said=said):
            header, body = messages.read(honest(content))
            return messages.write({**header, **said}, body)

        deployment.grid.answers[nodes[EVIL]] = lie
        (record,) = deployment.fit(spec).records
        ((who, why),) = record["troubles"].items()
        assert who in ("site-2", "node 103")
        free = f"no site has taken this place yet; {who} {why.rstrip('.')}"
        assert record["missing"] == {"3": free}
        (tmp_path / "sites.json").unlink()


def test_a_site_with_an_odd_description_is_left_out_named_and_told(tmp_path, capfd):
    folders = [tmp_path / f"data-{n}" for n in range(SITES)]
    for n, folder in enumerate(folders):
        folder.mkdir()
        shape = (30, 5) if n != EVIL else (30, 7)
        np.save(folder / "x.npy", np.random.default_rng(n).normal(size=shape).astype(np.float32))
        np.save(folder / "y.npy", np.arange(30) % 3)
    deployment = InProcessDeployment(tmp_path, SITES, [str(folder) for folder in folders])
    settings = {**SMALL, "rounds": 2, "data": "own", "model": "mlp"}
    run = deployment.fit(make_spec("fedavg", settings))
    assert run.records[0]["troubles"]["site-2"].startswith("has samples with shape [7], but")
    told = "the run goes on without this site, which has samples with shape [7], but"
    assert capfd.readouterr().err.count(told) == 1
    free = "no site has taken this place yet; site-2 has samples with shape [7], but"
    assert all(record["missing"]["3"].startswith(free) for record in run.records)


def silent(honest):
    """Honest until it is asked to introduce itself as a newcomer."""

    def answer(content):
        asked = messages.read(content).header["kind"].startswith("onboard")
        return None if asked else honest(content)

    return answer


def empty(honest):
    """Well-formed answers without anything in them."""

    def answer(content):
        header, body = messages.read(honest(content))
        return messages.write(header, body if header["kind"] == "describe" else {})

    return answer


NEWCOMERS = {"mutated": lambda honest: evil(honest, 0), "empty": empty, "silent": silent}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("harm", NEWCOMERS)
@pytest.mark.parametrize("spec", ["fedavg", "gene-fl", "clustered+feddbe", "pfedhn", "fedau"])
def test_an_evil_newcomer_stops_no_run(spec, harm, tmp_path, images):
    deployment = InProcessDeployment(tmp_path, SITES + 1, images, common=True, deadline=0.2)
    node = list(deployment.grid.answers)[SITES - 1]
    deployment.grid.answers[node] = NEWCOMERS[harm](deployment.grid.answers[node])
    options = {f"method.{key}": value for key, value in OPTIONS.get(spec, {}).items()}
    more = {"clients": SITES - 1, "newcomers": 2, "newcomers_after": 1, "rounds": 3}
    more |= {"model": "mlp", "data": images, "partition": "iid", **options}
    run = deployment.fit(make_spec(spec, {**SMALL, **more}))
    first, *later = run.records
    assert len(later) == 2 and not first["missing"]
    for record in later:  # the honest newcomer works on
        troubles = record["missing"] | record["refused"]
        assert str(SITES) in map(str, record["participants"]) and set(troubles) <= {str(SITES - 1)}


def conspirator(honest, change):
    """An honest site's uploads, changed as the other conspirators' are."""

    def answer(content):
        header, body = messages.read(honest(content))
        return messages.write(header, change(body) if header["kind"] == "train" else body)

    return answer


def longer(body):
    """Every tensor beside the model has an axis more."""
    flat = flatten(body).items()
    return unflatten(
        {path: one if path.startswith("model/") else one[..., None] for path, one in flat}
    )


CONSPIRACIES = {"model only": lambda body: {"model": body["model"]}, "longer": longer}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", CONSPIRACIES)
def test_two_evil_sites_of_four_that_agree_stop_no_run(change, tmp_path, images):
    """What both lack or change is nothing that all others have."""
    deployment = InProcessDeployment(tmp_path, SITES, images, common=True)
    for node in list(deployment.grid.answers)[EVIL:]:
        honest = deployment.grid.answers[node]
        deployment.grid.answers[node] = conspirator(honest, CONSPIRACIES[change])
    more = {"model": "mlp", "data": images, "partition": "iid", "rounds": 3}
    run = deployment.fit(make_spec("scaffold", {**SMALL, **more}))
    assert [set(record["refused"]) for record in run.records] == [{"2", "3"}] * 3
    before = flatten(run.federation.initialize(3).server)
    after = flatten(run.state.server)
    assert all(value.isfinite().all() for value in after.values())
    assert not all(torch.equal(after[path], before[path]) for path in before)


@pytest.mark.filterwarnings("ignore")
def test_two_evil_sites_of_four_with_anything_stop_no_run(tmp_path, images):
    deployment = InProcessDeployment(tmp_path, SITES, images, common=True, deadline=0.2)
    nodes = list(deployment.grid.answers)
    deployment.grid.names = {node: f"site-{n}" for n, node in enumerate(nodes)}
    for node in nodes[EVIL:]:
        deployment.grid.answers[node] = evil(deployment.grid.answers[node], node)
    more = {"model": "mlp", "data": images, "partition": "iid", "rounds": 12}
    assert len(deployment.fit(make_spec("scaffold", {**SMALL, **more})).records) == 12
