import json
import shutil
import sys
from pathlib import Path

import pytest

from fedhelix.cli import app as cli
from fedhelix.papers import study

ROOT = Path(__file__).parents[2]


def bench(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["fedhelix", "bench", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def test_ctrl_c_says_how_to_go_on(monkeypatch, capsys, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "run_studies", interrupted)
    assert bench(monkeypatch, "genfed-table4", "--out", str(tmp_path)) == 130
    assert capsys.readouterr().err == "stopped; the same command goes on where it stopped.\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["genfed-tabel2"], "did you mean 'genfed-table2'"),
        (["genfed-table2", "--scale", "huge"], "unknown scale 'huge'"),
        (["genfed-table2", "--seeds", "0"], "seeds must lie between 1 and 1000, not 0"),
        (["genfed-table2", "--minutes", "nan"], "minutes must be at least 0, not nan"),
        (["genfed-table2", "--minutes", "-1"], "minutes must be at least 0, not -1"),
        (
            ["genfed-table2", "--commit", "x"],
            "--commit takes seven to forty hexadecimal digits, not 'x'",
        ),
        (["genfed-table2", "--save", "/proc/nowhere"], "'/proc/nowhere' cannot be written"),
    ],
)
def test_mistakes_end_with_code_2(monkeypatch, capsys, words, sentence):
    assert bench(monkeypatch, *words) == 2
    assert sentence in capsys.readouterr().err


def test_without_a_name_it_lists_the_studies(monkeypatch, capsys):
    assert bench(monkeypatch) == 0
    assert "genfed-table2" in capsys.readouterr().out


def test_a_result_keeps_what_it_has_and_names_its_command(monkeypatch, capsys, tmp_path):
    known = ROOT / "benchmarks" / "results" / "pfedgpa-table1-quick.json"
    path = tmp_path / known.name
    words = ["pfedgpa-table1", "--minutes", "0", "-q", "--out", str(tmp_path / "runs")]
    assert bench(monkeypatch, *words, "--save", str(tmp_path)) == 0
    empty = json.loads(path.read_text())
    assert (
        not empty["complete"] and empty["command"] == "fedhelix bench pfedgpa-table1 --scale quick"
    )
    old = json.loads(known.read_text())
    shutil.copy(known, path)
    assert bench(monkeypatch, *words, "--seeds", "2", "--save", str(tmp_path)) == 0
    new = json.loads(path.read_text())
    assert [cell["accuracy"] for cell in new["cells"]] == [
        cell["accuracy"] for cell in old["cells"]
    ]
    assert (new["device"], new["versions"]) == (old["device"], old["versions"])
    assert new["command"].endswith("--seeds 2") and not new["complete"]
    assert bench(monkeypatch, *words, "--seeds", "2", "--first-seed", "2") == 2
    assert "the first seed must lie between 0 and 1, not 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["genfed-table4"], "Scale quick trains on digits, scale paper on cifar10; so no numbers"),
        (["genfed-table4", "--scale", "gpu"], ""),
        (["devices"], ""),
    ],
)
def test_it_says_why_no_numbers_of_the_paper_stand_beside(
    monkeypatch, capsys, tmp_path, words, why
):
    assert bench(monkeypatch, *words, "--minutes", "0", "-q", "--out", str(tmp_path)) == 0
    said = capsys.readouterr().out
    assert why in said and ("so no numbers" in said) == bool(why)


def test_runs_of_a_bench_do_not_go_into_a_run(monkeypatch, capsys, tmp_path):
    (tmp_path / "config.toml").touch()
    assert bench(monkeypatch, "genfed-table4", "--out", str(tmp_path)) == 2
    assert "is a run itself" in capsys.readouterr().err
