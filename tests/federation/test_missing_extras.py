"""What only an extra installs is missed before any round."""

import sys

import pytest

from fedhelix import Federation, load_run
from fedhelix.core.errors import UserError
from helpers import small

BUDGETED = ["private+fedavg", "dp-sgd+fedavg", "finish+dp-sgd+fedavg"]
SMALL = ["--rounds", "1", "--clients", "4", "--model", "linear", "--epochs", "1"]


@pytest.fixture
def no_accounting(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)


@pytest.mark.parametrize("method", BUDGETED)
def test_a_method_is_refused_before_its_first_round(method, tmp_path, no_accounting):
    with pytest.raises(UserError, match=r"dp_accounting.*fedhelix\[privacy\]"):
        Federation("digits", clients=4, method=method).fit(1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_no_method_of_a_comparison_trains_before_all_are_set_up(tmp_path, cli, no_accounting):
    done = cli("compare", "fedavg", "private+fedavg", *SMALL, "--out", "both")
    assert done.code == 2 and "fedhelix[privacy]" in done.err
    assert not (tmp_path / "both").exists()


@pytest.mark.parametrize("command", ["sweep", "tune"])
def test_nor_one_of_a_sweep_or_a_search(command, tmp_path, cli, no_accounting):
    (tmp_path / "grid.toml").write_text(
        'methods = ["fedavg", "private+fedavg"]\n[settings]\nrounds = 1\nclients = 4\n'
        'model = "linear"\nvalid = 0.2\n[grid]\nlr = [0.1]\n'
    )
    done = cli(command, "grid.toml", "--out", "all")
    assert done.code == 2 and "fedhelix[privacy]" in done.err
    assert not list(tmp_path.rglob("config.toml"))


def test_a_finished_run_needs_no_extra(tmp_path, monkeypatch):
    pytest.importorskip("dp_accounting")
    fed = small("private+fedavg", "linear")
    fed.fit(1, out=tmp_path / "run", quiet=True)
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    assert load_run(tmp_path / "run").predict(fed.data.x_test[:2]).shape == (2,)
