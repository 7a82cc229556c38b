"""The server's model on the test set, and every client's personal model on its own part of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

import numpy as np
import torch

from fedhelix.core.cpu import one_thread
from fedhelix.core.hooks import checked
from fedhelix.core.method import Context
from fedhelix.core.tree import State
from fedhelix.engines.local import ClientTask, Scores, make_client, predict
from fedhelix.federation.setup import FederationSetup
from fedhelix.federation.state import FederationState
from fedhelix.store.records import Record


@one_thread()
def evaluate(fed: FederationSetup, state: FederationState, ctx: Context) -> Record:
    """What a record says about the models after a round."""
    record, name = Record(), fed.objective.name
    clients = [client for client in fed.evaluated if client in ctx.present]
    model = checked(fed.method).model(state.server, ctx)
    tasks = fed.tasks(state, clients, ctx)
    scores, evaluation = fed.engine.evaluate(tasks, model)
    if evaluation is not None:
        record[name], record["loss"] = evaluation
    backdoor = fed.scorer(fed.triggered)
    if model is not None and backdoor is not None:
        record["attack_success"] = backdoor([model])[0][0]
    on_server = _on_server_data(fed, model, clients, ctx)
    if on_server is not None:
        record[f"valid_{name}"] = on_server
    if scores:
        record = {**_personal(fed, tasks, scores, ctx), **record}
    elif evaluation is not None and np.isnan(evaluation[0]) and np.isfinite(evaluation[1]):
        record["unmeasured"] = True
    if fed.eval_trained and (trained := after_training(fed, tasks)):
        record[f"trained_{name}"] = float(np.mean(list(trained.values())))
    return record


def keep_models(fed: FederationSetup, state: FederationState, ctx: Context) -> None:
    """Have sites whose rounds are over keep their models: before newcomers take over, and in the
    end those that were not evaluated. In a simulation a model is made when somebody asks for it.
    """
    ended = state.round >= ctx.rounds
    replaced = fed.settings.arrived(state.round) and not fed.settings.arrived(ctx.round)
    if fed.engine.deployed and (ended or replaced):
        kept = fed.evaluated if ended else []  # by the last evaluation
        clients = [client for client in ctx.present if client not in kept]
        if clients:
            fed.engine.evaluate(fed.tasks(state, clients, replace(ctx, rounds=state.round)))


def without_evaluation(record: Record, name: str) -> Record:
    """A record without what `evaluate` says."""
    metrics = {f"{kind}{name}" for kind in ("", "personal_", "valid_", "trained_", "untuned_")}
    more = {"loss", "attack_success", "personal", "personal_p10", "valid"}
    more |= {"nonfinite_personal", "unevaluated", "unmeasured", "unmeasured_clients"}
    more |= {"untuned", "used"}
    return {key: value for key, value in record.items() if key not in metrics | more}


def after_training(fed: FederationSetup, tasks: Sequence[ClientTask]) -> dict[int, float]:
    """The metric of every client's model after the local training of one round, which nobody keeps.

    So all methods are compared in the same state. Clients that are missing or lack test samples,
    or whose samples have no metric, do not count.
    """
    tasks = [task._replace(trained=True) for task in tasks if len(fed.splits[task.client].test)]
    scores = fed.engine.evaluate(tasks)[0] if tasks else []
    lossless = _without_loss(fed, tasks, scores)
    return {
        task.client: score.test
        for task, score, none in zip(tasks, scores, lossless, strict=True)
        if task.client not in fed.engine.missing
        and not (np.isnan(score.test) and (none or np.isfinite(score.test_loss)))
    }


def _without_loss(
    fed: FederationSetup, tasks: Sequence[ClientTask], scores: Sequence[Scores]
) -> list[bool]:
    """Whose test samples have no loss for lack of labels, such as targets that all equal an
    ignore_index: that of the untrained network, whose outputs are sound, is no number either.
    """
    return [
        math.isnan(score.test_loss) and _lacks_labels(fed, task.client)
        for task, score in zip(tasks, scores, strict=True)
    ]


@torch.no_grad()
def _lacks_labels(fed: FederationSetup, client: int) -> bool:
    setup, samples = fed.engine.setup, torch.from_numpy(fed.splits[client].test)
    if not fed.data_is_here or not len(samples):
        return False
    outputs = predict(setup, setup.initial, "test", samples)
    targets = setup.data.y_test[samples.to(setup.data.y_test.device)]
    return bool(setup.objective.mean_loss(outputs, targets).isnan())


def _on_server_data(
    fed: FederationSetup, model: State | None, clients: Sequence[int], ctx: Context
) -> float | None:
    """The model on the server's validation set, where clients keep no validation samples.

    None where clients train on samples of that set.
    """
    if model is None or ctx.score is None:
        return None
    if np.isin(fed.reserve.scoring, fed.reserve.pool).any():
        return None
    if any(len(fed.splits[client].valid) for client in clients):
        return None
    return ctx.score([model])[0][0]


def _personal(
    fed: FederationSetup, tasks: Sequence[ClientTask], scores: Sequence[Scores], ctx: Context
) -> Record:
    """The figures of the personal models."""
    record, name = Record(), fed.objective.name
    tests, losses, valids = (
        np.array(column) for column in zip(*(score[:3] for score in scores), strict=True)
    )
    # Clients that are missing or lack test or validation samples do not count, nor do those whose
    # samples have no metric, such as R² of a single one or any where labels are lacking; a client
    # whose model has diverged does.
    splits = [fed.splits[task.client] for task in tasks]
    present = np.array([task.client not in fed.engine.missing for task in tasks])
    lossless = np.array(_without_loss(fed, tasks, scores))
    finite = np.isfinite(losses) | lossless
    has_test = np.array([len(split.test) > 0 for split in splits])
    has_valid = np.array([len(split.valid) > 0 for split in splits])
    unscored = present & has_test & np.isnan(tests) & finite
    tested = present & has_test & ~unscored
    validated = present & has_valid & ~(np.isnan(valids) & finite)
    if not present.all():
        record["unevaluated"] = {str(i): why for i, why in fed.engine.missing.items()}
    if (present & has_test).any() and not tested.any():
        record["unmeasured"] = True
    elif scoreless := [task.client for task, lacks in zip(tasks, unscored, strict=True) if lacks]:
        record["unmeasured_clients"] = scoreless
    record["personal"] = [float(test) for test in tests]
    spoilt = present & has_test & np.isnan(losses) & ~lossless
    if spoilt.any():
        record["nonfinite_personal"] = [task.client for task in compress(tasks, spoilt)]
    if tested.any():
        if (counted := tested & ~lossless).any():
            record["loss"] = float(losses[counted].mean())
        record[f"personal_{name}"] = float(tests[tested].mean())
        with np.errstate(invalid="ignore"):  # a diverged model's score may be infinite
            record["personal_p10"] = float(np.percentile(tests[tested], 10))
        if ctx.round == ctx.rounds - 1 and _personalizes(fed, tasks):
            received = np.array([score.test for score in fed.engine.evaluate_received(tasks)])
            record["untuned"] = received.tolist()
            record[f"untuned_{name}"] = float(received[tested].mean())
    if tasks[0].final and fed.method.overrides("choose"):
        used = (score.used for score, there in zip(scores, present, strict=True) if there)
        record["used"] = dict(Counter(used))
    if validated.any():
        record[f"valid_{name}"] = float(valids[validated].mean())
        if fed.engine.deployed:  # sites may be away, and rounds are compared over the same ones
            whose = (str(task.client) for task in tasks)
            known = zip(whose, valids, validated, strict=True)
            record["valid"] = {client: float(valid) for client, valid, counts in known if counts}
    return record


def _personalizes(fed: FederationSetup, tasks: Sequence[ClientTask]) -> bool:
    """Whether clients train what they receive before they use it."""
    hooks = checked(fed.method)
    return any(hooks.personalize(make_client(fed.engine.setup, task)) for task in tasks[:1])
