"""Help pages and tables: arguments with their meaning, groups, nothing cut at 80 columns."""

import dataclasses
import io
import re
import tomllib

import pandas as pd
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedhelix.cli.app import app
from fedhelix.core.registry import METHODS
from fedhelix.report.tables import render
from fedhelix.runs.config import Config


def page(*words):
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80", "TERM": "dumb"})
    assert result.exit_code == 0
    return result.output


def test_settings_are_grouped_with_the_most_used_first():
    text = page("run")
    titles = re.findall(r"─ (\w+) ─", text)
    assert titles == [
        "Arguments", "Options", "Data", "Federation", "Training", "Engine", "Output", "Advanced"
    ]  # fmt: skip
    missing = [name for name in Config.names if f"--{name.replace('_', '-')} " not in text]
    assert not missing
    assert text.index("--data ") < text.index("--rounds ") < text.index("--lr ")


@pytest.mark.parametrize("command", ["sweep", "tune"])
def test_the_default_folder_of_a_file_is_named(command):
    words = " ".join(re.sub(r"[│─╭╮╰╯]", " ", page(command)).split())
    assert f"(default: runs/{command}-FILE, where the same file goes on)" in words


def test_settings_name_their_values_and_no_flag_is_cut():
    text = page("run")
    assert "…" not in text and "--no-SWITCH, such as --no-standardize" in text
    words = " ".join(re.sub(r"[│─╭╮╰╯]", " ", text).split())
    assert "(uniform, bernoulli, classes) (default: uniform)" in words and "(drop, keep)" in words
    parsed = CliRunner().invoke(app, ["run", "fedavg", "--no-augment", "--rounds", "0"])
    assert "rounds" in str(parsed.exception), "switches still have their opposites"


def test_a_setting_without_a_value_says_what_that_means():
    settings = dataclasses.fields(Config)
    without = {one.name: one.metadata["meaning"] for one in settings if one.default is None}
    assert not [name for name, words in without.items() if not re.search(r"\((auto|none): ", words)]
    words = " ".join(re.sub(r"[│─╭╮╰╯]", " ", page("run")).split())
    assert "the summary gives (none: no such time). " in words, "and not (default: auto)"


def test_a_list_is_given_as_help_says(tmp_path):
    words = " ".join(re.sub(r"[│─╭╮╰╯]", " ", page("run")).split())
    assert "--lr-decay X[,...]" in words
    example = re.search(r"with commas: ([\d.,]+)\)", words)[1]
    arguments = ["run", "fedavg", "--rounds", "1", "--clients", "2", "--engine", "serial"]
    out = tmp_path / "run"
    CliRunner().invoke(app, [*arguments, "--lr-decay", example, "--out", str(out)])
    written = tomllib.loads((out / "config.toml").read_text())["lr_decay"]
    assert written == [float(number) for number in example.split(",")] and len(written) > 1


@pytest.mark.parametrize("command", ["run", "compare", "sweep", "resume", "report", "data"])
def test_arguments_have_help(command):
    panel = page(command).partition("─ Arguments ─")[2].partition("╰")[0]
    words = re.sub(r"[│*]|\[required\]|\b[A-Z]+\b", "", panel)
    assert len(words.split()) > 5, panel


def test_the_example_of_a_sweep_works_when_copied():
    text = page("sweep")
    lines = [line[1:].rstrip() for line in text.splitlines()]
    start = next(at for at, line in enumerate(lines) if "methods =" in line)
    example = tomllib.loads("\n".join(lines[start : lines.index("", start)]))
    assert example["settings"] == {"rounds": 20}
    assert example["grid"] == {"lr": [0.05, 0.1], "genfed.rho_max": [3, 5]}


@pytest.mark.parametrize("command", ["bench", "leaderboard", "audit", "compare"])
def test_a_command_that_help_shows_stands_in_a_line_of_its_own(command):
    above = page(command).partition("╭")[0].splitlines()[2:]
    examples = [line.strip() for line in above if line.strip().startswith("fedhelix ")]
    shown = " ".join(above).count(f"fedhelix {command} ")
    assert len(examples) == shown > 0 and all(line.count("fedhelix") == 1 for line in examples)


def test_methods_are_one_liners_and_one_method_has_its_options():
    runner = CliRunner()
    listed = runner.invoke(app, ["methods"], env={"COLUMNS": "80"}).output
    assert not re.search(r"^ +\w", listed, re.M), "a method takes more than one line"
    assert all(re.search(rf"^{re.escape(name)}\s+\w", listed, re.M) for name in METHODS)
    assert "method.mu" not in listed
    one = runner.invoke(app, ["methods", "fedprox"]).output
    assert "method.mu = " in one and "mu/2 times the squared distance" in " ".join(one.split())


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_comparison_fits_and_no_name_is_cut(width):
    names = ["gene-fl", "genfed (lr=0.05, rho_max=3)", "fedavg-ft"]
    row = {
        "seeds": 3, "rounds": 20, "accuracy": 0.5, "accuracy_se": 0.01, "personal_accuracy": 0.9,
        "personal_accuracy_se": 0.01, "personal_p10": 0.1, "personal_p10_se": 0.01,
        "personal_accuracy_at_best": 0.91, "personal_accuracy_at_best_se": 0.01,
        "difference": 0.1, "difference_se": 0.01, "uplink_bytes": 2e6, "seconds": 12.0,
    }  # fmt: skip
    table = pd.DataFrame([row] * 3, index=pd.Index(names, name="method"))
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render(table, width))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text and all(word in text for name in names for word in name.split())
    for cell in ("50.0 ± 1.0", "90.0 ± 1.0", "91.0 ± 1.0", "+10.0 ± 1.0", "1.9 MiB", "12 s"):
        assert text.count(cell) >= 3, cell
    assert "percentile" in text
