"""The server's model of a run across sites: `fedhelix deploy model RUN`."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedhelix import UserError, load_run, metrics
from fedhelix.deploy import submit
from fedhelix.deploy.engine import RemoteEngine
from fedhelix.deploy.site_state import MODEL
from fedhelix.models import build
from fedhelix.runs.spec import make_spec
from in_process import InProcessDeployment, Link, small_images

SMALL = {"clients": 3, "rounds": 2, "epochs": 1, "model": "mlp", "kernels": "onednn"}
NET = """import torch

class Net(torch.nn.Module):
    def __init__(self, shape, outputs):
        super().__init__()
        self.frozen = torch.nn.Parameter(torch.ones(64), requires_grad=False)
        self.fc = torch.nn.Linear(64, outputs)

    def forward(self, x):
        return self.fc(x.flatten(1) * self.frozen)
"""


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Runs a method across three sites, which keep the samples that they have."""
    monkeypatch.setattr(submit, "FOLDER_SECONDS", 0.02)
    monkeypatch.setattr(submit, "STATUS_SECONDS", 0.02)

    def run(method, terms=(), code=(), **settings):
        data = small_images(tmp_path)
        own = settings.get("data") == "own"
        spec = make_spec(method, {**SMALL, "data": data, "partition": None, **settings})
        sites = InProcessDeployment(tmp_path, 3, data, common=not own, code=code)
        folder = submit.create(spec, tmp_path / "run", terms)
        submit.follow(Link(sites.grid), folder, quiet=True)
        return folder

    return run


def site_models(folder, experiment):
    return [load_file(folder / "kept" / experiment / f"site-{n}" / MODEL) for n in range(3)]


def test_the_method_has_the_name_that_sites_know(trained, cli):
    trained("median+fedavg")
    done = cli("deploy", "model", "run")
    assert done.err == "fedhelix: the server's model after 2 rounds of median+fedavg\n"


@pytest.mark.parametrize("data", ["own", "common"])
def test_it_is_the_model_that_all_sites_use(trained, data, cli, tmp_path):
    folder = trained("secure", **({"data": "own"} if data == "own" else {}))
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    done = cli("deploy", "model", "run", "--out", "new/m.safetensors")
    assert done.code == 0 and done.out == "new/m.safetensors\n", done.err
    assert done.err == "fedhelix: the server's model after 2 rounds of secure\n"
    mine = load_file(tmp_path / "new" / "m.safetensors")
    build("mlp", (1, 8, 8), 3).load_state_dict(mine)
    for theirs in site_models(tmp_path, folder.config["deployment"]["experiment"]):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert before == {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}


@pytest.mark.parametrize("data", ["own", "common"])
def test_models_of_sites_and_server_are_written_as_onnx(trained, data, cli, tmp_path):
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    folder = trained("fedavg", **({"data": "own"} if data == "own" else {}))
    site = ("site", "model", "--name", "site-1", "--folder", "kept", "--out")
    done = cli(*site, "m.onnx")
    assert done.code == 2 and "'m.onnx' also needs --data as the site was started with" in done.err
    for command in ((*site, "m.bin"), ("deploy", "model", "run", "--out", "m.bin")):
        done = cli(*command)
        assert done.code == 2 and "FILE.safetensors, FILE.pt2, FILE.onnx, not 'm.bin'" in done.err
    assert cli(*site, "site.onnx", "--data", "images.npz").code == 0
    assert cli("deploy", "model", "run", "--out", "server.onnx").code == 0
    x = torch.from_numpy(np.load(tmp_path / "images.npz")["x"][:5])
    module = build("mlp", (1, 8, 8), 3)
    module.load_state_dict(site_models(tmp_path, folder.config["deployment"]["experiment"])[1])
    for name in ("site.onnx", "server.onnx"):  # which is the same model in FedAvg
        session = reference.ReferenceEvaluator(str(tmp_path / name))
        (found,) = session.run(None, {session.input_names[0]: x.numpy()})
        assert np.allclose(found, module.eval()(x).detach().numpy(), atol=1e-4)


def test_rounds_without_an_answer_do_not_count(trained, monkeypatch, cli):
    whole = RemoteEngine.results

    def results(engine, tasks):
        if tasks[0].round == 0:
            return whole(engine, tasks)
        engine.missing = {task.client: "is away" for task in tasks}
        return {}

    monkeypatch.setattr(RemoteEngine, "results", results)
    trained("fedavg")
    said = "fedhelix: the server's model after 2 rounds of fedavg, 1 of which changed it\n"
    assert cli("deploy", "model", "run").err == said


@pytest.mark.parametrize("data", ["own", "common"])
def test_load_run_gives_what_the_server_has(trained, data, cli, tmp_path):
    folder = trained("fedavg", **({"data": "own"} if data == "own" else {}))
    run = load_run(tmp_path / "run")
    assert run.records == folder.records() and len(run.metrics) == 2
    assert run.summary == folder.summary
    assert "the clients are sites" in run.summary["engine"]
    run.plot(tmp_path / "run.png")
    assert cli("deploy", "model", "run").code == 0
    mine, written = run.model().state_dict(), load_file(tmp_path / "model.safetensors")
    assert mine.keys() == written.keys()
    assert all(torch.equal(mine[name], written[name]) for name in mine)
    x = torch.randn(5, 1, 8, 8)
    expected = run.model()(run.prepare(x)).argmax(1)
    assert run.predict(x).tolist() == expected.tolist()
    card = (run.export(tmp_path / "out", "torch") / "README.md").read_text()
    assert "the server's model" in card
    assert ("| Data | of the sites, which keep it |" in card) == (data == "own")
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    assert torch.allclose(program(run.prepare(x)), run.model()(run.prepare(x)), atol=1e-5)


def test_load_run_says_what_stays_at_the_sites(trained, tmp_path):
    trained("fedper", data="own")
    run, x = load_run(tmp_path / "run"), torch.randn(5, 1, 8, 8)
    assert run.model() is None
    at_sites = "write a site's own one there with `fedhelix site model`"
    with pytest.raises(UserError, match=f"fedper has no global model; {at_sites}"):
        run.predict(x)
    for personal in (
        lambda: run.personal(0),
        lambda: run.personal_model("site-1"),
        lambda: run.predict(x, client=0),
        lambda: run.export(tmp_path / "out", client=0),
    ):
        with pytest.raises(UserError, match=f"personal models stay at the sites .*; {at_sites}"):
            personal()
    with pytest.raises(UserError, match=r"run\.records has what they measured"):
        run.evaluate({"auc": metrics.auc})
    for join in (lambda: run.onboard((x, [0] * 5)), lambda: run.inherit(torch.nn.Identity(), x)):
        with pytest.raises(UserError, match="`fedhelix deploy admit`"):
            join()
    with pytest.raises(UserError, match="without a federation"):
        load_run(tmp_path / "run", run.federation)


def test_a_server_without_samples_does_not_guess_their_scale(trained, tmp_path):
    trained("fedavg", data="own")
    with pytest.raises(UserError, match="the scale of the training samples is not known here"):
        load_run(tmp_path / "run").predict(np.full((2, 1, 8, 8), 200, np.uint8))


def test_a_network_of_your_own_is_written_whole(trained, cli, tmp_path):
    (tmp_path / "mynet.py").write_text(NET)
    trained("fedavg", data="own", model=f"{tmp_path}/mynet.py:Net", code=(tmp_path / "mynet.py",))
    assert cli("deploy", "model", "run").code == 0
    found = load_file(tmp_path / "model.safetensors")
    assert sorted(found) == ["fc.bias", "fc.weight", "frozen"]


def test_with_samples_of_the_server(trained, cli, tmp_path):
    y = np.arange(30) % 3
    x = np.random.default_rng(1).normal(size=(30, 1, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "server.npz", x=x, y=y)
    trained("genfed", [f"server_data={tmp_path}/server.npz"], data="own")
    done = cli("deploy", "model", "run")
    assert done.code == 0 and (tmp_path / "model.safetensors").exists(), done.err


def test_what_has_none_says_where_the_models_are(trained, cli, tmp_path):
    trained("fedper", data="own")
    done = cli("deploy", "model", "run")
    said = "fedper has no global model; write a site's own one there with `fedhelix site model`."
    assert done.code == 2 and done.err == f"fedhelix: {said}\n"
    submit.create(make_spec("fedavg", {**SMALL, "data": "own"}), tmp_path / "new").close()
    done = cli("deploy", "model", "new")
    said = "'new' has no checkpoint yet; let it finish a round first."
    assert done.code == 2 and done.err == f"fedhelix: {said}\n"
    assert cli("run", "fedavg", "--rounds", 1, "--data", "wine", "--out", "here").code == 0
    done = cli("deploy", "model", "here")
    assert done.code == 2 and "load_run('here').model() is its server's model" in done.err
    assert not (tmp_path / "model.safetensors").exists()
