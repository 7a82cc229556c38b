import pytest

from fedhelix.errors import BadInput
from fedhelix.runs import jobs
from fedhelix.runs.sweep import read_sweep, variants

FILE = """
methods = ["fedavg", "genfed"]
seeds = 2
[settings]
preset = "genfed.strong"
data = "digits"
rounds = 1
model = "linear"
clients = 6
cohort = 3
[grid]
lr = [0.05, 0.1]
"genfed.rho_max" = [2]
"""


def written(folder, text):
    path = folder / "sweep.toml"
    path.write_text(text)
    return path


def test_a_method_takes_what_concerns_it():
    grid = {"lr": [0.1, 0.2], "genfed.rho_max": [3, 5], "augment": [False]}
    assert variants("fedavg", grid) == ["fedavg@lr=0.1,augment=false", "fedavg@lr=0.2,augment=false"]
    assert variants("genfed+fedau@b=0.5", {"genfed.c": [9], "fedprox.mu": [1]}) == ["genfed+fedau@b=0.5,c=9"]
    assert variants("fedavg", {}) == ["fedavg"]


def test_a_sweep_is_a_comparison_of_variants(tmp_path):
    asked = read_sweep(written(tmp_path, FILE))
    assert asked.methods == ["fedavg@lr=0.05", "fedavg@lr=0.1", "genfed@lr=0.05,rho_max=2", "genfed@lr=0.1,rho_max=2"]
    assert asked.settings["momentum"] == 0.9  # from the preset
    folders = jobs.compare(asked.methods, asked.settings, asked.seeds, tmp_path / "out", quiet=True)
    assert len(folders) == 8
    assert {folder.summary["options"].get("rho_max") for folder in folders} == {None, 2}
    assert {folder.config["lr"] for folder in folders} == {0.05, 0.1}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("seeds = 1", "names no methods"),
        ('methods = "fedavg"', "'methods' in .* must be a list"),
        ('methods = ["fedavg"]\nseed = 1', "'seed'"),
        ('methods = ["fedavg"]\n[grid]\nlr = 0.1', "'lr' in the grid .* must be a list of values, not 0.1"),
        ('methods = ["fedavg"]\n[settings]\npreset = "genfed.weak"', "genfed.weak"),
        ('methods = ["fedagv"]', "fedagv"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path, text, sentence):
    with pytest.raises(BadInput, match=sentence):
        read_sweep(written(tmp_path, text))
