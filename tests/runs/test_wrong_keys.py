"""Keys of methods that a comparison does not know."""

import pytest

from fedhelix.core.errors import UserError
from fedhelix.runs.spec import make_specs


@pytest.mark.parametrize(
    ("specs", "key", "says"),
    [
        ("fedavg fedprox", "fedprx.mu", "unknown key 'fedprx.mu'; did you mean 'fedprox.mu'?"),
        ("fedprox", "fedprx.mu", "unknown key 'fedprx.mu'; did you mean 'fedprox.mu'?"),
        ("fedavg fedprox", "method.mu", "fedavg has no option mu; write fedprox.mu."),
        ("fedavg@lr=1 fedprox@lr=1", "fedavg.mu", "fedavg has no option mu; write fedprox.mu."),
        ("fedavg fedprox", "mu", "fedavg has no option mu; write fedprox.mu."),
        ("fedprox fedavg", "mu", "'mu' is an option of fedprox; write fedprox.mu."),
        ("fedprox", "mu", "'mu' is an option of fedprox; write method.mu."),
    ],
)
def test_a_wrong_key_names_the_option_that_was_meant(specs, key, says):
    with pytest.raises(UserError) as problem:
        make_specs(specs.split(), {key: 0.1})
    assert str(problem.value) == says
