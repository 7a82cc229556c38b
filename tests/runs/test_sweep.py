import pytest

from fedhelix.core.errors import UserError
from fedhelix.runs import comparison
from fedhelix.runs.jobs import Session
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
    assert variants("fedavg", grid) == [
        "fedavg@lr=0.1,augment=false",
        "fedavg@lr=0.2,augment=false",
    ]
    assert variants("genfed+fedau@b=0.5", {"genfed.c": [9], "fedprox.mu": [1]}) == [
        "genfed+fedau@b=0.5,c=9"
    ]
    assert variants("fedavg", {}) == ["fedavg"]


def test_a_sweep_is_a_comparison_of_variants(tmp_path):
    requested = read_sweep(written(tmp_path, FILE))
    assert requested.methods == [
        "fedavg@lr=0.05",
        "fedavg@lr=0.1",
        "genfed@lr=0.05,rho_max=2",
        "genfed@lr=0.1,rho_max=2",
    ]
    assert requested.settings["momentum"] == 0.9  # from the preset
    folders = comparison.compare(
        requested.methods,
        requested.settings,
        requested.seeds,
        tmp_path / "out",
        session=Session(quiet=True),
    )
    assert len(folders) == 8
    assert {folder.summary["options"].get("rho_max") for folder in folders} == {None, 2}
    assert {folder.config["lr"] for folder in folders} == {0.05, 0.1}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("seeds = 1", "names no methods"),
        ('methods = "fedavg"', "'methods' in .* must be a list"),
        ('methods = ["fedavg"]\nseeds = "two"', "'seeds' in .* must be a whole number, not 'two'"),
        ('methods = ["fedavg"]\nseed = 1', "'seed'"),
        (
            'methods = ["fedavg"]\n[grid]\nlr = 0.1',
            "'lr' in the grid .* must be a list of values, not 0.1",
        ),
        ('methods = ["fedavg"]\n[settings]\npreset = "genfed.weak"', "genfed.weak"),
        ('methods = ["fedagv"]', "fedagv"),
        ('methods = ["fedavg"]\n[settings]\npreset = ["x"]', "preset"),
        (
            'methods = ["fedavg"]\n[grid]\n"fedprox.mu" = [0.1]',
            "'fedprox.mu' in the grid .* concerns none of its methods",
        ),
        (
            'methods = ["fedavg"]\nrounds = 8\n[grid]\nlr = [0.1]',
            r"'rounds' stands above the tables of .*; write it in the table \[settings\], or",
        ),
        (
            'methods = ["fedprox"]\n[grid]\n"fedprx.mu" = [0.1]',
            "unknown method of 'fedprx.mu' in the grid .* did you mean 'fedprox'",
        ),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path, text, sentence):
    with pytest.raises(UserError, match=sentence):
        read_sweep(written(tmp_path, text))


def test_a_grid_of_many_keys_has_short_folders(cli, tmp_path):
    keys = [
        "batch_size = [32]",
        "lr = [0.1]",
        "momentum = [0.5]",
        "epochs = [1]",
        "participation_alpha = [0.5]",
    ]
    keys += [
        "validation_size = [0.1]",
        "supplement_size = [5.0]",
        "supplement_below = [1.0]",
        "weight_decay = [0.001]",
    ]
    keys += [
        "lr_decay = [0.99]",
        "eval_clients = [2]",
        "cohort = [2]",
        "valid = [0.05]",
        "attack_scale = [1.0]",
    ]
    text = 'methods = ["fedavg"]\n[settings]\nrounds = 1\nclients = 3\n[grid]\n' + "\n".join(keys)
    (tmp_path / "many.toml").write_text(text)
    found = cli("sweep", "many.toml", "-q")
    assert found.code == 0, found.err


def test_a_sweep_says_that_its_time_is_up(cli, tmp_path):
    (tmp_path / "a.toml").write_text(
        'methods = ["fedavg"]\n[settings]\nrounds = 1\nclients = 3\n[grid]\nlr = [0.1, 0.2]'
    )
    found = cli("sweep", "a.toml", "--minutes", 0, "-q")
    assert found.code == 0 and "the time is up" in found.err
