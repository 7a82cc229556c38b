"""Shifts: what groups of clients do to labels and inputs, and who is in which group."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from labelled_data import labelled, table

from fedhelix.core.errors import UserError
from fedhelix.data import Dataset, Shift, from_arrays, load, shifted
from fedhelix.data.partitions import dirichlet, iid, parse, quantity
from fedhelix.data.shifts import KINDS
from fedhelix.data.transforms import blurred, faded, permuted, recoloured, rotated, swapped

quick = settings(max_examples=40, deadline=None)
DIGITS = load("digits").subsample(300, 100)
COLOURED = Dataset(
    "coloured",
    torch.arange(12 * 12, dtype=torch.uint8).view(12, 3, 2, 2),
    torch.arange(12) % 2,
    torch.arange(12 * 12, dtype=torch.uint8).view(12, 3, 2, 2),
    torch.arange(12) % 2,
    classes=2,
)


class TestTransforms:
    @given(classes=st.integers(2, 30), seed=st.integers(0, 99))
    @quick
    def test_permuted_labels_are_permutations_that_agree_nowhere(self, classes, seed):
        order = np.random.default_rng(seed).permutation(classes)
        square = np.stack([permuted(order, group) for group in range(classes)])
        assert np.array_equal(square[0], np.arange(classes))
        for line in (*square, *square.T):
            assert np.array_equal(np.sort(line), np.arange(classes))

    def test_labels_by_hand(self):
        order = np.array([2, 0, 1, 3])  # 2 → 0 → 1 → 3 → 2
        assert permuted(order, 1).tolist() == [1, 3, 0, 2]
        assert permuted(order, 2).tolist() == [3, 2, 1, 0]
        assert swapped(order, 0).tolist() == [0, 1, 2, 3]
        assert swapped(order, 1).tolist() == [2, 1, 0, 3]
        assert swapped(order, 2).tolist() == [0, 3, 2, 1]

    @given(turns=st.integers(0, 4), side=st.integers(1, 9))
    @quick
    def test_quarter_turns_are_exact(self, turns, side):
        x = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(side))
        torch.testing.assert_close(rotated(x, turns / 4), torch.rot90(x, turns, (2, 3)))

    def test_oblong_images_keep_their_proportions(self):
        x = torch.zeros(1, 1, 5, 9)
        x[0, 0, 2, 6] = 1  # two pixels to the right of the centre
        assert rotated(x, 0.25)[0, 0, 0, 4] == pytest.approx(1, abs=1e-5)  # two above it
        torch.testing.assert_close(rotated(x, 0.5), x.flip(2, 3))

    def test_a_blurred_point_is_a_gaussian_and_its_light_stays(self):
        x = torch.zeros(1, 1, 15, 15)
        x[0, 0, 7, 7] = 1
        weights = torch.exp(-0.5 * torch.arange(-3.0, 4) ** 2)
        weights /= weights.sum()
        torch.testing.assert_close(blurred(x, 1.0)[0, 0, 4:11, 4:11], torch.outer(weights, weights))
        assert blurred(x, 2.0).sum() == pytest.approx(1)
        flat = torch.full((1, 2, 8, 8), 7.0)
        torch.testing.assert_close(blurred(flat, 3.0), flat)
        assert blurred(x, 0) is x

    def test_faded_by_hand(self):
        x = torch.tensor([0.0, 4.0, 8.0, 12.0]).view(1, 1, 2, 2)  # mean 6
        assert faded(x, 2).flatten().tolist() == [3, 5, 7, 9]

    def test_hues_turn_and_grey_stays(self):
        x = torch.rand(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(recoloured(x, 1 / 3), x[:, [2, 0, 1]])  # red becomes green
        torch.testing.assert_close(recoloured(x, 2 / 3), x[:, [1, 2, 0]])
        torch.testing.assert_close(recoloured(recoloured(x, 0.1), 0.9), x)
        grey = x[:, :1].expand(-1, 3, -1, -1)
        torch.testing.assert_close(recoloured(grey, 0.2), grey)


class TestGroups:
    def test_every_client_points_into_the_copy_of_its_group(self):
        splits = iid(6).split(DIGITS, 0)
        data, moved, names = shifted(DIGITS, splits, "rotation:2", 0)
        assert sorted(set(names)) == ["none", "rotation 180°"] and names.count("none") == 3
        for before, after, name in zip(splits, moved, names, strict=True):
            turn = 0 if name == "none" else 2
            for part, x, shifted_x in (
                ("train", DIGITS.x, data.x),
                ("valid", DIGITS.x, data.x),
                ("test", DIGITS.x_test, data.x_test),
            ):
                expected = torch.rot90(x[getattr(before, part)], turn, (2, 3))
                assert torch.equal(shifted_x[getattr(after, part)], expected)
            assert torch.equal(data.y[after.train], DIGITS.y[before.train])

    def test_concepts_change_the_labels_of_test_samples_alike(self):
        splits = dirichlet(6, 0.3).split(DIGITS, 1)
        data, moved, names = shifted(DIGITS, splits, "concept:3", 1)
        for before, after, name in zip(splits, moved, names, strict=True):
            relabelled = dict(
                zip(DIGITS.y[before.train].tolist(), data.y[after.train].tolist(), strict=True)
            )
            tests = zip(DIGITS.y_test[before.test], data.y_test[after.test], strict=True)
            for old, new in tests:
                assert relabelled.setdefault(int(old), int(new)) == int(new)
            assert all((old == new) == (name == "none") for old, new in relabelled.items())

    @given(
        clients=st.integers(2, 40),
        newcomers=st.integers(0, 20),
        groups=st.integers(2, 6),
        seed=st.integers(0, 9),
    )
    @quick
    def test_groups_are_of_equal_size_among_known_clients_and_among_newcomers(
        self, clients, newcomers, groups, seed
    ):
        splits = iid(clients + newcomers).split(DIGITS, seed)
        if clients < groups:
            with pytest.raises(UserError, match=f"{groups} groups for {clients} clients"):
                shifted(DIGITS, splits, f"contrast:{groups}", seed, newcomers)
            return
        names = shifted(DIGITS, splits, f"contrast:{groups}", seed, newcomers).names
        for part in (names[:clients], names[clients:]):
            counts = [part.count(name) for name in {*names}]
            assert not part or max(counts) - min(counts) <= 1 or len(part) < groups
        assert len({*names[:clients]}) == groups

    def test_shares_say_how_many(self):
        splits = iid(20).split(DIGITS, 0)
        names = shifted(DIGITS, splits, "swap:0.7/0.2/0.1", 0).names
        assert [names.count(name) for name in ("none", "swap 1", "swap 2")] == [14, 4, 2]

    def test_kinds_can_be_mixed(self):
        splits = iid(12).split(DIGITS, 0)
        data, moved, names = shifted(DIGITS, splits, "concept:2+rotation:4", 0)
        assert len(data.y) == 8 * len(DIGITS.y) and len(data.y_test) == 8 * len(DIGITS.y_test)
        assert sum("labels 1" in name for name in names) == 6
        assert sum("rotation 90°" in name for name in names) == 3
        client = next(i for i, name in enumerate(names) if name.startswith("labels 1, rotation"))
        turns = int(names[client].split()[-1].removesuffix("°")) // 90
        before, after = splits[client].train, moved[client].train
        assert torch.equal(data.x[after], torch.rot90(DIGITS.x[before], turns, (2, 3)))
        assert not (data.y[after] == DIGITS.y[before]).any()

    def test_the_first_copy_is_the_data_as_they_are(self):
        for name in KINDS.keys() - {"colour"}:
            data = shifted(DIGITS, iid(6).split(DIGITS, 0), f"{name}:3", 0).data
            assert torch.equal(data.x[: len(DIGITS.x)], DIGITS.x)
            assert torch.equal(data.y_test[: len(DIGITS.y_test)], DIGITS.y_test)
            assert data.x.dtype == torch.uint8 and data.shape == DIGITS.shape

    def test_copies_are_shared_by_all_seeds_unless_labels_are_drawn(self):
        splits = iid(6).split(DIGITS, 0)
        turned, concept = (
            [shifted(DIGITS, splits, text, seed).data for seed in (3, 3, 4)]
            for text in ("rotation:3", "concept:3")
        )
        assert turned[0] is turned[1] is turned[2]
        assert concept[0] is concept[1] and not torch.equal(concept[0].y, concept[2].y)

    def test_owners_and_tables_can_be_shifted(self):
        draw = np.random.default_rng(0)
        owners = np.repeat(["a", "b", "c"], 20)
        towns = from_arrays(draw.normal(size=(60, 4)), draw.normal(size=60), owners=owners)
        splits = parse("natural", 0).split(towns, 0)
        data, moved, names = shifted(towns, splits, "scale:2", 0)
        client = names.index("scale 1/2")
        halved = towns.x[splits[client].train] / 2
        torch.testing.assert_close(data.x[moved[client].train], halved)
        assert data.owners is not None
        assert {*data.owners[moved[client].train]} == {*towns.owners[splits[client].train]}

    def test_colours(self):
        splits = iid(3).split(COLOURED, 0)
        data, moved, names = shifted(COLOURED, splits, "colour:3", 0)
        client = names.index("hue 120°")
        expected = COLOURED.x[splits[client].train][:, [2, 0, 1]]
        assert torch.equal(data.x[moved[client].train], expected)


class TestBadInput:
    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("concept", "must say how many groups"),
            ("concept:1", "must say how many groups"),
            ("concept:2.5", "must say how many groups"),
            ("concept:many", "must say how many groups"),
            ("concept:nan", "must say how many groups"),
            ("concept:0.5/0.4", "must be above 0 and sum to 1"),
            ("concept:1.5/-0.5", "must be above 0 and sum to 1"),
            ("concept:nan/1", "must be above 0 and sum to 1"),
            ("rotated:3", "unknown shift 'rotated'"),
            ("blur:2+blur:3", "names a kind twice"),
            ("concept:2+", "unknown shift ''"),
        ],
    )
    def test_text(self, text, sentence):
        with pytest.raises(UserError, match=sentence):
            Shift(shift=text)

    @pytest.mark.parametrize(
        ("data", "text", "sentence"),
        [
            (DIGITS, "colour:3", "needs colour images, and 'digits' has samples of 1×8×8"),
            (DIGITS, "concept:11", "has 11 groups, but 'digits' allows 10 at most"),
            (DIGITS, "swap:7", "has 7 groups, but 'digits' allows 6 at most"),
            (DIGITS, "blur:0.999/0.001", "is too small for one of 12 clients"),
            (from_arrays(np.ones((40, 3)), np.ones(40)), "concept:2", "needs classes, and"),
            (from_arrays(np.ones((40, 3)), np.ones(40)), "rotation:2", "needs images, and"),
            (from_arrays(np.ones((40, 3), dtype=int), np.arange(40) % 2), "scale:2", "numbers"),
        ],
    )
    def test_data(self, data, text, sentence):
        with pytest.raises(UserError, match=sentence):
            shifted(data, iid(12).split(data, 0), text, 0)


class TestQuantity:
    @given(
        clients=st.integers(1, 30),
        alpha=st.floats(1e-3, 100),
        seed=st.integers(0, 99),
        sizes=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    )
    @quick
    def test_every_sample_is_used_once_and_nobody_has_too_few(self, clients, alpha, seed, sizes):
        data = labelled(sizes)
        if clients > sum(sizes):
            with pytest.raises(UserError, match="clients cannot share"):
                quantity(clients, alpha).split(data, seed)
            return
        counts = table(data, quantity(clients, alpha).split(data, seed))
        assert counts.sum(0).tolist() == sizes
        assert counts.sum(1).min() >= min(10, sum(sizes) // clients)

    def test_most_have_few_and_all_have_all_classes(self):
        data = labelled([1000] * 10)
        counts = table(data, parse("quantity:0.2", 20).split(data, 0))
        totals = np.sort(counts.sum(1))
        assert totals[:10].sum() < 0.1 * totals.sum()
        largest = counts[counts.sum(1).argmax()]
        assert largest.min() > 0.8 * largest.mean()

    def test_a_large_alpha_gives_equal_clients(self):
        counts = table(DIGITS, quantity(10, 1e6).split(DIGITS, 0))
        assert counts.sum(1).min() >= 29

    def test_it_needs_no_classes(self):
        data = from_arrays(np.ones((400, 3)), np.ones(400))
        assert len(quantity(5, 0.5).split(data, 0)) == 5
