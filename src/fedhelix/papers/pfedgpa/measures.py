"""The measures of pFedGPA's tables."""

from __future__ import annotations

import statistics

from fedhelix.papers.measures import Finished, Measure, last_percent, percent
from fedhelix.papers.pfedgpa.settings import turns_of
from fedhelix.store.records import LAST, NEAR_PEAK, is_number

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


def after_arrival(run: Finished) -> list[float]:
    """The newcomers' accuracies round by round, in percent, of the model that they receive.

    Without the last round: there they use what they uploaded themselves, another kind of model.
    """
    arrived = next(at for at, record in enumerate(run.records) if "arrival_bytes" in record)
    return [100 * record["personal_accuracy"] for record in run.records[arrived:-1]]


def peak(run: Finished) -> float | None:
    """The best of these accuracies."""
    return max(after_arrival(run), default=None)


def last_ten(run: Finished) -> float | None:
    """Their mean over the last ten rounds."""
    accuracies = after_arrival(run)[-LAST:]
    return statistics.fmean(accuracies) if accuracies else None


def trainings_to_peak(run: Finished) -> float | None:
    """Local trainings until 95 % of the peak: those of the arrival's dialogue, then one a round."""
    accuracies = after_arrival(run)
    reached = (t for t, one in enumerate(accuracies, 1) if one >= NEAR_PEAK * max(accuracies))
    first = next(reached, None)
    return None if first is None else turns_of(run.cell) + first


BEFORE = {"before fine-tuning": last_percent("untuned_accuracy")}
AFTER = {"after fine-tuning": percent("personal_accuracy")}
CHOICE = {"validation": last_percent("valid_accuracy"), "test": percent("personal_accuracy")}
ARRIVED = {
    "after one local training": percent("arrival_accuracy"),
    "last ten rounds": last_ten,
    "peak": peak,
    "local trainings to 95 % of the peak": trainings_to_peak,
}
