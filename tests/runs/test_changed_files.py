"""Files that a run names, changed or moved after it: the network, the data, the method."""

import numpy as np
import pytest
import torch

from fedhelix import Federation, UserError, load_run
from fedhelix.core import imports, registry
from fedhelix.data import from_npz
from fedhelix.federation.description import check_same
from fedhelix.models import from_file
from fedhelix.privacy.victim import from_run
from fedhelix.runs import jobs
from fedhelix.runs.spec import make_spec
from fedhelix.store import RunFolder
from helpers import unseal

NET = """
from torch import nn
class Net(nn.Module):
    def __init__(self, shape, outputs):
        super().__init__()
        self.b = nn.Linear(shape[0], 8)
        self.h = nn.Linear(8, outputs)
    def forward(self, x):
        return self.h(self.b(x).relu())
"""
METHOD = """
from fedhelix import FedAvg, register
@register("method-that-moves")
class Mine(FedAvg):
    pass
"""
OTHERS = {
    "renamed": (
        NET.replace("self.h", "self.head"),
        "it has head.weight, head.bias instead of h.weight, h.bias; restore the file of its model",
    ),
    "wider": (NET.replace("8", "9"), r"b.weight has the shape \(9, 6\) instead of \(8, 6\)"),
    "more": (
        NET.replace("    def f", "        self.m = nn.LayerNorm(8)\n    def f"),
        r"it also has m\.weight, m\.bias; restore",
    ),
    "fewer": (
        NET.replace("nn.Linear(8, outputs)", "nn.Linear(8, outputs, bias=False)"),
        r"it lacks h\.bias; restore the file of its model, '.*/mynet\.py', as it was then\.$",
    ),
}
QUICK = {"rounds": 1, "epochs": 1, "kernels": "onednn", "engine": "serial"}


def make(folder, method="fedavg"):
    """A run of the command line on files of its own."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(60, 6))
    np.savez(folder / "t.npz", x=x, y=x[:, 0] > 0, owners=np.arange(60) % 2)
    (folder / "mynet.py").write_text(NET)
    values = {**QUICK, "data": str(folder / "t.npz"), "model": f"{folder / 'mynet.py'}:Net"}
    return jobs.Session(quiet=True).start(make_spec(method, values), folder / "run").folder.path


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """Files are read anew, as in another process."""
    monkeypatch.setattr(imports, "IMPORTED", {})
    yield lambda: imports.IMPORTED.clear()


@pytest.mark.parametrize("method", ["fedavg", "fedper"])
def test_a_network_that_was_edited_since_is_refused(tmp_path, forget, method):
    run = make(tmp_path, method)
    for code, sentence in OTHERS.values():
        (tmp_path / "mynet.py").write_text(code)
        for use in (
            lambda: load_run(run),
            lambda: jobs.resume(run, quiet=True, changes=["rounds=2"]),
            lambda: from_run(str(run)),
        ):
            forget()
            with pytest.raises(UserError, match=f"network is not that of '{run}': .*{sentence}"):
                use()
    (tmp_path / "mynet.py").write_text(NET)
    forget()
    assert load_run(run).personal(1) is not None


def test_a_network_that_was_edited_within_its_shapes_is_noticed(tmp_path, forget):
    run, x = make(tmp_path), np.ones((1, 6))
    before = load_run(run).predict(x, client=0, raw=True)
    (tmp_path / "mynet.py").write_text(NET.replace("relu()", "tanh().square()"))
    changed = rf"mynet\.py', the file of the network, has changed since '{run}' was run; "
    for use in (load_run, from_run):
        forget()
        with pytest.warns(UserWarning, match=f"{changed}its models may give other outputs"):
            use(str(run))
    for changes in ((), ("rounds=2",)):
        forget()
        with pytest.raises(UserError, match=f"{changed}restore it as it was then, or start a new"):
            jobs.resume(run, quiet=True, changes=changes)
    (tmp_path / "mynet.py").write_text(NET)
    forget()
    assert np.array_equal(load_run(run).predict(x, client=0, raw=True), before)
    assert len(jobs.resume(run, quiet=True, changes=["rounds=2"]).records) == 2


def test_a_federation_of_python_notices_an_edited_network_too(tmp_path, forget):
    (tmp_path / "mynet.py").write_text(NET)
    data = from_npz(make(tmp_path).parent / "t.npz")
    usual = {"model": f"{tmp_path / 'mynet.py'}:Net", "engine": "serial", "kernels": "onednn"}
    Federation(data, **usual).fit(1, out=tmp_path / "mine", quiet=True)
    (tmp_path / "mynet.py").write_text(NET.replace("relu()", "tanh().square()"))
    forget()
    fed = Federation(data, **usual)
    with pytest.warns(UserWarning, match="has changed since"):
        load_run(tmp_path / "mine", fed)
    with pytest.raises(UserError, match=r"has changed since .*; restore it"):
        fed.fit(2, out=tmp_path / "mine", resume=True, quiet=True)


def test_a_file_that_was_edited_is_run_again_in_the_same_process(tmp_path):
    """As in a notebook; the file has as many characters as before."""
    run = make(tmp_path)
    first = load_run(run).model()
    (tmp_path / "mynet.py").write_text(NET.replace("relu()", "tanh()"))
    with pytest.warns(UserWarning, match="has changed since"):
        second = load_run(run).model()
    assert type(second) is not type(first)
    x = torch.randn(4, 6)
    assert torch.equal(second(x), second.h(second.b(x).tanh()))
    (tmp_path / "mynet.py").unlink()  # what was run last stays
    assert type(from_file(f"{tmp_path}/mynet.py:Net")((6,), 2)) is type(second)


def test_a_module_beside_the_file_of_a_network_is_named(tmp_path):
    (tmp_path / "blocks_beside.py").write_text("WIDTH = 8")
    (tmp_path / "mynet.py").write_text("from blocks_beside import WIDTH\n" + NET)
    said = rf"imports 'blocks_beside', which lies beside it; .* or set PYTHONPATH={tmp_path}\."
    with pytest.raises(UserError, match=said):
        Federation("wine", "iid", clients=2, model=f"{tmp_path}/mynet.py:Net")


@pytest.mark.parametrize("change", ["renamed", "wider", "fewer"])
def test_a_run_that_says_nothing_of_its_network_gives_no_model_of_another(tmp_path, forget, change):
    run = make(tmp_path)
    (run / "clients.json").unlink()  # older runs have one without the network
    unseal(run)
    (tmp_path / "mynet.py").write_text(OTHERS[change][0])
    forget()
    with pytest.raises(UserError, match="the network is not that of '"):
        load_run(run).predict(np.zeros((1, 6)), client=0)


@pytest.mark.parametrize(("key", "file"), [("data", "t.npz"), ("model", "mynet.py")])
def test_a_file_that_has_moved_is_named_with_its_setting(tmp_path, forget, key, file):
    run = make(tmp_path)
    (tmp_path / file).rename(tmp_path / f"new-{file}")
    forget()
    gone = f"there is no file '{tmp_path / file}', the {key} of '{run}'; put it back, or "
    with pytest.raises(UserError, match=f"{gone}build the same Federation with it and call load_"):
        load_run(run)
    with pytest.raises(UserError, match=f"{gone}say where it is now: .* --set {key}=PLACE"):
        jobs.resume(run, quiet=True)
    place = f"{tmp_path / f'new-{file}'}{':Net' * (key == 'model')}"
    assert len(jobs.resume(run, quiet=True, changes=[f"{key}={place}", "rounds=2"]).records) == 2
    forget()
    assert len(load_run(run).records) == 2, "config.toml names the new place"


def test_another_network_is_not_the_moved_one(tmp_path):
    run = make(tmp_path)
    with pytest.raises(UserError, match=r"was begun with model = .* start a new one"):
        jobs.resume(run, quiet=True, changes=["model=linear"])
    (tmp_path / "other.py").write_text(OTHERS["renamed"][0])
    with pytest.raises(UserError, match=r"it has head\.weight, head\.bias instead of"):
        jobs.resume(run, quiet=True, changes=[f"model={tmp_path / 'other.py'}:Net"])


def test_a_method_whose_file_is_gone_is_named(tmp_path):
    (tmp_path / "mine.py").write_text(METHOD)
    run = make(tmp_path, str(tmp_path / "mine.py"))
    (tmp_path / "mine.py").unlink()
    for use in (load_run, jobs.resume):
        with pytest.raises(UserError, match=r"mine\.py', the method of '.*run'; put it back\.$"):
            use(run)


def test_a_federation_for_a_run_of_the_command_line_has_its_settings(tmp_path):
    run = make(tmp_path)
    usual = {"model": f"{tmp_path / 'mynet.py'}:Net", "method": "fedavg", "engine": "serial"}
    usual["kernels"] = "onednn"
    data = from_npz(tmp_path / "t.npz")
    assert len(load_run(run, Federation(data, **usual, epochs=1)).records) == 1
    for other, sentence in (
        ({"method": "fedper"}, "method = fedavg, not fedper"),
        ({"lr": 0.3}, "lr = 0.1, not 0.3"),
        ({"seed": 2}, "seed = 0, not 2"),
    ):
        fed = Federation(data, **{**usual, "epochs": 1, **other})
        with pytest.raises(UserError, match=f"was run with {sentence}"):
            load_run(run, fed)


def test_a_run_of_python_finds_its_network_from_any_folder(tmp_path, monkeypatch):
    (tmp_path / "mynet.py").write_text(NET)
    (tmp_path / "devices.csv").write_text("client,speed\n0,1\n1,2\n")
    monkeypatch.chdir(tmp_path)
    usual = {"clients": 2, "epochs": 1, "engine": "serial", "kernels": "onednn"}
    Federation("wine", model="mynet.py:Net", devices="devices.csv", **usual).fit(
        1, out="run", quiet=True
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert len(load_run(tmp_path / "run").records) == 1


def test_a_deployment_goes_on_with_its_network_only(tmp_path):
    folder = RunFolder.open(make(tmp_path))
    with folder:
        folder.change(deployment={"experiment": "one"})
    data = from_npz(tmp_path / "t.npz").first(40, None)  # the server has others than the sites
    check_same(Federation(data, model=f"{tmp_path / 'mynet.py'}:Net", engine="serial"), folder)
    with pytest.raises(UserError, match=r"fc\.weight, fc\.bias instead of .*mynet\.py'"):
        check_same(Federation(data, model="linear", engine="serial"), folder)


TWO_METHODS = """
from fedhelix import FedAvg, Method, Wrapper, option, register
@register("method-of-two")
class Mine(FedAvg):
    slope: float = option(0.5, "of nothing")
@register("wrapper-of-two")
class Around(Wrapper):
    inner: Method = option(FedAvg(), "the method inside")
"""


def of_python(folder, method):
    """A run of Python from names alone, and what another process knows."""
    known = dict(registry.METHODS)
    usual = {"clients": 2, "epochs": 1, "engine": "serial", "kernels": "onednn"}
    Federation("wine", model="linear", method=method, **usual).fit(
        1, out=folder / "run", quiet=True
    )
    registry.METHODS.clear()
    registry.METHODS.update(known)
    return folder / "run"


@pytest.mark.parametrize("spec", ["two.py:method-of-two", "two.py:wrapper-of-two+fedprox"])
def test_a_run_of_python_finds_its_method_from_any_folder(tmp_path, monkeypatch, spec):
    (tmp_path / "two.py").write_text(TWO_METHODS)
    monkeypatch.chdir(tmp_path)
    run = of_python(tmp_path, spec)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_run(run).federation.method.label == spec.partition(":")[2]
    assert len(jobs.resume(run, quiet=True, changes=["rounds=2"]).records) == 2
    (tmp_path / "two.py").unlink()
    for use in (load_run, jobs.resume):
        with pytest.raises(UserError, match=r"two\.py', the method of '.*run'; put it back\.$"):
            use(run)


@pytest.mark.parametrize("of", [make, of_python])
def test_a_method_that_was_edited_since_is_noticed(tmp_path, of):
    (tmp_path / "mine.py").write_text(METHOD)
    run = of(tmp_path, f"{tmp_path / 'mine.py'}")
    load_run(run)
    (tmp_path / "mine.py").write_text(METHOD + "# other\n")
    changed = rf"mine\.py', the file of the method, has changed since '{run}' was run; "
    with pytest.warns(UserWarning, match=f"{changed}its models may give other outputs"):
        load_run(run)
    for changes in ((), ("rounds=2",)):
        with pytest.raises(UserError, match=f"{changed}restore it as it was then, or start a new"):
            jobs.resume(run, quiet=True, changes=changes)
    (tmp_path / "mine.py").write_text(METHOD)
    assert len(jobs.resume(run, quiet=True, changes=["rounds=2"]).records) == 2
