"""Which models are dropped: vectors in the plane, and losses worked out by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhelix.components.culling import agreeing, agreement, culled, suspects
from fedhelix.components.culling import uncopied as uncopied_models


def no_harm():
    """The loss before a round that no mean is worse than."""
    return math.inf


def vectors(*rows):
    return torch.tensor([list(map(float, row)) for row in rows])


def uncopied(updates):
    return uncopied_models(updates, {"x": torch.zeros(len(updates[0]))})


def losses_by(harm, log=None):
    """The loss of a group is one plus the mean harm of its members."""

    def losses(groups, count):
        if log is not None:
            log.extend(map(tuple, groups))
        return [1 + sum(harm[i] for i in group) / len(group) for group in groups]

    return losses


def test_copies_and_their_originals_go():
    near = 5 * (1 - 5e-5)  # within a ten-thousandth of its length
    far = 5 * (1 - 2e-4)
    assert uncopied(vectors((0, 5), (3, 4), (0, near), (0, 5), (0, far))) == [1, 4]
    assert uncopied(vectors((0, 0), (0, 0), (0, 1))) == [2]
    assert uncopied(vectors((1, 0), (-1, 0))) == [0, 1]


def test_where_all_are_copies_one_of_each_stays():
    assert uncopied(vectors((1, 0), (0, 1), (1, 0), (0, 1))) == [0, 1]
    assert uncopied(vectors((0, 0), (0, 0))) == [0]


def test_nobody_is_a_copy_of_an_absurdly_long_update():
    """Its square is beyond float32, but not beyond what an upload may hold."""
    assert uncopied(vectors((1e30, 1e30), (1, 0), (0, 1))) == [0, 1, 2]


def test_agreement_by_hand():
    # Directions (1, 0), (0, 1), (0, -1); the others' sums are (0, 0), (1, -1), (1, 1).
    found = agreement(vectors((2, 0), (0, 3), (0, -1)), [0, 1, 2])
    assert found.tolist() == pytest.approx([0, -(0.5**0.5), -(0.5**0.5)])
    # Among the first two alone they are orthogonal; lengths do not count.
    assert agreement(vectors((2, 0), (0, 3), (0, -1)), [0, 1]).tolist() == pytest.approx([0, 0])
    # (3, 4) / 5 beside (1, 0) and (0, 1), whose sum points to 45°: cos = 1.4 / √2.
    found = agreement(vectors((3, 4), (1, 0), (0, 1)), [0, 1, 2])
    assert float(found[0]) == pytest.approx(1.4 / 2**0.5)


def test_without_losses_those_stay_who_point_where_the_others_point():
    # Three point right, up to some degrees, and one left; another points right, eleven times as far
    # as the median, which is 1.
    updates = vectors((1, 0), (1, 0.2), (1, -0.2), (-1, 0), (11.5, 0.1))
    assert agreeing(updates, range(5), 1) == [0, 1, 2]
    # Half as far is not too far.
    updates[4] /= 2
    assert agreeing(updates, range(5), 1) == [0, 1, 2, 4]
    # Only those that are asked about have a voice.
    assert agreeing(updates, [3, 0, 2, 1], 1) == [0, 1, 2]
    assert len(agreeing(updates, [3, 4], 1)) == 1


def test_without_losses_some_stay_in_any_case():
    updates = vectors((1, 0), (-1, 0))  # each is the other's opposite
    assert len(agreeing(updates, [0, 1], 1)) == 1 and agreeing(updates, [0, 1], 2) == [0, 1]
    assert agreeing(vectors((1, 0)), [0], 1) == [0]
    # The most agreeable of those who do not agree is the next one, and the far one the last.
    updates = vectors((1, 0), (1, 0.1), (-1, 1), (30, 0))
    assert agreeing(updates, range(4), 3) == [0, 1, 2]
    assert agreeing(updates, range(4), 4) == [0, 1, 2, 3]


def test_suspects_are_single_models_the_longest_and_those_who_agree_least():
    found = suspects([1, 4, 2, 3], [0.5, 0.9, -1, 0.1], least=1)
    alone = [{0}, {1}, {2}, {3}]
    longest, opposed = [{1, 3}, {1, 3, 2}], [{2, 3}, {2, 3, 0}]
    assert found == [*alone, *longest, *opposed]
    assert suspects([1, 4, 2, 3], [0.5, 0.9, -1, 0.1], least=3) == alone


FOUR = vectors((1, 0), (1, 0.1), (1, -0.1), (1, 0.2))


def test_who_does_no_harm_stays():
    assert culled(range(4), FOUR, losses_by([0, 0, 0, 0]), no_harm, 0.05, 1) == [0, 1, 2, 3]


def test_a_drop_must_lower_the_loss_by_more_than_the_margin():
    # With all four the loss is 1 + h / 4, without the last it is 1: (1 + h / 4)(1 - 0.05) > 1
    # needs h / 4 > 0.0526.
    assert culled(range(4), FOUR, losses_by([0, 0, 0, 4 * 0.052]), no_harm, 0.05, 1) == [
        0,
        1,
        2,
        3,
    ]
    assert culled(range(4), FOUR, losses_by([0, 0, 0, 4 * 0.053]), no_harm, 0.05, 1) == [0, 1, 2]
    assert culled(range(4), FOUR, losses_by([0, 0, 0, 4 * 0.001]), no_harm, 0.0, 1) == [0, 1, 2]


def test_who_opposes_the_others_has_no_margin():
    updates = FOUR.clone()
    updates[3] = torch.tensor([-1.0, 0])
    assert culled(range(4), updates, losses_by([0, 0, 0, 4 * 0.001]), no_harm, 0.05, 1) == [
        0,
        1,
        2,
    ]
    # But harmless as it is, it stays.
    assert culled(range(4), updates, losses_by([0, 0, 0, 0]), no_harm, 0.05, 1) == [0, 1, 2, 3]


def test_a_round_that_would_harm_has_no_margin():
    # The loss of all is 1.001, of the first three 1.
    harm = losses_by([0, 0, 0, 4 * 0.001])
    assert culled(range(4), FOUR, harm, lambda: 1.0005, 0.05, 1) == [0, 1, 2]
    assert culled(range(4), FOUR, harm, lambda: 1.0015, 0.05, 1) == [0, 1, 2, 3]


def test_several_are_dropped_at_once_where_no_single_one_would_help():
    """Two long updates: as long as one of them is left, the loss is high."""
    updates = vectors((1, 0), (1, 0.1), (1, -0.1), (9, 0), (9, 0.1))

    def losses(groups, count=0):
        return [5.0 if {3, 4} & set(group) else 1.0 for group in groups]

    assert culled(range(5), updates, losses, no_harm, 0.05, 1) == [0, 1, 2]


def test_models_that_stay_in_any_case():
    harm = [0, 5, 10, 20]
    assert culled(range(4), FOUR, losses_by(harm), no_harm, 0.05, 1) == [0]
    assert culled(range(4), FOUR, losses_by(harm), no_harm, 0.05, 2) == [0, 1]
    log = []
    assert culled(range(4), FOUR, losses_by(harm, log), no_harm, 0.05, 4) == [0, 1, 2, 3]
    assert log == []  # nothing was tried


def test_only_those_among_whom_to_choose():
    assert culled([0, 2, 3], FOUR, losses_by([0, 0, 0, 9]), no_harm, 0.05, 1) == [0, 2]


def test_losses_beyond_all_numbers():
    updates = vectors((1, 0), (1, 0.1), (1, -0.1), (9, 0), (9, 0.1))

    def losses(groups, count=0):
        return [math.inf if {3, 4} & set(group) else 1.0 for group in groups]

    assert culled(range(5), updates, losses, no_harm, 0.05, 1) == [0, 1, 2]
    # Where nothing helps, nobody is dropped.
    nothing = culled(
        range(5), updates, lambda groups, count: [math.inf] * len(groups), no_harm, 0.05, 1
    )
    assert nothing == [0, 1, 2, 3, 4]


def test_losses_below_zero():
    """Dropping the last raises the loss from -1 to -0.97: less than the margin is no gain."""

    def losses(groups, count=0):
        return [-1.0 if 3 in group else -0.97 for group in groups]

    assert culled(range(4), FOUR, losses, no_harm, 0.05, 1) == [0, 1, 2, 3]


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 7), st.integers(0, 2**31), st.floats(0, 0.5), st.integers(1, 3),
    st.sampled_from([0.0, -2.0]),
)  # fmt: skip
def test_what_is_kept_is_never_worse_than_all(count, seed, margin, least, offset):
    draw = torch.Generator().manual_seed(seed)
    updates = torch.randn(count, 3, generator=draw)
    target = torch.randn(3, generator=draw)

    def losses(groups, count=0):
        return [
            float((updates[list(group)].mean(0) - target).square().sum()) + offset
            for group in groups
        ]

    least = min(least, count)
    kept = culled(range(count), updates, losses, no_harm, margin, least)
    assert len(kept) >= least and kept == sorted(set(kept))
    before, after = losses([range(count), kept])
    assert after <= before
    # Nobody is left whose removal alone would have paid.
    if len(kept) > least:
        single = losses([[i for i in kept if i != one] for one in kept])
        prices = [loss + abs(loss) * margin / (1 - margin) for loss in single]
        assert min(prices) >= after - 1e-6


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.integers(0, 2**31), st.integers(1, 40))
def test_honest_updates_stay_and_copies_go(count, seed, size):
    draw = torch.Generator().manual_seed(seed)
    updates = torch.randn(count, size + 8, generator=draw)
    assert uncopied(updates) == list(range(count))
    places = torch.randperm(count, generator=draw)[: count - 1]
    copied = torch.cat([updates, updates[places] * (1 + 1e-5)])
    assert uncopied(copied) == sorted(set(range(count)) - set(places.tolist()))


def culled_eagerly(among, updates, losses, before, margin, least):
    """The rule as its page states it: every candidate is scored, also twice, and the old model."""
    kept = list(among)
    (loss,) = losses([kept], 0)
    while len(kept) > least:
        agrees, lengths = agreement(updates, kept).tolist(), updates[kept].norm(dim=1).tolist()
        groups = suspects(lengths, agrees, least)
        left = [[kept[i] for i in range(len(kept)) if i not in group] for group in groups]
        found = losses(left, 0)
        prices = [
            one / (1 - margin) if any(agrees[i] >= 0 for i in group) else one
            for group, one in zip(groups, found, strict=True)
        ]
        at = min(range(len(left)), key=lambda i: prices[i])
        if not (found[at] if loss > before else prices[at]) < loss:
            return kept
        kept, loss = left[at], found[at]
    return kept


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 7), st.integers(0, 2**31), st.floats(0, 0.3), st.floats(0.2, 3))
def test_what_is_not_scored_would_not_change_the_choice(count, seed, margin, before):
    draw = torch.Generator().manual_seed(seed)
    updates, target = (torch.randn(n, 3, generator=draw) for n in (count, 1))
    scored, asked = [], []

    def losses(groups, samples):
        scored.append([(tuple(group), samples) for group in groups])
        return [1 + float((updates[list(g)].mean(0) - target).square().sum()) for g in groups]

    def old():
        asked.append(before)
        return before

    kept = culled(range(count), updates, losses, old, margin, 1)
    assert all(len(set(groups)) == len(groups) for groups in scored)
    assert kept == culled_eagerly(range(count), updates, losses, before, margin, 1)


def test_the_old_model_is_scored_only_where_the_margin_decides():
    def never():
        raise AssertionError

    assert culled(range(4), FOUR, losses_by([0, 0, 0, 0]), never, 0.05, 1) == [0, 1, 2, 3]
    assert culled(range(4), FOUR, losses_by([0, 0, 0, 4]), never, 0.05, 1) == [0, 1, 2]
