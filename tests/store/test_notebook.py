"""Runs in a notebook: live progress, a table as a run's value, figures that show themselves."""

import pytest
from rich.console import Console

from fedhelix import Federation
from fedhelix.store import notebook
from fedhelix.store.progress import Progress


def test_progress_replaces_one_output_of_the_cell(monkeypatch):
    shown = []
    monkeypatch.setattr(notebook.CellOutput, "show", lambda self, html: shown.append(html))
    console = Console(force_jupyter=True, stderr=True)
    with Progress(2, "helix <x>", console=console) as progress:
        for round in (1, 2):
            progress.update({"round": round, "accuracy": 0.5, "uplink_bytes": 2048})
    assert len(shown) == 2
    assert "<b>helix &lt;x&gt;</b> <progress value='1' max='2'>" in shown[0]
    assert "1/2 global 50.0 % · ↑ 2.0 KiB" in shown[0]
    assert "2/2 global 50.0 % · ↑ 4.0 KiB" in shown[1]


def test_a_cell_shows_what_it_was_given_last():
    pytest.importorskip("IPython")
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    InteractiveShell.instance()
    cell = notebook.CellOutput()
    with capture_output() as captured:
        cell.show("<b>one</b>")
        cell.show("<b>two</b>")
    assert [output.data["text/html"] for output in captured.outputs] == ["<b>one</b>", "<b>two</b>"]
    InteractiveShell.clear_instance()


def test_a_run_is_a_table_and_its_figure_a_picture():
    run = Federation("digits", clients=4, engine="serial", model="linear").fit(1, quiet=True)
    html = run._repr_html_()
    assert "<caption><b>fedavg, 1 round on digits, 4 clients</b></caption>" in html
    accuracy = f"{100 * run.summary['personal_accuracy']:.1f} %"
    assert f">personal accuracy</th><td style='text-align:right'>{accuracy}<" in html
    assert repr(run) == f"<Run of fedavg, 1 round on digits, 4 clients: {accuracy}>"
    assert run.plot()._repr_png_().startswith(b"\x89PNG")
