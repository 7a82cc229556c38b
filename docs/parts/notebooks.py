"""Notebooks of the documentation: run them, and show them with their outputs as pages."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

SECONDS = 300  # for one cell
ANSI = re.compile(r"\x1b\[[0-9;]*m")
FOLDER = Path(__file__).parents[1] / "tutorials"
EXECUTED = "executed_code"  # in the metadata of a notebook


def execute(path: Path) -> dict[str, Any]:
    """The notebook after a run in a fresh kernel; the first error is raised."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": "."}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it ran, which is different each time
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return json.loads(nbformat.writes(notebook))


def write(path: Path) -> None:
    """Run a notebook and keep its outputs in it, with the hash of the code that made them."""
    executed = execute(path)
    executed["metadata"][EXECUTED] = code_hash(executed)
    path.write_text(json.dumps(executed, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def code_hash(notebook: dict[str, Any]) -> str:
    """What tells the code of a notebook from other code."""
    cells = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256(json.dumps(["".join(source) for source in cells]).encode()).hexdigest()


def page(path: Path) -> str:
    """A notebook as Markdown: its text, its code, and what that showed."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    parts = [part for cell in notebook["cells"] for part in _cell(cell)]
    title, *rest = parts
    heading, _, text = title.partition("\n")
    download = f"[Download this notebook]({path.name})"
    return "\n\n".join([heading, text.strip(), download, *rest]) + "\n"


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        yield _shown(output)


def _shown(output: dict[str, Any]) -> str:
    """One output of a cell, in the richest form that it has."""
    data = output.get("data", {})
    if "image/png" in data:
        image = "".join(data["image/png"].split())
        inside = f'<img alt="what the cell shows" src="data:image/png;base64,{image}">'
    elif "text/html" in data:
        inside = " ".join("".join(data["text/html"]).split())
    else:
        text = "".join(output.get("text", data.get("text/plain", "")))
        inside = f"<pre>{escape(ANSI.sub('', text).rstrip())}</pre>"
    return f'<div class="output">{inside}</div>'
