import math

import pytest

from fedhelix.store.records import (
    best_record,
    diverged_clients,
    has_effect,
    is_stalled,
    newcomers,
    summarise,
)


def record(round: int, **more) -> dict:
    return {
        "round": round,
        "uplink_bytes": 10,
        "downlink_bytes": 20,
        "other_bytes": 1,
        "seconds": 0.5,
        **more,
    }


def evaluated(round: int, test: float, valid: float | None) -> dict:
    result = {"accuracy": test - 0.1, "personal_accuracy": test, "personal_p10": test / 2}
    return record(round, **result, **({} if valid is None else {"valid_accuracy": valid}))


RECORDS = [
    evaluated(1, 0.9, 0.4),
    record(2),
    evaluated(3, 0.7, 0.6),
    evaluated(4, 0.8, 0.6),
    evaluated(5, 0.6, 0.5),
]


def test_the_best_round_is_chosen_on_validation_and_never_on_test():
    assert best_record(RECORDS)["round"] == 3  # the first of equals; round 1 is best on test


@pytest.mark.parametrize(
    ("rounds", "best"),
    [
        ([(0.8, 0.6, 0.1), (0.8, 0.6, None), (0.8, 0.6, 0.1)], 1),  # equal but for the absence
        ([(0.8, 0.6, None), (0.8, 0.6, 0.1), (0.8, 0.7, 0.1)], 3),  # one that comes later
        ([(0.5, 0.6, 0.1), (0.6, 0.6, None), (0.7, 0.6, None)], 3),  # one that leaves for good
        ([(0.5, 0.6, 0.9), (0.6, 0.6, None), (0.7, 0.6, None)], 3),  # also where it was good
        ([(None, 0.6, 0.2), (0.9, None, 0.2), (0.9, 0.6, None), (0.9, 0.6, 0.3)], 4),
    ],
)
def test_rounds_are_compared_over_the_same_clients(rounds, best):
    records = []
    for number, scores in enumerate(rounds, 1):
        valid = {str(i): score for i, score in enumerate(scores) if score is not None}
        mean = sum(valid.values()) / len(valid)
        records.append(evaluated(number, 0.5, mean) | {"valid": valid})
    assert best_record(records)["round"] == best
    assert is_stalled(records, "accuracy", 1) == (best < len(records))


@pytest.mark.parametrize("nothing", [math.nan, None], ids=["NaN", "null"])
def test_rounds_whose_models_diverged_are_never_the_best(nothing):
    assert (
        best_record([evaluated(1, 0.9, 0.0) | {"valid_accuracy": nothing}, *RECORDS[2:]])["round"]
        == 3
    )
    blind = [evaluated(1, 0.9, None), evaluated(2, 0.5, None) | {"valid_accuracy": nothing}]
    assert best_record(blind)["round"] == 2


@pytest.mark.parametrize("nothing", [math.nan, None], ids=["NaN", "null"])
def test_newcomers_that_diverged_keep_their_peak_but_have_no_mean(nothing):
    curve = [nothing, 0.5, 0.8, nothing]
    after = [
        record(4, arrival_bytes=1),
        *(record(at, personal_accuracy=value) for at, value in enumerate(curve, 5)),
    ]
    result = newcomers(
        [record(1, personal_accuracy=0.4), record(2), record(3, personal_accuracy=0.6)], after
    )
    assert result["known_accuracy"] == 0.5 and result["newcomer_accuracy"] is None
    assert (result["newcomer_peak_accuracy"], result["newcomer_rounds_to_peak"]) == (0.8, 4)


def test_without_validation_the_last_evaluated_round_counts():
    blind = [evaluated(1, 0.9, None), evaluated(2, 0.5, None), record(3)]
    assert best_record(blind)["round"] == 2
    assert best_record([record(1)]) is None and best_record([]) is None


def test_a_summary_by_hand():
    summary = summarise(
        [*RECORDS, record(6, refused={"3": "NaN", "4": "NaN"})], {"method": "fedavg", "seed": 3}
    )
    assert summary == {
        "method": "fedavg",
        "seed": 3,
        "rounds": 6,
        "final_accuracy": 0.5,
        "personal_accuracy": 0.6,
        "personal_p10": 0.3,
        "trained_accuracy": None,
        "best_round": 3,
        "accuracy_at_best": 0.7 - 0.1,
        "personal_accuracy_at_best": 0.7,
        "uplink_bytes": 60,
        "downlink_bytes": 120,
        "other_bytes": 6,
        "refused": 2,
        "missing": 0,
        "seconds": 3.0,
        "diverged": None,
        "diverged_clients": [],
        "untrained": None,
        "idle_since": None,
        "complete": True,
    }


def test_a_run_without_a_global_model_has_no_final_accuracy():
    summary = summarise([record(1, personal_score=0.4, valid_score=0.3)], {}, metric="score")
    assert (summary["final_score"], summary["personal_score"], summary["best_round"]) == (
        None,
        0.4,
        1,
    )
    assert summarise([], {})["rounds"] == 0


def test_the_largest_epsilon_that_a_client_has_spent():
    tables = [{"0": 1.5}, {"0": 1.5, "1": 2.5, "2": "much"}]
    spent = [{"epsilon": table, "privacy_level": "sample"} for table in tables]
    records = [record(n, metadata=table) for n, table in enumerate([*spent, {}, None], 1)]
    privacy = {"epsilon": 2.5, "delta": 0.1, "privacy_level": "sample"}
    assert summarise(records, {"options": {"delta": 0.1}}).items() >= privacy.items()
    assert "epsilon" not in summarise([record(1, metadata={"epsilon": [9]})], {})


def test_places_that_no_site_has_taken_are_missing_and_lose_nothing():
    free = {"missing": {"1": "free", "2": "free"}, "train_loss": math.nan, "nonfinite_losses": [0]}
    assert has_effect(record(1, participants=[0], **free))
    assert not has_effect(record(1, participants=[], **free))
    assert not has_effect(record(1, participants=[0], **free, refused={"0": "NaN"}))
    assert diverged_clients([record(1, participants=[0], **free)]) == []
    assert diverged_clients([record(1, participants=[0, 3], **free)]) == [0]
