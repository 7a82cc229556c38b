"""Privacy budgets that end at single sites: who is told, and whom the run waits for."""

import shutil
import threading
from dataclasses import replace

import pytest

from fedhelix.core.errors import EngineFailure, NoMoreRounds
from fedhelix.deploy import messages, requests, submit, transport
from fedhelix.deploy.notices import finished_already
from fedhelix.deploy.server import remember_spent, serve_run
from fedhelix.deploy.site_policy import SitePolicy
from fedhelix.runs.spec import make_spec
from fedhelix.store import RunFolder
from in_process import EXPERIMENT, InProcessDeployment, Late, Link, small_images

pytest.importorskip("dp_accounting")
pytestmark = pytest.mark.filterwarnings(
    "ignore:the budget epsilon", "ignore:the run ends after round [0-9]:"
)

TOLD = "the privacy budget (epsilon 8 at delta 1e-05) of site-0, site-1 is spent after round 2"
SMALL = {"clients": 3, "cohort": 3, "epochs": 1, "model": "linear", "kernels": "onednn"}
NOISE = {"private": {"method.noise": 1.0}, "dp-sgd": {"method.noise": 1.0}}


@pytest.fixture
def sites(tmp_path, monkeypatch):
    """Three sites; whoever follows a run looks often."""
    monkeypatch.setattr(submit, "FOLDER_SECONDS", 0.02)
    monkeypatch.setattr(submit, "STATUS_SECONDS", 0.02)
    monkeypatch.setattr(transport, "REFRESH_SECONDS", 0.02)
    monkeypatch.setattr(transport, "WORD_SECONDS", 0.0)
    return InProcessDeployment(tmp_path, 3, small_images(tmp_path), common=True)


def begin(sites, rounds, method="private", terms=()):
    """A run whose budget lasts for two rounds; site-2 is away in the second one."""
    data = str(sites.folder / "images.npz")
    settings = {**SMALL, **NOISE[method], "data": data, "partition": "iid", "rounds": rounds}
    folder = submit.create(make_spec(method, settings), sites.folder / "run", terms)
    node = list(sites.grid.answers)[2]
    fail_in_the_second_round(sites, node)
    return folder, node


def fail_in_the_second_round(sites, node):
    honest = sites.grid.answers[node]

    def fails(content):
        header = messages.read(content).header
        is_second = header["kind"] == "train" and header["round"] == 1
        return RuntimeError("broken") if is_second else honest(content)

    sites.grid.answers[node] = fails


@pytest.mark.parametrize("method", list(NOISE))
def test_console_and_sites_say_whose_budget_is_spent(sites, method, capfd):
    folder, _ = begin(sites, 4, method)
    with pytest.warns(UserWarning, match="after round 3 of 4: the privacy budget is spent"):
        submit.follow(Link(sites.grid), folder, quiet=True)
    said = capfd.readouterr().err
    assert said.count(TOLD) == said.count("fedhelix: the privacy budget (") == 1
    at_sites = "the privacy budget of this site is spent after round {} (epsilon "
    assert said.count(at_sites.format(2)) == 2 and said.count(at_sites.format(3)) == 1
    assert " of 8 at delta 1e-05), so it takes no part in later rounds of the run" in said
    spent = [record["metadata"].get("budget_spent") for record in folder.records()]
    assert spent == [None, [0, 1], [0, 1, 2]]


def test_more_rounds_wait_for_the_site_with_budget_left(sites, capfd):
    folder, node = begin(sites, 2, terms=["grace=0.1", "patience=60"])
    link = Link(sites.grid)
    submit.follow(link, folder, quiet=True)
    assert TOLD not in capfd.readouterr().err  # the run was over
    submit.change(link, folder, ["rounds=3"])
    answer = sites.grid.answers.pop(node)
    back = threading.Timer(1.5, lambda: sites.grid.answers.update({node: answer}))
    back.start()
    submit.follow(link, folder, quiet=True)
    said = capfd.readouterr().err
    assert TOLD in said
    assert "for 1 of those with privacy budget left: site-2 (connected: site-0, site-1)" in said
    record = RunFolder.open(folder.path).records()[-1]
    assert (record["participants"], record["missing"]) == ([2], {})


def test_rounds_without_the_site_with_budget_left_do_not_count(sites):
    folder, node = begin(sites, 2, terms=["grace=0.1", "patience=0.3"])
    link = Link(sites.grid)
    submit.follow(link, folder, quiet=True)
    submit.change(link, folder, ["rounds=9"])
    del sites.grid.answers[node]
    why = (
        r"waited 0\.3 s for 1 of those with privacy budget left: site-2 \(connected: site-0, site-1"
    )
    with pytest.raises(EngineFailure, match=why):
        serve_run(sites.grid, folder.path, quiet=True)
    assert RunFolder.open(folder.path).rounds_saved == 2


def test_a_run_ends_when_fewer_sites_have_budget_left_than_a_round_needs(sites):
    folder, _ = begin(sites, 4, terms=["minimum=2"])
    with pytest.warns(UserWarning, match="after round 2 of 4: the privacy budget is spent"):
        submit.follow(Link(sites.grid), folder, quiet=True)
    assert folder.rounds_saved == 2


def test_bytes_of_a_run_that_ends_by_its_budget_have_its_last_evaluation(sites):
    folder, _ = begin(sites, 4, terms=["minimum=2"])
    seen = {"sent": 0, "received": 0}
    for node, answer in list(sites.grid.answers.items()):

        def counted(content, answer=answer):
            seen["sent"] += len(content)
            if isinstance(reply := answer(content), bytes):
                seen["received"] += len(reply)
            return reply

        sites.grid.answers[node] = counted
    with pytest.warns(UserWarning, match="the privacy budget is spent"):
        submit.follow(Link(sites.grid), folder, quiet=True)
    records = RunFolder.open(folder.path).records()
    assert {key: sum(record["wire"][key] for record in records) for key in seen} == seen


@pytest.mark.parametrize("method", ["private", "secure+private"])
def test_one_site_with_budget_left_is_too_few_where_only_sums_are_seen(sites, method, monkeypatch):
    folder, _ = begin(sites, 4)
    spec = make_spec(method, {**SMALL, **NOISE["private"]})
    record = {"round": 2, "metadata": {"budget_spent": [0, 1]}}
    monkeypatch.setattr(RunFolder, "records", lambda self: [record])
    more = "for more rounds: " in finished_already(folder, spec)
    assert more == (method == "private")


REFUSES = "site-2 answered: the site's policy allows 5.0 as epsilon of all runs together, not 8.0"


def refusing(sites, method="dp-sgd", **settings):
    """A run of which site-2 refuses every round, and the rounds that site-0 and site-1 are asked
    to train.
    """
    sites.sites[2].policy = SitePolicy(total_epsilon=5)
    sites.policy, asked = replace(sites.policy, minimum=2, grace=0.1, patience=0.5), [[], []]
    for node, rounds in zip(list(sites.grid.answers), asked, strict=False):

        def noted(content, honest=sites.grid.answers[node], rounds=rounds):
            header = messages.read(content).header
            if header["kind"] == "train":
                rounds.append(header["round"] + 1)
            return honest(content)

        sites.grid.answers[node] = noted
    data = str(sites.folder / "images.npz")
    common = {**SMALL, **NOISE[method], "data": data, "partition": "iid", "rounds": 6}
    return sites.federation(make_spec(method, common | settings)), asked


@pytest.mark.parametrize("method", [*NOISE, "secure+dp-sgd"])
def test_no_site_trains_while_too_few_are_there_that_do_not_refuse(sites, method, monkeypatch):
    monkeypatch.setitem(NOISE, "secure+dp-sgd", NOISE["dp-sgd"])
    fed, asked = refusing(sites, method)
    node, records = list(sites.grid.answers)[1], []
    with pytest.raises(EngineFailure) as stopped:
        for record, _ in fed.run_rounds(6):
            records.append(record)
            sites.grid.answers.pop(node, None)  # site-1 is away after round 1
            fed.engine.transport._refreshed = 0
    assert asked == [[1], [1]] and len(records) == 1 and list(records[0]["missing"]) == ["2"]
    said = str(stopped.value)
    assert "waited 0.5 s for 2 of site-0, site-1, site-2 (connected: site-0, site-2; " in said
    assert REFUSES in said


def test_a_run_ends_where_only_sites_that_refuse_have_budget_left(sites):
    fed, asked = refusing(sites)
    fail_in_the_second_round(sites, next(iter(sites.grid.answers)))
    records = []
    why = "1 of 3 sites have privacy budget left and policies that admit the run, and a round needs"
    with pytest.raises(NoMoreRounds, match=f"{why} 2; {REFUSES}"):
        records.extend(record for record, _ in fed.run_rounds(6))
    assert asked == [[1], [1, 2]]


def test_a_cohort_of_which_too_few_can_answer_is_not_asked(sites):
    more = {"method.noise": 4.0, "cohort": 2, "seed": 4}  # a cohort without site-2 comes first
    fed, asked = refusing(sites, **more)
    records = [record for record, _ in fed.run_rounds(6)]
    drawn = [record["participants"] for record in records]
    together = [number for number, who in enumerate(drawn, start=1) if who == [0, 1]]
    with_refusing = [record for record in records if 2 in record["participants"]]
    # Only the first time does the server not know better.
    assert sorted(asked[0] + asked[1]) == sorted([*together * 2, with_refusing[0]["round"]])
    assert len(with_refusing) > 1
    for record in with_refusing[1:]:
        other = record["participants"][0]
        why = f"site-{other} was not asked, since 2 answers are needed"
        assert record["missing"][str(other)] == why and REFUSES in record["missing"]["2"]
        assert record["downlink_bytes"] == 0


def test_a_site_that_was_started_again_with_another_policy_takes_part_at_once(sites):
    fed, asked = refusing(sites)
    _, node, last = list(sites.grid.answers)
    rounds = fed.run_rounds(2)
    next(rounds)
    del sites.grid.answers[node]
    fed.engine.transport._refreshed = 0
    sites.sites[2].policy = SitePolicy()
    sites.grid.activated[last] = "2"
    record, _ = next(rounds)
    assert record["missing"] == {"1": "site-1 is not connected"} and asked == [[1, 2], [1]]


def test_a_refusal_for_the_hours_of_a_site_lasts_until_they_begin(monkeypatch):
    now, refusals = [100.0], requests.Refusals()
    monkeypatch.setattr(requests.time, "monotonic", lambda: now[0])
    refusals.note("ulm", "train", {"error": "at night", "policy": True, "opens_in": 50.0})
    refusals.note("metz", "evaluate", {"error": "no scores", "policy": True})
    refusals.note("bern", "train", {"error": "disk full"})
    assert refusals.now() == {"ulm": "answered: at night"} and refusals.lasting() == {}
    now[0] = 151.0
    assert refusals.now() == {}
    refusals.note("ulm", "train", {"error": "never", "policy": True})
    assert refusals.now() == refusals.lasting() == {"ulm": "answered: never"}
    refusals.note("ulm", "train", {"samples": 3})
    assert refusals.now() == {}


@pytest.mark.parametrize("method", list(NOISE))
def test_cohorts_are_drawn_from_the_sites_with_budget_left(sites, method):
    """One site of three in a round, two rounds each: none is empty, as in the simulation."""
    data = str(sites.folder / "images.npz")
    settings = {**SMALL, **NOISE[method], "data": data, "partition": "iid", "cohort": 1}
    spec = make_spec(method, {**settings, "rounds": 9})
    deployed, simulated = (
        [record["participants"] for record in run.records]
        for run in (sites.fit(spec), spec.config.federation(spec.method).fit(9, quiet=True))
    )
    assert deployed == simulated and all(deployed)
    assert sorted(client for (client,) in deployed) == [0, 0, 1, 1, 2, 2]


def test_a_site_that_spent_its_budget_on_what_came_too_late_is_not_drawn(sites, tmp_path):
    """The server's ledger does not have it, but the site has said so."""
    data, node = str(sites.folder / "images.npz"), list(sites.grid.answers)[1]
    honest, sites.policy = sites.grid.answers[node], replace(sites.policy, deadline=0.5)
    settings = {**SMALL, **NOISE["dp-sgd"], "data": data, "partition": "iid", "rounds": 9}

    def late(content):
        is_train = messages.read(content).header["kind"] == "train"
        return Late(honest(content)) if is_train else honest(content)

    sites.grid.answers[node] = late
    fed, records = sites.federation(make_spec("dp-sgd", {**settings, "cohort": 1, "seed": 2})), []
    folder = RunFolder.create(tmp_path / "late", {})
    with pytest.raises(NoMoreRounds, match="0 of 3 sites have privacy budget left"):
        for record, _ in fed.run_rounds(9):
            records.append(record)
            folder.append(record)
            sites.grid.deliver()
    drawn = [record["participants"] for record in records]
    assert sorted(client for (client,) in drawn) == [0, 0, 1, 1, 2, 2]
    assert [record["missing"].keys() for record in records if record["participants"] == [1]] == [
        {"1"}
    ] * 2
    assert records[-1]["metadata"]["budget_spent"] == [0, 1, 2]
    again = transport.Transport(sites.grid, sites.policy)
    remember_spent(again, folder, fed.engine.registry)  # by a server that was started again
    assert again.spending.exhausted == {"site-0", "site-1", "site-2"}


def test_a_site_whose_answers_were_lost_is_not_drawn_after_it_has_refused(sites):
    """The server has never heard what this site has spent; its first refusal says so."""
    data, node = str(sites.folder / "images.npz"), list(sites.grid.answers)[1]
    honest = sites.grid.answers[node]

    def lost(content):
        header = messages.read(answer := honest(content)).header
        is_lost = header["kind"] == "train" and "error" not in header
        return RuntimeError("lost") if is_lost else answer

    sites.grid.answers[node] = lost
    settings = {**SMALL, **NOISE["dp-sgd"], "data": data, "partition": "iid", "cohort": 1}
    fed, records = sites.federation(make_spec("dp-sgd", {**settings, "rounds": 12})), []
    with pytest.raises(NoMoreRounds, match="0 of 3 sites have privacy budget left"):
        for record, _ in fed.run_rounds(12):
            records.append(record)
    drawn = [record["participants"] for record in records]
    assert sorted(client for (client,) in drawn) == [0, 0, 1, 1, 1, 2, 2]
    assert records[-1]["metadata"]["budget_spent"] == [0, 1, 2]


@pytest.mark.parametrize("method", ["dp-sgd", "secure+dp-sgd", "private", "secure+private"])
def test_a_server_that_has_gone_back_learns_from_refusals_what_was_spent(sites, method):
    data, run = str(sites.folder / "images.npz"), sites.folder / "run"
    settings = {**SMALL, "method.noise": 2.0, "data": data, "partition": "iid", "rounds": 4}
    spec = make_spec(method, settings)

    def fit(rounds, resume=True):
        return sites.federation(spec).fit(rounds, out=run, resume=resume, quiet=True)

    fit(1, resume=False)
    shutil.copytree(run, sites.folder / "backup")
    before = fit(4).records[-1]["metadata"]["epsilon"]
    shutil.rmtree(run)
    shutil.copytree(sites.folder / "backup", run)
    restored = fit(4).records
    assert "round 2 is over" in restored[1]["missing"]["0"]
    assert restored[0]["metadata"]["epsilon"]["0"] < before["0"]
    for record in restored[1:]:
        assert record["metadata"]["epsilon"] == pytest.approx(before)
    (sites.folder / "kept" / EXPERIMENT / "site-0" / "sent.safetensors").write_bytes(b"broken")
    request = {"kind": "train", "experiment": EXPERIMENT, "round": 0, "client": 0, "spec": "{}"}
    said = messages.read(sites.sites[0].answer(messages.write(request))).header
    assert said["error"] and "epsilon" not in said  # the site goes on all the same
