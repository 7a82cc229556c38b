"""Mistakes in a deployed run's settings: told before a folder is made, or with exit code 2."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedhelix.core.errors import EngineFailure, UserError
from fedhelix.deploy import app, messages, submit
from fedhelix.deploy.control import RunStatus
from fedhelix.deploy.policy import GO_ON
from fedhelix.deploy.server import _public
from fedhelix.deploy.site import Site
from fedhelix.runs.spec import make_spec
from in_process import EXPERIMENT

OWN = {"data": "own", "clients": 3, "rounds": 1}


@pytest.mark.parametrize(
    ("method", "settings", "said"),
    [
        ("fedavg", {"standardize": True}, "scale them there"),
        ("fedavg", {"participation": "classes"}, "leave them out"),
        ("secure+genfed", {}, "secure cannot aggregate the uploads of genfed"),  # not: server_data
        ("secure+scaffold", {}, "secure cannot aggregate the uploads of scaffold"),
        ("private+scaffold", {}, "private cannot protect clients of scaffold"),
        ("dp-sgd+scaffold", {}, "dp-sgd cannot protect samples of scaffold"),
        ("median+secure", {}, "must be the outermost method"),
        ("median+clustered", {}, "median must stand inside of clustered"),
        ("median+fedamp", {}, "median sees no updates of a common model around fedamp"),
        ("compact+secure", {}, "must be the outermost method"),
        ("secure", {"attack": "ipm"}, "cannot change what secure uploads"),
        ("fedavg", {"validation_size": 20}, "validation_size = 20 takes .* server_data=FILE.npz"),
        ("fedavg", {"supplement_size": 5}, "validation_size = 0.1 takes .* server_data=FILE.npz"),
        ("secure", {"clients": 1}, "cohorts need two clients at least"),
        ("secure", {"cohort": 1}, "cohorts need two clients at least"),
        ("secure@degree=4", {}, "degree = 4 needs more than 3 clients"),
        ("secure", {"clients": 1, "data": "digits"}, "cohorts need two clients at least"),
    ],
)
def test_what_needs_no_samples_is_refused_before_there_is_a_folder(
    method, settings, said, tmp_path
):
    with pytest.raises(UserError, match=said):
        submit.create(make_spec(method, {**OWN, **settings}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["secure+private+fedbn", "private+fedper", "helix", "dp-sgd"])
def test_what_depends_on_the_network_is_left_to_the_server(method, tmp_path):
    pytest.importorskip("dp_accounting")
    submit.create(make_spec(method, OWN), tmp_path / "run")


def test_with_a_common_data_set_the_network_is_known(tmp_path):
    pytest.importorskip("dp_accounting")
    spec = make_spec("private", {"data": "digits", "model": "digits-bn-cnn", "clients": 3})
    said = r"BatchNorm travel; use private\+fedbn, or a network without BatchNorm\."
    with pytest.raises(UserError, match=said):
        submit.create(spec, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["private", "secure+dp-sgd"])
def test_without_the_package_that_counts_epsilon_nothing_begins(method, tmp_path, monkeypatch):
    """No folder is made, and no site books a budget or sends keys."""
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    said = r"this needs dp_accounting; install it with: pip install 'fedhelix\[privacy\]'"
    with pytest.raises(UserError, match=said):
        submit.create(make_spec(method, OWN), tmp_path / "run")
    with pytest.raises(UserError, match="cannot "):  # which no package helps
        submit.create(make_spec(f"{method}+scaffold", OWN), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    spec = make_spec("secure+dp-sgd", {"data": "digits", "clients": 3})
    header = {"experiment": EXPERIMENT, "client": 0, "round": 0, "spec": json.dumps(_public(spec))}
    site = Site("north", "digits", tmp_path)
    for kind in ("masking_keys", "train"):
        answer = messages.read(site.answer(messages.write({**header, "kind": kind})))
        assert "fedhelix[privacy]" in answer.header["error"]
    assert not site.budgets.path.exists()


def test_a_mistake_that_only_the_server_finds_is_the_users_and_says_what_works(tmp_path):
    folder = SimpleNamespace(
        rounds_saved=0, summary=None, path=Path("my run"), where=" --superlink 127.0.0.1:8000"
    )
    words = f"{submit.APP_FAILED}{submit.REFUSED}fedbn needs a model with BatchNorm."
    with pytest.raises(UserError, match=r"^fedbn needs .* BatchNorm \(no round .* --out\)\.$"):
        submit._explain(RunStatus("finished", "failed", words), folder)
    folder.rounds_saved = 2
    with pytest.raises(UserError, match=r"BatchNorm\.$"):
        submit._explain(RunStatus("finished", "failed", words), folder)
    with pytest.raises(EngineFailure, match=r"^no site came\.$"):
        submit._explain(
            RunStatus("finished", "failed", f"{submit.APP_FAILED}no site came."), folder
        )
    words = f"{submit.APP_FAILED}a answered: no; {GO_ON} when that is fixed."
    with pytest.raises(EngineFailure) as refused:
        submit._explain(RunStatus("finished", "failed", words), folder)
    assert str(refused.value) == (
        "a answered: no; go on with `fedhelix deploy resume 'my run' --superlink 127.0.0.1:8000` "
        "when that is fixed."
    )


def test_the_server_app_marks_a_users_mistake(monkeypatch):
    def refuse(*_, **__):
        raise UserError("fedbn needs a model with BatchNorm.")

    monkeypatch.setattr(app, "serve_run", refuse)
    monkeypatch.setattr(app, "HttpGrid", SimpleNamespace)
    context = SimpleNamespace(run_config={"run": "."})
    with pytest.raises(UserError, match=r"^refused: fedbn needs a model with BatchNorm"):
        app.run_server(SimpleNamespace(pull_messages=None), context)
