"""A run that goes on with another number of rounds."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedhelix.core.errors import UserError
from fedhelix.federation.evaluation import evaluate, without_evaluation
from fedhelix.federation.run import Run
from fedhelix.store.mistakes import longer
from fedhelix.store.records import Record


def check_rounds(rounds: int, done: int, where: str | Path) -> None:
    """Refuse fewer rounds than there are."""
    if rounds < done:
        raise UserError(
            f"'{where}' has {done} rounds already, so rounds must be {done} or more, not {rounds}."
        )


def settle(run: Run, rounds: int, eval_every: int, settings: Mapping[str, Any]) -> None:
    """Write down how many rounds there will be, and other settings of a run that goes on.

    The last round is evaluated in another way: methods may fine-tune then. So the record of the
    last checkpoint is evaluated again where its round was the last one and no longer is, or the
    reverse. Which it was is seen from the summary, which is there before the settings change, and
    goes after the record: a kill in between costs nothing but this evaluation. What sites have
    evaluated stays.
    """
    folder, done = run.folder, run.state.round
    assert folder is not None
    rounds = max(rounds, done)
    record, ends = None, rounds == done
    if done and not run.federation.engine.deployed:
        if folder.summary is None and not ends and folder.config.get("rounds") == done:
            folder.write_summary(run.summary)  # it was killed just before
        if (folder.summary is None) == ends:
            every = folder.config.get("eval_every", eval_every)
            record = _evaluated_again(run, rounds, ends or done % every == 0)
    folder.change(**{**_within(folder.config, settings), "rounds": rounds})
    if record is not None:
        folder.replace_last(record)
        run.records[-1] = record
        if not ends:
            folder.remove_summary()


def _within(config: Mapping[str, Any], settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """New settings in their place; those of a run from Python are its `made_from`."""
    if "made_from" not in config:
        return settings
    made_from = {**config["made_from"], **settings, "rounds": None}
    return {"made_from": {key: value for key, value in made_from.items() if value is not None}}


def note_finished(run: Run, begun: int, silent: bool) -> None:
    """Say so where no round was left; commands say it themselves."""
    done = run.state.round
    if silent or run.folder is None or done > begun:
        return
    where = run.folder.path
    how = f"fed.fit(rounds={2 * done}, out={str(where)!r}, resume=True)"
    more = longer(run.records, how, run.federation.clients)
    print(
        f"fedhelix: '{where}' was finished already, so nothing was trained; {more}",
        file=sys.stderr,
    )


def end_here(run: Run) -> None:
    """The round that a run has just had was its last one; sites keep their models of it."""
    record = _evaluated_again(run, run.state.round, evaluated=True)
    record |= run.federation.engine.report_again(record)
    if run.folder is not None:
        run.folder.change(rounds=run.state.round)
        run.folder.replace_last(record)
    run.records[-1] = record


def _evaluated_again(run: Run, rounds: int, evaluated: bool) -> Record:
    """The last record, as it is in a run of so many rounds."""
    fed, done = run.federation, run.state.round
    record = without_evaluation(run.records[-1], fed.objective.name)
    return record | evaluate(fed, run.state, fed.context(done - 1, rounds)) if evaluated else record
