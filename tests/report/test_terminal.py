import json

from rich.console import Console

from fedhelix.report import columns, plots, terminal
from fedhelix.report.tables import comparison, texts
from fedhelix.report.terminal import show_comparison, show_run


def test_incidents_are_printed_beside_the_result(make_run, capsys):
    run = make_run(rounds=1)
    summary = {**(run.summary or {}), "refused": 3, "missing": 2}
    show_run(run.path, summary, as_json=False)
    shown = capsys.readouterr()
    assert shown.err == (
        "fedhelix: 3 uploads were refused; metrics.jsonl says which and why.\n"
        "fedhelix: 2 answers were missing; metrics.jsonl says which and why.\n"
    )
    show_run(run.path, {**summary, "refused": 1, "missing": 1}, as_json=False)
    said = capsys.readouterr().err
    assert "1 upload was refused;" in said and "1 answer was missing;" in said
    assert shown.out.startswith("method=fedavg rounds=1 ")


def test_missing_answers_have_the_numbers_of_their_reasons(make_run, capsys):
    lost = {"0": "metz is not connected.", "1": "ulm refuses", "2": "ulm refuses"}
    run = make_run(rounds=2, incidents={"missing": lost, "refused": {"1": "has NaN."}})
    show_run(run.path, {**(run.summary or {}), "refused": 2, "missing": 6}, as_json=False)
    assert capsys.readouterr().err == (
        "fedhelix: 2 uploads were refused (each has NaN); metrics.jsonl says which and why.\n"
        "fedhelix: 6 answers were missing (4 × ulm refuses; 2 × metz is not connected); "
        "metrics.jsonl says which and why.\n"
    )


def test_sites_that_answered_the_same_stand_together(make_run, capsys):
    lost = {str(n): f"site-{n} answered: no key of ulm." for n in range(7)}
    run = make_run(rounds=2, incidents={"missing": lost | {"7": "metz is not connected."}})
    show_run(run.path, {**(run.summary or {}), "missing": 16}, as_json=False)
    assert capsys.readouterr().err == (
        "fedhelix: 16 answers were missing (14 × site-0, site-1, site-2, site-3, site-4 and 2 more "
        "answered: no key of ulm; 2 × metz is not connected); metrics.jsonl says which and why.\n"
    )


def test_the_number_of_rounds_without_effect_is_told(make_run, capsys):
    def said(lost, since):
        run = make_run(rounds=5, every=1, name=f"run-{lost}")
        path = run.path / "metrics.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        records = [
            {**one, "participants": [0], "missing": {"0": "away"}} if one["round"] in lost else one
            for one in records
        ]
        path.write_text("".join(json.dumps(one) + "\n" for one in records))
        show_run(run.path, {**run.summary, "idle_since": since}, as_json=False)
        return capsys.readouterr().err

    assert said((), None) == ""
    assert said((2, 3), None) == "fedhelix: 2 of 5 rounds had no effect.\n"
    assert said((4, 5), 4) == "fedhelix: no round after round 3 had an effect.\n"
    mixed = "fedhelix: 2 of 5 rounds had no effect; no round after round 4 had an effect.\n"
    assert said((2, 5), 5) == mixed


def test_the_privacy_that_was_spent_is_shown(make_run, monkeypatch, capsys):
    options = {"delta": 1e-5}
    level = {"privacy_level": "client"}
    run = make_run(
        "private", options=options, metadata=lambda n: {"epsilon": {"3": n * 0.65671}} | level
    )
    show_run(run.path, run.summary, as_json=False)
    assert " epsilon=13.14 delta=1e-05 privacy_level=client folder=" in capsys.readouterr().out
    monkeypatch.setattr(terminal, "console", Console(force_terminal=True, width=100))
    show_run(run.path, {**run.summary, "engine": "serial", "downlink_bytes": 0}, as_json=False)
    assert "13.14 at δ = 1e-05, client-level" in capsys.readouterr().out


def test_the_folder_of_a_run_is_not_broken(make_run, monkeypatch, capsys):
    run = make_run(rounds=1)
    monkeypatch.setattr(terminal, "console", Console(force_terminal=True, width=40))
    show_run(run.path, {**run.summary, "engine": "serial", "downlink_bytes": 0}, as_json=False)
    assert capsys.readouterr().out.endswith(f"\nfolder: {run.path}\n")


def test_tables_for_a_program_are_as_wide_as_columns_says(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert columns.screen().width == columns.PAGE
    monkeypatch.setenv("COLUMNS", "80")
    assert columns.screen().width == 80


def test_how_often_a_backdoor_succeeds_is_shown(make_run, capsys):
    run = make_run(rounds=2, incidents={"attack_success": 0.75})
    show_run(run.path, run.summary, as_json=False)
    assert " attack_success=0.7500 folder=" in capsys.readouterr().out
    table = comparison([run, make_run("median", rounds=2)])
    headers, rows = texts(table)
    place = headers.index("attack succeeds %")
    assert [row[place] for row in rows] == ["75.0", "–"]


def test_paths_stay_whole_and_as_they_are(make_run, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(plots, "comparison_plot", lambda folders, figure: None)
    folder = tmp_path / "[x]" / ("long" * 30)
    show_comparison(folder, [make_run(rounds=1)], as_json=False)
    assert capsys.readouterr().out.endswith(f"figure: {folder}/comparison.png\nruns:   {folder}\n")


def test_what_a_killed_command_left_of_its_figure_is_removed(make_run, tmp_path):
    left = tmp_path / ".comparison.png.0123456789abcdef"
    left.write_bytes(b"half a figure")
    show_comparison(tmp_path, [make_run(rounds=1)], as_json=True)
    assert not left.exists() and (tmp_path / "comparison.png").exists()
