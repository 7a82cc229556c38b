"""Keywords that people try because other libraries have them, or at the wrong place."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fedhelix.core.errors import UserError
from fedhelix.core.method import Method
from fedhelix.core.registry import option_names

ELSEWHERE = {  # keywords of other libraries, and what there is here
    "batch": "batch_size is the size of a minibatch",
    "fraction_fit": "cohort is the number of clients in a round",
    "early_stopping": "fit(..., patience=N) ends once N rounds were no better on validation",
    "learning_rate": "lr is the learning rate",
    "local_epochs": "epochs is the number of local epochs of a round",
    "lr_scheduler": "lr_decay takes a list with a factor for each round",
    "num_clients": "clients is their number",
    "num_rounds": "fit(rounds=N) takes it, and --rounds N on the command line",
    "strategy": "method is the method, a name or a value such as FedAvg()",
    "optim": "optimizer is sgd, adam, adamw or an OptimizerRule",
    "transform": "augment takes an Augmentation, which is drawn anew in every epoch",
}
SAME = {"lr_schedule": "lr_scheduler", "scheduler": "lr_scheduler", "transforms": "transform"}
SAME |= {"patience": "early_stopping", "num_epochs": "local_epochs", "n_clients": "num_clients"}
SAME |= {
    "rounds": "num_rounds",
    "fraction_train": "fraction_fit",
    "min_fit_clients": "fraction_fit",
}


def elsewhere(key: str) -> str | None:
    """What there is here for a keyword of other libraries."""
    return ELSEWHERE.get(SAME.get(key, key))


def check_keys(options: Mapping[str, Any], method: Method, known: Collection[str]) -> None:
    """Refuse keywords of other libraries and options of the method, and say what there is here."""
    for key, value in options.items():
        if how := elsewhere(key):
            raise UserError(f"a federation has no '{key}'; {how}.")
        part, around = (None if key in known else method), list[str]()
        while part is not None:
            around.append(type(part).__name__)
            if key in option_names(type(part)):
                made = f"{'('.join(around)}({key}={value!r}{')' * len(around)}"
                raise UserError(f"'{key}' is an option of {part.name}; give method={made}.")
            part = getattr(part, "inner", None)
