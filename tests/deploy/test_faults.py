"""Failures are data: the round goes on, and its record says who was missing and why."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Error
from flwr.common.constant import ErrorCode

from fedhelix.core.errors import EngineFailure, UserError
from fedhelix.deploy import messages, notices, submit, transport
from fedhelix.deploy.readiness import wait_for_count
from fedhelix.deploy.server import remember_spent
from fedhelix.deploy.site import Site
from fedhelix.deploy.site_policy import SitePolicy
from fedhelix.deploy.transport import Transport
from fedhelix.engines.serial import Serial
from fedhelix.runs.spec import make_spec
from fedhelix.store import RunFolder
from helpers import same
from in_process import GONE, InProcessDeployment, Late

SMALL = {
    "clients": 3,
    "rounds": 3,
    "epochs": 1,
    "batch_size": 256,
    "kernels": "onednn",
    "model": "linear",
}


def spec_for(spec="fedavg", **more):
    return make_spec(spec, {**SMALL, **more})


def disturb(deployment, trouble, site=1, kind="train", rounds=(1,)):
    """Let a site mishandle some requests; `trouble` gets the request and the honest handler."""
    node = list(deployment.grid.answers)[site]
    honest = deployment.grid.answers[node]

    def answer(content):
        header = messages.read(content).header
        if header["kind"] == kind and header.get("round") in rounds:
            return trouble(content, honest)
        return honest(content)

    deployment.grid.answers[node] = answer
    return deployment


def forged(change_header=None, change_body=None):
    """An answer that differs from the honest one."""

    def trouble(content, honest):
        header, body = messages.read(honest(content))
        changed = change_body(body) if change_body else body
        return messages.write({**header, **(change_header or {})}, changed)

    return trouble


def replaced(value):
    return lambda body: {"model": {**body["model"], "fc.weight": value}}


HARMS = {
    "did not answer within 0.5 s": lambda content, honest: None,
    "out of memory": lambda content, honest: RuntimeError("out of memory"),
    "is no message": lambda content, honest: b"garbage",
    "bytes, and": lambda content, honest: honest(content) + bytes(4 << 20),
    "is about round 7 instead of 1": forged({"round": 7}),
    "is about site 'site-0' instead of 'site-1'": forged({"site": "site-0"}),
    "is about client 0 instead of 1": forged({"client": 0}),
    "is about experiment 'another' instead of '0123": forged({"experiment": "another"}),
    "has -3 for samples": forged({"samples": -3}),
    "has 'many' for samples": forged({"samples": "many"}),
    "holds no tensor for 'fc.weight'": forged(change_body=replaced(None)),
    "something else than a model": forged(change_body=lambda body: {"model": 3.0}),
    "torch.float64 for 'fc.weight'": forged(
        change_body=replaced(torch.zeros(10, 64, dtype=torch.float64))
    ),
    "answered: division by zero": forged({"error": "division by zero"}),
}


@pytest.mark.parametrize("said", HARMS)
def test_a_bad_answer_costs_its_site_one_round(said, tmp_path):
    deployment = disturb(InProcessDeployment(tmp_path, 3, deadline=0.5), HARMS[said])
    run = deployment.fit(spec_for())
    assert [sorted(record["missing"]) for record in run.records] == [[], ["1"], []]
    assert said in run.records[1]["missing"]["1"] and run.records[1]["missing"]["1"].startswith(
        "site-1 "
    )
    # The round was FedAvg of the two others.
    assert run.records[1]["uplink_bytes"] == 2 * 2600


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.full((10, 64), float("nan")), "not finite"),
        (torch.zeros(10, 65), "has shape (10, 65) for 'fc.weight'"),
    ],
)
def test_bad_values_are_refused_like_in_a_simulation(value, said, tmp_path):
    run = disturb(InProcessDeployment(tmp_path, 3), forged(change_body=replaced(value))).fit(
        spec_for()
    )
    assert said in run.records[1]["refused"]["1"]
    assert all(bool(entry.isfinite().all()) for entry in run.state.server["model"].values())


def test_an_upload_that_lacks_what_all_others_have_is_refused(tmp_path):
    deployment = disturb(
        InProcessDeployment(tmp_path, 3), forged(change_body=lambda body: {"model": body["model"]})
    )
    run = deployment.fit(spec_for("scaffold"))
    assert "lacks 'control'" in run.records[1]["missing"]["1"]

    def cut(body):
        return {**body, "control": {name: value[:1] for name, value in body["control"].items()}}

    deployment = disturb(InProcessDeployment(tmp_path / "again", 3), forged(change_body=cut))
    assert (
        "another shape or type for 'control/"
        in deployment.fit(spec_for("scaffold")).records[1]["missing"]["1"]
    )


def test_a_late_answer_is_dropped_and_recorded(tmp_path):
    deployment = disturb(
        InProcessDeployment(tmp_path, 3, deadline=0.4),
        lambda content, honest: Late(honest(content)),
    )
    records = []
    for record, _ in deployment.federation(spec_for()).run_rounds(3):
        records.append(record)
        deployment.grid.deliver()
    assert "did not answer within 0.4 s" in records[1]["missing"]["1"]
    assert records[2]["troubles"] == {"site-1": "answered the request of round 2 too late"}
    assert records[2]["missing"] == {}


def test_what_came_too_late_or_stayed_masked_counts_in_the_ledger(tmp_path):
    """The server has seen it, and the sites have counted it."""
    pytest.importorskip("dp_accounting")
    deployment = InProcessDeployment(tmp_path / "late", 3, deadline=0.4)
    disturb(deployment, lambda content, honest: Late(honest(content)), rounds=(1, 2))
    federation, ledgers = deployment.federation(spec_for("dp-sgd")), []
    folder = RunFolder.create(tmp_path / "run", {})
    for record, _ in federation.run_rounds(3):
        ledgers.append(record["metadata"]["epsilon"])
        folder.append(record)
        deployment.grid.deliver()
    once, twice, thrice = (ledger["0"] for ledger in ledgers)
    assert once < twice < thrice
    assert [ledger["1"] for ledger in ledgers] == pytest.approx([once, once, twice])
    restarted = Transport(deployment.grid, deployment.policy)
    remember_spent(restarted, folder, federation.engine.registry)
    assert restarted.spending.epsilon == {
        f"site-{client}": spent for client, spent in ledgers[-1].items()
    }
    remember_spent(restarted, RunFolder.create(tmp_path / "new", {}), federation.engine.registry)
    assert restarted.spending.epsilon == {}

    deployment = InProcessDeployment(tmp_path / "masked", 3)
    for site in (1, 2):
        disturb(deployment, lambda *_: EngineFailure("killed"), site, "masking_reveal")
    records = deployment.fit(spec_for("secure+dp-sgd")).records
    assert "took part in vain" in records[1]["missing"]["0"]
    spent = [record["metadata"]["epsilon"] for record in records]
    assert spent[0]["0"] < spent[1]["0"] < spent[2]["0"] and spent[1]["0"] == spent[1]["2"]


class WithoutClient1InRound1(Serial):
    """A simulation in which one client drops out."""

    def run_clients(self, tasks):
        return super().run_clients([t for t in tasks if (t.round, t.client) != (1, 1)])


@pytest.mark.parametrize("spec", ["scaffold", "compact+fedavg", "ditto"])
def test_a_site_whose_answer_came_too_late_goes_on_as_if_it_had_not_worked(spec, tmp_path):
    """Else SCAFFOLD's controls and the error feedback of `compact` lose what never arrived."""
    plan = spec_for(spec, rounds=4)
    deployment = InProcessDeployment(tmp_path, 3, deadline=0.4, common=True)
    run = disturb(deployment, lambda content, honest: Late(honest(content))).fit(plan)
    right = plan.config.federation(plan.method, engine=WithoutClient1InRound1).fit(4, quiet=True)
    assert "1" in run.records[1]["missing"] and same(run.state.server, right.state.server)
    scores = [one.records[-1]["personal_accuracy"] for one in (run, right)]
    assert scores[0] == pytest.approx(scores[1])


def test_a_second_answer_to_one_request_is_ignored(tmp_path):
    deployment = InProcessDeployment(tmp_path, 3)
    pull = deployment.grid.pull_messages
    deployment.grid.pull_messages = lambda keys: [
        message for message in pull(keys) for _ in range(2)
    ]
    twice = deployment.fit(spec_for())
    assert same(
        twice.state.server, InProcessDeployment(tmp_path / "once", 3).fit(spec_for()).state.server
    )
    assert set(twice.records[0]["troubles"].values()) == {"answered twice"}


def test_below_the_minimum_a_round_changes_nothing(tmp_path):
    deployment = InProcessDeployment(tmp_path, 3, deadline=0.3, minimum=2)
    for site in (1, 2):
        disturb(deployment, lambda content, honest: None, site)
    fed = deployment.federation(spec_for())
    states = [state.server for _, state in fed.run_rounds(3)]
    assert same(states[0], states[1]) and not same(states[1], states[2])


REFUSED = {
    "answered: no": forged({"error": "no"}),
    "is no message": lambda content, honest: b"garbage",
}


@pytest.mark.parametrize("said", REFUSED)
def test_a_run_stops_when_all_sites_refuse_from_the_start(said, tmp_path):
    deployment = InProcessDeployment(tmp_path, 2)
    for site in (0, 1):
        disturb(deployment, REFUSED[said], site, rounds=(0, 1, 2))
    with pytest.raises(
        EngineFailure, match=f"site-0 .*{said}.*; continue the run when that is fixed"
    ):
        deployment.fit(spec_for(clients=2))


def closed(content, honest):
    return messages.write({"error": "the site's hours are 00:00-00:01.", "kind": "describe"})


@pytest.mark.usefixtures("soon")
def test_a_run_stops_with_a_sites_reason_although_another_did_not_even_join(tmp_path):
    deployment = InProcessDeployment(tmp_path, 3)
    deployment.grid.names = {101: "site-0", 102: "site-1", 103: "site-2"}
    for site in (0, 1):
        disturb(deployment, REFUSED["answered: no"], site, rounds=(0, 1, 2))
    disturb(deployment, closed, 2, "describe", rounds=(None,))
    said = (
        "site-0 answered: no; site-2 answered: the site's hours are 00:00-00:01; continue the run"
    )
    with pytest.raises(EngineFailure, match=said):
        deployment.fit(spec_for())


@pytest.mark.usefixtures("soon")
def test_a_free_place_names_the_site_that_refuses_before_it_has_a_number(tmp_path):
    deployment = InProcessDeployment(tmp_path, 3, begin=2)
    deployment.grid.names = {101: "site-0", 102: "site-1", 103: "ulm"}
    disturb(deployment, closed, 2, "describe", rounds=(None,))
    run = deployment.fit(spec_for(rounds=2))
    why = "no site has taken this place yet; ulm answered: the site's hours are 00:00-00:01"
    assert [record["missing"] for record in run.records] == [{"2": why}] * 2


@pytest.mark.usefixtures("soon")
def test_a_site_outside_its_hours_is_asked_once_and_again_when_they_begin(tmp_path, monkeypatch):
    monkeypatch.setattr(SitePolicy, "_open_at", lambda policy, now: policy.hours is None)
    monkeypatch.setattr(SitePolicy, "opens_in", lambda policy, now: 2.0 if policy.hours else 0.0)
    deployment, asked = InProcessDeployment(tmp_path, 3, begin=2), []
    deployment.sites[2].policy = SitePolicy(hours="20:00-06:00")

    def noted(content, honest):
        asked.append(content)
        return honest(content)

    disturb(deployment, noted, 2, "describe", rounds=(None,))
    server = deployment.federation(spec_for()).engine.transport
    assert not server.wait(lambda: len(asked) > 1, 0.3, str)
    deployment.sites[2].policy = SitePolicy()
    assert server.wait(lambda: "site-2" in server.connected, 60.0, str) and len(asked) == 2


@pytest.mark.usefixtures("soon")
def test_a_site_that_refuses_for_another_reason_is_asked_seldom(tmp_path):
    deployment, asked = InProcessDeployment(tmp_path, 3, begin=2), []

    def refused(content, honest):
        asked.append(content)
        return closed(content, honest)

    disturb(deployment, refused, 2, "describe", rounds=(None,))
    server = deployment.federation(spec_for()).engine.transport
    assert not server.wait(lambda: len(asked) > 1, 0.5, str)
    server._ask_again.clear()  # a minute later
    assert server.wait(lambda: len(asked) > 1, 5.0, str)


@pytest.mark.usefixtures("soon")
def test_a_site_that_does_not_join_is_called_by_the_name_of_its_key(tmp_path):
    deployment = InProcessDeployment(tmp_path, 2, patience=0.3, minimum=2)
    deployment.grid.names = {101: "site-0", 102: "ulm"}
    disturb(deployment, closed, 1, "describe", rounds=(None,))
    said = r"\(connected: site-0; ulm answered: the site's hours are 00:00-00:01\); start what is"
    with pytest.raises(EngineFailure, match=said):
        deployment.federation(spec_for(clients=2))


def test_a_run_without_any_work_names_a_sites_reason_before_a_free_place():
    record = {"participants": [0, 1], "refused": {}}
    free, real = "no site has taken this place yet", "site-0 did not answer within 1 s"
    records = [{**record, "missing": {"1": free, "0": free}}]
    with pytest.raises(EngineFailure, match=f"in this run: {free}"):
        notices.check_any_work(records, Path("run"))
    records.append({**record, "missing": {"1": free, "0": real}})
    with pytest.raises(EngineFailure, match=f"in this run: {real}"):
        notices.check_any_work(records, Path("run"))
    records[0]["missing"]["1"] = f"{free}; c has samples"  # which `troubles` says, too
    records[0]["troubles"] = {"c": "has samples with shape [20], but 'a' has [30]; check its data."}
    with pytest.raises(EngineFailure) as said:
        notices.check_any_work(records, Path("run"))
    shape = "c has samples with shape [20], but 'a' has [30]; check its data"
    how = "go on with `fedhelix deploy resume run --set rounds=4` when that is fixed."
    assert str(said.value) == f"no site did any work in this run: {real}; {shape}; {how}"
    records[1]["troubles"] = {f"d{n}": "answered twice" for n in range(4)}
    with pytest.raises(EngineFailure, match=r"d1 answered twice; and 2 more; go on"):
        notices.check_any_work(records, Path("run"))


def test_a_run_stops_when_too_few_sites_are_willing(tmp_path):
    deployment = disturb(
        InProcessDeployment(tmp_path, 3, minimum=3), REFUSED["answered: no"], 2, rounds=(0,)
    )
    with pytest.raises(EngineFailure, match="site-2 answered: no"):
        deployment.fit(spec_for())


@pytest.mark.parametrize("spec", ["fedavg", "secure"])
def test_a_run_that_goes_on_stops_when_all_sites_refuse_twice_for_the_same_reasons(spec, tmp_path):
    more = {"out": tmp_path / "run"}
    first = InProcessDeployment(tmp_path, 2).fit(spec_for(spec, clients=2, rounds=2), **more)
    assert [record["missing"] for record in first.records] == [{}, {}]
    deployment = InProcessDeployment(tmp_path, 2)
    for site in (0, 1):
        disturb(deployment, REFUSED["answered: no"], site, rounds=range(2, 9))
    with pytest.raises(EngineFailure, match="site-0 answered: no; continue the run when that"):
        deployment.fit(spec_for(spec, clients=2, rounds=9), resume=True, **more)
    records = RunFolder.open(tmp_path / "run").records()
    assert [len(record["missing"]) for record in records] == [0, 0, 2]  # the fourth is not over
    disturb(deployment := InProcessDeployment(tmp_path, 2), REFUSED["answered: no"], 0, rounds=(3,))
    disturb(deployment, REFUSED["answered: no"], 1, rounds=(3,))
    run = deployment.fit(spec_for(spec, clients=2, rounds=6), resume=True, **more)
    assert [len(record["missing"]) for record in run.records] == [0, 0, 2, 2, 0, 0]


def test_sites_that_are_silent_or_refuse_later_do_not_stop_a_run(tmp_path):
    deployment = InProcessDeployment(tmp_path, 2, deadline=0.3)
    disturb(deployment, lambda content, honest: None, 0, rounds=(0,))
    disturb(deployment, REFUSED["answered: no"], 0, rounds=(2,))
    disturb(deployment, REFUSED["answered: no"], 1, rounds=(0, 2))
    run = deployment.fit(spec_for(clients=2))
    assert [sorted(record["missing"]) for record in run.records] == [["0", "1"], [], ["0", "1"]]


@pytest.mark.filterwarnings("ignore:nothing was learned")
def test_a_run_without_any_work_is_no_success(tmp_path):
    spec, silent = spec_for(clients=2, rounds=1), InProcessDeployment(tmp_path, 2, deadline=0.2)
    for site in (0, 1):
        disturb(silent, lambda content, honest: None, site, rounds=(0,))
    silent.fit(spec, out=tmp_path / "run", config=spec.as_dict() | {"deployment": {}})
    with pytest.raises(
        EngineFailure,
        match=r"no site did any work in this run: site-\d did not answer within 0\.2 s",
    ):
        submit.follow(None, RunFolder.open(tmp_path / "run"), quiet=True)
    # The sites were evaluated all the same, and keep no model that nobody has trained.
    assert not list(tmp_path.rglob("model.safetensors"))
    InProcessDeployment(tmp_path / "other", 2).fit(spec)
    assert len(list((tmp_path / "other").rglob("model.safetensors"))) == 2


def test_more_rounds_than_budgets_allow_end_with_a_warning(tmp_path):
    spec, deployment = spec_for(clients=2, rounds=1), InProcessDeployment(tmp_path, 2)
    deployment.fit(spec, out=tmp_path / "run", config=spec.as_dict() | {"deployment": {}})
    folder = RunFolder.open(tmp_path / "run")
    folder.change(rounds=3)  # the server puts it back to where the run ends
    with pytest.warns(UserWarning, match="ends after round 1 of 3: the privacy budget is"):
        submit.follow(None, folder, quiet=True)


def test_a_complete_run_whose_checkpoint_was_changed_is_not_resumed(tmp_path):
    spec, deployment = spec_for(clients=2, rounds=1), InProcessDeployment(tmp_path, 2)
    deployment.fit(spec, out=tmp_path / "run", config=spec.as_dict() | {"deployment": {}})
    folder = RunFolder.open(tmp_path / "run")
    assert submit.follow(None, folder, quiet=True) == folder.summary
    (state,) = (tmp_path / "run" / "checkpoint").glob("server-*")
    state.write_bytes(state.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match=f"{state.name}' of the checkpoint is damaged"):
        submit.follow(None, folder, quiet=True)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("minimum=3", "3 answers never come from a cohort of 2"),
        ("begin=4", "cannot begin with 4 sites"),
    ],
)
def test_a_policy_that_no_round_could_meet_is_refused(setting, said, tmp_path):
    with pytest.raises(UserError, match=said):
        submit.create(spec_for(cohort=2), tmp_path / "run", [setting])


def test_a_run_says_which_sites_are_there_while_it_waits_for_others(tmp_path):
    config = submit.create(spec_for(cohort=2), tmp_path / "all").config
    names = [f"site-{number}" for number in range(config["clients"])]
    assert submit.awaited(names, config) is None
    words = submit.awaited(names[:1], config)
    assert words.startswith(f"1 of {len(names)} sites are connected (site-0); the run begins once")
    assert "stops after 600 s" in words and "--clients" in words and "--term begin=N" in words
    few = submit.create(spec_for(cohort=2), tmp_path / "few", ["begin=1"]).config
    assert submit.awaited(names[:1], few) is None
    assert submit.awaited([], few).startswith("0 of 1 sites are connected; the run")


def test_a_round_is_not_the_best_because_a_site_was_away(tmp_path):
    deployment = InProcessDeployment(tmp_path, 3, deadline=0.5)
    for site, valid in enumerate((0.8, 0.6, 0.1)):
        scored = forged({"valid": valid})
        disturb(deployment, scored, site, kind="evaluate", rounds=range(4))
    disturb(deployment, lambda content, honest: None, 2, kind="evaluate", rounds=(2,))
    run = deployment.fit(spec_for(eval_every=1))
    means = [record["valid_accuracy"] for record in run.records]
    assert means == pytest.approx([0.5, 0.7, 0.5]) and set(run.records[1]["unevaluated"]) == {"2"}
    assert run.records[1]["valid"] == {"0": 0.8, "1": 0.6} and run.summary["best_round"] == 1


def test_with_extra_clients_a_round_ends_when_the_cohort_is_in(tmp_path):
    deployment = InProcessDeployment(tmp_path, 3, deadline=60, extra=1)
    disturb(deployment, lambda content, honest: None, 2, rounds=(0, 1, 2))
    run = deployment.fit(spec_for(cohort=2, eval_every=3))
    assert [record["participants"] for record in run.records] == [[0, 1, 2]] * 3
    assert all("the round had enough answers" in record["missing"]["2"] for record in run.records)
    assert sum(record["seconds"] for record in run.records) < 30  # of a deadline of 60


def test_a_site_that_joins_later_takes_the_place_that_was_left_for_it(tmp_path):
    deployment = InProcessDeployment(tmp_path, 3, begin=2)
    node, newcomer = deployment.grid.answers.popitem()
    fed = deployment.federation(spec_for(rounds=4))
    records = []
    for record, _ in fed.run_rounds(4):
        records.append(record)
        if record["round"] == 2:
            deployment.grid.answers[node] = newcomer
            fed.engine.transport._refreshed = 0
            wait_for_count(fed.engine.transport, 3)
    assert [sorted(record["missing"]) for record in records] == [["2"], ["2"], [], []]
    taken = [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]
    assert [record["participants"] for record in records] == taken
    assert records[0]["missing"]["2"] == "no site has taken this place yet"
    assert list(json.loads((tmp_path / "sites.json").read_text())) == ["site-0", "site-1", "site-2"]
    assert fed.census()["names"] == ["site-0", "site-1", "site-2"]
    assert 0 not in fed.census()["samples"]
    assert "unevaluated" in records[0] and "unevaluated" not in records[3]


def test_reports_call_a_site_that_joins_later_by_its_name(tmp_path):
    deployment = InProcessDeployment(tmp_path, 3, begin=2)
    node, newcomer = deployment.grid.answers.popitem()
    names, fed = [], deployment.federation(spec_for(rounds=3))

    def join(record):
        names.append(RunFolder.open(tmp_path / "run").clients["names"])
        if record["round"] == 1:
            deployment.grid.answers[node] = newcomer
            fed.engine.transport._refreshed = 0
            wait_for_count(fed.engine.transport, 3)

    fed.fit(3, out=tmp_path / "run", quiet=True, watch=join)
    sites = ["site-0", "site-1", "site-2"]
    assert names == [["site-0", "site-1", "2"], sites, sites]


def test_a_run_stops_when_no_site_comes(tmp_path):
    deployment = InProcessDeployment(tmp_path, 2, patience=0.2)
    deployment.grid.answers.clear()
    with pytest.raises(EngineFailure, match=r"waited 0\.2 s for 2 sites"):
        deployment.federation(spec_for(clients=2))


def test_a_site_that_restarts_while_it_works_gets_its_request_again(tmp_path):
    deployment = InProcessDeployment(tmp_path, 3, deadline=20)
    node = list(deployment.grid.answers)[1]

    def dies(content, honest):
        deployment.grid.activated[node] = "2"  # it came back, and has lost the request
        deployment.grid.answers[node] = deployment.sites[1].answer

    disturb(deployment, dies)
    run = deployment.fit(spec_for())
    assert all(record["missing"] == {} for record in run.records)
    assert same(
        run.state.server, InProcessDeployment(tmp_path / "calm", 3).fit(spec_for()).state.server
    )


class Away:
    """A site that signs off when it gets a request, and comes back after some looks at nodes."""

    def __init__(self, deployment, looks=2):
        self.grid, self.looks = deployment.grid, looks
        self.node = list(self.grid.answers)[1]
        self.home, self.get_nodes = self.grid.answers[self.node], self.grid.get_nodes
        self.grid.get_nodes = self.watched

    def leave(self, content, honest):
        self.grid.answers.pop(self.node)
        return GONE

    def watched(self):
        if self.node not in self.grid.answers:
            self.looks -= 1
            if self.looks == 0:
                self.grid.activated[self.node] = "2"
                self.grid.answers[self.node] = self.home
        return self.get_nodes()


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(transport, "REFRESH_SECONDS", 0.05)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_site_that_is_away_for_a_moment_is_waited_for(kind, tmp_path):
    calm = InProcessDeployment(tmp_path / "calm", 3).fit(spec_for("fedper", model="mlp"))
    deployment = InProcessDeployment(tmp_path, 3, deadline=20)
    disturb(deployment, Away(deployment).leave, kind=kind)
    run = deployment.fit(spec_for("fedper", model="mlp"))
    assert same(run.state.server, calm.state.server)
    for record, expected in zip(run.records, calm.records, strict=True):
        assert record["missing"] == {} and record["personal"] == expected["personal"]


@pytest.mark.usefixtures("soon")
def test_a_site_that_is_away_when_a_round_begins_is_waited_for(tmp_path):
    deployment = InProcessDeployment(tmp_path, 3, deadline=20)
    away, fed, records = Away(deployment), deployment.federation(spec_for()), []
    for record, _ in fed.run_rounds(3):
        records.append(record)
        if record["round"] == 1:
            away.leave(b"", None)
            fed.engine.transport._refreshed = 0
    assert all(record["missing"] == {} and "unevaluated" not in record for record in records)


@pytest.mark.usefixtures("soon")
def test_a_site_that_stays_away_is_left_out_after_the_grace_period(tmp_path):
    deployment = InProcessDeployment(tmp_path, 3, deadline=20, grace=0.3)
    disturb(deployment, Away(deployment, looks=10**6).leave)
    run = deployment.fit(spec_for())
    assert [record["missing"] for record in run.records] == [
        {},
        {"1": "site-1 is not connected"},
        {"1": "site-1 is not connected"},
    ]
    first, second, third = (record["downlink_bytes"] for record in run.records)
    assert second == first and 3 * third == 2 * first  # it left when it was asked in round 2


@pytest.mark.usefixtures("soon")
def test_an_answer_that_stays_incomplete_is_refused_the_second_time(tmp_path):
    deployment, asked = InProcessDeployment(tmp_path, 3), []

    def incomplete(content, honest):
        asked.append(content)
        return Error(code=ErrorCode.MESSAGE_UNAVAILABLE, reason="Reply message objects missing")

    run = disturb(deployment, incomplete).fit(spec_for())
    assert [sorted(record["missing"]) for record in run.records] == [[], ["1"], []]
    said = run.records[1]["missing"]["1"]
    assert said == "site-1 could not answer: Reply message objects missing" and len(asked) == 2


@pytest.mark.usefixtures("soon")
def test_a_site_is_looked_at_again_whenever_it_was_started_again(tmp_path, capfd):
    """One with other data is left out with that reason, until it has the right ones."""
    sources = [str(tmp_path / f"{name}.npz") for name in ("a", "b", "c", "other")]
    for number, source in enumerate(sources):
        x = np.random.default_rng(number).normal(size=(30, 5 if number < 3 else 4))
        np.savez(source, x=x.astype(np.float32), y=np.arange(30) % 3)
    deployment = InProcessDeployment(tmp_path, 3, sources[:3], deadline=20)
    fed = deployment.federation(spec_for(data="own", model="mlp", rounds=5))
    node, records = list(deployment.grid.answers)[1], []
    for record, _ in fed.run_rounds(5):
        records.append(record)
        if record["round"] in (1, 3):  # killed, so that it counts as connected all the time
            source = sources[3 if record["round"] == 1 else 1]
            again = Site("site-1", source, tmp_path / "kept")
            deployment.grid.answers[node] = again.answer
            deployment.grid.activated[node] = str(record["round"] + 1)
            time.sleep(0.1)
    what = "site-1 has samples with shape [4], but the run has [5]"
    why = f"{what}; check its --data and start it again"
    assert [record["missing"] for record in records] == [{}, {"1": why}, {"1": why}, {}, {}]
    told = f"the run goes on without this site, which {why.removeprefix('site-1 ')}"
    assert capfd.readouterr().err.count(told) == 1
    assert records[2]["unevaluated"] == {"1": why} and "unevaluated" not in records[4]


@pytest.mark.usefixtures("soon")
def test_a_site_that_is_connected_after_a_long_wait_is_not_given_up(tmp_path, monkeypatch):
    """Whatever kept the server from looking; the site is asked once more."""
    deployment = InProcessDeployment(tmp_path, 3, deadline=20, grace=0.3)
    monkeypatch.setattr(transport, "REFRESH_SECONDS", 0.2)
    pull, lost = deployment.grid.pull_messages, []

    def incomplete(content, honest):
        if lost:
            return honest(content)
        lost.append(content)
        return Error(code=ErrorCode.MESSAGE_UNAVAILABLE, reason="Reply message objects missing")

    def slow(keys):
        found = pull(keys)
        if any(message.has_error() for message in found):
            time.sleep(0.5)
        return found

    deployment.grid.pull_messages = slow
    run = disturb(deployment, incomplete).fit(spec_for())
    assert lost and [record["missing"] for record in run.records] == [{}, {}, {}]


def test_a_request_of_an_earlier_round_is_not_sent_again(tmp_path):
    deployment, asked = InProcessDeployment(tmp_path, 3, deadline=0.3), []
    node = list(deployment.grid.answers)[1]

    def silent(content, honest):
        asked.append(content)

    fed = disturb(deployment, silent).federation(spec_for(rounds=4))
    for record, _ in fed.run_rounds(4):
        if record["round"] == 3:
            deployment.grid.activated[node] = "2"  # it comes back after it has worked on round 3
            fed.engine.transport._refreshed = 0
    assert len(asked) == 1


def test_a_name_belongs_to_its_key(tmp_path):
    deployment = InProcessDeployment(tmp_path, 2, patience=0.3, minimum=2)
    deployment.grid.names = dict(
        zip(deployment.grid.answers, ["site-0", "somebody else"], strict=True)
    )
    said = "connected: site-0; somebody else is not let in as 'site-1'"
    with pytest.raises(EngineFailure, match=said):
        deployment.federation(spec_for(clients=2))


@pytest.mark.parametrize("spec", ["fedper", "scaffold", "fedumf"])
def test_a_killed_server_goes_on_as_if_nothing_had_happened(spec, tmp_path):
    """The server dies after the sites have worked on round 3 and before it has written anything of
    it.
    """
    spec = spec_for(spec, model="mlp", rounds=4)
    calm = InProcessDeployment(tmp_path / "calm", 3).fit(spec)
    deployment = InProcessDeployment(tmp_path, 3)

    def killed(content, honest):
        raise KeyboardInterrupt

    disturb(deployment, killed, 2, "evaluate", rounds=(3,))
    with pytest.raises(KeyboardInterrupt):
        deployment.fit(spec, out=tmp_path / "run")
    again = InProcessDeployment(tmp_path, 3)  # the sites are new processes as well
    run = again.federation(spec).fit(4, out=tmp_path / "run", resume=True, quiet=True)
    assert same(run.state.server, calm.state.server)
    assert [record["personal"] for record in run.records] == [
        record["personal"] for record in calm.records
    ]
