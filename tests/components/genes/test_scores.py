"""Scores of units by hand, the choice of a gene, and the golden sizes of ResNet-18's genes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedhelix import GeneFL
from fedhelix.components.genes import choose, shrunk, unit_scores
from fedhelix.core.layers import Layers
from fedhelix.models import build

MIB, GIB = 2**20, 2**30
UNITS = {"one": ["a"], "two": ["b"]}
BEFORE = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([0.0, 2.0, 0.0, 0.0])}
AFTER = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0, 3.0, 4.0, 0.0])}


@pytest.mark.parametrize(
    ("measure", "raw"),
    [
        ("similarity", [0.6 / 2, 0.6 / 4]),
        ("distance", [0.4 / 2, 0.4 / 4]),
        ("l1", [6 / 2, 5 / 4]),
        ("l2", [math.sqrt(20) / 2, math.sqrt(17) / 4]),
        # Sorted: (3, 4) against (0, 1) moves 3 each; (0, 0, 3, 4) against (0, 0, 0, 2) moves 3 and
        # 2 of four.
        ("emd", [3 / 2, 5 / 4 / 4]),
    ],
)
def test_scores_by_hand(measure, raw):
    found = unit_scores(AFTER, BEFORE, UNITS, measure)
    assert found.tolist() == pytest.approx([value / sum(raw) for value in raw])


def test_per_unit_the_change_decides_and_not_the_size():
    after = {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([0.0, 3.0, 4.0, 0.0])}
    found = unit_scores(after, BEFORE, UNITS, "distance", "unit")
    assert found.tolist() == pytest.approx([1 / 1.4, 0.4 / 1.4])
    sizes = [2, 4]
    small_changed, large_changed = {**AFTER, "a": after["a"]}, {**AFTER, "b": -BEFORE["b"]}
    for state, wanted in ((small_changed, [1]), (large_changed, [0])):
        for measure, select in (("similarity", "highest"), ("distance", "lowest")):
            scores = unit_scores(state, BEFORE, UNITS, measure, "unit").tolist()
            assert choose(scores, sizes, select, 1) == wanted


def test_a_unit_that_did_not_move_has_no_distance_however_it_is_rounded():
    state = {
        "a": torch.randn(1000, generator=torch.Generator().manual_seed(0)),
        "b": torch.zeros(3),
    }
    assert unit_scores(
        state, state, {"a": ["a"], "b": ["b"]}, "distance"
    ).tolist() == pytest.approx([0, 0], abs=1e-12)


def test_choice_by_hand():
    scores, sizes = [0.3, 0.1, 0.1, 0.5], [4, 10, 2, 3]
    assert choose(scores, sizes, "lowest", 2) == [1, 2]
    assert choose(scores, sizes, "lowest", 1) == [1]  # of equals the earlier
    assert choose(scores, sizes, "highest", 2) == [0, 3]
    assert (
        choose(scores, sizes, "lowest", None, budget=7) == [2, 0][::-1]
    )  # 10 does not fit, 2 and 4 do, 3 no more
    assert choose(scores, sizes, "lowest", None, budget=1) == [2]  # nothing fits: the smallest
    assert choose(scores, sizes, "lowest", 1, budget=7) == [2]  # the budget has room for another
    waiting = [1, 1, 1, 5]
    assert choose(scores, sizes, "lowest", 2, waiting=waiting) == [1, 3]  # the last one is overdue
    assert choose(scores, sizes, "lowest", 2, budget=5, waiting=waiting) == [2, 3]


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 50)), min_size=1, max_size=12),
    st.integers(1, 200),
)
def test_a_gene_never_exceeds_its_budget_unless_nothing_fits(units, budget):
    scores, sizes = zip(*units, strict=True)
    chosen = choose(scores, sizes, "lowest", None, budget)
    assert chosen == sorted(set(chosen)) and chosen
    assert sum(sizes[at] for at in chosen) <= budget or (len(chosen) == 1 and min(sizes) > budget)


def test_shrinking_by_hand():
    assert shrunk(4, 1, before=0.5, now=0.6, tolerance=0.005) == 3
    assert shrunk(4, 1, before=0.5, now=0.496, tolerance=0.005) == 3
    assert shrunk(4, 1, before=0.5, now=0.49, tolerance=0.005) == 4
    assert shrunk(1, 1, before=0.5, now=0.6, tolerance=0.005) == 1


@pytest.fixture(scope="module")
def resnet():
    module = build("resnet18", (3, 32, 32), 10)
    units = Layers.of(module, torch.zeros(2, 3, 32, 32))
    state = {name: value for name, value in module.state_dict().items() if name in units.names}
    # Every tensor turned by the same angle: what remains is the size.
    before, after = (
        {name: torch.cat([torch.tensor(start), torch.zeros(value.numel())])[: value.numel()]
               .view_as(value)
         for name, value in state.items()}
        for start in ([1.0, 0.0], [3.0, 4.0])
    )  # fmt: skip
    return units, after, before


def gene_size(method, resnet, gamma):
    units, after, before = resnet
    due = {"gamma": torch.tensor(float(gamma))}
    gene = method._size.gene(after, before, method._units(units), due, method._scored)
    return 4 * sum(units.sizes[name] for name in gene) / MIB


def test_golden_payloads_of_both_readings(resnet):
    b = GeneFL(gene_score="distance", gene_select="lowest", gene_budget=0)
    assert [round(gene_size(b, resnet, gamma), 3) for gamma in (1, 2, 3, 4)] == [
        9.0,
        18.0,
        27.0,
        31.5,
    ]
    a = GeneFL(gene_budget=0)  # the default
    assert [round(gene_size(a, resnet, gamma), 3) for gamma in (14, 15, 16, 17)] == [
        6.569,
        8.819,
        11.069,
        15.569,
    ]


def test_a_quarter_of_the_bytes_is_kept(resnet):
    whole = 4 * sum(resnet[0].sizes.values()) / MIB
    for method in (GeneFL(), GeneFL(gene_score="distance", gene_select="lowest")):
        assert 0.15 * whole < gene_size(method, resnet, 20) <= 0.25 * whole


class Now:
    def __init__(self, round, rounds=100):
        self.round, self.rounds = round, rounds


def test_golden_schedule_of_a_hundred_rounds(resnet):
    """4, 3, 2 units for three rounds each, then 1: 10.239 GiB for ten clients."""
    method, total = GeneFL(gene_score="distance", gene_select="lowest", gene_budget=0), 0.0
    book = method._size.open_book(method._units(resnet[0]))
    sizes = {gamma: gene_size(method, resnet, gamma) for gamma in (1, 2, 3, 4)}
    for t in range(100):
        page = method._size.turned(book["page"], method._units(resnet[0]), Now(t))
        total += 10 * sizes[int(page[0])] / 1024
        upload = {"model": {}, "report": torch.tensor([1.0, 0.5])}
        book = method._size.entered(book, [upload], method._units(resnet[0]), Now(t))
    assert round(total, 3) == 10.239


def test_a_fall_of_accuracy_keeps_the_size_and_missing_figures_do_not():
    method, units = (
        GeneFL(gene_budget=0, gene_shrink_every=2),
        {str(k): (str(k),) for k in range(6)},
    )
    book, gammas = method._size.open_book(units), []
    for t, valid in enumerate([0.5, 0.5, 0.4, 0.4, 0.6, 0.6, None, None, 0.6]):
        gammas.append(int(method._size.turned(book["page"], units, Now(t))[0]))
        report = torch.tensor([1.0] if valid is None else [1.0, valid])
        book = method._size.entered(book, [{"model": {}, "report": report}], units, Now(t))
    assert gammas == [4, 4, 3, 3, 3, 3, 2, 2, 1]


def test_windows_pass_for_a_cluster_in_which_nobody_took_part():
    method = GeneFL(gene_budget=0, gene_shrink_every=3)
    units = {str(k): (str(k),) for k in range(6)}
    page = method._size.open_book(units)["page"]
    assert [int(method._size.turned(page, units, Now(t))[0]) for t in (0, 2, 3, 6, 9, 50)] == [
        4,
        4,
        3,
        2,
        1,
        1,
    ]
