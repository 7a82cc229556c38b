"""Many runs at once: one program where the engine can, the same results in any case."""

import threading
from dataclasses import replace

import pytest

from fedhelix.engines import batched
from fedhelix.progress import Progress
from fedhelix.runs import jobs
from fedhelix.runs.config import Config, make_plan
from fedhelix.store import RunFolder

SMALL = {
    "clients": 6,
    "cohort": 3,
    "rounds": 3,
    "epochs": 1,
    "validation_size": 60.0,
    "model": "mlp",
    "kernels": "native",
}


def plans(tmp_path, engine, methods=("fedavg", "genfed", "fedper"), **more):
    return {
        tmp_path / f"{engine}-{name}-{seed}": make_plan(name, {**SMALL, **more, "engine": engine, "seed": seed})
        for name in methods
        for seed in (0, 1)
    }


def finals(asked):
    return [RunFolder.open(path).summary["personal_accuracy"] for path in asked]


def test_runs_that_go_together_end_as_they_do_alone(tmp_path):
    one_by_one, as_one = plans(tmp_path, "serial"), plans(tmp_path, "batched")
    assert jobs.run_all(one_by_one, quiet=True) and jobs.run_all(as_one, quiet=True)
    assert finals(as_one) == pytest.approx(finals(one_by_one), abs=0.02)


def test_methods_with_one_objective_share_their_slots(tmp_path, monkeypatch):
    shops, known = [], batched.Batched._train_alike

    def watched(self, kind, tasks):
        shops.append({task.setup.method.name for task in tasks})
        known(self, kind, tasks)

    monkeypatch.setattr(batched.Batched, "_train_alike", watched)
    jobs.run_all(plans(tmp_path, "batched", ("fedavg", "genfed")), quiet=True)
    assert shops == [{"fedavg", "genfed"}] * SMALL["rounds"]


def test_time_that_is_up_loses_nothing(tmp_path, monkeypatch):
    shown = []

    class Watched(Progress):
        def update(self, record):
            shown.append((record["round"], self._total))

    asked = plans(tmp_path, "batched", ("fedavg", "genfed"), rounds=4)
    assert not jobs.run_all(asked, quiet=True, minutes=0)
    assert not any(path.exists() for path in asked)  # without any time nothing is begun
    assert not jobs.run_all(asked, quiet=True, minutes=1e-3)  # over when the first round is
    assert {len(RunFolder.open(path).records()) for path in asked} == {1}
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "Progress", Watched)
        assert jobs.run_all(asked, quiet=True)
    assert shown == [(round, 16) for round in range(5, 17)]  # four runs of which a round each is there
    straight = plans(tmp_path / "straight", "batched", ("fedavg", "genfed"), rounds=4)
    assert jobs.run_all(straight, quiet=True)
    assert finals(asked) == finals(straight)
    assert jobs.run_all(asked, quiet=True)  # nothing is left to do


def test_ctrl_c_stops_all_runs_after_their_round(tmp_path, monkeypatch):
    asked = plans(tmp_path, "batched", ("fedavg", "genfed"), rounds=50)
    clock = jobs._Clock.__call__

    def pressed(self, record):
        if record["round"] == 2 and threading.current_thread() is not threading.main_thread():
            raise KeyboardInterrupt
        clock(self, record)

    monkeypatch.setattr(jobs._Clock, "__call__", pressed)
    with pytest.raises(KeyboardInterrupt):
        jobs.run_all(asked, quiet=True)
    assert {RunFolder.open(path).rounds_saved for path in asked} == {2}


def test_a_run_goes_on_where_the_command_says_and_not_where_it_began(tmp_path, monkeypatch):
    path, plan = next(iter(plans(tmp_path, "serial", ("fedavg",), rounds=3).items()))
    assert not jobs.run_all({path: plan}, quiet=True, minutes=1e-3)
    met, known = [], Config.federation
    monkeypatch.setattr(Config, "federation", lambda self, *args: met.append(self) or known(self, *args))
    elsewhere = replace(plan, config=replace(plan.config, engine="batched", kernels="onednn"))
    assert jobs.run_all({path: elsewhere}, quiet=True)
    assert [config.engine for config in met] == ["batched"]
    assert [config.kernels for config in met] == ["native"]  # on the same device they stay what they were


def test_a_run_of_a_gpu_goes_on_without_one(tmp_path):
    path, plan = next(iter(plans(tmp_path, "serial", ("fedavg",), rounds=3).items()))
    assert not jobs.run_all({path: plan}, quiet=True, minutes=1e-3)
    config = (path / "config.toml").read_text()
    elsewhere = config.replace('device = "auto"', 'device = "cuda"').replace('device = "CPU"', 'device = "NVIDIA H200"')
    assert elsewhere.count("cuda") == elsewhere.count("H200") == 1
    (path / "config.toml").write_text(elsewhere)
    assert jobs.run_all({path: plan}, quiet=True)
    assert len(RunFolder.open(path).records()) == 3
