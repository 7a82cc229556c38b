import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch

from fedhelix import METHODS
from fedhelix import cli as command_line

torch.set_num_threads(1)  # tests run side by side


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """The output without the line breaks of a narrow screen."""
        return " ".join(self.out.split())


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """A registry that forgets what a test registers: tests may come in any order."""
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys) -> Callable[..., Result]:
    """The command line, called in this process and in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["fedhelix", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            command_line.main()
        return Result(int(stop.value.code or 0), *capsys.readouterr())

    return call
