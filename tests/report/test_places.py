import os

import pytest

from fedhelix import toml
from fedhelix.errors import BadInput
from fedhelix.report.places import select


def comparison(path, make_run, methods, settings) -> None:
    path.mkdir(parents=True)
    (path / "comparison.toml").write_text(toml.dumps({"methods": methods, "seeds": 11, "settings": settings}))
    for seed in (10, 2):
        for method in methods:
            make_run(method, seed=seed, rounds=2, name=path / f"{method}-seed{seed}")


def test_a_comparison_comes_in_its_own_order_with_its_command(make_run, tmp_path):
    comparison(tmp_path / "runs" / "mine", make_run, ["genfed", "fedavg"], {"lr": 0.1, "genfed.rho_max": "3; rm -rf /"})
    chosen = select([tmp_path / "runs" / "mine"])
    names = ["genfed-seed2", "genfed-seed10", "fedavg-seed2", "fedavg-seed10"]
    assert [folder.path.name for folder in chosen.folders] == names
    command = "fedhelix compare genfed fedavg --seeds 11 --set lr=0.1 --set 'genfed.rho_max=3; rm -rf /'"
    assert chosen.commands == [command]


def test_runs_and_folders_of_runs(make_run, tmp_path):
    run = make_run("fedavg", rounds=2)
    assert select([run.path, run.path]).folders[0].path == run.path
    assert len(select([run.path, tmp_path]).folders) == 1, "a run counts once"
    (command,) = select([run.path]).commands
    assert command == f"fedhelix run fedavg --config {run.path}/config.toml"
    with pytest.raises(BadInput, match="holds no run"):
        select([tmp_path / "nothing"])


def test_the_last_comparison_is_the_default(make_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="no run in 'runs/' yet"):
        select([])
    (tmp_path / "runs").mkdir()
    make_run(rounds=1, name=tmp_path / "runs" / "single")
    assert [folder.path.name for folder in select([]).folders] == ["single"]
    for name, when in (("new", 2e9), ("old", 1e9)):
        comparison(tmp_path / "runs" / name, make_run, [name], {})
        os.utime(tmp_path / "runs" / name / "comparison.toml", (when, when))
    assert select([]).folders[0].path.parent.name == "new"
