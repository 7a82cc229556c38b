import os

import pytest

from fedhelix.core import toml
from fedhelix.core.errors import UserError
from fedhelix.report.documents import markdown_report
from fedhelix.report.live import Watch
from fedhelix.report.locate import runs_below, select
from fedhelix.report.page import html


def comparison(path, make_run, methods, settings) -> None:
    path.mkdir(parents=True)
    (path / "comparison.toml").write_text(
        toml.dumps({"methods": methods, "seeds": 11, "settings": settings})
    )
    for seed in (10, 2):
        for method in methods:
            make_run(method, seed=seed, rounds=2, name=path / f"{method}-seed{seed}")


def test_a_comparison_comes_in_its_own_order_with_its_command(make_run, tmp_path):
    comparison(
        tmp_path / "runs" / "mine",
        make_run,
        ["genfed", "fedavg"],
        {"lr": 0.1, "genfed.rho_max": "3; rm -rf /"},
    )
    chosen = select([tmp_path / "runs" / "mine"])
    names = ["genfed-seed2", "genfed-seed10", "fedavg-seed2", "fedavg-seed10"]
    assert [folder.path.name for folder in chosen.folders] == names
    command = (
        "fedhelix compare genfed fedavg --seeds 11 --set lr=0.1 --set 'genfed.rho_max=3; rm -rf /'"
    )
    assert chosen.commands == [command]


def test_a_report_names_the_runs_of_a_comparison_that_have_not_begun(make_run, tmp_path):
    note = {"methods": ["fedavg", "apfl"], "labels": ["fedavg", "apfl"], "seeds": 2}
    path = tmp_path / "my runs"
    for name in ("fedavg-seed3", "fedavg-seed4"):
        make_run(rounds=1, seed=int(name[-1]), name=path / name)
    (path / "comparison.toml").write_text(toml.dumps(note | {"settings": {"seed": "3"}}))
    chosen = select([path])
    assert chosen.lacking == [
        "2 of 4 runs have not begun (apfl-seed3, apfl-seed4); "
        f"continue with `fedhelix resume '{path}'`."
    ]
    assert "2 of 4 runs have not begun" in html(chosen)
    assert "> 2 of 4 runs have not begun" in markdown_report(chosen, tmp_path / "r.md")
    make_run(rounds=1, seed=3, name=path / "apfl-seed3")
    assert select([path]).lacking[0].startswith("1 of 4 runs has not begun (apfl-seed4);")
    make_run(rounds=1, seed=4, name=path / "apfl-seed4")
    assert select([path]).lacking == select([path / "apfl-seed3"]).lacking == []


def test_of_runs_alike_those_without_any_round_are_left_out(make_run, tmp_path):
    path = tmp_path / "all"
    for name in ("t1", "t2", "t3"):
        make_run("fedavg-ft", rounds=0, summary=False, name=path / name)
    with pytest.warns(
        UserWarning, match=r"^left out: 2 runs without any round \(.*t1, .*t2\), since"
    ):
        chosen = select([path])
    assert [folder.path.name for folder in chosen.folders] == ["t3"]
    assert "t3 is unfinished: 0 of" in html(chosen)
    make_run("fedavg-ft", rounds=2, summary=False, name=path / "t4")
    make_run("fedavg-ft", rounds=0, seed=1, summary=False, name=path / "t5")
    with pytest.warns(UserWarning, match="left out: 3 runs"):
        chosen = select([path])
    assert [folder.path.name for folder in chosen.folders] == ["t4", "t5"]
    markdown_report(chosen, tmp_path / "r.md")
    make_run("fedavg-ft", rounds=2, summary=False, name=path / "t6")
    with (
        pytest.warns(UserWarning, match="left out: 3 runs"),
        pytest.raises(UserError, match="compare only one of them"),
    ):
        html(select([path]))


def test_commands_leave_out_options_of_methods_that_did_not_run(make_run, tmp_path):
    kept = {
        "fedprox.mu": 1,
        "mine.depth": 2,
        "genfed+fedau.rho_max": 3,
        "genfed.decay": 4,
        "method.x": 5,
        "attack.share": 6,
    }
    note = {"methods": ["fedprox@lr=1", "/own.py", "genfed+fedau"], "seeds": 1}
    note["settings"] = {"lr": 0.1, "pfedgpa.ft_rate": 1.0, "fedbabu.ft_rate": 1.0, **kept}
    for label in ("fedprox@lr=1", "mine", "genfed+fedau"):
        make_run(rounds=1, name=tmp_path / "one" / f"{label}-seed0", config={"attack_share": 6})
    (tmp_path / "one" / "comparison.toml").write_text(toml.dumps(note))
    (command,) = select([tmp_path / "one"]).commands
    words = [f"--set {key}={value}" for key, value in {"lr": 0.1, **kept}.items()]
    assert (
        command == f"fedhelix compare fedprox@lr=1 /own.py genfed+fedau --seeds 1 {' '.join(words)}"
    )


def test_a_deployed_run_is_made_again_by_a_deployment(make_run):
    terms = {"experiment": "a0f0", "deadline": 9.0, "server_data": "my data.npz"}
    run = make_run("fedavg", rounds=1, config={"deployment": terms})
    (command,) = select([run.path]).commands
    where = f"fedhelix deploy run fedavg --config {run.path}/config.toml"
    assert command == f"{where} --term deadline=9.0 --term 'server_data=my data.npz'"


def test_a_deployed_run_is_made_again_where_it_was_made(make_run):
    named = " --superlink 127.0.0.1:8913 --folder 'my server'"
    run = make_run("fedavg", rounds=1, config={"deployment": {"experiment": "a0", "where": named}})
    (command,) = select([run.path]).commands
    assert command == f"fedhelix deploy run fedavg --config {run.path}/config.toml{named}"


def test_runs_and_folders_of_runs(make_run, tmp_path):
    run = make_run("fedavg", rounds=2)
    assert select([run.path, run.path]).folders[0].path == run.path
    assert len(select([run.path, tmp_path]).folders) == 1, "a run counts once"
    (command,) = select([run.path]).commands
    assert command == f"fedhelix run fedavg --config {run.path}/config.toml"
    with pytest.raises(UserError, match="holds no run"):
        select([tmp_path / "nothing"])


def test_comparisons_below_a_folder_are_not_forgotten(make_run, tmp_path, recwarn):
    runs = tmp_path / "runs"
    for name in ("one", "two"):
        comparison(runs / name, make_run, ["fedavg"], {})
    with pytest.raises(
        UserError, match=f"holds no run, but 4 runs further down; .* as '{runs}/one'"
    ):
        select([runs])
    make_run("fedavg", rounds=1, name=runs / "single")
    assert not recwarn.list
    assert [folder.path.name for folder in select([runs]).folders] == ["single"]
    assert [str(warning.message) for warning in recwarn.list] == [
        f"left out of '{runs}': 4 runs further down; name their folder to see them, such as "
        f"'{runs}/one'."
    ]
    recwarn.clear()
    assert len(select([runs, runs / "one", runs / "two"]).folders) == 5 and not recwarn.list


def test_runs_are_found_however_deep_they_lie(make_run, tmp_path):
    top = tmp_path / "top"
    run = make_run("fedavg", rounds=1, name=top / "1" / "2" / "3" / "4" / "x")
    make_run("fedavg", rounds=1, name=top / ".hidden" / "y")
    (top / "again").symlink_to(top)
    assert list(runs_below(top)) == list(runs_below(run.path)) == [run.path]
    watch = Watch(top)
    watch.refresh()
    assert list(watch.runs) == ["1/2/3/4/x"]
    with pytest.raises(UserError, match=f"but 1 run further down.* '{run.path.parent}'"):
        select([top])


def test_the_last_comparison_is_the_default(make_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no run in 'runs/' yet"):
        select([])
    (tmp_path / "runs").mkdir()
    make_run(rounds=1, name=tmp_path / "runs" / "single")
    assert [folder.path.name for folder in select([]).folders] == ["single"]
    for name, when in (("new", 2e9), ("old", 1e9)):
        comparison(tmp_path / "runs" / name, make_run, [name], {})
        os.utime(tmp_path / "runs" / name / "comparison.toml", (when, when))
    assert select([]).folders[0].path.parent.name == "new"
