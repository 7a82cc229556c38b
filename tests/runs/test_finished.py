"""Finished runs: loaded in one line, used for predictions, exported with the same outputs."""

import json
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from fedhelix import (
    DPSGD,
    Federation,
    FedPer,
    Private,
    Run,
    UserError,
    from_arrays,
    from_table,
    load,
    load_run,
)
from fedhelix.core.bounds import rounded_up
from fedhelix.runs import jobs
from fedhelix.runs.spec import make_spec
from fedhelix.store import RunFolder
from helpers import fit_and_stop, same, small, timeless

DRAW = np.random.default_rng(0)
QUICK = {"rounds": 1, "clients": 4, "epochs": 1, "kernels": "onednn", "engine": "serial"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    spec = make_spec("fedavg", {**QUICK, "data": "wine", "model": "mlp"})
    return jobs.Session(quiet=True).start(spec, tmp_path_factory.mktemp("runs") / "wine")


def test_a_run_of_the_command_line_is_loaded_in_one_line(run):
    again = load_run(run.folder.path)
    assert same(again.state.server, run.state.server)
    assert len(again.records) == 1 and again.summary["method"] == "fedavg"
    x = run.federation.data.x_test
    assert np.array_equal(again.predict(x, raw=True), run.predict(x, raw=True))
    assert np.array_equal(again.predict(x, client=1), run.predict(x, client=1))


def test_loading_a_run_writes_nothing(run):
    """It may be somebody else's, on a disk that cannot be written, or under way."""

    def found():
        stats = {path: path.stat() for path in run.folder.path.rglob("*")}
        return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in stats.items()}

    before = found()
    load_run(run.folder.path)
    assert found() == before
    with RunFolder.open(run.folder.path):  # whoever writes it holds its lock
        during = found()
        assert len(load_run(run.folder.path).records) == 1
        assert found() == during


def test_a_run_with_workers_is_loaded_without_them(tmp_path):
    places = {"engine": "parallel", "workers": 1}
    spec = make_spec("fedavg", {**QUICK, "data": "wine", "model": "mlp", **places})
    run = jobs.Session(quiet=True).start(spec, tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(load_run(tmp_path / "run").state.server, run.state.server)


def test_a_run_of_the_library_needs_its_federation(tmp_path):
    data = load("digits")
    fed = small(FedPer(), "mlp", data=data)
    run = fed.fit(1, out=tmp_path / "mine", quiet=True)
    with pytest.raises(UserError, match="which its folder does not hold; build the same"):
        load_run(tmp_path / "mine")
    with pytest.raises(UserError, match="was run with seed = 0, not 1"):
        load_run(tmp_path / "mine", small(FedPer(), "mlp", data=data, seed=1))
    again = load_run(tmp_path / "mine", small(FedPer(), "mlp", data=data))
    assert same(dict(again.personal(2).state_dict()), dict(run.personal(2).state_dict()))
    with pytest.raises(UserError, match="fedper has no global model; say which client's"):
        again.predict(fed.data.x[:2])


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("genfed+fedper", {"partition": "iid", "validation_size": 20, "optimizer": "adam"}),
        (FedPer(), {"shift": "swap:2", "eval_clients": 2, "cohort": 2}),
    ],
)
def test_a_run_of_the_library_with_names_alone_is_loaded_without_its_federation(
    tmp_path, method, more
):
    usual = {"model": "mlp", "clients": 4, "engine": "auto", "kernels": "onednn", "epochs": 1}
    fed = Federation("wine", method=method, **usual, **more, seed=3)
    run = fed.fit(1, out=tmp_path / "mine", quiet=True)
    again = load_run(tmp_path / "mine")
    assert again.summary == json.loads((tmp_path / "mine" / "summary.json").read_text())
    x = fed.data.x_test
    assert np.array_equal(again.predict(x, client=1, raw=True), run.predict(x, client=1, raw=True))
    resumed = fed.fit(2, out=tmp_path / "mine", resume=True, quiet=True)
    assert resumed.summary["rounds"] == 2, "what was loaded is not locked"


def test_a_run_of_the_library_with_names_alone_is_resumed_by_the_command(tmp_path, cli):
    def build():
        return Federation(
            "wine", "dirichlet:0.5", method="helix", model="mlp", clients=4, engine="serial",
            epochs=1, eval_clients=3,
        )  # fmt: skip

    straight = build().fit(6, out=tmp_path / "straight", eval_every=2, quiet=True)
    fit_and_stop(build(), 4, 1, tmp_path / "mine", eval_every=2)
    done = cli("resume", "mine", "-q")
    assert done.code == 0 and "rounds=4" in done.out
    folder = RunFolder.open(tmp_path / "mine")
    begun = folder.config
    assert begun["library"] and begun["made_from"].items() >= {"engine": "serial"}.items()
    assert cli("resume", "mine", "--set", "rounds=6", "-q").code == 0
    assert timeless(folder.records()) == timeless(straight.records)
    assert same(load_run(tmp_path / "mine").state.server, straight.state.server)
    assert RunFolder.open(tmp_path / "mine").config == {**begun, "rounds": 6}
    assert cli("resume", "mine", "--set", "rounds=7", "--set", "eval_every=1", "-q").code == 0
    made_from = RunFolder.open(tmp_path / "mine").config["made_from"]
    assert made_from == {**begun["made_from"], "eval_every": 1}
    longer = build().fit(8, out=tmp_path / "mine", resume=True, quiet=True)
    assert longer.summary["rounds"] == 8, "Python goes on with it too"


def test_predictions_of_arrays_frames_and_tensors_are_equal(run):
    x = run.federation.data.x_test
    right = run.predict(x)
    assert right.shape == (len(x),) and set(right) <= {0, 1, 2}
    for form in (x.numpy(), x.double(), x.numpy().astype(np.float64), pd.DataFrame(x.numpy())):
        assert np.array_equal(run.predict(form), right)
    module = run.model()
    prepared = run.federation.data.prepare(x)  # with the mean and deviation of every column
    assert np.allclose(run.predict(x, raw=True), module(prepared).detach().numpy())
    with pytest.raises(UserError, match=r"shape \(2, 5\), but a sample of 'wine' has the shape"):
        run.predict(np.zeros((2, 5)))


def test_pixels_are_whole_numbers_or_floats_between_0_and_1():
    run = small(FedPer(), "mlp", data=load("digits")).fit(1, quiet=True)
    pixels = run.federation.data.x_test[:20]
    right = run.predict(pixels, client=0)
    for form in (pixels.numpy(), pixels.long(), pixels / 255, pixels.double().numpy() / 255):
        assert np.array_equal(run.predict(form, client=0), right)
    for wrong in (pixels.double(), pixels / 255 - 0.5, pixels.long() + 100):
        with pytest.raises(UserError, match="pixels are whole numbers from 0 to 255 or floats"):
            run.predict(wrong, client=0)


def test_a_folder_of_runs_names_them(run):
    with pytest.raises(UserError, match=r"no config\.toml; name one of the runs in it: wine"):
        load_run(run.folder.path.parent)


def test_a_folder_that_is_not_there_names_its_neighbours(run, tmp_path):
    beside = run.folder.path.parent
    with pytest.raises(UserError, match=r"no config\.toml; the runs beside it are wine\.$"):
        load_run(beside / "win")
    with pytest.raises(UserError, match=r"no config\.toml\.$"):
        load_run(tmp_path / "win")
    for number in range(8):
        RunFolder.create(tmp_path / f"a{number}", {}).close()
    RunFolder.create(tmp_path / "helix-seed0", {}).close()
    with pytest.raises(UserError, match=r"beside it are helix-seed0, a0, .*, a4 and 3 more\.$"):
        load_run(tmp_path / "helix")


def test_predictions_have_the_form_of_the_targets():
    x = DRAW.normal(size=(40, 3)).astype("float32")
    table = pd.DataFrame(x, columns=list("abc"))
    table["label"] = np.where(x[:, 0] > 0, "high", "low")
    usual = {"model": "linear", "partition": "iid", "clients": 2, "engine": "serial", "epochs": 1}
    texts = Federation(from_table(table), **usual).fit(1, quiet=True).predict(table[list("abc")])
    assert set(texts) <= {"high", "low"}
    for y, shape, kind in (
        (x @ DRAW.normal(size=(3, 2)), (40, 2), np.float32),
        (x[:, 0].astype(np.float32), (40,), np.float32),
        ((x > 0).astype(int), (40, 3), np.bool_),
    ):
        found = Federation(from_arrays(x, y), **usual).fit(1, quiet=True).predict(x)
        assert found.shape == shape and found.dtype == kind


def test_exports_give_the_same_outputs(run, tmp_path):
    folder = run.export(tmp_path / "model", ("safetensors", "torch"))
    x = run.federation.data.x_test[:7]
    expected = run.model()(x)
    program = torch.export.load(folder / "model.pt2").module()
    assert torch.allclose(program(x), expected, atol=1e-5)
    network = run.model()
    for parameter in network.parameters():
        torch.nn.init.zeros_(parameter)
    network.load_state_dict(load_file(folder / "model.safetensors"))
    assert torch.equal(network(x), expected)
    card = (folder / "README.md").read_text()
    for words in ("wine", "fedavg", "no formal guarantee", "model.pt2", "Global accuracy"):
        assert words in card
    with pytest.raises(UserError, match="formats are safetensors, torch, onnx, not 'pickle'"):
        run.export(tmp_path / "other", "pickle")


@pytest.mark.parametrize(
    ("method", "whom"),
    [
        (Private(delta=1e-4), "clients"),
        (DPSGD(delta=1e-4), "single samples"),
        (DPSGD(FedPer(), delta=1e-4), "single samples"),
    ],
)
def test_a_model_card_says_whom_privacy_protects_and_how_well(method, whom, tmp_path):
    pytest.importorskip("dp_accounting")
    private = Federation("wine", clients=2, model="mlp", method=method)
    private.fit(1, out=tmp_path / "run", quiet=True)
    run = load_run(tmp_path / "run", private)
    most = max(run.records[-1]["metadata"]["epsilon"].values())
    level = whom.split()[-1].removesuffix("s")
    spent = {"epsilon": most, "delta": 1e-4, "privacy_level": level}
    assert run.summary.items() >= spent.items() and run.folder.summary.items() >= spent.items()
    assert f">{rounded_up(most)} at δ = 0.0001, {level}-level<" in run._repr_html_()
    card = (run.export(tmp_path / "model", "safetensors", client=0) / "README.md").read_text()
    assert f"differential privacy of {whom}, epsilon {rounded_up(most)} at delta 0.0001" in card


PLAIN = "(what a client has spent at most) |"
OWN = "(what a client has spent at most), for what clients have sent and for the server's model; "


@pytest.mark.parametrize(
    ("method", "client", "says"),
    [
        ("private", 0, PLAIN),
        ("private+fedavg-ft", None, PLAIN),
        ("private+fedavg-ft", 0, OWN),
        ("private+fedper", 0, OWN),
        ("private+fedprox", 0, PLAIN),
        ("finish+dp-sgd", 0, OWN),
        ("dp-sgd+fedavg-ft", 0, OWN),
        ("dp-sgd+fedavg-ft", None, PLAIN),
    ],
)
def test_the_card_of_a_personal_model_claims_no_epsilon_for_what_a_client_trains_for_itself(
    method, client, says, tmp_path
):
    pytest.importorskip("dp_accounting")
    made = make_spec(method, {}).method
    run = Federation("wine", clients=2, model="mlp", method=made).fit(1, quiet=True)
    card = (run.export(tmp_path, client=client) / "README.md").read_text()
    assert says in card
    assert ("no epsilon holds for them |" in card) == (says == OWN)


def test_a_model_card_says_how_many_rounds_changed_the_model(run, tmp_path):
    def rounds(card):
        (line,) = [line for line in card.splitlines() if line.startswith("| Rounds |")]
        return line

    card = run.export(tmp_path / "model") / "README.md"
    assert rounds(card.read_text()) == "| Rounds | 1 |"
    idle = {**run.records[0], "round": 2, "refused": dict.fromkeys("0123", "NaN")}
    Run(run.federation, [*run.records, idle], run.state).export(tmp_path / "model")
    assert rounds(card.read_text()) == "| Rounds | 2, 1 of which changed the model |"


def test_onnx_gives_the_same_outputs(run, tmp_path):
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    run.export(tmp_path, ("onnx",), client=0)
    x = run.federation.data.x_test[:7]
    session = reference.ReferenceEvaluator(str(tmp_path / "model.onnx"))
    (found,) = session.run(None, {session.input_names[0]: x.numpy()})
    assert np.allclose(found, run.personal(0)(x).detach().numpy(), atol=1e-5)


def test_a_run_without_a_round_is_refused(run, tmp_path):
    (tmp_path / "empty").mkdir()
    config = (run.folder.path / "config.toml").read_text()
    (tmp_path / "empty" / "config.toml").write_text(config)
    with pytest.raises(UserError, match="has no checkpoint yet"):
        load_run(tmp_path / "empty")
    assert json.loads((run.folder.path / "clients.json").read_text())["samples"]


def test_several_metrics_at_once_are_those_of_the_records():
    run = small("calibrated", "mlp").fit(2, quiet=True)
    hits = {"hits": lambda output, target: (output.argmax(1) == target).float().mean()}
    found = run.evaluate(hits | {"samples": lambda output, target: len(target)})
    assert found["hits"].tolist() == pytest.approx(run.records[-1]["personal"])
    assert found["samples"].tolist() == [len(split.test) for split in run.federation.splits]


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(run, monkeypatch):
    tries = iter([UserError("gone"), None])
    rounds, read = iter([0, 1, 1]), RunFolder.state

    def replaced(folder, device):
        if problem := next(tries):
            raise problem
        return read(folder, device)

    monkeypatch.setattr(RunFolder, "state", replaced)
    monkeypatch.setattr(RunFolder, "rounds_saved", property(lambda folder: next(rounds)))
    assert len(load_run(run.folder.path).records) == 1
    monkeypatch.setattr(RunFolder, "rounds_saved", 1)
    tries = iter([UserError("gone")])
    with pytest.raises(UserError, match="gone"):
        load_run(run.folder.path)
