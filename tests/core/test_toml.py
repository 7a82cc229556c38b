import math
import tomllib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhelix.core import toml
from fedhelix.core.errors import UserError

scalars = st.text() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.booleans()
values = st.recursive(
    scalars | st.lists(scalars | st.lists(scalars), max_size=4),
    lambda inner: st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=60)
@given(st.dictionaries(st.text(), values, max_size=5))
def test_what_is_written_is_read_back(content):
    assert tomllib.loads(toml.dumps(content)) == content


def test_the_text_is_what_a_person_would_write():
    content = {
        "method": {"name": "genfed", "rho": 3, "gene": {"keep": [0.5, 1.0]}},
        "seed": 0,
        "note": None,
    }
    assert toml.dumps(content) == (
        'seed = 0\n\n[method]\nname = "genfed"\nrho = 3\n\n[method.gene]\nkeep = [0.5, 1.0]\n'
    )


def test_nan_and_numpy_numbers():
    back = tomllib.loads(
        toml.dumps({"a": math.nan, "b": np.float32(0.5), "c": np.int64(3), "d": -math.inf})
    )
    assert math.isnan(back["a"]) and back["b"] == 0.5 and back["c"] == 3 and back["d"] == -math.inf


@pytest.mark.parametrize("value", [object(), [None], [{"a": 1}]])
def test_other_types_are_refused_with_their_place(value):
    with pytest.raises(UserError, match=r"'method\.rho' holds a"):
        toml.dumps({"method": {"rho": value}})


def test_reading(tmp_path):
    path = tmp_path / "config.toml"
    with pytest.raises(UserError, match=r"config\.toml' is missing"):
        toml.read(path)
    path.write_text("seed = 1\n")
    assert toml.read(str(path)) == {"seed": 1}
    path.write_text("seed = 1\nrounds = \n")
    with pytest.raises(UserError, match=r"config\.toml' is not valid TOML: .*line 2, column 10"):
        toml.read(path)
    path.write_bytes(b"name = '\xff'\n")
    with pytest.raises(UserError, match=r"config\.toml' is not valid TOML: .*position 8"):
        toml.read(path)
    with pytest.raises(UserError, match="cannot be read"):
        toml.read(tmp_path)
