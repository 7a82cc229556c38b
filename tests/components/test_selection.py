"""The arithmetic of GenFed: schedules as printed, heap = sorting."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedhelix.components.selection import (
    diverse,
    effective,
    fitness_of,
    fittest,
    not_diverged,
    parents,
    whole,
    without_copies,
)

TIMES = [0, 100, 200, 250, 400, 500, 600, 800, 999, 1000, 1500]
PRINTED = {
    "constant": [5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5],
    "power": [1, 1, 2, 2, 3, 3, 4, 4, 4, 5, 5],
    "linear": [1, 1, 2, 2, 3, 3, 4, 5, 5, 5, 5],
    "sine": [1, 1, 2, 2, 3, 4, 5, 5, 5, 5, 5],
    "wave": [1, 2, 3, 4, 5, 5, 5, 3, 1, 1, 1],
}


@pytest.mark.parametrize("schedule", PRINTED)
def test_the_table_of_schedules(schedule):
    assert [whole(parents(schedule, t, 2000, 5), 5) for t in TIMES] == PRINTED[schedule]
    given = [whole(parents(schedule, t, 99, 5, b=5 ** (-1 / 1000), c=1000), 5) for t in TIMES]
    assert given == PRINTED[schedule]


@pytest.mark.parametrize("schedule", PRINTED)
def test_there_is_always_a_parent_and_never_more_than_models(schedule):
    for t in range(60):
        assert 1 <= whole(parents(schedule, t, 30, 8), min(8, 3)) <= 3


@given(
    st.lists(st.tuples(st.sampled_from([0.1, 0.2, 0.3]), st.sampled_from([1.0, 2.0])), min_size=1),
    st.integers(1, 9),
)
def test_the_heap_chooses_as_sorting_does(evaluated, count):
    fitness = [fitness_of(metric, loss, client) for client, (metric, loss) in enumerate(evaluated)]
    expected = sorted(range(len(evaluated)), key=lambda i: (-evaluated[i][0], evaluated[i][1], i))[
        :count
    ]
    assert fittest(fitness, count) == sorted(expected)


def test_ties_go_to_the_smaller_loss_and_then_to_the_smaller_id():
    assert fittest(
        [fitness_of(0.5, 1.0, 7), fitness_of(0.5, 0.9, 9), fitness_of(0.5, 1.0, 3)], 2
    ) == [1, 2]
    nan = float("nan")
    assert fittest(
        [fitness_of(0.1, nan, 0), fitness_of(nan, nan, 1), fitness_of(0.1, 5.0, 2)], 1
    ) == [2]


@pytest.mark.parametrize(("metric", "loss"), [(0.9, math.nan), (0.9, math.inf), (math.nan, 1.0)])
def test_a_model_that_has_diverged_is_the_least_fit(metric, loss):
    fitness = [fitness_of(metric, loss, 0), fitness_of(0.0, 1e30, 1), fitness_of(0.1, 1.0, 2)]
    assert fittest(fitness, 2) == [1, 2]
    assert not_diverged(fitness, [0, 1, 2]) == [2]  # a loss of 1e30 is that of absurd weights
    assert not_diverged([fitness_of(0.1, 1e-9, 0), fitness_of(0.9, 50.0, 1)], [0, 1]) == [0, 1]
    assert not_diverged(fitness, [0]) == [0]  # somebody has to be chosen


def test_effective_numbers():
    assert effective([0.5] * 8) == pytest.approx(8)
    assert effective([0.9, 0, 0]) == pytest.approx(1)
    assert effective([0.9, 0.1, 0.1]) == pytest.approx(1)  # what all have by chance does not count
    assert effective([0.5, 0.4, 0.3]) == pytest.approx(0.3**2 / 0.05)
    assert effective([0.5, -math.inf, 0.3]) == pytest.approx(1)  # a model that has diverged
    assert effective([-math.inf]) == 1


def test_diversity_prefers_the_one_that_points_elsewhere():
    fitness = [fitness_of(metric, 1.0, i) for i, metric in enumerate([0.9, 0.89, 0.7])]
    distances = [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 1.0, 0.0]]
    assert diverse(fitness, distances, 2, 0.0) == [0, 1]
    assert diverse(fitness, distances, 2, 0.5) == [0, 2]
    assert diverse(fitness, distances, 5, 0.5) == [0, 1, 2]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0.1, 0.3, 0.5])), min_size=1, max_size=12
    )
)
def test_of_copies_only_the_fittest_is_kept(models):
    fitness = [fitness_of(metric, 1.0, client) for client, (_, metric) in enumerate(models)]
    kept = without_copies(fitness, [original for original, _ in models])
    assert sorted(models[i][0] for i in kept) == sorted({original for original, _ in models})
    assert all(
        fitness[i] == max(f for f, m in zip(fitness, models, strict=True) if m[0] == models[i][0])
        for i in kept
    )
