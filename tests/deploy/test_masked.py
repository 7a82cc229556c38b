"""Secure aggregation across sites: equal to the simulation, and drop-outs at every stage."""

import itertools
import multiprocessing
import os

import pytest
import torch

from fedhelix.components.secure_sum import KEY, SIGNATURE, sum_words
from fedhelix.core.errors import EngineFailure
from fedhelix.core.tree import payload_bytes
from fedhelix.deploy import messages, submit, transport
from fedhelix.deploy import site as site_module
from fedhelix.deploy.site import Site
from fedhelix.deploy.site_state import SiteState
from fedhelix.report.headline import warnings_of_page
from fedhelix.report.results import read
from fedhelix.runs.spec import make_spec
from fedhelix.store import RunFolder
from helpers import close, same
from in_process import EXPERIMENT, InProcessDeployment

STAGES = ["masking_keys", "masking_shares", "train", "masking_agree", "masking_reveal"]


def spec_for(method="secure", sites=4, rounds=2, **more):
    settings = {
        "clients": sites,
        "cohort": sites,
        "rounds": rounds,
        "model": "linear",
        "epochs": 1,
        "kernels": "onednn",
    }
    return make_spec(method, {"data": "digits", **settings, **more})


def silenced(deployment, kind, who, round=0):
    """Sites that answer a kind of request of a round no more."""
    for (node, before), site in zip(
        list(deployment.grid.answers.items()), deployment.sites, strict=True
    ):
        if site.name in who:
            deployment.grid.answers[node] = lambda content, honest=before: (
                RuntimeError("killed")
                if (head := messages.read(content).header).get("kind") == kind
                and head["round"] == round
                else honest(content)
            )
    return deployment


@pytest.mark.parametrize(("method", "rounds"), [("secure", 2), ("secure@word_bits=8", 1)])
def test_sites_and_simulation_agree_to_the_bit(tmp_path, method, rounds):
    spec = spec_for(method, rounds=rounds)
    federation = InProcessDeployment(tmp_path, 4).federation(spec)
    run = federation.fit(rounds, quiet=True)
    assert federation.engine.exchanged == run.records[-1]["other_bytes"] > 0
    simulated = spec.config.federation(spec.method).fit(rounds, quiet=True)
    assert same(run.state.server, simulated.state.server)
    assert run.records[-1]["other_bytes"] == simulated.records[-1]["other_bytes"]


@pytest.mark.parametrize("kind", STAGES)
def test_a_site_that_dies_at_any_stage_leaves_the_sum_of_the_others(tmp_path, kind):
    spec = spec_for(rounds=2)
    deployment = silenced(InProcessDeployment(tmp_path / kind, 4), kind, {"site-1"})
    run = deployment.fit(spec)
    counted = kind in ("masking_agree", "masking_reveal")  # its upload was there already
    assert set(run.records[0]["missing"]) == (set() if counted else {"1"})
    assert run.records[1]["missing"] == {}
    plain = InProcessDeployment(tmp_path / "plain", 4)
    if not counted:
        plain = silenced(plain, "train", {"site-1"})
    expected = plain.fit(spec_for("fedavg", rounds=2))
    assert close(run.state.server["model"], expected.state.server["model"], 1e-5)


def weighed(deployment, round):
    """Bytes of keys and shares that pass in a round, one number per message."""
    sizes = []
    for node, before in list(deployment.grid.answers.items()):

        def spy(content, honest=before):
            answer, (header, body) = honest(content), messages.read(content)
            if header["kind"] in STAGES and header["round"] == round:
                trees = [body.get(part, {}) for part in ("keys", "shares", "agreed")]
                if header["kind"] != "train" and isinstance(answer, bytes):
                    trees.append(messages.read(answer).body)
                sizes.append(sum(map(payload_bytes, trees)))
            return answer

        deployment.grid.answers[node] = spy
    return sizes


@pytest.mark.parametrize("kind", STAGES)
def test_below_the_threshold_a_round_changes_nothing_and_the_next_one_does(tmp_path, kind):
    spec = spec_for(rounds=2)
    deployment = silenced(InProcessDeployment(tmp_path, 4), kind, {"site-1", "site-2"}, round=1)
    passed = weighed(deployment, round=1)
    records, states = zip(*deployment.federation(spec).run_rounds(3), strict=True)
    assert same(states[0].server, states[1].server)
    assert not same(states[1].server, states[2].server)
    assert records[1]["other_bytes"] == sum(passed) >= 2 * (2 * KEY + SIGNATURE)


def test_nobody_trains_and_spends_budget_where_too_few_share_keys(tmp_path, monkeypatch):
    """Three of four have sent keys and fall silent; a server that asks all the same is refused."""
    pytest.importorskip("dp_accounting")
    spec = spec_for("secure+dp-sgd", rounds=3, **{"method.noise": 1.0, "method.epsilon": 1e6})
    others = {"site-1", "site-2", "site-3"}
    deployment = silenced(InProcessDeployment(tmp_path, 4), "masking_shares", others, round=1)
    lone, asked = deployment.sites[0], []
    honest = deployment.grid.answers[101]

    def spy(content):
        asked.append((messages.read(content), content))
        return honest(content)

    deployment.grid.answers[101] = spy
    records = deployment.fit(spec).records
    trained = [one.header["round"] for one, _ in asked if one.header["kind"] == "train"]
    assert trained == [0, 2] and set(records[1]["missing"]) == set("0123")
    why = "took part in vain: 3 clients are needed for masks, and 1 sent shares"
    assert records[1]["missing"]["0"] == f"site-0 {why}"
    monkeypatch.setattr(site_module, "run_client", lambda *_: pytest.fail("has trained"))
    header, body = next(one for one, _ in asked[::-1] if one.header["kind"] == "train")
    keys = next(text for one, text in asked[::-1] if one.header["kind"] == "masking_keys")
    header = {**header, "round": 3, "after": 2}
    lone.answer(messages.write({**messages.read(keys).header, "round": 3, "after": 2}))
    said = messages.read(lone.answer(messages.write(header, {**body, "shares": {}}))).header
    assert "secure aggregation needs 2 clients that share keys, and 1 are there" in said["error"]


def test_masked_uploads_count_though_their_sum_cannot_be_unmasked(tmp_path):
    """A site is killed after the uploads have come: 650 words of 4 bytes each, for nothing."""
    deployment = InProcessDeployment(tmp_path, 2)
    for round in (1, 2):
        silenced(deployment, "masking_agree", {"site-1"}, round=round)
    run = deployment.fit(spec_for(sites=2, rounds=3), out=tmp_path / "run")
    assert [record["uplink_bytes"] for record in run.records] == [2 * 650 * 4] * 3
    assert [record["uplink_values"] for record in run.records] == [2 * 650] * 3
    assert run.summary["uplink_bytes"] == 3 * 2 * 650 * 4 and run.summary["idle_since"] == 2
    assert run.records[1]["missing"] == {
        "0": "site-0 answered: 2 clients must have been told the same about who has answered, and "
        "1 were; so the sum could not be unmasked",
        "1": "site-1 could not answer: killed; so the sum could not be unmasked",
    }
    said = list(warnings_of_page(read(RunFolder.open(tmp_path / "run"))))
    assert len(said) == 1 and ": no upload that arrived counted in 2 rounds (2 × " in said[0]
    assert "killed; so the sum could not be unmasked" in said[0]


def test_a_run_of_which_no_sum_could_be_unmasked_has_uploads_and_no_result(tmp_path):
    deployment = InProcessDeployment(tmp_path, 2, deadline=0.5)
    spec, honest = spec_for(sites=2, rounds=1), deployment.sites[1].answer
    deployment.grid.answers[102] = lambda content: (
        None if messages.read(content).header["kind"] == "masking_reveal" else honest(content)
    )
    with pytest.warns(UserWarning, match="the sum could not be unmasked: 2 shares are"):
        deployment.fit(spec, out=tmp_path / "run", config=spec.as_dict() | {"deployment": {}})
    with pytest.raises(
        EngineFailure, match=r"^no upload counted in this run: site-1 did not answer"
    ):
        submit.follow(None, RunFolder.open(tmp_path / "run"), quiet=True)


def test_uploads_of_a_round_with_too_few_of_them_count_too(tmp_path):
    deployment = InProcessDeployment(tmp_path, 3, minimum=3)
    silenced(deployment, "train", {"site-1"}, round=1)
    run = deployment.fit(spec_for("fedavg", sites=3))
    assert [record["uplink_bytes"] for record in run.records] == [3 * 2600, 2 * 2600]
    assert len(run.records[1]["missing"]) == 3


@pytest.mark.parametrize(("sites", "who"), [(4, {0, 1, 2, 3}), (4, {1, 2}), (2, {1})])
@pytest.mark.parametrize("kind", ["masking_keys", "train"])
def test_a_run_stops_where_too_many_refuse_from_the_start(tmp_path, kind, sites, who):
    """Some who sent keys and shares may refuse to train; fewer than the masks need are too few."""
    deployment = InProcessDeployment(tmp_path, sites)
    silenced(deployment, kind, {f"site-{n}" for n in who})
    first = f"site-{min(who)} could not answer: killed; continue the run when that is fixed"
    with pytest.raises(EngineFailure, match=first):
        deployment.fit(spec_for(sites=sites))


def test_a_site_whose_update_is_not_finite_says_so_and_drops_out(tmp_path):
    with pytest.raises(EngineFailure, match=r"site-0 .*the client has nothing finite to send"):
        InProcessDeployment(tmp_path, 4).fit(spec_for(lr=3e38, epochs=2))


def test_the_server_never_sees_an_upload_and_is_told_nothing_twice(tmp_path):
    spec, seen, asked = spec_for(rounds=1), {}, {}
    deployment = InProcessDeployment(tmp_path, 4)
    for node, site in zip(list(deployment.grid.answers), deployment.sites, strict=True):

        def spy(content, honest=site.answer, name=site.name):
            answer = honest(content)
            kind = messages.read(content).header["kind"]
            asked[kind, name] = content
            if kind == "train":
                seen[name] = messages.read(answer).body["words"]
            return answer

        deployment.grid.answers[node] = spy
    deployment.fit(spec)
    for words in seen.values():  # a plain upload has small numbers only: all changes are below 1
        assert (words.long().abs() > 1 << 28).float().mean() > 0.7
    site = deployment.sites[0]
    again = site.answer(asked["train", "site-0"])
    assert torch.equal(messages.read(again).body["words"], seen["site-0"])
    for kind, refused in (
        ("masking_agree", "round 1 was masked for other clients already"),
        ("masking_reveal", "3 clients must have been told the same"),
    ):
        header, body = messages.read(asked[kind, "site-0"])
        fewer = messages.write(header, {**body, "survivors": {"clients": torch.tensor([0, 1, 2])}})
        assert refused in messages.read(site.answer(fewer)).header["error"]
    header, body = messages.read(asked["train", "site-0"])
    shares = {key: value for key, value in body["shares"].items() if key != "3"}
    said = messages.read(site.answer(messages.write(header, {**body, "shares": shares})))
    assert "round 1 was masked for other clients already" in said.header["error"]


def test_a_site_that_was_started_again_has_lost_its_keys(tmp_path):
    deployment = InProcessDeployment(tmp_path, 4)
    honest = deployment.sites[2].answer

    def restarted(content):
        if messages.read(content).header["kind"] == "train":
            deployment.sites[2]._masker.__init__()
        return honest(content)

    deployment.grid.answers[103] = restarted
    run = deployment.fit(spec_for(rounds=1))
    assert "no keys for round 1: it was started again" in run.records[0]["missing"]["2"]
    assert len(run.records[0]["missing"]) == 1


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        ("masking_keys", {"1": torch.zeros(3, dtype=torch.uint8)}, "not 128 bytes long"),
        ("masking_shares", {"x": torch.zeros(148, dtype=torch.uint8)}, "no keys or shares"),
        ("train", {"words": torch.zeros(7, dtype=torch.int32)}, "another shape or type"),
        ("train", {"words": torch.zeros(7)}, "another shape or type"),
        ("train", {"words": torch.zeros(650, dtype=torch.int8)}, "another shape or type"),
    ],
)
def test_nonsense_of_a_site_makes_it_drop_out(tmp_path, kind, body, said):
    deployment = InProcessDeployment(tmp_path, 4)
    honest = deployment.sites[1].answer

    def forged(content):
        answer = honest(content)
        header = messages.read(answer).header
        return messages.write(header, body) if header["kind"] == kind else answer

    deployment.grid.answers[102] = forged
    run = deployment.fit(spec_for(rounds=1))
    assert said in run.records[0]["missing"]["1"]
    assert len(run.records[0]["missing"]) == 1


# Which of three processes is killed in which round and exchange: when the request comes, or when it
# has done the work and its answer is lost.
KILLS = {
    (0, "masking_keys"): ("site-1", "before"),
    (0, "masking_shares"): ("site-4", "before"),
    (0, "train"): ("site-7", "before"),
    (1, "masking_keys"): ("site-1", "after"),
    (1, "masking_shares"): ("site-4", "after"),
    (1, "train"): ("site-7", "after"),
    (2, "masking_agree"): ("site-1", "before"),
    (2, "masking_reveal"): ("site-7", "before"),
    (3, "masking_agree"): ("site-4", "after"),
    (3, "masking_reveal"): ("site-1", "after"),
}


class SiteInAProcess:
    """A site in a process of its own, which starts at once and may be killed at any moment."""

    def __init__(self, name, folder):
        self.name, self.folder = name, folder
        self.start()

    def start(self):
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=self.serve, args=(theirs,), daemon=True)
        self.process.start()

    def serve(self, pipe):
        site = Site(self.name, "digits", self.folder)
        while True:
            pipe.send_bytes(site.answer(pipe.recv_bytes()))

    def stop(self):
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def ask(self, content):
        self.pipe.send_bytes(content)
        return self.pipe.recv_bytes()

    def answer(self, content):
        """SIGKILL ends the process where KILLS says so, and a new one gets the request again."""
        header = messages.read(content).header
        who, moment = KILLS.get((header.get("round"), header["kind"]), ("", ""))
        if who == self.name:
            if moment == "after":
                self.ask(content)
            self.stop()
            self.start()
        return self.ask(content)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_process_that_is_killed_at_any_stage_drops_out_of_its_round_only(tmp_path):
    """Of ten clients three are processes. Who has lost its keys drops out, at the threshold of
    seven others too; whose upload is there stays in the sum, which is exact in every round.
    """
    deployment = silenced(InProcessDeployment(tmp_path, 10), "train", {"site-9"})
    kept = tmp_path / "kept"
    processes = [SiteInAProcess(f"site-{i}", kept) for i in (1, 4, 7)]
    deployment.grid.answers |= {
        101 + i: process.answer for i, process in zip((1, 4, 7), processes, strict=True)
    }
    federation = deployment.federation(spec_for(sites=10, rounds=5))
    engine, sums = federation.engine, []
    honest = engine.results
    engine.results = lambda tasks: sums.append(honest(tasks)) or sums[-1]
    servers, lost = [], []
    try:
        for round, (record, state) in enumerate(federation.run_rounds(5)):
            uploads = [result.upload["words"] for result in sums[-1].values()]
            states = [SiteState(kept / EXPERIMENT / f"site-{i}") for i in sums[-1]]
            plain = [known.sent(round)["upload"]["words"] for known in states]
            assert torch.equal(sum_words(uploads), sum_words(plain))
            lost.append(record["missing"])
            servers.append(state.server["model"])
    finally:
        for process in processes:
            process.stop()
    assert [set(one) for one in lost] == [{"4", "7", "9"}, {"4", "7"}, set(), set(), set()]
    assert all("it was started again since" in one[i] for one in lost[:2] for i in ("4", "7"))
    assert not any(same(one, two) for one, two in itertools.pairwise(servers))


def test_a_site_that_comes_in_the_middle_of_a_round_does_not_stop_it(tmp_path, monkeypatch):
    """It is asked who it is, which is no request of the round."""
    monkeypatch.setattr(transport, "REFRESH_SECONDS", 0.0)
    deployment = InProcessDeployment(tmp_path, 4)
    (first, honest), *_, (node, late) = deployment.grid.answers.items()
    del deployment.grid.answers[node]

    def calls_the_late_one(content):
        if messages.read(content).header["kind"] == "masking_keys":
            deployment.grid.answers.setdefault(node, late)
        return honest(content)

    deployment.grid.answers[first] = calls_the_late_one
    run = deployment.fit(spec_for(sites=3, rounds=1))
    assert node in deployment.grid.answers and run.records[0]["missing"] == {}
