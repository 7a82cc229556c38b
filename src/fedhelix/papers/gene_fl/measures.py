"""The measures of GENE-FL's tables: of known clients, of newcomers, and of both."""

from __future__ import annotations

from fedhelix.papers.measures import Finished, Measure, from_summary, in_units, percent

MIB, GIB = 2**20, 2**30
CURVE, TRAINED = "personal_accuracy", "trained_accuracy"


def after_rounds(count: int, curve: str = CURVE) -> Measure:
    """The newcomers' accuracy in percent `count` rounds after their arrival, or in the next
    evaluated round.
    """

    def measure(run: Finished) -> float | None:
        arrived = next(
            (record["round"] for record in run.records if "arrival_bytes" in record), None
        )
        if arrived is None:
            return None
        later = [record for record in run.records if record["round"] >= arrived + count - 1]
        return next((100 * record[curve] for record in later if curve in record), None)

    return measure


def known_uploads(unit: int) -> Measure:
    """What the known clients upload, counted as the paper does: 4 bytes for every value."""

    def measure(run: Finished) -> float | None:
        values = run.summary.get("known_uplink_values")
        # Version 0.1 counted bytes like that, and no values.
        size = run.summary.get("known_uplink_bytes") if values is None else 4 * values
        return None if size is None else size / unit

    return measure


OF_KNOWN: dict[str, Measure] = {
    "accuracy of the known": percent("known_accuracy"),
    "the known after one training": percent(f"known_{TRAINED}"),
    "uploads in GiB": known_uploads(GIB),
    "MiB of all uploads": known_uploads(MIB),
    "MiB of all downloads": in_units("known_downlink_bytes", MIB),
    "MiB of fingerprints": in_units("known_other_bytes", MIB),
    "adjusted Rand index of clusters": from_summary("cluster_agreement"),
}
OF_NEWCOMERS: dict[str, Measure] = {
    "accuracy of newcomers": percent("newcomer_accuracy"),
    "newcomers after one training": percent(f"newcomer_{TRAINED}"),
    "at arrival": percent("arrival_accuracy"),
    "after 10 rounds": after_rounds(10),
    "after 10 rounds and one training": after_rounds(10, TRAINED),
    "rounds to 95 % of the peak": from_summary("newcomer_rounds_to_peak"),
    "initial download in MiB": in_units("arrival_bytes", MIB),
}
OF_BOTH = {**OF_NEWCOMERS, **OF_KNOWN}
