"""`fedhelix doctor` tells what is here."""

import json

import torch
from typer.testing import CliRunner

from fedhelix import __version__
from fedhelix.cli.app import app


def test_doctor_says_what_is_installed_and_what_is_missing(monkeypatch):
    monkeypatch.setattr("fedhelix.cli.doctor.EXTRAS", {"x": ("no-such-package", "nothing")})
    facts = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).output)
    assert facts["fedhelix"] == __version__ and facts["torch"] == torch.__version__
    assert facts["[x] nothing"] == 'missing: pip install "fedhelix[x]"'
    assert "digits" in facts["data"] and "kernels" in facts["C compiler"]
    shown = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "80"}).output
    assert "[x] nothing" in shown and "…" not in shown
