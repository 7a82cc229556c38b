"""The measures of pFedGPA's tables."""

from __future__ import annotations

import statistics

from fedhelix.papers.measures import Finished, Measure, from_summary, last_percent, percent
from fedhelix.store.records import is_number

FAILED = 0.6  # a generated model with a lower accuracy counts as failed


def failed(key: str) -> Measure:
    """The share of clients whose accuracy in the last round counts as failed, in percent."""

    def measure(run: Finished) -> float | None:
        accuracies = [value for value in run.records[-1].get(key) or () if is_number(value)]
        if not accuracies:
            return None
        return 100 * statistics.fmean(accuracy < FAILED for accuracy in accuracies)

    return measure


def reconstruction(run: Finished) -> float | None:
    """The share of the uploads' spread that the autoencoder keeps, in percent."""
    share = run.records[-1]["metadata"].get("reconstruction")
    return None if share is None else 100 * share


def distance(name: str) -> Measure:
    """The mean of a kind of distance in the last round, relative to the uploads' mean distance
    from their mean.
    """

    def measure(run: Finished) -> float | None:
        distances = run.records[-1]["metadata"].get("distances")
        if not distances:
            return None
        return statistics.fmean(distances[name]) / statistics.fmean(distances["uploads_spread"])

    return measure


BEFORE = {"before fine-tuning": last_percent("untuned_accuracy")}
AFTER = {"after fine-tuning": percent("personal_accuracy")}
CHOICE = {"validation": last_percent("valid_accuracy"), "test": percent("personal_accuracy")}
ARRIVED = {
    "after one local training": percent("arrival_accuracy"),
    "last ten rounds": percent("newcomer_accuracy"),
    "peak": percent("newcomer_peak_accuracy"),
    "rounds to 95 % of the peak": from_summary("newcomer_rounds_to_peak"),
}
