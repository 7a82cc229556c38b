"""What only shows names, such as `fedhelix --help`, does not wait for PyTorch."""

import subprocess
import sys

import pytest

import fedhelix
from fedhelix.cli.commands import COMMANDS, load
from fedhelix.federation import public

MEASURE = """
import atexit, sys, time
import fedhelix
from fedhelix_command import main
atexit.register(lambda: print("torch" in sys.modules, time.process_time(), file=sys.stderr))
if sys.argv[1:]:
    main()
"""
CPU_SECONDS = 1.0  # twice what a quiet machine needs at most


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"]], ids=str)
def test_torch_is_not_imported(arguments):
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, check=True
    )
    imported, seconds = done.stderr.split()
    assert imported == "False" and float(seconds) < CPU_SECONDS
    assert bool(done.stdout) == bool(arguments)


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
