import errno
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fedhelix import FedAvg
from fedhelix.core import toml
from fedhelix.core.errors import UserError
from fedhelix.report.locate import inside
from fedhelix.report.tables import comparison as compared
from fedhelix.runs import comparison, jobs
from fedhelix.runs.jobs import Session
from fedhelix.runs.spec import make_spec, read_spec
from fedhelix.store import RunFolder
from helpers import checkpoint, on_disk, same

QUIET = Session(quiet=True)
SMALL = {
    "clients": 6,
    "cohort": 3,
    "rounds": 2,
    "epochs": 1,
    "batch_size": 64,
    "model": "mlp",
    "engine": "serial",
}


def test_a_started_run_can_be_resumed_to_the_end(tmp_path):
    done = jobs.start(make_spec("fedper", SMALL), tmp_path / "run", quiet=True)
    before = on_disk(tmp_path / "run"), done.summary
    again = jobs.resume(tmp_path / "run", quiet=True)  # nothing is left to do
    assert (on_disk(tmp_path / "run"), again.summary) == before
    assert not (tmp_path / "run" / "lock").exists()


def test_a_run_without_a_checkpoint_says_that_it_starts_again(tmp_path, recwarn):
    spec = make_spec("fedavg", {**SMALL, "rounds": 1})
    RunFolder.create(tmp_path / "run", spec.as_dict()).close()
    with pytest.raises(UserError, match="begun with lr"):
        jobs.resume(tmp_path / "run", quiet=True, changes=["lr=5"])
    assert not recwarn  # a run that does not go on says nothing else
    with pytest.warns(UserWarning, match="no checkpoint; the run starts again from its first"):
        jobs.resume(tmp_path / "run", quiet=True)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["lr=5"], "begun with lr = 0.1, .* start a new one with `.* --set lr=5`"),
        (["rounds=4", "model=linear"], "begun with model = mlp"),
        (["seed=1"], "begun with seed = 0"),
        (["rounds=1"], "has 2 rounds already, so rounds must be 2 or more, not 1"),
        (["fedprox.mu=3"], "begun with method.mu = 0.01"),
        (["eval_clients=2"], "begun with eval_clients = auto"),
        (["rounds=4", "engine=fast"], "unknown engine 'fast'"),  # found out later
    ],
)
def test_a_change_that_is_refused_leaves_the_run_as_it_was(changes, sentence, fedprox_run):
    before = {path: path.read_bytes() for path in fedprox_run.rglob("*.*")}
    with pytest.raises(UserError, match=sentence):
        jobs.resume(fedprox_run, quiet=True, changes=changes)
    assert {path: path.read_bytes() for path in fedprox_run.rglob("*.*")} == before


def test_a_run_may_get_more_rounds_and_another_place(fedprox_run, tmp_path):
    folder = RunFolder.open(shutil.copytree(fedprox_run, tmp_path / "run"))
    before = folder.config
    changes = ["rounds=3", "engine=parallel", "workers=1", "lr=0.1"]  # lr is as it was
    jobs.resume(folder.path, quiet=True, changes=changes)
    after = before | {"rounds": 3, "engine": "parallel", "workers": 1}
    assert folder.config == after and len(folder.records()) == 3


@pytest.fixture(scope="module")
def fedprox_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fedprox") / "run"
    jobs.start(make_spec("fedprox", SMALL), folder, quiet=True)
    return folder


def test_a_run_of_owners_records_their_number_and_resumes_with_the_usual_one(tmp_path):
    x, y = np.arange(120, dtype=np.float32).reshape(60, 2), np.arange(60) % 2
    np.savez(tmp_path / "towns.npz", x=x, y=y, owners=np.repeat(["a", "b", "c"], 20))
    settings = {"data": str(tmp_path / "towns.npz"), "rounds": 1, "engine": "serial"}
    jobs.start(make_spec("fedavg", settings), tmp_path / "run", quiet=True)
    config = RunFolder.open(tmp_path / "run").config
    assert (config["partition"], config["clients"]) == ("natural", 3)
    older = {**config, "clients": 20}  # as versions before wrote it
    assert read_spec(older, "run").config.clients is None
    assert read_spec({**older, "deployment": {}}, "run").config.clients == 20


def test_resuming_what_is_no_run(tmp_path):
    with pytest.raises(UserError, match=r"is not a run: it holds no config\.toml"):
        jobs.resume(tmp_path)


def test_a_comparison_runs_every_method_with_every_seed_on_the_same_cohorts(tmp_path):
    folders = comparison.compare(
        ["fedavg", "fedper"], {**SMALL, "seed": 4}, 2, tmp_path / "c", session=QUIET
    )
    names = ["fedavg-seed4", "fedper-seed4", "fedavg-seed5", "fedper-seed5"]
    assert [folder.path.name for folder in folders] == names
    assert all(folder.summary["complete"] for folder in folders)
    cohorts = [[record["participants"] for record in folder.records()] for folder in folders]
    assert cohorts[0] == cohorts[1] and cohorts[2] == cohorts[3] and cohorts[0] != cohorts[2]
    assert [folder.summary["seed"] for folder in folders] == [4, 4, 5, 5]
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == sorted(
        ["comparison.toml", *names]
    )


def test_a_stopped_comparison_goes_on_and_leaves_the_finished_runs_alone(tmp_path, monkeypatch):
    methods, out = ["fedavg", "fedrep", "local"], tmp_path / "c"
    comparison.compare(methods, SMALL, 1, tmp_path / "straight", session=QUIET)

    class Killed(Exception):
        pass

    seen = []
    aggregate = FedAvg.aggregate

    def dies_in_the_second_run(self, server, uploads, weights, ctx):
        seen.append((self.name, ctx.round))
        if (self.name, ctx.round) == ("fedrep", 1):
            raise Killed
        return aggregate(self, server, uploads, weights, ctx)

    with monkeypatch.context() as patch:
        patch.setattr(FedAvg, "aggregate", dies_in_the_second_run)
        with pytest.raises(Killed):
            comparison.compare(methods, SMALL, 1, out, session=QUIET)
    assert seen == [("fedavg", 0), ("fedavg", 1), ("fedrep", 0), ("fedrep", 1)]
    finished = [out / "fedavg-seed0" / name for name in ("metrics.jsonl", "summary.json")]
    written = [path.stat().st_mtime_ns for path in finished]
    assert comparison.is_comparison(out) and not comparison.is_comparison(out / "fedavg-seed0")

    comparison.resume_comparison(out, session=QUIET)
    assert [path.stat().st_mtime_ns for path in finished] == written
    for name in methods:
        run = f"{name}-seed0"
        assert on_disk(out / run) == on_disk(tmp_path / "straight" / run)
        assert same(checkpoint(out / run), checkpoint(tmp_path / "straight" / run))


def test_a_run_without_its_summary_is_summed_up_again(tmp_path):
    comparison.compare(["fedavg", "local"], SMALL, 1, tmp_path / "c", session=QUIET)
    summary = tmp_path / "c" / "local-seed0" / "summary.json"
    content = summary.read_text()
    summary.unlink()
    comparison.compare(["fedavg", "local"], SMALL, 1, tmp_path / "c", session=QUIET)
    assert summary.read_text() == content


GREETING = """
import torch
from dataclasses import dataclass
from fedhelix import FedAvg, register

@register("greeting")
@dataclass(frozen=True)
class Greeting(FedAvg):
    "Sends a tensor beside the model."

    def upload(self, local):
        tree, kept = super().upload(local)
        return {**tree, "hello": torch.zeros(1)}, kept
"""


def test_a_method_that_is_refused_at_its_first_upload_can_be_left_out(tmp_path, cli):
    pytest.importorskip("dp_accounting")
    (tmp_path / "greeting.py").write_text(GREETING)
    options = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    options += ["--out", "c", "-q"]
    done = cli("compare", "fedavg", "private+greeting.py", "local", *options)
    assert done.code == 2 and done.err == (
        "fedhelix: private cannot protect what greeting sends too: hello; have its upload send the "
        "model alone, or leave out private+greeting.\n"
    )
    before = on_disk(tmp_path / "c/fedavg-seed0")
    done = cli("compare", "fedavg", "local", *options)
    assert done.code == 0 and on_disk(tmp_path / "c/fedavg-seed0") == before
    assert cli("resume", "c", "-q").code == 0  # which goes on without it, too
    # What has a run there stays.
    assert "holds another comparison" in cli("compare", "fedavg", *options).err


def test_a_comparison_keeps_what_its_methods_share(tmp_path):
    note = {"methods": ["fedavg", "genfed"], "seeds": 1, "settings": SMALL}
    assert not comparison._is_rest({**note, "methods": ["fedavg"]}, note, tmp_path)
    note["methods"] = ["fedavg", "local"]
    assert comparison._is_rest({**note, "methods": ["fedavg"]}, note, tmp_path)


def test_a_folder_belongs_to_one_comparison(tmp_path):
    comparison.compare(["fedavg"], SMALL, 1, tmp_path / "c", session=QUIET)
    for methods, values, seeds in (
        (["local"], SMALL, 1),
        (["fedavg"], {**SMALL, "lr": 0.2}, 1),
        (["fedavg"], SMALL, 2),
    ):
        with pytest.raises(UserError, match="holds another comparison; choose another folder"):
            comparison.compare(methods, values, seeds, tmp_path / "c", session=QUIET)
    with pytest.raises(UserError, match="is not empty"):
        comparison.compare(["fedavg"], SMALL, 1, tmp_path, session=QUIET)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file or lies below one"):
        comparison.compare(["fedavg"], SMALL, 1, tmp_path / "file" / "c", session=QUIET)


@pytest.mark.parametrize(
    ("methods", "values", "seeds", "sentence"),
    [
        (
            ["fedavg", "fedavg"],
            {},
            1,
            "'fedavg' is named twice; a comparison needs different methods",
        ),
        (
            ["fedavg", "fedavg@lr=0.1"],
            {},
            1,
            "'fedavg@lr=0.1' is named twice; a comparison needs different methods",
        ),
        (["fedavg"], {}, 0, "seeds must lie between 1 and 1000, not 0"),
        (["fedavg", "fedbn"], {}, 1, "fedbn needs a model with BatchNorm"),
        (["fedavg", "fedprox"], {"fedprox.muu": 1}, 1, "unknown key of the method fedprox 'muu'"),
        (["fedavg", "local"], {"method.mu": 1}, 1, "unknown key of the method fedavg 'mu'"),
    ],
)
def test_every_mistake_shows_before_the_first_round(methods, values, seeds, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence):
        comparison.compare(methods, SMALL | values, seeds, tmp_path / "c", session=QUIET)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("key", ["methods", "settings", "seeds"])
def test_a_damaged_note(tmp_path, key):
    note = {"methods": ["fedavg"], "settings": {}, "seeds": 1, key: "damaged"}
    (tmp_path / "comparison.toml").write_text(toml.dumps(note))
    with pytest.raises(UserError, match=rf"comparison\.toml' is damaged: it lacks its {key}"):
        comparison.resume_comparison(tmp_path)


MINE = """
from dataclasses import dataclass
from fedhelix import FedAvg, register

@register("mine")
@dataclass(frozen=True)
class Mine(FedAvg):
    rate: float = 1.0

@register("other")
@dataclass(frozen=True)
class Other(FedAvg):
    pass
"""


def test_methods_of_one_file_side_by_side(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    specs = [f"{tmp_path / 'mine.py'}:{name}" for name in ("mine", "other")]
    folders = comparison.compare(
        ["fedavg", *specs], {**SMALL, "rounds": 1, "mine.rate": 3}, 1, tmp_path / "c", session=QUIET
    )
    assert [folder.path.name for folder in folders] == ["fedavg-seed0", "mine-seed0", "other-seed0"]
    assert folders[1].summary["options"] == {"rate": 3.0}
    assert [folder.summary["method"] for folder in folders] == ["fedavg", "mine", "other"]


def test_variants_of_one_method_are_told_apart(tmp_path):
    methods = [
        "fedavg",
        "fedavg@supplement_size=20,supplement_below=1",
        "fedavg@attack=ipm",
        "genfed",
    ]
    folders = comparison.compare(
        methods, {**SMALL, "rounds": 1, "model": "linear"}, 2, tmp_path / "c", session=QUIET
    )
    assert [folder.path.name for folder in folders[:4]] == [f"{name}-seed0" for name in methods]
    # The server keeps the same samples from all of them, so that they differ in nothing else.
    assert {folder.config["validation_size"] for folder in folders} == {0.1}
    assert [folder.summary["other_bytes"] > 0 for folder in folders[:4]] == [
        False,
        True,
        False,
        False,
    ]
    assert list(compared(folders).index) == [
        "fedavg (supplement_size=0.0, supplement_below=0.2, attack=none)",
        "fedavg (supplement_size=20.0, supplement_below=1.0, attack=none)",
        "fedavg (supplement_size=0.0, supplement_below=0.2, attack=ipm)",
        "genfed (supplement_size=0.0, supplement_below=0.2, attack=none)",
    ]
    written = [path.stat().st_mtime_ns for path in sorted((tmp_path / "c").rglob("summary.json"))]
    comparison.resume_comparison(tmp_path / "c", session=QUIET)
    assert [
        path.stat().st_mtime_ns for path in sorted((tmp_path / "c").rglob("summary.json"))
    ] == written


def test_a_free_folder_is_never_one_that_exists(tmp_path):
    assert jobs.free_folder("run", tmp_path) == tmp_path / "run"
    (tmp_path / "run-2").write_text("a file")
    assert jobs.free_folder("run", tmp_path) == tmp_path / "run-3"
    with pytest.raises(
        UserError, match=r"'.*run-2/x' cannot be made \(Not a directory\); choose another folder"
    ):
        jobs.free_folder("x", tmp_path / "run-2")


def test_processes_at_the_same_moment_choose_other_folders(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: jobs.free_folder("run", tmp_path), range(40)))) == 40


def test_a_run_that_cannot_begin_leaves_no_folder_but_the_users(cli, tmp_path):
    assert cli("run", "fedbn", "--model", "linear", "-q").code == 2
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine").mkdir()
    assert cli("run", "fedbn", "--model", "linear", "-q", "--out", "mine").code == 2
    assert cli("resume", "mine").code == 2 and (tmp_path / "mine").is_dir()


def test_a_folder_says_what_was_left_open(tmp_path):
    jobs.start(make_spec("fedavg", {"rounds": 1, "epochs": 1}), tmp_path / "run", quiet=True)
    config = RunFolder.open(tmp_path / "run").config
    assert (config["partition"], config["cohort"], config["model"]) == (
        "dirichlet:0.3",
        10,
        "digits-cnn",
    )


ELSEWHERE = """
from dataclasses import dataclass
from fedhelix import FedAvg, register

@register("mine-elsewhere")
@dataclass(frozen=True)
class Mine(FedAvg):
    zeta: float = 1.0
"""


def test_runs_and_comparisons_go_on_from_any_folder(cli, tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    (tmp_path / "sub").mkdir()
    np.savez(
        tmp_path / "sub" / "tab.npz",
        x=draw.normal(size=(120, 4)).astype(np.float32),
        y=np.arange(120) % 3,
    )
    (tmp_path / "mine.py").write_text(ELSEWHERE)
    common = ["--data", "sub/tab.npz", "--clients", 3, "--rounds", 1, "-q"]
    assert cli("run", "mine.py", *common).code == 0
    run = tmp_path / "runs" / "mine-elsewhere-tab-seed0"
    assert cli("compare", "mine.py", "fedavg", "mine.py@zeta=2", *common, "--out", "two").code == 0
    assert [run.name for run in inside(tmp_path / "two")] == [
        f"{label}-seed0" for label in ("mine-elsewhere", "fedavg", "mine-elsewhere@zeta=2")
    ]
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    for folder in (run, tmp_path / "two"):
        found = cli("resume", folder, "-q")
        assert found.code == 0, found.err
    found = cli(
        "run", tmp_path / "mine.py", "--config", run / "config.toml", "-q", "--out", "again"
    )
    assert found.code == 0, found.err
    assert on_disk(tmp_path / "other" / "again") == on_disk(run)


def test_a_full_disk_is_one_sentence(cli, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", "run/metrics.jsonl")

    monkeypatch.setattr(RunFolder, "append", full)
    found = cli("run", "fedavg", "--rounds", 1, "--clients", 3, "-q")
    assert found.code == 1 and "no space left on the device; no complete round is lost" in found.err
