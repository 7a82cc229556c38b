"""Tables at the width of a narrow terminal."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

import fedhelix
from fedhelix.papers.tables import _number
from fedhelix.report.columns import tabulate
from fedhelix.report.tables import _percent
from fedhelix.report.terminal import show_table
from fedhelix.report.wording import percent


def printed(headers, rows, width):
    console = Console(width=width, file=io.StringIO())
    console.print(tabulate(headers, rows, width))
    return console.file.getvalue()


AUDIT = ("method, attacker", "sees", "labels found", "PSNR, median", "best", "SSIM")
ATTACKED = [
    ["fedavg + noise, insider", "100.0 %", "100.0 %", "11.5 dB", "10.7 dB", "0.80"],
    ["fedlg, outsider", "93.9 %", "", "3.1 dB", "7.6 dB", "-0.15"],
]


@pytest.mark.parametrize("width", [30, 60, 76, 200])
def test_no_number_of_an_audit_is_cut(width):
    text = printed(AUDIT, ATTACKED, width)
    assert max(map(len, text.splitlines())) <= width
    assert all(cell in text for row in ATTACKED for cell in row[1:])
    assert all(word in text for header in AUDIT for word in header.split())


def test_percentages_have_a_space_everywhere():
    """Columns of studies apart, whose names are in result files."""
    package = Path(fedhelix.__file__).parent
    files = [path for path in package.rglob("*.py") if "papers" not in path.parts]
    assert [str(path) for path in files if re.search(r"[.:]\d*%\}", path.read_text("utf-8"))] == []
    assert percent(0.625) == "62.5 %" and percent(0.625, 0.01) == "62.5 ± 1.0 %"


def test_names_take_the_room_that_is_left():
    rows = [["fedprox (epochs=1, mu=0.01)", "87.9 ± 0.1", "86.0 ± 0.5", "-0.2 ± 0.2"]]
    headers = ["method", "global %", "personal %", "vs fedavg (epochs=1)"]
    text = printed(headers, rows, 64)
    assert "fedprox (epochs=1, mu=0.01)" in text and "-0.2 ± 0.2" in text
    assert text.count("method") == 1


def test_a_name_or_a_cell_that_is_too_long_alone_is_wrapped_whole():
    name, classes = "fedprox@" + "epochs=2," * 10, " ".join(map(str, range(100, 140)))
    text = printed(["client", "of each class"], [[name, classes]], 60)
    assert max(map(len, text.splitlines())) <= 60
    assert [word for word in text.split() if word.isdigit()] == classes.split()
    assert "".join(line[:15].strip() for line in text.splitlines()[2:]) == name


def test_a_command_uses_the_terminal_or_wide_lines(monkeypatch, capsys):
    show_table(AUDIT, ATTACKED)
    assert len(capsys.readouterr().out.splitlines()) == 4
    for key, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "60"}.items():
        monkeypatch.setenv(key, value)
    show_table(AUDIT, ATTACKED)
    out = capsys.readouterr().out
    assert "outsider" in out and "-0.15" in out


def test_nothing_has_no_sign():
    assert percent(-0.0001) == "0.0 %" and percent(-0.0001, 0.01) == "0.0 ± 1.0 %"
    assert _percent(-0.0004) == "0.0" and _percent(-0.004) == "-0.4"
    assert _number(-0.001, whole=False) == "0.00" and _number(-0.01, whole=False) == "-0.01"
