"""Networks and methods of the user's own at sites: the same files everywhere; no code travels."""

import json

import httpx
import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from fedhelix.core import toml
from fedhelix.core.errors import UserError
from fedhelix.core.registry import METHODS
from fedhelix.deploy import messages, node, submit
from fedhelix.deploy.code import SiteCode, code_files, file_hash, public_names
from fedhelix.deploy.dry_run import asked_run
from fedhelix.deploy.keys import KEY_IN_USE, KEY_WITHDRAWN
from fedhelix.deploy.schema import REQUEST, check
from fedhelix.deploy.site import Site
from fedhelix.deploy.site_predictions import predictions, trained_site
from fedhelix.deploy.site_state import latest_model
from fedhelix.models import from_file
from fedhelix.runs.spec import make_spec
from in_process import EXPERIMENT, InProcessDeployment

CODE = """
from fedhelix import FedAvg, register
from torch import nn

MADE = []


class Net(nn.Sequential):
    def __init__(self, shape, outputs):
        MADE.append(shape)
        super().__init__(nn.Flatten(), nn.Linear(shape[0], 7), nn.ReLU(), nn.Linear(7, outputs))


@register("halved-at-sites")
class Halved(FedAvg):
    def aggregate(self, server, uploads, weights, ctx):
        new = super().aggregate(server, uploads, weights, ctx)["model"]
        old = server["model"]
        return {"model": {name: (old[name] + value) / 2 for name, value in new.items()}}
"""
SMALL = {"clients": 2, "rounds": 2, "kernels": "onednn", "data": "own", "batch_size": 16}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ours.py"
    path.write_text(CODE)
    return path


def test_a_file_that_is_replaced_while_the_site_runs_is_run_again(file):
    """A site's process lives long; it must not work with a file that it has not checked."""
    code, before = SiteCode([file]), file_hash(file)
    settings = {"method": {"name": "halved-at-sites"}, "model": f"{file.name}:Net"}
    old = METHODS["halved-at-sites"]
    assert isinstance(
        from_file(code.settled(settings, {file.name: before})["model"])((4,), 3)[2], nn.ReLU
    )
    assert METHODS["halved-at-sites"] is old
    file.write_text(CODE.replace("ReLU", "Tanh"))
    with pytest.raises(UserError, match="differs from the server's"):
        code.settled(settings, {file.name: before})
    model = code.settled(settings, {file.name: file_hash(file)})["model"]
    assert isinstance(from_file(model)((4,), 3)[2], nn.Tanh)
    assert METHODS["halved-at-sites"] is not old


@pytest.fixture
def folders(tmp_path):
    """Two sites' data: three classes that a few rounds tell apart."""
    made = []
    for number in range(2):
        draw, y = np.random.default_rng(number), np.arange(60) % 3
        folder = tmp_path / f"data-{number}"
        folder.mkdir()
        np.save(folder / "x.npy", draw.normal(size=(60, 5)) + 4 * np.eye(5)[y])
        np.save(folder / "y.npy", y)
        made.append(str(folder))
    return made


def spec_of(file, **more):
    return make_spec(str(file), {**SMALL, "model": f"{file}:Net", **more})


def test_sites_train_and_predict_with_files_that_they_have_too(tmp_path, file, folders, cli):
    spec = spec_of(file, rounds=4, lr=0.5)
    assert public_names(spec) == ("halved-at-sites", "ours.py:Net")
    deployment = InProcessDeployment(tmp_path, 2, folders, code=(file,))
    run = deployment.fit(spec, out=tmp_path / "run")
    assert run.records[-1]["personal_accuracy"] > 0.8
    asked = str(deployment.sites[0]._setup[0])  # what the server sent
    assert str(tmp_path) not in asked and file_hash(file) in asked
    new = np.eye(5)[[2, 0, 1]] * 4
    np.save(tmp_path / "new.npy", new)
    site = Site("site-1", folders[1], tmp_path / "kept", code=SiteCode([file]))
    assert predictions(site, tmp_path / "new.npy").tolist() == [2, 0, 1]
    # The model file alone gives the same outputs in plain PyTorch.
    module = run.federation.engine.setup.module
    stored = safetensors.torch.load_file(latest_model(tmp_path / "kept", "site-1"))
    module.load_state_dict(stored)
    expected = module(torch.tensor(new, dtype=torch.float32)).detach().numpy()
    outputs = predictions(site, tmp_path / "new.npy", outputs=True)
    np.testing.assert_allclose(outputs, expected, rtol=1e-5)
    np.save(tmp_path / "new.npy", np.full_like(new, np.nan))
    with pytest.raises(UserError, match="the new samples"):
        predictions(site, tmp_path / "new.npy")
    np.save(tmp_path / "none.npy", new[:0])  # the list of a day without patients
    asked = ["--name", "site-1", "--data", folders[1], "--folder", tmp_path / "kept"]
    asked += ["--inputs", tmp_path / "none.npy"]
    ended = cli("site", "predict", *asked)
    assert ended.code == 2 and "add --code ours.py to this command" in ended.err
    asked += ["--code", file]
    for more, shape in ((), (0,)), (["--outputs"], (0, 3)):
        ended = cli("site", "predict", *asked, *more)
        rounds = len(run.records)
        assert ended.code == 0 and f"the model of site-1 after {rounds} rounds of " in ended.err
        assert np.load(tmp_path / "predictions.npy").shape == shape
    ended = cli("site", "predict", *asked, "--out", "p.csv")
    assert ended.code == 2 and "written as FILE.npy, not 'p.csv'" in ended.err
    for content in (b"a,b\n1,2\n", b"", b"\x93NUMPY"):
        (tmp_path / "new.csv").write_bytes(content)
        with pytest.raises(UserError, match=r"no FILE\.npy with numbers; .*numpy.save"):
            predictions(site, tmp_path / "new.csv")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("nix", r"has the entry 'nix', which the network lacks; there are: 1\.weight, 1\.bias, "),
        ("3.bias", r"has shape \(7,\) for '3\.bias' instead of \(3,\)\.$"),
    ],
)
def test_payloads_that_do_not_fit_are_refused_before_sites_train(
    tmp_path, file, folders, entry, said
):
    name = f"sends-{entry[0]}"
    more = f"""
    def download(self, server, client, ctx):
        return {{"model": {{**server["model"], "{entry}": server["model"]["1.bias"]}}}}
"""
    file.write_text(CODE.replace("halved-at-sites", name) + more)
    with pytest.raises(UserError, match=rf"^{name}\.download {said}"):
        InProcessDeployment(tmp_path, 2, folders, code=(file,)).fit(spec_of(file))


def test_predictions_are_the_methods_own(tmp_path, folders):
    """kNN-Per's model is the network and the client's samples, not the network alone."""
    deployment = InProcessDeployment(tmp_path, 2, folders)
    spec = make_spec("knn-per", {**SMALL, "model": "mlp"})
    run = deployment.fit(spec, out=tmp_path / "run")
    site = Site("site-0", folders[0], tmp_path / "kept")
    x, y = site.own_data.x_test, site.own_data.y_test.numpy()
    np.save(tmp_path / "test.npy", x.numpy())
    assert (predictions(site, tmp_path / "test.npy") == y).mean() > 0.9
    module = run.federation.engine.setup.module
    module.load_state_dict(safetensors.torch.load_file(latest_model(site.folder, "site-0")))
    outputs = predictions(site, tmp_path / "test.npy", outputs=True)
    assert not np.allclose(outputs, module(x).detach().numpy(), atol=0.1)


def test_sites_that_share_a_file_predict_its_text_labels(tmp_path):
    """As after `fedhelix up --data FILE.npz`."""
    y, file = np.arange(60) % 2, str(tmp_path / "all.npz")
    x = np.random.default_rng(0).normal(size=(60, 5)) + 4 * np.eye(5)[y]
    np.savez(file, x=x, y=np.array(["well", "ill"])[y])
    with pytest.raises(UserError, match="has no model"):
        trained_site("site-0", file, tmp_path / "kept")
    spec = make_spec("fedavg", {**SMALL, "data": file, "partition": "iid", "lr": 0.5})
    InProcessDeployment(tmp_path, 2, file, common=True).fit(spec, out=tmp_path / "run")
    np.save(tmp_path / "new.npy", 4 * np.eye(5)[[1, 0]])
    site = trained_site("site-0", file, tmp_path / "kept")
    assert predictions(site, tmp_path / "new.npy").tolist() == ["ill", "well"]


def request(file, **changes):
    """A request to train, as the server would send it."""
    spec = spec_of(file)
    settings = {**spec.as_dict(), "method": {"name": "halved-at-sites"}, "model": "ours.py:Net"}
    settings = {key: value for key, value in settings.items() if key != "versions"}
    header = {
        "kind": "train", "experiment": EXPERIMENT, "client": 0, "round": 0, "classes": 3,
        "code": {"ours.py": file_hash(file)},
    }  # fmt: skip
    for name in ("model", "method"):
        if name in changes:
            settings[name] = changes.pop(name)
    return messages.write({**header, "spec": json.dumps(settings), **changes}, {})


def refusal(site, content):
    return messages.read(site.answer(content)).header.get("error")


def test_a_site_refuses_files_that_it_has_not_or_has_otherwise(tmp_path, file, folders):
    bare = Site("a", folders[0], tmp_path / "kept")
    assert "start the site with --code ours.py" in refusal(bare, request(file))
    site = Site("a", folders[0], tmp_path / "kept", code=SiteCode([file]))
    content = request(file)
    file.write_text(CODE + "# changed\n")
    assert "differs from the server's" in refusal(site, content)
    file.write_text(CODE)
    assert refusal(site, content) is None or "ours.py" not in refusal(site, content)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"code": None}, "does not say which 'ours.py'"),
        ({"code": {}}, "does not say which 'ours.py'"),
        ({"code": {}, "method": {"name": "fedavg"}}, "does not say which 'ours.py'"),
        ({"code": {"ours.py": "00"}}, "SHA-256"),
        ({"code": {f"{n}.py": "0" * 64 for n in range(20)}}, "SHA-256"),
        ({"code": ["ours.py"]}, "SHA-256"),
        ({"model": "ours.py:MADE"}, "no class or function"),
        ({"model": "ours.py:nn.Linear"}, "name the network"),
        ({"model": "ours.py:Absent"}, "no network 'Absent'"),
    ],
)
def test_a_site_refuses_names_that_say_too_little_or_too_much(
    tmp_path, file, folders, changes, says
):
    site = Site("a", folders[0], tmp_path / "kept", code=SiteCode([file]))
    assert says in refusal(site, request(file, **changes))


def test_a_network_that_the_file_lacks_is_refused_before_a_folder_is_made(tmp_path, file):
    spec = make_spec("fedavg", {**SMALL, "model": f"{file}:Nett"})
    with pytest.raises(UserError, match="has no network 'Nett'"):
        submit.create(spec, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("form", ["{}:Net", "{}c:Net", "sub/../{}:Net"])
def test_no_file_of_the_servers_choice_is_run(tmp_path, file, folders, form):
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "evil.pyc").write_text(evil.read_text())
    site = Site("a", folders[0], tmp_path / "kept", code=SiteCode([file]))
    assert refusal(site, request(file, model=form.format(evil)))
    assert refusal(site, request(file, method={"name": str(evil)}))
    assert not (tmp_path / "ran").exists()


def test_files_are_told_apart_by_their_names(tmp_path, file):
    other = tmp_path / "other" / "ours.py"
    other.parent.mkdir()
    other.write_text(CODE)
    with pytest.raises(UserError, match=r"two files are called 'ours\.py'"):
        code_files(make_spec(str(file), {**SMALL, "model": f"{other}:Net"}))
    assert code_files(make_spec("fedavg", SMALL)) == {}
    with pytest.raises(UserError, match="must be SHA-256"):
        check({"code": {"a.py": "G" * 64}}, {"code": REQUEST["code"]})


@pytest.mark.parametrize(
    ("status", "content", "says"),
    [
        (400, {"code": 3001, "detail": "no", "extra": KEY_IN_USE}, "another site is connected"),
        (400, {"code": 3001, "detail": "no", "extra": KEY_WITHDRAWN}, "needs a new key pair"),
        (400, None, "it is not admitted; on the server, `fedhelix deploy admit clinic-a`"),
        (401, {"detail": "Invalid SuperNode authentication"}, "clocks"),
        (500, {"code": 1, "detail": "Something else"}, "Something else"),
    ],
)
def test_each_reason_to_turn_a_site_away_has_its_own_sentence(tmp_path, status, content, says):
    if content is None:
        content = {"code": int(node.ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED), "detail": "no"}
    question = httpx.Request("POST", "https://server/v1/fleet/activate-node")
    answer = httpx.Response(status, json=content, request=question)
    problem = httpx.HTTPStatusError("refused", request=question, response=answer)
    refusal = node.refused(problem, "server:8000", tmp_path / "clinic-a.key")
    said = str(refusal)
    assert says in said and said.count(";") <= 2
    reasons = ("another site", "withdrawn", "not admitted", "clocks")
    assert sum(reason in said for reason in reasons) == (status != 500)
    assert refusal.may_pass == ("another site" in said or "clocks" in said)


def test_a_dry_run_of_the_servers_run_folder_takes_the_sites_own_files(file, folders, tmp_path):
    spec = make_spec(f"genfed+{file}", {**SMALL, "model": f"{file}:Net"})
    values = {key: value for key, value in spec.as_dict().items() if value is not None}
    text = toml.dumps(values).replace(str(file), "/server/ours.py")
    (tmp_path / "config.toml").write_text(text)
    code = SiteCode([file])
    asked, *_ = asked_run(str(tmp_path / "config.toml"), code)
    assert asked.config.model == f"{file}:Net" and asked.method.label == "genfed+halved-at-sites"
    with pytest.raises(UserError, match="does not say which method"):
        (tmp_path / "config.toml").write_text("rounds = 3")
        asked_run(str(tmp_path / "config.toml"), code)
