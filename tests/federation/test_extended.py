"""A run that goes on beyond its last round is the same as one that never stopped there."""

import shutil

import pytest

from fedhelix import FedAvg, Finish, UserError
from fedhelix.store import RunFolder, checkpoint, folder
from helpers import fit_and_stop, small, timeless


def fit(path, rounds, resume=False, **more):
    return small(Finish(FedAvg())).fit(rounds, out=path, resume=resume, quiet=True, **more)


def straight(rounds, **more):
    return small(Finish(FedAvg())).fit(rounds, quiet=True, **more)


def kept(path):
    return timeless(RunFolder.open(path).records())


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_longer_run_equals_one_that_was_as_long_from_the_start(every, tmp_path):
    shorter = fit(tmp_path, 2, eval_every=every)
    assert "untuned" in shorter.records[1] and "used" in shorter.records[1]
    longer, whole = fit(tmp_path, 4, resume=True, eval_every=every), straight(4, eval_every=every)
    assert timeless(longer.records) == kept(tmp_path) == timeless(whole.records)
    assert ("personal_accuracy" in longer.records[1]) == (every != 3)
    assert longer.summary["best_round"] == whole.summary["best_round"]
    assert RunFolder.open(tmp_path).summary["rounds"] == 4


def test_a_run_that_ends_earlier_than_planned_is_evaluated_as_one_that_ends(tmp_path):
    fit_and_stop(small(Finish(FedAvg())), 4, 2, tmp_path)
    assert "untuned" not in RunFolder.open(tmp_path).records()[1]
    ended = fit(tmp_path, 2, resume=True)
    assert timeless(ended.records) == kept(tmp_path) == timeless(straight(2).records)


class Killed(BaseException):
    """As if the power had gone."""


def kill_at_step(monkeypatch, step):
    """Let a program die instead of its write with this number."""
    left = [step]
    for module in (folder, checkpoint):
        write = module.write_atomically

        def dying(path, content, write=write):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            write(path, content)

        monkeypatch.setattr(module, "write_atomically", dying)


@pytest.mark.parametrize("has_summary", [True, False])
def test_a_kill_while_a_run_is_extended_loses_nothing(has_summary, tmp_path, monkeypatch):
    fit(tmp_path / "begun", 2)
    if not has_summary:
        with RunFolder.open(tmp_path / "begun") as begun:
            begun.remove_summary()
    wanted = {rounds: timeless(straight(rounds).records) for rounds in (2, 3)}
    step, seen = 0, set()
    while 3 not in seen:  # until the first round after them is there
        run = shutil.copytree(tmp_path / "begun", tmp_path / f"run{step}")
        with monkeypatch.context() as patch, pytest.raises(Killed):
            kill_at_step(patch, step)
            fit(run, 3, resume=True)
        rounds = RunFolder.open(run).config["rounds"]
        seen.add(RunFolder.open(run).rounds_saved)
        again = shutil.copytree(run, tmp_path / f"again{step}")
        fit(again, rounds, resume=True)  # `fedhelix resume RUN`
        assert kept(again) == wanted[rounds], step
        fit(run, 3, resume=True)
        assert kept(run) == wanted[3], step
        step += 1
    assert step > 6


def test_rounds_that_are_there_are_not_taken_away(tmp_path):
    fit(tmp_path, 3)
    before = kept(tmp_path)
    with pytest.raises(
        UserError, match=r"has 3 rounds already, so rounds must be 3 or more, not 2"
    ):
        fit(tmp_path, 2, resume=True)
    assert kept(tmp_path) == before and len(fit(tmp_path, 3, resume=True).records) == 3


def test_time_needs_a_clock():
    with pytest.raises(UserError, match="time_to needs simulated devices"):
        straight(1).time_to(0.1)


def test_a_level_in_percent_is_refused():
    run = small(FedAvg(), devices="uniform").fit(1, quiet=True)
    assert run.time_to(0.0) > 0
    with pytest.raises(UserError, match=r"level = 80 is never reached.* 80 % is 0\.8"):
        run.time_to(80)
