"""What only shows names, such as `fedhelix --help`, does not wait for PyTorch."""

import signal
import subprocess
import sys
import typing

import pytest
import typer

import fedhelix
from fedhelix.cli import app, commands
from fedhelix.cli.commands import COMMANDS, NUMBERS, check_numbers, load
from fedhelix.federation import public
from fedhelix.runs.config import Config

MEASURE = """
import atexit, sys, time
import fedhelix
from fedhelix_command import main
atexit.register(lambda: print("torch" in sys.modules, time.process_time(), file=sys.stderr))
if sys.argv[1:]:
    main()
"""
REFERENCE = "import time, numpy; print(time.process_time())"
TIMES_NUMPY, TRIES = 3, 4  # twice what a quiet machine needs; a busy one may need several tries


def output(*arguments):
    return subprocess.run(
        [sys.executable, "-c", *arguments], capture_output=True, text=True, check=True
    )


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"]], ids=str)
def test_torch_is_not_imported(arguments):
    ratios = []
    for _ in range(TRIES):
        done = output(MEASURE, *arguments)
        imported, seconds = done.stderr.split()
        assert imported == "False" and bool(done.stdout) == bool(arguments)
        ratios.append(float(seconds) / float(output(REFERENCE).stdout))
        if ratios[-1] < TIMES_NUMPY:
            return
    pytest.fail(f"needs {ratios} times the processor time of importing NumPy")


@pytest.mark.parametrize(
    "command", ["run helix --rounds abc", "run helix --lr=fast", "deploy run helix --clients many"]
)
def test_a_word_instead_of_a_number_is_refused_without_torch(command):
    words = [sys.executable, "-c", MEASURE, *command.split()]
    done = subprocess.run(words, capture_output=True, text=True)
    sentence, measured = done.stderr.splitlines()
    assert done.returncode == 2 and sentence.startswith("fedhelix: ") and "must be a" in sentence
    assert measured.startswith("False"), "PyTorch was imported"


def test_settings_without_a_value_are_left_to_the_command():
    for arguments in ([], ["fedavg", "--rounds"], ["fedavg", "--rounds", "3", "--clients", "auto"]):
        check_numbers(arguments)


def test_numbers_are_those_of_the_settings():
    hints = {name: typing.get_type_hints(Config)[name] for name in Config.names}
    for kind, names in NUMBERS.items():
        assert set(names.split()) == {name for name, hint in hints.items() if hint == kind}


SLOW_IMPORTS = """
import sys
import fedhelix.engines.parallel.worker, fedhelix.methods
from fedhelix.data import load
load("digits")
print(*sorted({"matplotlib", "pandas", "scipy", "sklearn"} & {*sys.modules}))
"""


def test_a_worker_imports_no_library_that_it_does_not_need():
    done = subprocess.run([sys.executable, "-c", SLOW_IMPORTS], capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == ([], "")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_begins_its_help_with_the_sentence_of_the_list(name):
    command, entry = load(name), COMMANDS[name]
    assert command.help is not None
    assert " ".join(command.help.split("\n\n")[0].split()) == entry.summary


def test_all_names_are_there():
    assert set(public.__all__) <= set(dir(fedhelix))
    for name in public.__all__:
        assert getattr(fedhelix, name) is getattr(public, name)
    assert fedhelix.engines.ENGINES  # a subpackage that nobody imported by name
    with pytest.raises(AttributeError, match="module 'fedhelix' has no attribute 'Nothing'"):
        fedhelix.Nothing  # noqa: B018


def test_ctrl_c_before_a_command_has_begun_says_that_it_stopped(monkeypatch, capsys):
    interrupted = typer.Typer()

    @interrupted.command()
    def begin() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "app", interrupted)
    monkeypatch.setattr(sys, "argv", ["fedhelix"])
    with pytest.raises(SystemExit) as end:
        app.main()
    assert end.value.code == 130 and capsys.readouterr().err == "fedhelix: stopped.\n"


def test_ctrl_c_while_a_command_is_imported_counts_once_that_is_done(monkeypatch, capsys):
    """In the middle of it PyTorch may abort."""
    done = []

    def slow_import(name):
        signal.raise_signal(signal.SIGINT)
        done.append(name)

    monkeypatch.setattr(commands, "import_module", slow_import)
    monkeypatch.setattr(sys, "argv", ["fedhelix", "run"])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as end:
            app.main()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == ["fedhelix.cli.train"] and end.value.code == 130
    assert capsys.readouterr().err == "fedhelix: stopped.\n"
