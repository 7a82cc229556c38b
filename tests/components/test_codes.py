"""Codes of updates, against numbers worked out by hand."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fedhelix.components import codes
from fedhelix.core.errors import UserError

# Two rows of four values, and a layer of one row of two.
NAMES = ["a", "b"]
STATE = {"a": torch.zeros(2, 4), "b": torch.zeros(1, 2)}
LAYOUT = codes.layout_of(NAMES, STATE)
VECTOR = torch.tensor([1.0, -1, 3, -3, 0, 0, 0, 8, -0.5, 0.5])


def encoded(bits, vector=VECTOR):
    parts = codes.encode_bits(vector, LAYOUT, bits)
    return parts, codes.decode_bits(parts, LAYOUT, bits)


def test_a_layout_says_where_rows_and_entries_lie():
    assert (LAYOUT.sizes, LAYOUT.count, LAYOUT.rows) == ([8, 2], 10, 3)
    assert LAYOUT.row_lengths(VECTOR.device).tolist() == [4, 4, 2]
    state = LAYOUT.state(VECTOR)
    assert state["a"].tolist() == [[1, -1, 3, -3], [0, 0, 0, 8]]
    assert torch.equal(LAYOUT.flat(state), VECTOR)


def test_numbers_lie_in_bytes_the_first_one_lowest():
    # 1 + 2·4 + 0·16 + 2·64 = 137, then 1 alone in a byte that zeros fill up.
    numbers = torch.tensor([1, 2, 0, 2, 1], dtype=torch.uint8)
    assert codes.pack(numbers, 2).tolist() == [137, 1]
    assert codes.unpack(torch.tensor([137, 1], dtype=torch.uint8), 2, 5).tolist() == [1, 2, 0, 2, 1]


def test_one_bit_is_the_sign_times_a_scale_that_keeps_the_rows_length():
    # Means of squares over means of magnitudes: (1+1+9+9)/4 = 5 over 2, 64/4 = 16 over 2, 1/4 over
    # 1/2; but at most 1.5 times the mean of magnitudes: 2.5 < 3, 8 > 3, 0.5 < 0.75.
    # A zero counts as positive.
    parts, decoded = encoded(1)
    assert parts["scales"].tolist() == [2.5, 3, 0.5]
    # Signs + - + - + + + + are 1 + 4 + 16 + 32 + 64 + 128 = 245, and - + is 2.
    assert parts["values"].tolist() == [245, 2]
    assert decoded.tolist() == [2.5, -2.5, 2.5, -2.5, 3, 3, 3, 3, -0.5, 0.5]


def test_one_bit_of_nothing_is_nothing():
    parts, decoded = encoded(1, torch.zeros(10))
    assert parts["scales"].tolist() == [0, 0, 0] and decoded.unique().tolist() == [0]


def test_two_bits_are_signs_and_zeros():
    # Thresholds 0.7 · 2 = 1.4, 1.4 and 0.35: the threes survive, the eight, and both halves.
    parts, decoded = encoded(2)
    assert parts["scales"].tolist() == [3, 8, 0.5]
    # Levels 0 0 1 -1, 0 0 0 1, -1 1 are 1 1 2 0, 1 1 1 2, 0 2 with one added:
    # 1 + 4 + 32 = 37, 1 + 4 + 16 + 128 = 149, 8.
    assert parts["values"].tolist() == [37, 149, 8]
    assert decoded.tolist() == [0, 0, 3, -3, 0, 0, 0, 8, -0.5, 0.5]


def test_four_bits_are_a_grid_of_fifteen_levels():
    # Largest 7, 14 and 3.5: steps 1, 2 and 0.5. 2.4 is nearest to 2, 5 to 2 · 2 or 2 · 3 (2.5
    # rounds to the even 2), -3.5 is -7 steps.
    vector = torch.tensor([7.0, 2.4, -1, 0, -14, 5, 7, 0, -3.5, 1])
    parts, decoded = encoded(4, vector)
    assert parts["scales"].tolist() == [1, 2, 0.5]
    assert decoded.tolist() == [7, 2, -1, 0, -14, 4, 8, 0, -3.5, 1]
    # Levels 7 2, -1 0, ... are 14 9, 6 7, ... with 7 added, two in a byte: 14 + 16·9 = 158, ...
    assert parts["values"].tolist()[:2] == [158, 118]


def test_eight_bits_are_a_grid_of_255_levels():
    vector = torch.tensor([127.0, 2.4, -1, 0, -254, 5, 7, 0, -63.5, 1])
    parts, decoded = encoded(8, vector)
    assert parts["scales"].tolist() == [1, 2, 0.5]
    assert parts["values"].tolist() == [254, 129, 126, 127, 0, 129, 131, 127, 0, 129]
    assert decoded.tolist() == [127, 2, -1, 0, -254, 4, 8, 0, -63.5, 1]


def test_scales_are_rounded_before_they_are_used():
    # 1.01 lies between 1.0078125 and 1.015625, the neighbours with 8 bits of mantissa.
    parts, decoded = encoded(1, torch.full((10,), 1.01))
    assert parts["scales"].dtype == torch.bfloat16
    assert decoded.unique().tolist() == [1.0078125]


def test_the_level_that_nobody_writes_counts_as_the_largest():
    parts = {"values": torch.full((10,), 255, dtype=torch.uint8)}
    scales = {"scales": torch.ones(3, dtype=torch.bfloat16)}
    assert codes.decode_bits(parts | scales, LAYOUT, 8).unique().tolist() == [127]


def test_the_largest_values_alone():
    # 0.3 of ten values are three: 8 at place 7, and of the threes both.
    parts = codes.encode_top(VECTOR, LAYOUT, 0.3)
    assert parts["indices"].tolist() == [2, 3, 7] and parts["indices"].dtype == torch.int32
    assert parts["values"].tolist() == [3, -3, 8] and parts["values"].dtype == torch.bfloat16
    assert codes.decode_top(parts, LAYOUT).tolist() == [0, 0, 3, -3, 0, 0, 0, 8, 0, 0]
    assert codes.how_many(LAYOUT, 1e-9) == 1


def test_whole_layers():
    # Norms: a moved by sqrt(1+1+9+9+64) = 9.17 from a length of 1, so 1.15 per value; b by 0.71
    # from 0.01, so 35 per value. b is a fifth of all values, so 0.2 is reached and 0.3 is not.
    origin = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0, 0.01, 0])
    few = codes.encode_units(VECTOR, origin, LAYOUT, 0.2)
    assert few["layers"].tolist() == [0, 1] and few["values"].tolist() == [-0.5, 0.5]
    assert codes.decode_units(few, LAYOUT).tolist() == [0] * 8 + [-0.5, 0.5]
    both = codes.encode_units(VECTOR, origin, LAYOUT, 0.3)
    assert both["layers"].tolist() == [1, 1]
    assert torch.equal(codes.decode_units(both, LAYOUT), VECTOR)
    # From a hundred times as far, b moved relatively less than a.
    far = codes.encode_units(VECTOR, origin * torch.tensor([1.0] * 8 + [100] * 2), LAYOUT, 0.01)
    assert far["layers"].tolist() == [1, 0]


shapes = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=4)
drawn = st.tuples(shapes, st.integers(0, 2**31), st.sampled_from([0.0, 1e-6, 1.0, 1e3]))


def example(draw):
    """Entries of some shapes, of which some values are zero."""
    sizes, seed, scale = draw
    generator = torch.Generator().manual_seed(seed)
    state = {
        str(n): scale * torch.randn(size, generator=generator).relu()
        for n, size in enumerate(sizes)
    }
    layout = codes.layout_of(list(state), state)
    return layout, layout.flat(state) - 0.3 * scale


@settings(max_examples=60, deadline=None)
@given(drawn, st.sampled_from([1, 2, 4, 8]))
def test_what_a_code_says_is_near_and_as_short_as_it_should_be(draw, bits):
    layout, vector = example(draw)
    parts = codes.encode_bits(vector, layout, bits)
    codes.check_bits(parts, layout, bits)
    assert len(parts["values"]) == math.ceil(bits * layout.count / 8)
    assert len(parts["scales"]) == layout.rows
    lost = vector - (decoded := codes.decode_bits(parts, layout, bits))
    rounding = 1e-6 * float(vector.abs().max())
    assert torch.allclose(decoded + lost, vector, rtol=0, atol=rounding)
    if bits >= 4:  # half a step, and what the rounding of a scale takes away from the largest
        lengths = layout.row_lengths(vector.device)
        most = torch.segment_reduce(vector.abs(), "max", lengths=lengths).repeat_interleave(lengths)
        assert bool((lost.abs() <= most * (0.51 / codes.TOP[bits] + 2**-8)).all())


@settings(max_examples=60, deadline=None)
@given(drawn)
def test_a_sign_keeps_the_length_of_its_row_along_itself_unless_that_stretches_it(draw):
    """With s = Σv²/Σ|v| the product of a row with its code is Σ|v|·s = Σv²."""
    layout, vector = example(draw)
    decoded = codes.decode_bits(codes.encode_bits(vector, layout, 1), layout, 1)
    lengths = layout.row_lengths(vector.device).tolist()
    for row, code in zip(vector.split(lengths), decoded.split(lengths), strict=True):
        mean, along = float(row.abs().mean()), float(row @ code)
        stretched = 1.5 * mean * float(row.abs().sum())
        assert along == pytest.approx(min(float(row @ row), stretched), rel=1e-2, abs=1e-20)


@settings(max_examples=60, deadline=None)
@given(drawn, st.floats(0.01, 1.0))
def test_sparse_codes_pass_their_own_checks(draw, keep):
    layout, vector = example(draw)
    top = codes.encode_top(vector, layout, keep)
    codes.check_top(top, layout, keep)
    units = codes.encode_units(vector, vector, layout, keep)
    codes.check_units(units, layout)
    for decoded in (codes.decode_top(top, layout), codes.decode_units(units, layout)):
        sent = decoded != 0
        assert torch.allclose(decoded[sent], vector[sent], rtol=2**-8)


def changed(parts, **more):
    return {name: part for name, part in (parts | more).items() if part is not None}


BITS, TOP_K = codes.encode_bits(VECTOR, LAYOUT, 1), codes.encode_top(VECTOR, LAYOUT, 0.3)
UNITS = codes.encode_units(VECTOR, VECTOR, LAYOUT, 0.2)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"values": None}, "has scales packed instead of scales, values"),
        ({"more": VECTOR}, "has more, scales, values packed instead of scales, values"),
        ({"values": 3}, "has a int for 'values' instead of a tensor"),
        ({"values": BITS["values"].int()}, "has torch.int32 for 'values' instead of torch.uint8"),
        ({"values": BITS["values"][:1]}, r"has shape \(1,\) for 'values' instead of \(2,\)"),
        ({"values": BITS["values"][None]}, r"has shape \(1, 2\) for 'values' instead of \(2,\)"),
        ({"scales": BITS["scales"].float()}, "has torch.float32 for 'scales'"),
        ({"scales": BITS["scales"][:2]}, r"has shape \(2,\) for 'scales' instead of \(3,\)"),
        ({"scales": -BITS["scales"]}, "has scales from -3 to -0.5 instead of some between 0 and"),
        ({"scales": BITS["scales"] * math.nan}, "holds values that are not finite"),
        ({"scales": BITS["scales"] * math.inf}, "holds values that are not finite"),
        ({"scales": BITS["scales"] * 1e7}, r"has scales from 5.*e\+06 to 3.*e\+07 instead of"),
    ],
)
def test_bits_that_no_client_sends_are_refused(more, sentence):
    codes.check_bits(BITS, LAYOUT, 1)
    with pytest.raises(UserError, match=sentence):
        codes.check_bits(changed(BITS, **more), LAYOUT, 1)


def places(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"indices": None}, "has values packed instead of indices, values"),
        ({"indices": places(2, 3)}, r"has shape \(2,\) for 'indices' instead of \(3,\)"),
        ({"indices": places(2, 3, 7).long()}, "has torch.int64 for 'indices'"),
        ({"indices": places(2, 3, 10)}, "has indices from 2 to 10 instead of 0 to 9"),
        ({"indices": places(-1, 3, 7)}, "has indices from -1 to 7 instead of 0 to 9"),
        ({"indices": places(3, 2, 7)}, "has indices out of order instead of each once"),
        ({"indices": places(2, 2, 7)}, "has indices out of order instead of each once"),
        ({"values": TOP_K["values"].float()}, "has torch.float32 for 'values'"),
    ],
)
def test_places_that_no_client_sends_are_refused(more, sentence):
    codes.check_top(TOP_K, LAYOUT, 0.3)
    with pytest.raises(UserError, match=sentence):
        codes.check_top(changed(TOP_K, **more), LAYOUT, 0.3)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"layers": torch.tensor([0, 2], dtype=torch.uint8)}, "has 2 in 'layers' instead of 0 or"),
        ({"layers": torch.tensor([0, 0], dtype=torch.uint8)}, "has no layer instead of at least"),
        ({"layers": torch.tensor([1], dtype=torch.uint8)}, r"has shape \(1,\) for 'layers'"),
        ({"layers": torch.tensor([1, 0], dtype=torch.uint8)}, r"has shape \(2,\) for 'values'"),
        ({"values": UNITS["values"][None]}, r"has shape \(1, 2\) for 'values' instead of one dim"),
    ],
)
def test_layers_that_no_client_sends_are_refused(more, sentence):
    codes.check_units(UNITS, LAYOUT)
    with pytest.raises(UserError, match=sentence):
        codes.check_units(changed(UNITS, **more), LAYOUT)


def test_a_mask_says_which_entries_were_packed():
    layout, mask = codes.present({"b": STATE["b"]}, NAMES, STATE)
    assert layout.names == ("b",) and mask["entries"].tolist() == [0, 1]
    again, code = codes.announced(mask | {"values": VECTOR}, NAMES, STATE)
    assert again is layout and code.keys() == {"values"}
    assert codes.present(STATE, NAMES, STATE) == (LAYOUT, {})
    assert codes.announced({}, NAMES, STATE) == (LAYOUT, {})
    with pytest.raises(UserError, match="has no packed weights"):
        codes.announced(None, NAMES, STATE)
    with pytest.raises(UserError, match=r"has shape \(3,\) for 'entries' instead of \(2,\)"):
        codes.announced({"entries": torch.zeros(3, dtype=torch.uint8)}, NAMES, STATE)
    with pytest.raises(UserError, match="has 7 in 'entries' instead of 0 or 1"):
        codes.announced({"entries": torch.tensor([7, 1], dtype=torch.uint8)}, NAMES, STATE)


def test_the_same_model_is_packed_and_unpacked_once():
    model = LAYOUT.state(VECTOR)
    packed = codes.packed_model(model, LAYOUT, 8)
    assert codes.packed_model(dict(model), LAYOUT, 8) is packed
    assert codes.packed_model({**model, "a": model["a"].clone()}, LAYOUT, 8) is not packed
    assert codes.packed_model(model, LAYOUT, 4) is not packed
    unpacked = codes.unpacked_model(packed, LAYOUT, 8)
    assert codes.unpacked_model(dict(packed), LAYOUT, 8) is unpacked
    assert torch.allclose(unpacked["a"], model["a"], atol=8 / 127)


class Counter(TorchDispatchMode):
    """Counts operations, and those that would wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.steps, self.waits = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.steps += 1
        self.waits += func in (torch.ops.aten._local_scalar_dense.default,)
        return func(*args, **(kwargs or {}))


def cost(encode, decode, layers):
    state = {str(n): torch.randn(8, 9) for n in range(layers)}
    layout = codes.layout_of(list(state), state)
    vector = layout.flat(state)
    layout.row_lengths(vector.device)  # made once
    with Counter() as counter:
        decode(encode(vector, layout), layout)
    return counter.steps, counter.waits


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_steps_do_not_depend_on_the_number_of_layers_and_wait_for_nothing(bits):
    coder = partial(codes.encode_bits, bits=bits), partial(codes.decode_bits, bits=bits)
    assert cost(*coder, 3) == cost(*coder, 30) and cost(*coder, 3)[1] == 0
    top = partial(codes.encode_top, keep=0.1), codes.decode_top
    assert cost(*top, 3) == cost(*top, 30) and cost(*top, 3)[1] == 0
