"""A server that lies to its sites: what it learns of one site's upload, and what it is refused."""

import json
import math
import shutil

import pytest
import torch

from fedhelix.components.secure_sum import SIGNATURE, sum_words
from fedhelix.core.errors import EngineFailure
from fedhelix.deploy import messages
from fedhelix.deploy.key_ring import KeyRing
from fedhelix.deploy.keys import make_site_key
from fedhelix.deploy.masked import Masker
from fedhelix.deploy.server import _public
from fedhelix.deploy.site import Site
from fedhelix.deploy.site_policy import SitePolicy
from fedhelix.deploy.site_state import SiteState
from fedhelix.runs.spec import make_spec
from in_process import EXPERIMENT, InProcessDeployment

SMALL = {"data": "digits", "rounds": 3, "epochs": 1, "model": "linear", "kernels": "onednn"}


def spec_for(method="secure", sites=4, **more):
    return make_spec(method, {**SMALL, "clients": sites, "cohort": sites, **more})


def lying(deployment, change, victim="site-0"):
    """A server that changes what it sends to everybody but its victim."""
    for node, site in zip(list(deployment.grid.answers), deployment.sites, strict=True):

        def changed(content, honest=site.answer):
            header, body = messages.read(content)
            return honest(messages.write(*change(header, body)))

        if site.name != victim:
            deployment.grid.answers[node] = changed
    return deployment


def known_sum(deployment):
    """The words that a server gets as the sum of round 1, and those that its victim summed."""
    federation, sums = deployment.federation(spec_for()), []
    honest = federation.engine.results
    federation.engine.results = lambda tasks: sums.append(honest(tasks)) or sums[-1]
    next(iter(federation.run_rounds(1)))
    victim = SiteState(deployment.folder / "kept" / EXPERIMENT / "site-0").sent(0)
    return sum_words([result.upload["words"] for result in sums[0].values()]), victim["upload"]


def no_weight(header, body):
    """Tell the others that the cohort is so large that they hardly count."""
    if header["kind"] == "train":
        body["payload"]["secure"]["total"] = torch.tensor(1e15, dtype=torch.float64)
    return header, body


def other_model(header, body):
    """Send the others another model, of which the server knows what they will make."""
    if header["kind"] == "train":
        for value in body["payload"]["model"].values():
            value.fill_(0.0)
    return header, body


def no_training(header, body):
    """Tell the others not to train."""
    if header["kind"] != "describe":
        settings = json.loads(header["spec"])
        header["spec"] = json.dumps({**settings, "lr": 1e-30})
    return header, body


@pytest.mark.parametrize("change", [no_weight, other_model, no_training])
def test_what_other_sites_send_cannot_be_taken_off_a_sum(change, tmp_path):
    """Masks cancel between sites with one task only; else even a plain upload of zeros hides."""
    total, upload = known_sum(lying(InProcessDeployment(tmp_path, 4), change))
    assert (upload["words"].long().abs() < 1 << 28).all()
    assert (total.long().abs() > 1 << 28).float().mean() > 0.7


def test_the_same_lies_told_before_a_round_is_repeated_are_no_use_either(tmp_path):
    """A site answers a round for one task: others are refused."""
    lies = lying(InProcessDeployment(tmp_path, 4), other_model)
    known_sum(lies)
    lies.grid.answers = dict(enumerate((site.answer for site in lies.sites), start=101))
    said = "site-1 answered: round 1 was answered for another model or other settings already"
    with pytest.raises(EngineFailure, match=said):
        known_sum(lies)


def with_peers(folder, sites):
    """Sites that know each other, and what the server asked of each."""
    deployment, asked = InProcessDeployment(folder, sites), {}
    keys = [make_site_key(folder / "peers", site.name) for site in deployment.sites]
    for node, site, key in zip(list(deployment.grid.answers), deployment.sites, keys, strict=True):
        site._masker = Masker(KeyRing(key, folder / "peers"))

        def spy(content, site=site):
            asked[site.name, messages.read(content).header["kind"]] = content
            return site.answer(content)

        deployment.grid.answers[node] = spy
    return deployment, asked


def test_sites_that_are_told_of_different_cohorts_share_nothing(tmp_path):
    """Site 0 is told of three sites, of which two would do to unmask it, and the others of six."""
    deployment, _ = with_peers(tmp_path, 6)
    honest = deployment.sites[0].answer

    def fewer(content):
        header, body = messages.read(content)
        if header["kind"] == "masking_shares":
            body["keys"] = {i: body["keys"][i] for i in "012"}
        if header["kind"] == "train":
            body["shares"] = {i: body["shares"][i] for i in "12"}
        return honest(messages.write(header, body))

    deployment.grid.answers[101] = fewer
    federation = deployment.federation(spec_for(sites=6, rounds=1))
    with pytest.raises(EngineFailure, match="site-0 answered: the shares of client 1 are damaged"):
        federation.fit(1, quiet=True)
    assert "the shares of client 0 are damaged" in federation.engine.missing[1]


def test_sites_reveal_for_one_list_of_answers_that_enough_of_them_have_signed(tmp_path):
    deployment, _ = with_peers(tmp_path, 4)
    stopped = {}

    def unanswered(content, site):
        if messages.read(content).header["kind"] == "masking_agree":
            stopped[site.name] = content
            return RuntimeError("held back")
        return site.answer(content)

    for node, site in zip(list(deployment.grid.answers), deployment.sites, strict=True):
        deployment.grid.answers[node] = lambda content, site=site: unanswered(content, site)
    with pytest.raises(EngineFailure, match="held back"):
        next(iter(deployment.federation(spec_for()).run_rounds(1)))

    def ask(number, survivors, kind="masking_agree", **more):
        header = {**messages.read(stopped[f"site-{number}"]).header, "kind": kind}
        body = {"survivors": {"clients": torch.tensor(survivors)}, **more}
        return messages.read(deployment.sites[number].answer(messages.write(header, body)))

    assert "has not answered, and it has" in ask(3, [0, 1, 2]).header["error"]
    signed = {}
    for number, told in ((0, [0, 1, 2, 3]), (1, [0, 1, 2]), (2, [0, 1, 2]), (3, [0, 1, 2, 3])):
        signed |= ask(number, told).body
    said = ask(0, [0, 1, 2, 3], "masking_reveal", agreed=signed).header["error"]
    assert "3 clients must have been told the same about who has answered, and 2 were" in said
    forged = {**signed, "1": signed["0"], "2": signed["3"]}
    said = ask(0, [0, 1, 2, 3], "masking_reveal", agreed=forged).header["error"]
    assert "no trusted site has signed the list of answers of client 1" in said
    unsigned = torch.cat([signed["0"][:-SIGNATURE], torch.zeros(SIGNATURE, dtype=torch.uint8)])
    said = ask(0, [0, 1, 2, 3], "masking_reveal", agreed={**signed, "2": unsigned}).header["error"]
    assert "no trusted site has signed the list of answers of client 2" in said
    assert "masked for other clients already" in ask(1, [0, 1, 2, 3]).header["error"]


def test_a_site_makes_shares_for_one_set_of_keys_and_is_one_client(tmp_path):
    deployment, asked = with_peers(tmp_path, 4)
    deployment.fit(spec_for(rounds=1))
    site, content = deployment.sites[0], asked["site-0", "masking_shares"]
    assert site._masker._current.share(site._masker._current._keys)  # again the same
    header, body = messages.read(content)
    fewer = {i: body["keys"][i] for i in "012"}
    said = messages.read(site.answer(messages.write(header, {"keys": fewer}))).header["error"]
    assert "shares of a round are made once, and were made for other keys" in said
    said = messages.read(site.answer(messages.write({**header, "client": 1}, body)))
    assert "the site is client 0 in this round" in said.header["error"]


# Budgets ------------------------------------------------------------------------------------------


def test_runs_share_what_a_site_gives_in_all(tmp_path):
    """Of 10 the first run reserves 6 at once, so that a second one of 6 is too much, also when the
    site was started again and what it kept of the first one was deleted; one of 4 is not.
    """
    pytest.importorskip("dp_accounting")

    def asked(experiment, method, kind="train", **options):
        site = Site("north", "digits", tmp_path, policy=SitePolicy(total_epsilon=10.0))
        spec = json.dumps(_public(spec_for(method, **options)))
        header = {"kind": kind, "experiment": experiment * 32, "spec": spec}
        answer = site.answer(messages.write({**header, "client": 0, "round": 0}))
        return messages.read(answer).header.get("error", "")

    eight, six, four = ({"method.epsilon": epsilon} for epsilon in (8.0, 6.0, 4.0))
    assert asked("0", "secure+private", "masking_keys", **eight) == ""  # has spent nothing
    for _ in range(2):
        assert "of all runs" not in asked("a", "private", **six)
    shutil.rmtree(tmp_path / ("a" * 32), ignore_errors=True)
    said = asked("b", "secure+dp-sgd", "masking_keys", **six)
    assert "allows 10.0 as epsilon of all runs together, not 12.0" in said
    assert "this one adds no noise (total_epsilon)" in asked("b", "secure")
    assert "of all runs" not in asked("b", "dp-sgd", **four)
    said = asked("b", "secure+private", **four)
    assert "began as dp-sgd, and does not go on as secure+private" in said
    assert "not 14.0" in asked("b", "dp-sgd", **eight)
    (tmp_path / "north.budgets.json").write_text("[")
    assert "north.budgets.json' cannot be read" in asked("c", "secure+dp-sgd", **four)


@pytest.fixture
def ask(tmp_path):
    """Requests to one site in a run of dp-sgd whose budget lasts for six epochs."""
    pytest.importorskip("dp_accounting")
    site = Site("north", "digits", tmp_path)
    spec = spec_for("dp-sgd", rounds=100, **{"method.noise": 2.0, "method.epsilon": 6.0})
    header = {"experiment": EXPERIMENT, "client": 0, "spec": json.dumps(_public(spec))}
    federation = spec.config.federation(spec.method)
    payload = {"model": federation.initial}

    def request(kind, round, noise=2.0, **more):
        body = {"payload": {**payload, "samples": {"noise": torch.tensor(noise)}}, **more}
        content = messages.write({**header, "kind": kind, "round": round}, body)
        request.answer = site.answer(content)
        return messages.read(request.answer)

    return request


def rounds_until_refused(ask, first=0):
    for round in range(first, first + 20):
        said = ask("train", round).header
        if "error" in said:
            assert "the budget epsilon = 6 is spent" in said["error"]
            return round
    return None


def test_a_round_of_dp_sgd_that_is_asked_for_again_gives_the_same_bytes(ask):
    """New noise on the same samples would have to be counted again."""
    first, answer = ask("train", 0), ask.answer
    again = ask("train", 0)
    assert first.header["epsilon"] == again.header["epsilon"] > 0
    assert ask.answer == answer  # whole, so that both have the same hash in the site's log
    ask("train", 1)
    assert "round 1 is over" in ask("train", 0).header["error"]


def test_no_server_can_set_back_what_a_site_has_spent(ask):
    """Neither by a state of its own, nor by calling the site a newcomer."""
    state = {"samples": {"noise": 100.0, "steps": -1000}}
    assert ask("train", 0, client_state=state).header["epsilon"] > 1
    for round in (1, 2):
        ask("onboard_state", round)
        ask("train", round)
    assert rounds_until_refused(ask, 3) == 6


def test_noise_that_is_none_is_refused_by_the_methods_themselves(ask, tmp_path):
    """Whatever the policy says; a spent budget is refused before any training."""
    for noise in (-100.0, 0.0, math.nan, math.inf):
        assert (
            "dp-sgd needs noise, a finite number above 0" in ask("train", 0, noise).header["error"]
        )
    assert "budget epsilon = 6 is spent" in ask("train", 0, 0.1).header["error"]
    site = Site("south", "digits", tmp_path)
    spec = spec_for("private", **{"method.noise_by": "clients"})
    header = {"experiment": EXPERIMENT, "client": 0, "spec": json.dumps(_public(spec))}
    for noise in (-1.0, 0.0, math.nan, math.inf):
        rule = {"share": torch.tensor(noise), "clip": torch.tensor(1.0)}
        payload = {"privacy": rule, "spent": {"rounds": torch.tensor(1)}}
        content = messages.write({**header, "kind": "train", "round": 0}, {"payload": payload})
        said = messages.read(site.answer(content)).header["error"]
        assert "private uploads nothing with a noise of" in said
