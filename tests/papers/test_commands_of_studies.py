import sys

import pytest

from fedhelix import cli
from fedhelix.papers import commands


def bench(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["fedhelix", "bench", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def test_ctrl_c_says_how_to_go_on(monkeypatch, capsys, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "run_studies", interrupted)
    assert bench(monkeypatch, "genfed-table4", "--out", str(tmp_path)) == 130
    assert capsys.readouterr().err == "stopped; the same command goes on where it was.\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["genfed-tabel2"], "did you mean 'genfed-table2'"),
        (["genfed-table2", "--scale", "huge"], "unknown scale 'huge'"),
        (["genfed-table2", "--seeds", "0"], "seeds must be at least 1"),
    ],
)
def test_mistakes_end_with_code_2(monkeypatch, capsys, words, sentence):
    assert bench(monkeypatch, *words) == 2
    assert sentence in capsys.readouterr().err


def test_without_a_name_it_lists_the_studies(monkeypatch, capsys):
    assert bench(monkeypatch) == 0
    assert "genfed-table2" in capsys.readouterr().out
