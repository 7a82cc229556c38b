"""The tutorial notebook: it runs in a real kernel, and the site shows it with its outputs."""

import json
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TOUR = DOCS / "tutorials" / "tour.ipynb"


@pytest.fixture(autouse=True)
def notebooks(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    from parts import notebooks

    return notebooks


def kinds(notebook: dict) -> list[list[str]]:
    """What every cell shows besides warnings: images, tables, text."""
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [
        [
            " ".join(sorted(output.get("data", {"stream": 0})))
            for output in cell["outputs"]
            if output.get("name") != "stderr"
        ]
        for cell in code
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_the_notebook_runs_and_shows_what_is_kept_in_it(notebooks, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    seen = []
    listen = nbclient.NotebookClient.process_message
    monkeypatch.setattr(
        nbclient.NotebookClient,
        "process_message",
        lambda self, message, *more: (
            seen.append(message["msg_type"]) or listen(self, message, *more)
        ),
    )
    kept = json.loads(TOUR.read_text(encoding="utf-8"))
    short = tmp_path / "tour.ipynb"
    short.write_text(TOUR.read_text(encoding="utf-8").replace("rounds=10", "rounds=2"))
    assert kinds(notebooks.execute(short)) == kinds(kept)
    assert seen.count("update_display_data") == 3, "each of three runs renewed its bar once"


def test_outputs_are_those_of_the_code_above_them(notebooks):
    """After an edit, run `python docs/execute.py`."""
    kept = json.loads(TOUR.read_text(encoding="utf-8"))
    assert kept["metadata"][notebooks.EXECUTED] == notebooks.code_hash(kept)


def test_the_page_shows_text_code_tables_and_figures(notebooks):
    page = notebooks.page(TOUR)
    assert page.startswith("# A tour in a notebook\n")
    assert page.count("```python") == sum(
        cell["cell_type"] == "code" for cell in json.loads(TOUR.read_text())["cells"]
    )
    assert page.count("data:image/png;base64,") == 2 and "<caption><b>helix, 10 rounds" in page
    assert (
        "<progress value='10' max='10'>" in page and "[Download this notebook](tour.ipynb)" in page
    )
    assert str(Path(sys.prefix)) not in page and "/tmp" not in TOUR.read_text(encoding="utf-8")
