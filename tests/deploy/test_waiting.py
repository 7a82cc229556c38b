"""A run that waits for a site says for whom, to whoever follows it."""

from functools import partial

import numpy as np

from fedhelix.deploy import messages, notices, submit, transport, waiting
from fedhelix.deploy.policy import UNTAKEN, RoundPolicy
from fedhelix.deploy.readiness import wait_for_return
from fedhelix.runs.spec import make_spec
from in_process import InProcessDeployment, Link, small_images


def test_a_run_says_for_which_newcomer_it_waits(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(transport, "WORD_SECONDS", 0.0)
    monkeypatch.setattr(transport, "REFRESH_SECONDS", 0.02)
    monkeypatch.setattr(submit, "FOLDER_SECONDS", 0.02)
    monkeypatch.setattr(submit, "STATUS_SECONDS", 0.02)
    data = small_images(tmp_path)
    deployment = InProcessDeployment(tmp_path, 3, data, common=True)
    node, late = deployment.grid.answers.popitem()
    more = {"newcomers": 1, "newcomers_after": 1, "model": "linear", "partition": "iid"}
    spec = make_spec("fedavg", {"clients": 2, "rounds": 2, "epochs": 1, "data": data, **more})
    folder = submit.create(spec, tmp_path / "run", ["patience=60"])
    (folder.path / waiting.FILE).write_text("waits for nobody any more")
    said = submit._Watcher._show_waiting

    def comes_when_called(watcher):
        said(watcher)
        if "new site" in watcher.waited:
            deployment.grid.answers[node] = late

    monkeypatch.setattr(submit._Watcher, "_show_waiting", comes_when_called)
    summary = submit.follow(Link(deployment.grid), folder, quiet=True)
    assert summary["rounds"] == 2 and not (folder.path / waiting.FILE).exists()
    assert [line for line in capsys.readouterr().err.splitlines() if "new site" in line] == [
        "fedhelix: the run waits at most 60 s for a new site, as client 2 (connected: site-0, "
        "site-1)."
    ]


def test_a_run_that_goes_on_waits_for_the_sites_that_are_away_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(transport, "WORD_SECONDS", 0.0)
    monkeypatch.setattr(transport, "REFRESH_SECONDS", 0.02)
    deployment, said = InProcessDeployment(tmp_path, 2), []
    server = transport.Transport(deployment.grid, RoundPolicy(grace=0.5))
    monkeypatch.setattr(server.waiting, "say", said.append)
    wait_for_return(server, ["site-0", "site-1", "ulm"])
    assert said[-1] == "waits at most 0.5 s for ulm (connected: site-0, site-1)"


def test_the_first_round_without_effect_is_explained_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(submit, "FOLDER_SECONDS", 0.02)
    monkeypatch.setattr(submit, "STATUS_SECONDS", 0.02)
    data = small_images(tmp_path)
    deployment = InProcessDeployment(tmp_path, 2, data, common=True)
    for node, honest in deployment.grid.answers.items():

        def refusing(content, honest=honest):
            header = messages.read(content).header
            is_refused = header["kind"] == "train" and header["round"] in {1, 2}
            return messages.write({"error": "no key of ulm."}) if is_refused else honest(content)

        deployment.grid.answers[node] = refusing
    asked = {"clients": 2, "rounds": 4, "epochs": 1, "data": data, "model": "linear"}
    folder = submit.create(make_spec("fedavg", {**asked, "partition": "iid"}), tmp_path / "run")
    submit.follow(Link(deployment.grid), folder, quiet=True)
    said = [line for line in capsys.readouterr().err.splitlines() if "had no effect" in line]
    both = "site-0 answered: no key of ulm; site-1 answered: no key of ulm"
    assert said == [f"fedhelix: round 2 had no effect: {both}."]


def test_what_is_new_about_a_round_without_effect_is_said_first():
    why_idle = partial(notices.why_idle, names=lambda clients: [f"s{i}" for i in clients])
    ulm, bern = "ulm answered: the site's policy allows 7.", "bern is not connected."
    metz = "metz answered, but 2 answers are needed"
    before = [
        {"participants": [0, 1, 2], "missing": {"0": ulm}, "refused": {}},
        {"participants": [0, 1, 2], "missing": {"0": ulm, "1": bern, "2": metz}, "refused": {}},
    ]
    record = {**before[1], "round": 3}
    expected = f"{bern[:-1]}; {metz}; {ulm[:-1]}"
    assert why_idle(record, before=before) == why_idle(record, before=before[:1]) == expected
    assert why_idle(record) == f"{ulm[:-1]}; {bern[:-1]}; {metz}"
    many = {str(i): f"s{i} is not connected" for i in range(9)} | {"9": UNTAKEN}
    record = {"participants": list(range(9)), "missing": many, "refused": {"8": "harmful"}}
    said = "s0 is not connected; s1 is not connected; s2 is not connected; and 7 more"
    assert why_idle(record) == said
    assert why_idle({**record, "participants": [0, 10]}) == ""
    refused = {"8": "holds values that are not finite", "9": "is too long"}
    record = {"participants": [8, 9], "missing": {}, "refused": refused}
    said = "the upload of s8 holds values that are not finite; the upload of s9 is too long"
    assert why_idle(record) == said


def test_a_new_run_says_who_is_there_whenever_that_changes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(transport, "WORD_SECONDS", 0.0)
    monkeypatch.setattr(transport, "REFRESH_SECONDS", 0.02)
    monkeypatch.setattr(submit, "FOLDER_SECONDS", 0.02)
    monkeypatch.setattr(submit, "STATUS_SECONDS", 0.02)
    data = small_images(tmp_path)
    deployment = InProcessDeployment(tmp_path, 2, data, common=True)
    away = [deployment.grid.answers.popitem() for _ in range(2)]
    asked = {"clients": 2, "rounds": 1, "epochs": 1, "data": data, "model": "linear"}
    folder = submit.create(make_spec("fedavg", {**asked, "partition": "iid"}), tmp_path / "run")
    said = submit._Watcher._show_waiting

    def one_comes_whenever_called(watcher):
        before = watcher.waited
        said(watcher)
        if watcher.waited not in ("", before):
            node, answer = away.pop()
            deployment.grid.answers[node] = answer

    monkeypatch.setattr(submit._Watcher, "_show_waiting", one_comes_whenever_called)
    assert submit.follow(Link(deployment.grid), folder, quiet=True)["rounds"] == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if "waits" in line]
    assert [line.partition(" for ")[2] for line in lines] == [
        "2 sites (connected: none).",
        "2 sites (connected: site-0).",
    ]


def test_sites_with_other_data_or_a_loss_out_of_place_are_named_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(submit, "FOLDER_SECONDS", 0.02)
    monkeypatch.setattr(submit, "STATUS_SECONDS", 0.02)
    data = []
    for name, columns, scale in (("a", 4, 1), ("b", 4, 1), ("c", 4, 1e6), ("d", 3, 1)):
        x = np.random.default_rng(0).normal(size=(40, columns)).astype(np.float32)
        data.append(str(tmp_path / f"{name}.npz"))
        np.savez(data[-1], x=scale * x, y=(x[:, 0] > 0).astype(int))
    deployment = InProcessDeployment(tmp_path, 4, data)
    asked = {"clients": 4, "rounds": 2, "epochs": 1, "data": "own", "model": "linear"}
    folder = submit.create(make_spec("fedavg", asked), tmp_path / "run")
    submit.follow(Link(deployment.grid), folder, quiet=True)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fedhelix: ")]
    left_out = [line for line in said if "goes on without site-3, which has samples with" in line]
    outlying = [line for line in said if "the loss of site-2 in round 1 is far beyond" in line]
    assert len(left_out) == len(outlying) == 1
    assert not any("the loss of site-0" in line or "the loss of site-1" in line for line in said)
    assert folder.records()[0]["outlying_losses"] == [2]


def table(path, columns):
    """The samples of a site, in two classes."""
    x = np.random.default_rng(0).normal(size=(40, columns)).astype(np.float32)
    np.savez(path, x=x, y=(x[:, 0] > 0).astype(int))
    return str(path)


def test_a_run_that_goes_on_leaves_out_a_site_that_came_back_with_other_columns(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(submit, "FOLDER_SECONDS", 0.02)
    monkeypatch.setattr(submit, "STATUS_SECONDS", 0.02)
    data = [table(tmp_path / f"{name}.npz", 4) for name in "ab"]
    asked = {"clients": 2, "rounds": 1, "epochs": 1, "data": "own", "model": "linear"}
    folder = submit.create(make_spec("fedavg", asked), tmp_path / "run")
    submit.follow(Link(InProcessDeployment(tmp_path, 2, data).grid), folder, quiet=True)
    data[1] = table(tmp_path / "other.npz", 5)
    link = Link(InProcessDeployment(tmp_path, 2, data).grid)
    submit.change(link, folder, ["rounds=2"])
    assert submit.follow(link, folder, quiet=True)["rounds"] == 2
    assert (
        "fedhelix: the run goes on without site-1, which has samples with shape [5], but the run "
        "has [4]; check its --data and start it again.\n" in capsys.readouterr().err
    )
    assert list(folder.records()[1]["missing"]) == ["1"]
