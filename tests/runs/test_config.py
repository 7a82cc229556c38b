import dataclasses

import numpy as np
import pytest

from fedhelix import METHODS, FedAvgFT, FedProx, GenFed
from fedhelix.core import toml
from fedhelix.core.errors import UserError
from fedhelix.engines.local import Training
from fedhelix.federation.provenance import versions
from fedhelix.runs import spec
from fedhelix.runs.config import Config, layered
from fedhelix.runs.presets import PRESETS
from fedhelix.runs.spec import absolute, make_spec, read_spec
from fedhelix.store import RunFolder


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "settings.toml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


# Layers


def test_later_layers_win(write, monkeypatch):
    monkeypatch.setitem(
        PRESETS, "test", {"rounds": 1, "epochs": 1, "lr": 1.0, "clients": 1, "batch_size": 1}
    )
    file = write("epochs = 2\nlr = 0.2\nclients = 2\nbatch_size = 2\n")
    flags = {"lr": "0.3", "clients": "3", "batch_size": "3", "seed": None}
    assignments = ["clients=4", "batch-size=4", "batch_size=5"]
    config = make_spec("fedavg", layered("test", file, flags, assignments)).config
    assert (config.rounds, config.epochs, config.lr, config.clients, config.batch_size) == (
        1,
        2,
        0.3,
        4,
        5,
    )
    assert config.seed == 0


def test_options_of_the_method_by_either_name(write):
    file = write("[method]\nmu = 0.2\n")
    for last, mu in (("method.mu=0.3", 0.3), ("fedprox.mu=0.4", 0.4)):
        assert (
            make_spec(
                "fedprox", layered(file=file, assignments=["fedprox.mu=1", "method.mu=2", last])
            ).method.mu
            == mu
        )
    assert make_spec("fedprox", layered(file=file)).method == FedProx(mu=0.2)
    nested = write("[fedprox]\nmu = 0.5\n")
    assert make_spec("fedprox", layered(file=nested)).method.mu == 0.5
    assert make_spec("fedavg", layered(file=nested)).method == METHODS["fedavg"]()


def test_what_is_for_one_method_does_not_touch_the_others():
    values = layered(assignments=["fedprox.mu=0.5", "fedavg-ft.ft.epochs=3"])
    assert make_spec("fedprox", values).method == FedProx(mu=0.5)
    assert make_spec("fedavg-ft", values).method == FedAvgFT(ft_epochs=3)
    assert make_spec("fedavg", values).method == METHODS["fedavg"]()


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("round=3", "unknown key 'round'; did you mean 'rounds'?"),
        ("fedprx.lr=3", "unknown key 'fedprx.lr'"),  # must not pass as the learning rate
        ("method.muu=3", "unknown key of the method fedprox 'muu'; did you mean 'mu'?"),
        ("method.name=fedavg", "unknown key of the method fedprox 'name'"),
        ("method=fedavg", "unknown key 'method'"),
        ("rounds=many", "rounds must be a whole number, not 'many'"),
        ("rounds=0", "rounds must be at least 1, not 0"),
        ("valid=0.95", "valid must be at most 0.9, not 0.95"),
        ("rounds", "--set takes KEY=VALUE, not 'rounds'"),
        ("=3", "--set takes KEY=VALUE, not '=3'"),
    ],
)
def test_settings_that_cannot_be(assignment, sentence):
    with pytest.raises(UserError, match=sentence):
        make_spec("fedprox", layered(assignments=[assignment]))


# Presets


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid(name):
    spec = make_spec("fedavg", layered(name))
    assert dataclasses.replace(spec.config) == spec.config
    settings = {key: value for key, value in PRESETS[name].items() if not isinstance(value, dict)}
    assert {key: getattr(spec.config, key) for key in settings} == settings


def test_a_preset_sets_the_federation_for_all_and_the_method_for_one():
    strong = layered("genfed.strong")
    assert make_spec("genfed", strong).method == GenFed(rho_max=3, c=50)
    assert make_spec("genfed+fedavg-ft", strong).method == GenFed(FedAvgFT(), rho_max=3, c=50)
    assert make_spec("fedavg", strong).config == make_spec("genfed", strong).config
    literal = make_spec("genfed", layered("genfed.literal"))
    assert literal.method == GenFed(twins=True) and literal.config.momentum == 0


def test_the_papers_setting():
    config = make_spec("fedavg-ft", layered("pfedgpa.fashion-mnist")).config
    assert (config.clients, config.cohort, config.partition, config.rounds) == (
        20,
        20,
        "dominant:20",
        200,
    )
    assert (config.epochs, config.batch_size, config.lr, config.momentum, config.weight_decay) == (
        2,
        50,
        0.01,
        0.5,
        5e-4,
    )
    with pytest.raises(
        UserError, match=r"unknown preset 'pfedgpa\.mnist'; did you mean 'pfedgpa\.emnist'?"
    ):
        layered("pfedgpa.mnist")


# Files


@pytest.mark.parametrize("name", METHODS)
def test_a_plan_survives_its_config_toml(name, tmp_path):
    spec = make_spec(
        name, {"rounds": 7, "lr": 1e-4, "augment": True, "data_dir": 'a "b"\\c', "cohort": "auto"}
    )
    RunFolder.create(tmp_path, spec.as_dict())
    assert read_spec(RunFolder.open(tmp_path).config, tmp_path) == spec


def test_the_files_of_a_spec_are_found_from_any_folder(tmp_path, monkeypatch):
    folder = tmp_path / "c++"
    folder.mkdir()
    (folder / "ok.py").write_text(
        "from fedhelix import FedAvg, register\n@register('ok')\nclass Ok(FedAvg): ...\n"
    )
    (folder / "fedavg").write_text("not a method")
    monkeypatch.chdir(folder)
    assert absolute("genfed+ok.py:ok@lr=0.1") == f"genfed+{folder}/ok.py:ok@lr=0.1"
    assert absolute("fedavg@lr=0.1") == "fedavg@lr=0.1"
    spec = make_spec("genfed+ok.py", {})
    monkeypatch.chdir(tmp_path)
    assert read_spec(spec.as_dict(), "run").method.inner.name == "ok"


def test_the_config_of_a_run_is_a_settings_file(tmp_path):
    spec = make_spec("fedprox", {"rounds": 7, "method.mu": 0.7})
    RunFolder.create(tmp_path, spec.as_dict())
    values = layered(file=tmp_path / "config.toml", flags={"rounds": "8"})
    again = make_spec("fedprox", values)
    assert again.method == spec.method and again.config == dataclasses.replace(
        spec.config, rounds=8
    )
    # Another method takes the settings, but not the options of the first one.
    assert make_spec("ditto", values).method == METHODS["ditto"]()


def test_a_newer_or_damaged_file(write, tmp_path):
    with pytest.raises(
        UserError, match=r"settings\.toml' was written by a newer fedhelix \(format 99"
    ):
        layered(file=write("format = 99\nrounds = 3\n"))
    with pytest.raises(UserError, match="is not valid TOML"):
        layered(file=write("rounds = \n"))
    with pytest.raises(UserError, match=r"none\.toml' is missing"):
        layered(file=tmp_path / "none.toml")
    with pytest.raises(UserError, match="describes Python objects"):
        layered(file=write("library = true\n"))
    with pytest.raises(UserError, match=r"unknown key 'rounds\.more'"):
        make_spec("fedavg", layered(file=write("[rounds]\nmore = 3\n")))
    with pytest.raises(UserError, match=r"rounds must be a whole number, not '\[1, 2\]'"):
        make_spec("fedavg", layered(file=write("rounds = [1, 2]\n")))


def test_a_run_from_python_objects_is_resumed_from_python():
    with pytest.raises(UserError, match=r"'here' was made from Python objects, .* Federation\.fit"):
        read_spec({"library": True, "method": {"name": "fedavg"}}, "here")
    with pytest.raises(UserError, match="'here' does not say which method it ran"):
        read_spec({"rounds": 3}, "here")


def test_the_config_says_what_made_it():
    found = versions()
    assert {"fedhelix", "python", "torch", "numpy", "machine"} <= found.keys()
    assert toml.dumps({"versions": found})
    assert make_spec("fedavg", {"device": "cpu"}).as_dict()["versions"] == {
        **found,
        "device": "CPU",
    }


def test_the_defaults_are_the_librarys():
    config = Config()
    assert {
        field.name: getattr(config, field.name) for field in dataclasses.fields(Training)
    } == vars(Training())
    for field in dataclasses.fields(Config):
        assert field.metadata["meaning"]


def test_a_config_makes_its_federation():
    spec = make_spec(
        "fedprox",
        {"clients": 5, "cohort": 2, "partition": "iid", "valid": 0.2, "model": "linear", "lr": 0.3},
    )
    fed = spec.config.federation(spec.method)
    assert (fed.clients, fed.cohort_size, fed.training.lr, fed.method) == (5, 2, 0.3, FedProx())
    assert len(fed.splits[0].valid) == round(
        0.2 * (len(fed.splits[0].valid) + len(fed.splits[0].train))
    )


# Variants: METHOD@KEY=VALUE,...


def test_a_variant_has_settings_and_options_of_its_own():
    values = {"lr": 0.5, "supplement.size": 9, "genfed.rho_max": 2}
    plain = make_spec("genfed", values)
    spec = make_spec("genfed@supplement_size=0,epochs=7,rho_max=4,method.c=3", values)
    assert (spec.config.supplement_size, spec.config.epochs, spec.config.lr) == (0, 7, 0.5)
    assert (spec.method.rho_max, spec.method.c) == (4, 3.0)
    assert (plain.config.supplement_size, plain.method.rho_max) == (9, 2)
    assert spec.spec == "genfed" and plain.label == "genfed"
    assert spec.label == "genfed@supplement_size=0,epochs=7,rho_max=4,method.c=3"
    assert make_spec("fedbn@bn.filter=name", {}).method.bn_filter == "name"
    assert make_spec("fedavg@data=/a/b.npz", {}).label == "fedavg@data=_a_b.npz"


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (
            "fedavg@supplement",
            r"a variant is METHOD@KEY=VALUE,\.\.\. and 'supplement' is no KEY=VALUE",
        ),
        ("fedavg@lr=1,=2", "'=2' is no KEY=VALUE"),
        ("fedavg@seed=1", "a variant cannot have a seed of its own; set it for all methods"),
        ("fedavg@suplement_size=1", "'suplement_size'; did you mean 'supplement_size'"),
        ("dp-sgd@epsilon=8+fedper", r"after all methods; write dp-sgd\+fedper@epsilon=8\."),
        ("dp-sgd@epsilon=8+fedprox@mu=1", r"write dp-sgd\+fedprox@epsilon=8,mu=1\."),
        ("fedavg@lr=1e+fast", "lr must be a number, not '1e"),
        ("fedavg@lr=fast", "lr must be a number, not 'fast'"),
        ("fedavgg@lr=1", "unknown method 'fedavgg'; did you mean 'fedavg'"),
    ],
)
def test_wrong_variants(spec, sentence):
    with pytest.raises(UserError, match=sentence):
        make_spec(spec, {})


def test_owners_in_a_file_are_the_clients_unless_a_partition_is_named(tmp_path):
    x, y = np.arange(120, dtype=np.float32).reshape(60, 2), np.arange(60) % 2
    np.savez(tmp_path / "towns.npz", x=x, y=y, owners=np.repeat(["a", "b", "c"], 20))
    for more, clients in (({}, 3), ({"partition": "iid", "clients": 5}, 5)):
        spec = make_spec("fedavg", {"data": str(tmp_path / "towns.npz"), **more})
        assert spec.config.federation(spec.method).clients == clients
    assert make_spec("fedavg", {}).config.federation(FedAvgFT()).clients == 20


def test_commas_within_brackets_belong_to_a_value():
    assert spec._of_variant("fedavg", "sizes=[3, 4],lr=0.1", set()) == {
        "method.sizes": "[3, 4]",
        "lr": "0.1",
    }
