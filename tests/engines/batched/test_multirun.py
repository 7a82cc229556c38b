"""Many runs at once: one program where the engine can, the same results in any case."""

import threading
from dataclasses import replace

import pytest

from fedhelix.engines.batched.scheduler import Scheduler
from fedhelix.runs import jobs
from fedhelix.runs.config import Config
from fedhelix.runs.jobs import Session
from fedhelix.runs.spec import make_spec
from fedhelix.store import RunFolder
from fedhelix.store.progress import Progress
from helpers import unseal

SMALL = {
    "clients": 6,
    "cohort": 3,
    "rounds": 3,
    "epochs": 1,
    "validation_size": 60.0,
    "model": "mlp",
    "kernels": "native",
}


def specs(tmp_path, engine, methods=("fedavg", "genfed", "fedper"), **more):
    return {
        tmp_path / f"{engine}-{name}-{seed}": make_spec(
            name, {**SMALL, **more, "engine": engine, "seed": seed}
        )
        for name in methods
        for seed in (0, 1)
    }


def finals(runs):
    return [RunFolder.open(path).summary["personal_accuracy"] for path in runs]


def test_runs_that_go_together_end_as_they_do_alone(tmp_path):
    one_by_one, as_one = specs(tmp_path, "serial"), specs(tmp_path, "batched")
    assert Session(quiet=True).run_all(one_by_one) and Session(quiet=True).run_all(as_one)
    assert finals(as_one) == pytest.approx(finals(one_by_one), abs=0.02)
    engines = {RunFolder.open(path).summary["engine"] for path in as_one}
    assert engines == {"together (several runs as one program)"}


def test_methods_with_one_objective_share_their_slots(tmp_path, monkeypatch):
    groups, known = [], Scheduler._train_alike

    def watched(self, kind, tasks):
        groups.append({task.setup.method.name for task in tasks})
        known(self, kind, tasks)

    monkeypatch.setattr(Scheduler, "_train_alike", watched)
    Session(quiet=True).run_all(specs(tmp_path, "batched", ("fedavg", "genfed")))
    assert groups == [{"fedavg", "genfed"}] * SMALL["rounds"]


def test_time_that_is_up_loses_nothing(tmp_path, monkeypatch):
    shown = []

    class Watched(Progress):
        def update(self, record):
            shown.append((record["round"], self._total))

    runs = specs(tmp_path, "batched", ("fedavg", "genfed"), rounds=4)
    assert not Session.limited(0, True).run_all(runs)
    assert not any(path.exists() for path in runs)  # without any time nothing is begun
    assert not Session.limited(1e-3, quiet=True).run_all(runs)  # over when the first round is
    assert {len(RunFolder.open(path).records()) for path in runs} == {1}
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "Progress", Watched)
        assert Session(quiet=True).run_all(runs)
    # One round of each of the four runs was done before.
    assert shown == [(round, 16) for round in range(5, 17)]
    straight = specs(tmp_path / "straight", "batched", ("fedavg", "genfed"), rounds=4)
    assert Session(quiet=True).run_all(straight)
    assert finals(runs) == finals(straight)
    assert Session(quiet=True).run_all(runs)  # nothing is left to do


def test_ctrl_c_stops_all_runs_after_their_round(tmp_path, monkeypatch):
    runs = specs(tmp_path, "batched", ("fedavg", "genfed"), rounds=50)
    check, checks = Session.check_time, []

    def pressed(self):
        checks.append(threading.current_thread() is not threading.main_thread())
        if sum(checks) > len(runs):  # all runs have ended their first round
            raise KeyboardInterrupt
        check(self)

    monkeypatch.setattr(Session, "check_time", pressed)
    with pytest.raises(KeyboardInterrupt):
        Session(quiet=True).run_all(runs)
    assert {RunFolder.open(path).rounds_saved for path in runs} == {2}


def test_a_run_goes_on_where_the_command_says_and_not_where_it_began(tmp_path, monkeypatch):
    path, spec = next(iter(specs(tmp_path, "serial", ("fedavg",), rounds=3).items()))
    assert not Session.limited(1e-3, quiet=True).run_all({path: spec})
    met, known = [], Config.federation
    monkeypatch.setattr(
        Config, "federation", lambda self, *args: met.append(self) or known(self, *args)
    )
    elsewhere = replace(spec, config=replace(spec.config, engine="batched", kernels="onednn"))
    assert Session(quiet=True).run_all({path: elsewhere})
    assert [config.engine for config in met] == ["batched"]
    # On the same device the kernels stay as they were.
    assert [config.kernels for config in met] == ["native"]


def test_a_run_of_a_gpu_goes_on_without_one(tmp_path):
    path, spec = next(iter(specs(tmp_path, "serial", ("fedavg",), rounds=3).items()))
    assert not Session.limited(1e-3, quiet=True).run_all({path: spec})
    config = (path / "config.toml").read_text()
    elsewhere = config.replace('device = "auto"', 'device = "cuda"').replace(
        'device = "CPU"', 'device = "NVIDIA H200"'
    )
    assert elsewhere.count("cuda") == elsewhere.count("H200") == 1
    (path / "config.toml").write_text(elsewhere)
    unseal(path)
    assert Session(quiet=True).run_all({path: spec})
    assert len(RunFolder.open(path).records()) == 3
