"""A server that was restored from a backup, behind its sites: what they go on with, and say."""

import shutil

import pytest

from fedhelix import UserError
from fedhelix.core.errors import EngineFailure, NoMoreRounds
from fedhelix.deploy import messages
from fedhelix.deploy.site import Site
from fedhelix.deploy.site_state import MODEL, SiteState, rounds_of
from fedhelix.report.terminal import show_run
from fedhelix.runs.spec import make_spec
from helpers import same
from in_process import EXPERIMENT, InProcessDeployment, small_images

SMALL = {"clients": 2, "epochs": 1, "kernels": "onednn", "model": "mlp", "partition": "iid"}


def kept_rounds(folder):
    return sorted(int(path.stem[4:]) for path in folder.glob("own-*.safetensors"))


@pytest.fixture
def kept(tmp_path):
    """A site's state after rounds 0 to 7, all of which counted; the state is the round."""
    state = SiteState(tmp_path)
    for round in range(8):
        state.after = round - 1
        state.write(round, {"n": round})
    assert kept_rounds(tmp_path) == [6, 7]
    return state


def go_on(folder, after):
    """As a site does at every request."""
    state = SiteState(folder)
    state.go_on_after(after)
    return state


def test_the_oldest_state_stands_for_one_that_is_gone(kept, capsys):
    folder = kept.folder
    for after, expected in ((7, 7), (6, 6)):  # as ever
        state = go_on(folder, after)
        assert state.read() == {"n": expected} and state.remark == {}
    assert not capsys.readouterr().err
    state = go_on(folder, 2)
    assert state.read() == {"n": 6} and state.remark == {"state_of": 6}
    assert capsys.readouterr().err == (
        "fedhelix: the server goes on after round 3, of which the site keeps no state; it goes on "
        "with its own of round 7.\n"
    )
    again = go_on(folder, 2)  # it is said once
    assert again.read() == {"n": 6} and again.remark == {} and not capsys.readouterr().err
    again.write(3, {"n": 63})
    # Round 3 may be repeated, or its answer may be too late, as ever.
    assert go_on(folder, 2).read() == {"n": 6} and go_on(folder, 3).read() == {"n": 63}
    # The newer states stay, for the case that the server comes back with a newer backup.
    assert kept_rounds(folder) == [2, 3, 6, 7] and go_on(folder, 7).read() == {"n": 7}
    for round in range(4, 9):
        state = go_on(folder, round - 1)
        assert state.read() == {"n": 60 + round - 1}
        state.write(round, {"n": 60 + round})
    assert kept_rounds(folder) == [7, 8] and not capsys.readouterr().err


def test_whatever_a_server_says_few_states_are_kept(kept):
    for after in (5, 4, 3, 2, 1, 0):
        assert go_on(kept.folder, after).read() == {"n": 6}
        assert kept_rounds(kept.folder) == [after, 6, 7]


def test_before_its_first_round_a_client_has_no_state(kept, capsys):
    folder = kept.folder
    state = go_on(folder, None)
    assert state.read() == {} and "the server begins the run anew" in capsys.readouterr().err
    state.write(0, {})
    assert kept_rounds(folder) == [0, 6, 7] and go_on(folder, 0).read() == {}
    assert not capsys.readouterr().err


def test_an_answer_that_came_too_late_is_no_server_that_went_back(tmp_path, capsys):
    go_on(tmp_path, None).write(0, {"n": 0})
    assert go_on(tmp_path, None).read() == {}
    go_on(tmp_path, None).write(1, {"n": 1})
    assert kept_rounds(tmp_path) == [1] and not capsys.readouterr().err


def test_sites_keep_their_heads_where_a_server_is_restored_from_an_old_backup(tmp_path, capfd):
    data, asked = small_images(tmp_path), []
    spec = make_spec("fedper", {**SMALL, "rounds": 6, "data": data})

    def fit(rounds, resume=True):
        deployment = InProcessDeployment(tmp_path, 2, data, common=True)
        (node, honest), *_ = deployment.grid.answers.items()
        deployment.grid.answers[node] = lambda content: asked.append(content) or honest(content)
        fed = deployment.federation(spec)
        return fed.fit(rounds, out=tmp_path / "run", resume=resume, quiet=True)

    fit(2, resume=False)
    shutil.copytree(tmp_path / "run", tmp_path / "backup")
    first = fit(6)
    site = tmp_path / "kept" / EXPERIMENT / "site-0"
    assert kept_rounds(site) == [4, 5]
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(tmp_path / "backup", tmp_path / "run")
    capfd.readouterr()
    restored = fit(6)
    said = "the server goes on after round 2, of which the site keeps no state; it goes on with its"
    assert capfd.readouterr().err.count(f"{said} own of round 5.") == 2
    why = "goes on with its state of round 5, since it has no other"
    assert restored.records[2]["troubles"] == {"site-0": why, "site-1": why}
    assert not any("troubles" in record for record in restored.records[3:])
    # Heads that were trained are better than fresh ones, or those of round 2.
    losses = [run.records[2]["train_loss"] for run in (first, restored)]
    assert losses[1] < losses[0]
    assert not same(first.state.server, restored.state.server)
    # A site that is not sampled says it when it is evaluated.
    requests = map(messages.read, asked)
    header, body = [one for one in requests if one.header["kind"] == "evaluate"][-1]
    assert kept_rounds(site) == [4, 5]
    again = Site("site-0", data, tmp_path / "kept", common=True)
    for expected in (4, None):
        answer = messages.read(again.answer(messages.write({**header, "after": 1}, body)))
        assert answer.header["test"] > 0 and answer.header.get("state_of") == expected


@pytest.mark.parametrize(("method", "keeps"), [("fedper", True), ("fedavg", False)])
def test_a_site_that_has_lost_its_state_says_so(method, keeps, tmp_path, capsys):
    """In its terminal, its log and the run's records; a method that keeps nothing loses nothing."""
    data = small_images(tmp_path)
    deployment = InProcessDeployment(tmp_path, 2, data, common=True)
    lost, *_ = deployment.sites
    lost.log = Lines()
    spec = make_spec(method, {**SMALL, "data": data, "rounds": 4})
    records = []
    for record, _ in deployment.federation(spec).run_rounds(4):
        records.append(record)
        if record["round"] == 2:
            shutil.rmtree(tmp_path / "kept" / EXPERIMENT / "site-0")
    words = "has lost what it kept of this run, and begins anew"
    expected = [None, None, {"site-0": words} if keeps else None, None]
    assert [record.get("troubles") for record in records] == expected
    assert capsys.readouterr().err.count(
        "the site has worked in this run before, but the state that it kept of it is gone from "
        f"'{tmp_path / 'kept'}'; it begins anew.\n"
    ) == int(keeps)
    assert [line["round"] for line in lost.log if line.get("anew")] == [2] * keeps


@pytest.mark.parametrize("method", ["fedper", "gene-fl"])
def test_a_newcomer_has_lost_nothing(method, tmp_path, capsys):
    data = small_images(tmp_path)
    deployment = InProcessDeployment(tmp_path, 3, data, common=True)
    more = {"newcomers": 1, "newcomers_after": 2, "rounds": 4, "data": data}
    more |= {"model": "digits-cnn"} | ({"method.clusters": 1} if method == "gene-fl" else {})
    run = deployment.fit(make_spec(method, {**SMALL, **more}))
    assert not any("troubles" in record for record in run.records)
    assert "gone from" not in capsys.readouterr().err


def test_an_older_copy_of_a_sites_state_is_noticed(kept, capsys):
    state = go_on(kept.folder, 9)
    assert state.read() == {"n": 7} and state.remark == {"state_of": 7}
    assert capsys.readouterr().err == (
        "fedhelix: the site has answered round 10, but the newest state that it keeps in "
        f"'{kept.folder.parent.parent}' is of round 8: an older copy, with which it goes on.\n"
    )
    state.write(10, {"n": 107})
    assert go_on(kept.folder, 10).remark == {} and not capsys.readouterr().err


OLDER = "goes on with its state of round 1, since it has no other"
REFUSED = (
    "site-0 answered: the site has answered round 3, but what it keeps of this run is older, so it "
    "cannot tell what it has spent of its privacy budget; put the newest copy of the site's folder "
    "back, or begin a new run."
)


@pytest.mark.parametrize(
    ("method", "more", "expected"),
    [
        ("fedper", {}, [None, None, None, OLDER, None]),
        ("secure+fedper", {}, [None, None, None, OLDER, None]),
        ("fedavg", {}, [None] * 5),  # nothing was lost
        ("private+fedavg", {"method.noise_by": "clients"}, [None, None, None, REFUSED, REFUSED]),
    ],
)
def test_a_site_restored_from_its_own_older_copy(method, more, expected, tmp_path, capsys):
    data = small_images(tmp_path)
    deployment = InProcessDeployment(tmp_path, 3, data, common=True)
    asked = {**SMALL, "clients": 3, "data": data, "rounds": 5, **more}
    spec = make_spec(method, asked)
    folder, copy, found = tmp_path / "kept" / EXPERIMENT / "site-0", tmp_path / "copy", []
    for record, _ in deployment.federation(spec).run_rounds(5):
        found.append(record["missing"].get("0") or record.get("troubles", {}).get("site-0"))
        if record["round"] == 1:
            shutil.copytree(folder, copy)
        if record["round"] == 3:
            shutil.rmtree(folder)
            shutil.copytree(copy, folder)
    assert found == expected
    warned = capsys.readouterr().err.count("is of round 1: an older copy, with which it goes on.")
    assert warned == expected.count(OLDER)


class Lines(list):
    """An audit log in memory."""


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("secure+fedavg", {}),
        (
            "secure+private",
            {"method.noise_by": "clients", "method.noise": 1.0, "method.epsilon": 1e3},
        ),
    ],
)
def test_a_finished_model_outlives_a_server_that_has_gone_back(method, more, tmp_path, capfd):
    """One site refuses the rounds that it has masked, and the other has lost its folder."""
    data = small_images(tmp_path)
    spec = make_spec(method, {**SMALL, "rounds": 4, "data": data, **more})
    run, backup = tmp_path / "run", tmp_path / "backup"

    def fit(rounds, resume=True):
        fed = InProcessDeployment(tmp_path, 2, data, common=True).federation(spec)
        return fed.fit(rounds, out=run, resume=resume, quiet=True)

    fit(1, resume=False)
    shutil.copytree(run, backup)
    fit(4)
    knows, lost = (tmp_path / "kept" / EXPERIMENT / f"site-{n}" for n in (0, 1))
    before = (knows / MODEL).read_bytes()
    shutil.rmtree(lost)
    shutil.rmtree(run)
    shutil.copytree(backup, run)
    capfd.readouterr()
    if method == "secure+private":  # the site that has lost its folder cannot tell what it spent
        with pytest.raises(EngineFailure, match="site-1 answered: the site has answered round 1"):
            fit(4)
        assert (knows / MODEL).read_bytes() == before
        return
    restored = fit(4)
    said = capfd.readouterr().err
    assert (knows / MODEL).read_bytes() == before
    assert rounds_of(SiteState(knows).used()[0]) == 4
    assert said.count("older copy of this run; the site keeps its model after 4 rounds.") == 1
    assert restored.summary["idle_since"] == 2 and restored.summary["untrained"] is None
    assert rounds_of(SiteState(lost).used()[0]) == 1
    assert "after round 1: the site keeps its model of this run" in said
    show_run(run, restored.summary, as_json=False)
    assert "no round after round 1 had an effect.\n" in capfd.readouterr().err


@pytest.mark.parametrize(("method", "told"), [("secure", "masked"), ("private", "drawn")])
def test_what_to_do_where_a_server_goes_on_from_before_its_first_round(method, told, tmp_path):
    data = small_images(tmp_path)
    spec = make_spec(method, {**SMALL, "rounds": 2, "data": data})
    InProcessDeployment(tmp_path, 2, data, common=True).fit(spec)
    words = f"{told} again; begin a new run, or put the newest copy of the server's folder back; "
    with pytest.raises(EngineFailure, match=f"round 1 is over.* {words}continue the run when"):
        InProcessDeployment(tmp_path, 2, data, common=True).fit(spec)


def test_a_site_remembers_that_its_folder_is_an_older_copy(tmp_path):
    """Until the newest copy is back, also where the server goes back too."""
    state = SiteState(tmp_path / "kept")
    state.go_on_once(0, None, is_spent=True)
    state.write_sent({"round": 0})
    for counted in (2, 0, None):
        with pytest.raises(UserError, match="has answered round 3, but what it keeps of this run"):
            SiteState(tmp_path / "kept").go_on_once(3, counted, is_spent=True)
    state.write_sent({"round": 2})
    SiteState(tmp_path / "kept").go_on_once(3, 0, is_spent=True)


NOISY = {"method.noise": 1.0, "method.epsilon": 1e3, "clients": 3}
BY_CLIENTS = {"method.noise_by": "clients"}


def epsilons(record):
    return list(record["metadata"]["epsilon"].values())


def undisturbed(data, rounds):
    """What clients have spent after each of so many rounds of a simulation."""
    spec = make_spec("private", {**SMALL, **NOISY, "rounds": rounds, "data": data})
    run = spec.config.federation(spec.method).fit(rounds, quiet=True)
    return [epsilons(record) for record in run.records]


@pytest.mark.filterwarnings("ignore:training has diverged", "ignore:the run ends after")
@pytest.mark.parametrize(
    ("method", "more"), [("private", {}), ("private", BY_CLIENTS), ("secure+private", BY_CLIENTS)]
)
def test_rounds_that_a_restored_server_has_forgotten_cost_budget(method, more, tmp_path):
    data = small_images(tmp_path)
    costs = undisturbed(data, 7)
    run, backup = tmp_path / "run", tmp_path / "backup"

    def fit(rounds, budget=1e3, resume=True):
        asked = {**SMALL, **NOISY, **more, "rounds": rounds, "data": data}
        spec = make_spec(method, {**asked, "method.epsilon": budget})
        fed = InProcessDeployment(tmp_path, 3, data, common=True).federation(spec)
        return fed.fit(rounds, out=run, resume=resume, quiet=True)

    fit(1, resume=False)
    shutil.copytree(run, backup)
    fit(3)
    shutil.rmtree(run)
    shutil.copytree(backup, run)
    restored = fit(7)
    assert [len(record["missing"]) for record in restored.records] == [0, 3, 3, 0, 0, 0, 0]
    # Rounds 2 and 3 have left the sites already, and count from the moment they say so.
    expected = [costs[0], costs[2], costs[2], *costs[3:]]
    for record, cost in zip(restored.records, expected, strict=True):
        assert epsilons(record) == pytest.approx(cost)


@pytest.mark.filterwarnings("ignore:training has diverged", "ignore:the run ends after")
@pytest.mark.parametrize(("method", "more"), [("private", {}), ("secure+private", BY_CLIENTS)])
def test_a_site_takes_no_part_while_the_server_counts_too_little(method, more, tmp_path):
    """A server that crashed after the sites had sent, and before it wrote the round down."""
    data = small_images(tmp_path)
    costs = undisturbed(data, 5)
    asked = {**SMALL, **NOISY, **more, "rounds": 7, "data": data}
    budget = costs[4][0] + 1e-9  # for five rounds
    deployment = InProcessDeployment(tmp_path, 3, data, common=True)
    honest = dict(deployment.grid.answers)

    def losing(answer):
        def lost(content):
            header = messages.read(sent := answer(content)).header
            return (
                RuntimeError("lost") if (header["kind"], header["round"]) == ("train", 2) else sent
            )

        return lost

    deployment.grid.answers = {node: losing(answer) for node, answer in honest.items()}
    fed = deployment.federation(make_spec(method, {**asked, "method.epsilon": budget}))
    records = []
    with pytest.raises(NoMoreRounds, match="is spent: no client can take part in round 7"):
        for record, _ in fed.run_rounds(7):
            records.append(record)
    assert [len(record["missing"]) for record in records] == [0, 0, 3, 3, 0, 0]
    for why in records[3]["missing"].values():
        assert "has answered 3 rounds with noise, and the server counts 2; it counts all" in why
    counted = [1, 2, 2, 3, 4, 5]
    for record, rounds in zip(records, counted, strict=True):
        assert epsilons(record) == pytest.approx(costs[rounds - 1])
