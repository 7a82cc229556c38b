"""Who works on what, without Ray."""

import pytest

from fedhelix.engines.ray.cluster import capacity
from fedhelix.engines.ray.spread import ATTEMPTS, TaskQueue


def drained(queue, actors, whole=False):
    calls = []
    while queue:
        calls.append(queue.take(actors, whole))
    return calls


@pytest.mark.parametrize("actors", [1, 2, 7, 100])
@pytest.mark.parametrize("whole", [False, True])
def test_every_task_is_taken_once_and_the_longest_first(actors, whole):
    sizes = [5, 1, 90, 3, 3, 0, 40, 8]
    calls = drained(TaskQueue(sizes), actors, whole)
    taken = [index for call in calls for index in call]
    assert sorted(taken) == list(range(len(sizes)))
    assert [sizes[index] for index in taken] == sorted(sizes, reverse=True)


def test_many_short_tasks_are_few_calls():
    assert len(drained(TaskQueue([1] * 1000), 2)) <= 32
    assert [len(call) for call in drained(TaskQueue([1] * 100), 2, whole=True)] == [50, 50]
    assert [len(call) for call in drained(TaskQueue([1] * 25), 3, whole=True)] == [8, 8, 8, 1]


def test_calls_become_shorter_so_that_actors_end_together():
    queue, ends = TaskQueue([10] * 40 + [100]), [0.0, 0.0, 0.0]
    while queue:
        idle = ends.index(min(ends))
        ends[idle] += sum(queue.sizes[index] for index in queue.take(3))
    assert max(ends) <= 1.15 * sum(queue.sizes) / 3


def test_tasks_of_a_lost_actor_come_back_alone():
    queue = TaskQueue([4, 4, 4, 4])
    lost = queue.take(1)
    assert len(lost) == 2 and queue.give_back(lost) is None
    assert [queue.take(1) for _ in range(2)] == [[lost[0]], [lost[1]]]
    assert queue.take(1, whole=True) == [2, 3] and not queue and queue.left == 0


def test_a_task_that_is_lost_too_often_is_named():
    queue = TaskQueue([1])
    answers = [queue.give_back(queue.take(1)) for _ in range(ATTEMPTS)]
    assert answers == [None] * (ATTEMPTS - 1) + [0]
    calm = TaskQueue([1])
    assert [calm.give_back(calm.take(1), died=False) for _ in range(9)] == [None] * 9


def test_a_node_has_an_actor_per_gpu_or_else_per_cpu():
    assert capacity({"CPU": 8, "GPU": 2}, gpus=True) == (2, True)
    assert capacity({"CPU": 8, "GPU": 2}, gpus=False) == (8, False)
    assert capacity({"CPU": 8}, gpus=True) == (8, False)
    assert capacity({"memory": 1}, gpus=True) == (0, False)
