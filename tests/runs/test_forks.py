"""Runs that share their beginning end as if each had been run alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from fedhelix import PFedGPA
from fedhelix.errors import BadInput
from fedhelix.records import Record
from fedhelix.runs.config import Plan, make_plan
from fedhelix.runs.forks import BeforeTheEnd, fork, siblings, stop_before_the_end
from fedhelix.runs.jobs import go_on, run_all
from fedhelix.store import RunFolder

QUICK = {
    "data": "digits", "partition": "dominant:20", "clients": 4, "cohort": 4, "rounds": 4, "eval_every": 4,
    "epochs": 1, "engine": "serial", "valid": 0.0,
}  # fmt: skip
WAYS = {"own": {"generate": "own"}, "mean": {"generate": "own_mean"}, "gently": {"generate": "own", "ft_rate": 0.1}}

MOMENT = 1e-3  # minutes: enough to begin, and over when the first round is


def plans(folder: Path, **more: object) -> dict[Path, Plan]:
    own = {name: {f"pfedgpa.{key}": value for key, value in way.items()} for name, way in WAYS.items()}
    return {folder / name: make_plan("pfedgpa", {**QUICK, **more, **way}) for name, way in own.items()}


def outcome(path: Path) -> tuple[list[Record], object]:
    folder = RunFolder.open(path)
    assert folder.summary is not None
    records = [{key: value for key, value in record.items() if key != "seconds"} for record in folder.records()]
    return records, folder.config["method"]


def test_forked_runs_equal_single_ones_to_the_bit(tmp_path: Path) -> None:
    alone, forked = plans(tmp_path / "alone"), plans(tmp_path / "forked")
    for path, plan in alone.items():
        go_on(plan, path, quiet=True)
    families = siblings(forked)
    assert {first.name: [path.name for path in others] for first, others in families.items()} == {
        "own": ["mean", "gently"]
    }
    assert run_all(forked, quiet=True)
    for one, other in zip(alone, forked, strict=True):
        assert outcome(one) == outcome(other)


def test_a_beginning_that_was_stopped_is_not_run_again(tmp_path: Path) -> None:
    asked = plans(tmp_path)
    assert not run_all(asked, quiet=True, minutes=MOMENT)  # stops after one round of the first
    begun = [path for path in asked if path.exists()]
    assert [path.name for path in begun] == ["own"]
    assert run_all(asked, quiet=True)
    first = outcome(begun[0])[0]
    for path in asked:
        assert outcome(path)[0][:-1] == first[:-1]
    seconds = [[record["seconds"] for record in RunFolder.open(path).records()[:-1]] for path in asked]
    assert seconds[0] == seconds[1] == seconds[2]  # they are copies


def test_a_run_that_was_stopped_after_its_last_round_is_nobodys_beginning(tmp_path: Path) -> None:
    asked = plans(tmp_path)
    first, second, *_ = asked.items()

    def stop(record: Record) -> None:
        if record["round"] == QUICK["rounds"]:
            raise KeyboardInterrupt  # all rounds are kept, the summary is not written

    with pytest.raises(KeyboardInterrupt):
        go_on(first[1], first[0], quiet=True, watch=stop)
    assert RunFolder.open(first[0]).summary is None
    assert first[0] not in siblings(asked)
    with pytest.raises(BadInput, match="not before its last round"):
        fork(first[0], second[1], second[0])
    assert run_all(asked, quiet=True)
    assert outcome(first[0])[0][-1] != outcome(second[0])[0][-1]


def test_what_a_killed_fork_left_behind_is_no_obstacle_and_what_others_left_is_kept(tmp_path: Path) -> None:
    (source, plan), (target, other), *_ = plans(tmp_path).items()
    assert not run_all({source: plan}, quiet=True, minutes=MOMENT)
    go_on_to_the_end = partial(stop_before_the_end, plan)
    with pytest.raises(BeforeTheEnd):
        go_on(plan, source, quiet=True, watch=go_on_to_the_end)
    for folder in (target, target.with_name(f".{target.name}.half")):
        folder.mkdir()
        (folder / "lock").touch()
    fork(source, other, target)
    assert len(RunFolder.open(target).records()) == QUICK["rounds"] - 1
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("keep me")
    with pytest.raises(BadInput, match="not empty"):
        fork(source, other, mine)
    assert (mine / "notes.txt").read_text() == "keep me"


def test_a_class_that_inherits_the_promise_has_not_made_it(tmp_path: Path) -> None:
    class Own(PFedGPA):
        pass

    asked = {path: replace(plan, method=Own(**vars(plan.method))) for path, plan in plans(tmp_path).items()}
    assert siblings(asked) == {}


@pytest.mark.parametrize(
    ("more", "shared"),
    [({"eval_every": 1}, []), ({"newcomers": 2, "newcomers_after": 2}, []), ({"pfedgpa.mode": "online"}, ["gently"])],
)
def test_runs_whose_ways_part_earlier_share_nothing(more: dict[str, object], shared: list[str], tmp_path: Path) -> None:
    assert [path.name for others in siblings(plans(tmp_path, **more)).values() for path in others] == shared


def test_other_seeds_and_methods_share_nothing(tmp_path: Path) -> None:
    seeds = {tmp_path / str(seed): make_plan("pfedgpa", {**QUICK, "seed": seed}) for seed in range(2)}
    others = {tmp_path / name: make_plan(name, QUICK) for name in ("fedavg", "fedavg-ft")}
    assert others[tmp_path / "fedavg-ft"].method.late == {"ft_epochs", "ft_part", "ft_rate"}
    assert siblings(seeds | others) == {}
