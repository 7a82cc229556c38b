"""One site: its data, its state on disk, and what it refuses."""

import json
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedhelix.cli.app import main
from fedhelix.core.errors import UserError
from fedhelix.core.tree import payload_bytes, take, tensors
from fedhelix.data import Split, from_arrays
from fedhelix.deploy import messages
from fedhelix.deploy.node import only_process
from fedhelix.deploy.readiness import wait_for_count
from fedhelix.deploy.remote_data import (
    RemotePartition,
    common_description,
    describe_data,
    placeholder_data,
    read_site_data,
    site_split,
)
from fedhelix.deploy.site import Site
from fedhelix.deploy.site_setup import site_setup
from fedhelix.deploy.site_state import SiteState, latest_model
from fedhelix.deploy.submit import create
from fedhelix.runs.spec import make_spec
from helpers import same
from in_process import EXPERIMENT, InProcessDeployment, small_images

SMALL = {
    "clients": 3,
    "rounds": 2,
    "epochs": 1,
    "batch_size": 64,
    "kernels": "onednn",
    "model": "linear",
}


def blobs(folder, seed, count=60, classes=3):
    """A folder with an easy classification."""
    draw = np.random.default_rng(seed)
    y = np.arange(count) % classes
    x = draw.normal(size=(count, 5)) + 4 * np.eye(5)[y]
    folder.mkdir(parents=True)
    np.save(folder / "x.npy", x.astype(np.float32))
    np.save(folder / "y.npy", y)
    return str(folder)


def test_a_site_keeps_a_limited_number_of_experiments(tmp_path, monkeypatch):
    monkeypatch.setattr("fedhelix.deploy.site.MOST_EXPERIMENTS", 2)
    site = Site("a", "digits", tmp_path)
    for number in range(2):
        site._check_room(f"{number:032x}")
        SiteState(tmp_path / f"{number:032x}" / "a").write(0, {"n": 1})
    with pytest.raises(UserError, match="keeps the state of 2 experiments"):
        site._check_room(f"{2:032x}")
    site._check_room(f"{1:032x}")  # a known one


def test_a_site_says_what_it_cannot_work_on_and_goes_on(tmp_path, capsys):
    data, asked = small_images(tmp_path), []
    deployment = InProcessDeployment(tmp_path, 3, data, common=True)
    (node, honest), *_ = deployment.grid.answers.items()
    deployment.grid.answers[node] = lambda content: asked.append(content) or honest(content)
    deployment.fit(make_spec("scaffold", {**SMALL, "rounds": 1, "data": data, "partition": "iid"}))
    header, body = next(
        message for message in map(messages.read, asked) if message.header["kind"] == "train"
    )
    model = body["payload"]["model"]
    bad = {
        "the site cannot work on what the server sent (KeyError: 'control')": {"model": model},
        "has an entry 'extra' that the site's network has not; check that the samples in --data": {
            "model": {**model, "extra": torch.ones(1)}
        },
        "than the site's network; check that the samples in --data have the shape": {
            "model": {name: value[:1] for name, value in model.items()}
        },
    }
    for said, payload in bad.items():
        answer = deployment.sites[0].answer(messages.write(header, {"payload": payload}))
        assert said in messages.read(answer).header["error"]
    answer = deployment.sites[0].answer(messages.write(header, body))
    assert "error" not in messages.read(answer).header


def test_a_client_goes_on_from_the_last_round_that_counted(tmp_path):
    kept = SiteState(tmp_path)
    assert kept.read() == {}
    for round, after in ((0, -1), (1, 0), (4, 1)):
        kept.after = after
        kept.write(round, {"n": round})

    def read(after):
        kept.after = after
        return kept.read()

    assert [read(after) for after in (0, 1, 3, 4, 9)] == [
        {},
        {"n": 1},
        {"n": 1},
        {"n": 4},
        {"n": 4},
    ]
    kept.after = 1
    kept.write(4, {"n": 44})  # the server was killed and runs round 4 again
    assert read(1) == {"n": 1} and read(4) == {"n": 44}
    kept.after = 1
    kept.write(5, {"n": 5})  # the answer of round 4 came too late
    assert read(4) == {"n": 1} and read(5) == {"n": 5}
    kept.after = 1
    kept.write(2, {"n": 2})  # an older checkpoint was put in place
    assert read(2) == {"n": 2} and sorted(path.name for path in tmp_path.iterdir()) == [
        "own-000001.safetensors",
        "own-000002.safetensors",
        "own-000005.safetensors",  # for the case that the newer one comes back
    ]


def test_sites_with_data_of_their_own_train_together(tmp_path):
    folders = [blobs(tmp_path / f"data-{n}", n, count) for n, count in enumerate((60, 90, 30))]
    deployment = InProcessDeployment(tmp_path, 3, folders)
    run = deployment.fit(
        make_spec("fedavg", {**SMALL, "data": "own", "rounds": 5}), out=tmp_path / "run"
    )
    assert run.records[-1]["personal_accuracy"] > 0.9
    assert "accuracy" not in run.records[-1]  # the server has no samples to evaluate its model on
    # 20 % of 60, 90 and 30 are test samples; 10 % of the rest are for validation.
    assert [len(split.train) for split in run.federation.splits] == [43, 65, 22]
    assert run.federation.data.x.shape == (1, 5) and not run.federation.data.x.any()
    census = json.loads((tmp_path / "run" / "clients.json").read_text())
    assert (
        census["samples"] == [43, 65, 22] and "classes" not in census
    )  # the server does not see labels


def test_a_place_that_no_site_has_taken_has_no_samples(tmp_path):
    folders = [blobs(tmp_path / f"data-{n}", n, count) for n, count in enumerate((60, 90, 30))]
    deployment = InProcessDeployment(tmp_path, 3, folders, begin=2)
    node, newcomer = deployment.grid.answers.popitem()
    fed = deployment.federation(make_spec("fedavg", {**SMALL, "data": "own", "rounds": 2}))
    assert fed.census()["samples"] == [43, 65, 0]
    deployment.grid.answers[node] = newcomer
    fed.engine.transport._refreshed = 0
    wait_for_count(fed.engine.transport, 3)
    for _ in fed.run_rounds(1):
        pass
    assert fed.census()["samples"] == [43, 65, 22]


def test_sites_take_their_parts_of_one_file(tmp_path):
    x, y = (np.load(f"{blobs(tmp_path / name, 0)}/{name}.npy") for name in "xy")
    np.savez(tmp_path / "all.npz", x=x, y=y)
    deployment = InProcessDeployment(tmp_path, 3, str(tmp_path / "all.npz"), common=True)
    spec = make_spec("fedavg", {**SMALL, "data": str(tmp_path / "all.npz"), "partition": "iid"})
    across, here = (
        deployment.fit(spec),
        spec.config.federation(spec.method, engine="serial").fit(2, quiet=True),
    )
    assert same(across.state.server, here.state.server)
    with pytest.raises(UserError, match="site 'site-0' has no samples of its own"):
        InProcessDeployment(tmp_path / "own", 3, str(tmp_path / "all.npz"), common=True).fit(
            make_spec("fedavg", {**SMALL, "data": "own"})
        )


def test_a_free_place_is_no_obstacle_to_batch_norm(tmp_path):
    folders = []
    for site in range(3):
        folders.append(blobs(tmp_path / f"data-{site}", site))
        images = np.random.default_rng(site).normal(size=(60, 1, 8, 8)).astype(np.float32)
        np.save(tmp_path / f"data-{site}" / "x.npy", images)
    deployment = InProcessDeployment(tmp_path, 3, folders, begin=2)
    deployment.grid.answers.popitem()  # the third site has not come yet
    fed = deployment.federation(
        make_spec("fedavg", {**SMALL, "data": "own", "model": "digits-bn-cnn"})
    )
    record, _ = next(fed.run_rounds(1))
    assert record["missing"] == {"2": "no site has taken this place yet"} and np.isfinite(
        record["train_loss"]
    )
    assert (
        record["downlink_bytes"]
        == record["uplink_bytes"]
        == 2 * payload_bytes(fed.engine.setup.initial)
    )


def test_what_is_wrong_with_a_sites_samples_is_said_of_its_folder(tmp_path):
    blobs(tmp_path / "mine", 0)
    x = np.load(tmp_path / "mine" / "x.npy")
    x.flat[0] = np.nan
    np.save(tmp_path / "mine" / "x.npy", x)
    with pytest.raises(UserError, match=f"x of '{tmp_path / 'mine'}' has nan in sample 0"):
        read_site_data(tmp_path / "mine")


def test_a_server_may_have_samples_for_selection_and_tests(tmp_path):
    folders = [blobs(tmp_path / f"data-{n}", n) for n in range(3)]
    mine = blobs(tmp_path / "server", 9)
    x, y = (np.load(f"{mine}/{name}.npy") for name in "xy")
    np.savez(tmp_path / "server.npz", x=x[:40], y=y[:40], x_test=x[40:], y_test=y[40:])
    deployment = InProcessDeployment(tmp_path, 3, folders, server_data=str(tmp_path / "server.npz"))
    run = deployment.fit(make_spec("genfed", {**SMALL, "data": "own"}), out=tmp_path / "run")
    assert set(run.records[0]["metadata"]["fitness"]) == {"0", "1", "2"}
    assert run.records[-1]["accuracy"] > 0.5


@pytest.mark.parametrize("size", [None, 30])
def test_helix_uses_the_servers_samples_where_it_gets_some(size, tmp_path):
    folders = [blobs(tmp_path / f"data-{n}", n) for n in range(3)]
    mine = blobs(tmp_path / "server", 9)
    x, y = (np.load(f"{mine}/{name}.npy") for name in "xy")
    np.savez(tmp_path / "server.npz", x=x, y=y)
    where = {} if size is None else {"server_data": str(tmp_path / "server.npz")}
    deployment = InProcessDeployment(tmp_path, 3, folders, **where)
    spec = make_spec("helix", {**SMALL, "data": "own", "validation_size": size})
    run = deployment.fit(spec, out=tmp_path / "run")
    fed = run.federation
    model = fed.initialize(1).server["model"]
    assert same(model, take(fed.initial, list(model))) == (size is None)
    assert run.summary["complete"]


def test_small_sites_get_supplements_once(tmp_path):
    folders = [blobs(tmp_path / f"data-{n}", n, count) for n, count in enumerate((90, 90, 12))]
    mine = blobs(tmp_path / "server", 9)
    x, y = (np.load(f"{mine}/{name}.npy") for name in "xy")
    np.savez(tmp_path / "server.npz", x=x, y=y)
    deployment = InProcessDeployment(tmp_path, 3, folders, server_data=str(tmp_path / "server.npz"))
    sent = []
    for node, answer in list(deployment.grid.answers.items()):

        def spy(content, answer=answer):
            sent.append("supplement" in messages.read(content).body)
            return answer(content)

        deployment.grid.answers[node] = spy
    requested = {"validation_size": 40, "supplement_size": 6, "supplement_below": 20, "data": "own"}
    run = deployment.fit(make_spec("fedavg", {**SMALL, **requested}))
    assert run.federation.supplements == {2: 6} and sum(sent) == 1
    assert run.records[0]["other_bytes"] == 6 * 4 * (5 + 1)
    supplement = SiteState(tmp_path / "kept" / EXPERIMENT / "site-2").supplement()
    assert supplement["x"].shape == (6, 5)
    # 12 samples: 2 for tests, 1 for validation, 9 to train on, and the supplement.
    message = messages.write(
        {"kind": "train", "round": 0, "client": 2, **run.federation.engine.common_header}, {}
    )
    assert messages.read(deployment.sites[2].answer(message)).header["samples"] == 15


def test_sites_must_have_samples_of_one_kind(tmp_path):
    one, other = (
        from_arrays(np.zeros((10, 3)), np.arange(10) % 2),
        from_arrays(np.zeros((10, 4)), np.arange(10) % 2),
    )
    real = from_arrays(np.zeros((10, 3)), np.linspace(0, 1, 10))
    more = from_arrays(np.zeros((15, 3)), np.arange(15) % 3)
    assert common_description({"a": describe_data(one), "b": describe_data(more)})["classes"] == 3
    with pytest.raises(
        UserError, match=r"site 'b' has samples with shape \[4\], but 'a' has \[3\]"
    ):
        common_description({"a": describe_data(one), "b": describe_data(other)})
    with pytest.raises(UserError, match="site 'b' has a regression, but 'a' has a classification"):
        common_description({"a": describe_data(one), "b": describe_data(real)})
    assert (
        placeholder_data(describe_data(one)).shape == (3,)
        and placeholder_data(describe_data(real)).classes is None
    )


def test_parts_are_the_same_on_both_sides():
    server = RemotePartition([(100, 20), (1, 0)], valid=0.1).split(
        placeholder_data(describe_data(read_like())), seed=3
    )
    sites = [site_split(100, 20, 0.1, 3, 0), site_split(1, 0, 0.1, 3, 1)]
    for parts in (server, sites):
        assert [len(part) for part in vars(parts[0]).values()] == [90, 10, 20]
        assert [len(part) for part in vars(parts[1]).values()] == [1, 0, 0]


def read_like():
    return from_arrays(np.zeros((10, 3)), np.arange(10) % 2)


def ask(site, spec, **more):
    header = {
        "kind": "train",
        "experiment": EXPERIMENT,
        "client": 0,
        "round": 0,
        "spec": json.dumps(spec.as_dict()),
        **more,
    }
    return messages.read(site.answer(messages.write(header))).header


def test_what_a_site_refuses(tmp_path):
    site, spec = Site("a", "digits", tmp_path), make_spec("fedavg", SMALL)
    assert ask(site, spec)["samples"] > 0
    assert "no request 'run'" in ask(site, spec, kind="run")["error"]
    assert "for experiment, which must be" in ask(site, spec, experiment="../../etc")["error"]
    assert "for round, which must be" in ask(site, spec, round="0")["error"]
    other = make_spec("fedavg", {"data": "mnist"})
    assert "about the data 'mnist', but the site has 'digits'" in ask(site, other)["error"]
    assert "is no message" in messages.read(site.answer(b"?")).header["error"]
    # A method's file would be code that the server chooses.
    (tmp_path / "evil.py").write_text("raise SystemExit('executed')")
    config = {**spec.as_dict(), "method": {"name": str(tmp_path / "evil.py")}}
    evil = SimpleNamespace(as_dict=lambda: config)
    assert "knows no method" in ask(site, evil)["error"]


def test_what_comes_by_message_and_from_disk_is_moved_to_the_site_s_device(tmp_path, monkeypatch):
    site = Site("a", "digits", tmp_path)
    other_device = torch.device("meta")  # the only other device that every machine has
    monkeypatch.setattr(
        site,
        "_setup_for",
        lambda *_: SimpleNamespace(
            device=other_device, initial={"w": torch.ones(2)}, method=make_spec("fedavg", {}).method
        ),
    )
    SiteState(tmp_path / EXPERIMENT / "a").write(0, {"head": {"w": torch.ones(2)}})
    message = messages.Message(
        {"experiment": EXPERIMENT, "client": 0, "round": 1, "after": 0},
        {"payload": {"model": {"w": torch.ones(2)}}},
    )
    _, task, _ = site._open(message)
    assert {tensor.device for tensor in tensors(task.payload) + tensors(task.client_state)} == {
        other_device
    }
    assert len(tensors(task.client_state)) == 1


def test_a_site_with_one_sample_learns_that_batch_norm_needs_two():
    data = from_arrays(torch.zeros(30, 1, 8, 8), torch.arange(30) % 3)
    nobody, alone = (Split(np.arange(count), np.arange(0), np.arange(1)) for count in (0, 1))
    assert site_setup(make_spec("fedavg", SMALL), data, [nobody, alone]).layers.names
    with pytest.raises(UserError, match="BatchNorm needs two"):
        site_setup(make_spec("fedavg", {**SMALL, "model": "digits-bn-cnn"}), data, [nobody, alone])


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("../up", "digits", "a site's name has"),
        ("a", "digit", "did you mean 'digits'"),
        ("a", "missing.npz", "there is no file"),
        ("a", ".", "must hold x.npy and y.npy"),
    ],
)
def test_mistakes_show_at_the_start(name, data, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        Site(name, data, tmp_path / "kept")


def test_a_site_says_at_its_start_that_its_columns_are_not_scaled(tmp_path, cli):
    place = Path(blobs(tmp_path / "own", 0))
    command = ("site", "--name=a", f"--data={place}", "--dry-run=fedavg")
    assert cli(*command).err == ""
    np.save(place / "x.npy", 500 * np.load(place / "x.npy"))
    ended = cli(*command)
    assert ended.code == 0 and "fedavg may run at a" in ended.out
    assert ended.err.startswith(f"fedhelix: the inputs of '{place}' are not scaled (column ")
    assert ended.err.endswith("at all sites; scale the columns as the other sites do.\n")


def test_a_site_may_lack_the_first_classes(tmp_path):
    np.savez(tmp_path / "own.npz", x=np.zeros((20, 2), np.float32), y=1 + np.arange(20) % 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert read_site_data(tmp_path / "own.npz").y.unique().tolist() == [1, 2]


def test_data_that_would_be_pickled_are_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.save(tmp_path / "y.npy", np.zeros(1))
    with pytest.raises(UserError, match=r"x\.npy' cannot be read"):
        read_site_data(tmp_path)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engine": "serial"}, "engine = serial has no effect across sites"),
        ({"devices": "uniform"}, "devices = uniform has no effect across sites"),
        ({"client_state": "disk"}, "client_state = disk has no effect across sites"),
        (
            {"data": "own", "train_samples": 9},
            "train_samples = 9 has no effect where sites have their own samples",
        ),
    ],
)
def test_settings_without_effect_are_refused(settings, said, tmp_path):
    with pytest.raises(UserError, match=said):
        create(make_spec("fedavg", settings), tmp_path / "run")
    create(make_spec("fedavg", {"train_samples": 90, "partition": "iid"}), tmp_path / "run")
    with pytest.warns(UserWarning, match="the partition iid has no effect"):
        create(make_spec("fedavg", {"data": "own", "partition": "iid"}), tmp_path / "other")


def test_a_simulated_clock_is_no_match_for_sites(tmp_path):
    with pytest.raises(UserError, match="fedbuff is asynchronous by a simulated clock, and sites"):
        create(make_spec("fedbuff", {}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_mistakes_in_the_servers_own_data_show_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = make_spec("fedavg", {"data": "own"})
    with pytest.raises(UserError, match=r"there is no file '.*mine\.npz'"):
        create(spec, tmp_path / "run", ["server_data=mine.npz"])
    np.savez("mine.npz", x=np.zeros((10, 3)), y=np.arange(10) % 2)
    with pytest.raises(UserError, match="here the server takes its from 'digits'"):
        create(make_spec("fedavg", {}), tmp_path / "run", ["server_data=mine.npz"])
    made = create(spec, tmp_path / "run", ["server_data=mine.npz"])
    assert made.config["deployment"]["server_data"] == str(tmp_path / "mine.npz")


def test_labels_of_the_sites_own_samples_cannot_be_flipped(tmp_path):
    spec = make_spec("fedavg", {"data": "own", "attack": "label-flip"})
    with pytest.raises(
        UserError, match="label-flip changes samples, and here they are the sites' own"
    ):
        create(spec, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert (
        create(make_spec("fedavg", {"data": "own", "attack": "ipm"}), tmp_path / "run").config[
            "attack"
        ]
        == "ipm"
    )


def test_a_site_says_what_it_does_and_keeps_its_own_model(tmp_path, capfd):
    """After the last round each site has the network's entries in one file."""
    folders = [blobs(tmp_path / f"data-{n}", n) for n in range(2)]
    deployment = InProcessDeployment(tmp_path, 2, folders)
    spec = make_spec("fedavg", {**SMALL, "clients": 2, "data": "own"})
    run = deployment.fit(spec, out=tmp_path / "run")
    lines = capfd.readouterr().err.splitlines()
    assert sum(line.startswith("fedhelix: round 2: 43 samples, loss ") for line in lines) == 2
    assert sum(line.startswith("fedhelix: after round 2: accuracy ") for line in lines) == 2
    assert lines.count("fedhelix: a run asks which data this site has.") == 2
    assert lines.count("fedhelix: after round 2: the site keeps its model of this run.") == 2
    (found,) = tmp_path.rglob("site-1/model.safetensors")
    kept = load_file(latest_model(found.parents[2], "site-1"))
    expected = run.model().state_dict()
    assert kept.keys() == expected.keys()
    assert all(torch.equal(kept[name], value) for name, value in expected.items())
    with pytest.raises(UserError, match="the site 'site-9' has no model in"):
        latest_model(found.parents[2], "site-9")


def test_a_method_that_scores_models_says_which_term_is_missing(tmp_path):
    spec = make_spec("genfed", {**SMALL, "data": "own"})
    with pytest.raises(UserError, match=r"genfed scores models .* --term server_data=FILE.npz"):
        create(spec, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"there is no folder '.*nowhere' with the site's samples"):
        Site("a", str(tmp_path / "nowhere"), tmp_path)


def test_a_second_process_in_the_same_folder_is_refused(tmp_path, monkeypatch, capsys):
    """Until the first one ends, by whatever means."""
    hold = "import fcntl, sys; f = open(sys.argv[1], 'ab'); fcntl.flock(f, fcntl.LOCK_EX)"
    command = [sys.executable, "-c", f"{hold}; print('held', flush=True); input()"]
    data = blobs(tmp_path / "data", 0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the test's own stay
    words = ["--name=north", "--superlink=127.0.0.1:1", f"--data={data}", "--cert=c", "--key=k"]
    monkeypatch.setattr(sys, "argv", ["fedhelix", "site", *words, f"--folder={tmp_path}"])
    with subprocess.Popen(
        [*command, tmp_path / "north.lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdout.readline() == b"held\n"
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        said = f"another process runs the site north in '{tmp_path}' already; stop that one first."
        assert said in capsys.readouterr().err
        with only_process(tmp_path, "south"):  # another site
            first.kill()
            first.wait()
    with only_process(tmp_path, "north"):
        pass
