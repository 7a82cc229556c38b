"""Whose values are whose, once newcomers are evaluated in the place of the known clients."""

import csv
import math

import pytest
from browser import needs_chromium

from fedhelix.report.headline import warnings
from fedhelix.report.live import Watch, client_history, files, run_details
from fedhelix.report.locate import Selection
from fedhelix.report.page import html
from fedhelix.report.plots import overview
from fedhelix.report.results import grouped, read
from fedhelix.report.sections import clients, series
from fedhelix.report.tables import comparison
from fedhelix.runs.jobs import Session
from fedhelix.runs.spec import make_spec
from fedhelix.store import RunFolder

SETTINGS = {
    "data": "digits", "clients": 6, "newcomers": 2, "newcomers_after": 2, "rounds": 4,
    "model": "linear", "attack": "sign-flip", "attack_share": 0.34,
}  # fmt: skip


def test_newcomers_keep_their_numbers_and_marks(tmp_path, cli):
    Session(quiet=True).start(make_spec("fedavg", SETTINGS), tmp_path / "run")
    folder = RunFolder.open(tmp_path / "run")
    result, (*_, last) = read(folder), folder.records()
    assert sorted(result.clients()) == list(range(8))
    for client, history in result.clients().items():
        assert [round for round, _ in history] == ([3, 4] if client >= 6 else [1, 2])
    assert [result.client_finals()[client] for client in (6, 7)] == last["personal"]
    assert cli("export", "run", "--clients", "--out", "clients.csv").code == 0
    with (tmp_path / "clients.csv").open(newline="") as file:
        marked = {int(row["client"]) for row in csv.DictReader(file) if row["attacker"] == "True"}
    assert marked == set(result.attackers)
    watch = Watch(tmp_path)
    watch.refresh()
    details = run_details(watch.runs["run"])
    assert details["line"]["arrival"] == 3
    shown = {one["client"]: one["value"] for one in details["clients"]}
    assert shown == result.client_finals(), "the dashboard has the same numbers"
    for client, history in result.clients().items():
        past = client_history(watch.runs["run"], client)
        assert list(zip(past["rounds"], past["values"], strict=True)) == history
        assert past["worked"] == [round for round, _ in history]
    assert "Newcomers arrive before round 3, and from then on" in details["warnings"][0]


def test_the_arrival_is_known_where_only_the_last_records_are_read(tmp_path, monkeypatch):
    Session(quiet=True).start(make_spec("fedavg", SETTINGS | {"attack": "none"}), tmp_path / "run")
    last = (tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines(keepends=True)[-1]
    monkeypatch.setattr(files, "MOST_BYTES_AT_ONCE", len(last) + 1)
    watch = Watch(tmp_path)
    watch.refresh()
    details = run_details(watch.runs["run"])
    assert [one["client"] for one in details["clients"]] == [6, 7]
    assert not [one for one in details["warnings"] if "was cut" in one]


@pytest.mark.parametrize("mixed", [False, True])
def test_reports_say_whose_accuracy_it_is(mixed, tmp_path, cli):
    session, folders = Session(quiet=True), ["new", *["plain"] * mixed]
    session.start(make_spec("fedavg", SETTINGS), tmp_path / "new")
    if mixed:
        without = {key: value for key, value in SETTINGS.items() if "newcomers" not in key}
        session.start(make_spec("fedprox", without), tmp_path / "plain")
    results = [read(RunFolder.open(tmp_path / name)) for name in folders]
    table = comparison(results)
    for column in ("known_accuracy", "arrival_accuracy"):
        assert table[column].iloc[0] == results[0].summary[column]
        assert not mixed or math.isnan(table[column].iloc[1])
    (sentence,) = [one for one in warnings(results) if one.startswith("Newcomers")]
    assert f"before round 3 of {'1 of 2 runs' if mixed else 'all runs'}" in sentence
    for name in ("report.md", "report.html"):
        assert cli("report", *folders, "--out", name).code == 0
        text = (tmp_path / name).read_text()
        for words in ("Newcomers arrive", "known clients %", "newcomers on arrival %"):
            assert words in text
        assert ("is their mean over the last ten evaluated rounds" in text) == (name[-4:] == "html")


def test_the_figure_of_clients_shows_the_last_evaluation_alone(tmp_path):
    Session(quiet=True).start(make_spec("fedavg", SETTINGS), tmp_path / "run")
    folder = RunFolder.open(tmp_path / "run")
    result, (*_, last) = read(folder), folder.records()
    assert series(grouped([result]))[0]["arrival"] == 3
    figure = overview(grouped([result]))
    dots = [place[0] for part in figure.axes[-1].collections for place in part.get_offsets()]
    assert sorted(dots) == sorted(last["personal"]) and len(dots) == 2
    table = clients(grouped([result]))
    said = {row[0]["value"]: row[3]["text"] for row in table["rows"]}
    assert {who for who, text in said.items() if text.endswith(" (round 2)")} == set(range(6))
    assert "(round" not in said[6] + said[7] and "not in the last evaluation" in table["note"]


@needs_chromium
def test_the_curve_of_a_report_marks_where_newcomers_take_over(tmp_path, browser):
    Session(quiet=True).start(make_spec("fedavg", SETTINGS), tmp_path / "run")
    folder = RunFolder.open(tmp_path / "run")
    (tmp_path / "report.html").write_text(html(Selection([folder], [])), encoding="utf-8")
    browser.open(f"file://{tmp_path}/report.html", 360, wait_for="document.querySelector('.line')")
    ticks = "[...document.querySelectorAll('.canvas .tick')]"
    two = f"{ticks}.find((one) => one.textContent === '2').getAttribute('x')"
    mark = "document.querySelector('.canvas .arrival')"
    assert browser.evaluate(f"{mark}.getAttribute('x1') === {two}")
    words = "round (line: newcomers take over)"
    assert browser.evaluate(f"{ticks}.some((one) => one.textContent === '{words}')")
    browser.evaluate(
        "document.querySelectorAll('.picker')[1].querySelectorAll('button')[1].click()"
    )
    assert browser.evaluate(f"{mark} === null")
    assert browser.complaints == []


def test_reports_without_newcomers_have_no_word_on_them(make_run):
    results = [read(make_run())]
    assert "known_accuracy" not in comparison(results)
    assert not [one for one in warnings(results) if "ewcomers" in one]
    assert series(grouped(results))[0]["arrival"] is None
    assert "last evaluation" not in clients(grouped(results))["note"]
