"""Names of measures and incidents, and numbers as text, for reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from fedhelix.core.bounds import rounded_up
from fedhelix.store.records import MOST_NAMES, is_number

MIB = 2**20
MOST_REASONS = 3
ANSWERED = " answered: "  # between a site's name and the reason that it gave
MEASURES = {
    "personal_accuracy": "personal accuracy",
    "personal_score": "personal score",
    "personal_p10": "10th percentile of clients",
    "accuracy": "global accuracy",
    "score": "global score",
    "train_loss": "training loss",
}

# What went wrong with clients and sites: what was lost, whose it was, and how.
INCIDENT_WORDS = {
    "refused": ("upload", "client ", "refused"),
    "missing": ("answer", "client ", "missing"),
    "unevaluated": ("score", "client ", "missing"),
    "troubles": ("trouble", "", "noted"),
}


def count(number: int, noun: str) -> str:
    """A number with its noun: 1 run, 2 runs."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def reasons(given: Iterable[object]) -> str:
    """The most frequent reasons, each with its number unless it is the only one; sites that have
    answered the same stand together.
    """
    numbers, sites = Counter[str](), dict[str, list[str]]()
    for reason in given:
        who, answered, why = str(reason).rstrip(".").rpartition(ANSWERED)
        numbers[answered + why] += 1
        if who not in (names := sites.setdefault(answered + why, [])):
            names.append(who)
    words = {reason: _named(names) + reason for reason, names in sites.items()}
    if len(numbers) == 1:
        return next(iter(words.values()))
    shown = numbers.most_common(MOST_REASONS)
    more = numbers.total() - sum(number for _, number in shown)
    said = "; ".join(f"{number} × {words[reason]}" for reason, number in shown)
    return f"{said}; and {more} more" if more else said


def _named(sites: Sequence[str]) -> str:
    """The first of some sites by name, and how many more there are."""
    more = f" and {len(sites) - MOST_NAMES} more" if len(sites) > MOST_NAMES else ""
    return ", ".join(sites[:MOST_NAMES]) + more


def percent(value: float, error: float = np.nan) -> str:
    """A share in per cent, with its error unless that is NaN."""
    shown = f"{100 * value:z.1f}"  # never -0.0
    return f"{shown} %" if np.isnan(error) else f"{shown} ± {100 * error:.1f} %"


def plain(value: float, error: float) -> str:
    """A number, with its error unless that is NaN."""
    return f"{value:.4g}" if np.isnan(error) else f"{value:.4g} ± {error:.2g}"


def budget(epsilon: float, delta: object, privacy_level: object) -> str:
    """The privacy that was spent, with what is known of its delta and of whom it protects."""
    at = f" at δ = {delta:g}" if is_number(delta) else ""
    whom = f", {privacy_level}-level" if isinstance(privacy_level, str) else ""
    return f"{rounded_up(epsilon)}{at}{whom}"
