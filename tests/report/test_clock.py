"""Runs with a virtual clock in tables, figures and charts."""

import itertools

import pytest
from browser import needs_chromium

from fedhelix.report import plots
from fedhelix.report.figures import figures
from fedhelix.report.live.run import WatchedRun
from fedhelix.report.locate import Selection
from fedhelix.report.page import html
from fedhelix.report.results import grouped
from fedhelix.report.sections import series
from fedhelix.report.tables import comparison, texts
from fedhelix.store import RunFolder
from fedhelix.store.records import summarise, time_to


def write(path, method, seed, hours, target=0.7):
    """A run whose rounds end after some hours each, with accuracies of 0.5, 0.6, 0.7, ..."""
    with RunFolder.create(path, {"seed": seed, "method": {"name": method}}) as folder:
        records = []
        for number, hour in enumerate(hours, start=1):
            accuracy = 0.4 + number / 10
            record = {"round": number, "accuracy": accuracy, "seconds": 1.0, "uplink_bytes": 2**20}
            record |= {"downlink_bytes": 0, "other_bytes": 0, "late": [3], "clock": 3600.0 * hour}
            folder.append(record)
            records.append(record)
        facts = {"method": method, "options": {}, "seed": seed, "target": target}
        folder.write_summary(summarise(records, facts))
    return folder


@pytest.fixture
def runs(tmp_path):
    return [
        write(tmp_path / "a", "fedavg", 0, [2, 4, 6]),
        write(tmp_path / "b", "fedavg", 1, [4, 8, 12]),
        write(tmp_path / "c", "fedbuff", 0, [1, 2]),
    ]


def test_the_time_to_a_level_is_that_of_the_first_round_that_reaches_it(runs):
    records = runs[0].records()
    assert [time_to(records, level) for level in (0.5, 0.55, 0.7)] == [7200, 14_400, 21_600]
    assert time_to(records, 0.71) is None
    summary = runs[0].summary
    assert (summary["clock"], summary["time_to_target"], summary["late"]) == (21_600, 21_600, 3)
    assert runs[2].summary["time_to_target"] is None


def test_a_table_has_the_mean_over_seeds(runs):
    table = comparison(runs)
    assert table["clock"].tolist() == [9 * 3600, 2 * 3600]
    assert table.loc["fedavg", "time_to_target"] == 9 * 3600
    headers, (fedavg, fedbuff) = texts(table)
    place = headers.index("time to target")
    assert fedavg[place].startswith("9 h 00 min") and fedbuff[place] == "–"
    assert fedbuff[headers.index("simulated time")] == "2 h 00 min"


def test_figures_are_drawn_by_simulated_hours(runs):
    axes = plots.overview(grouped(runs)).axes[0]
    assert axes.get_xlabel().startswith("simulated hours")
    assert [line.get_xdata().tolist() for line in axes.lines] == [[3, 6, 9], [1, 2]]
    assert "accuracy-hours" in [figure.name for figure in figures(runs)]


@pytest.mark.parametrize(
    ("hour", "unit", "ends"),
    [(1, "hours", [9, 1.2]), (0.01, "minutes", [5.4, 0.72]), (0.001, "seconds", [32.4, 4.32])],
)
def test_short_times_are_drawn_in_minutes_or_seconds(tmp_path, hour, unit, ends):
    runs = [write(tmp_path / "a", "fedavg", 0, [3 * hour, 6 * hour, 9 * hour])]
    runs += [write(tmp_path / "b", "fedbuff", 0, [1.1 * hour, 1.2 * hour])]
    axes = plots.overview(grouped(runs)).axes[0]
    assert axes.get_xlabel().startswith(f"simulated {unit}\n")
    assert [line.get_xdata()[-1] for line in axes.lines] == pytest.approx(ends)


@pytest.mark.parametrize("ratio", [1, 4, 8, 30, 100, 450, 10_000])
@pytest.mark.parametrize("hour", [1e-6, 0.0004, 0.003, 0.9, 12_345])
def test_labels_of_times_keep_apart(tmp_path, hour, ratio):
    runs = [write(tmp_path / "a", "fedavg", 0, [hour / 3, hour * ratio])]
    runs += [write(tmp_path / "b", "fedbuff", 0, [hour / 2, hour])]
    figure = plots.overview(grouped(runs))
    figure.draw_without_rendering()
    for axes in figure.axes[:2]:
        low, high = axes.get_xlim()
        ticks = [tick for tick in axes.xaxis.get_major_ticks() if low <= tick.get_loc() <= high]
        boxes = [tick.label1.get_window_extent() for tick in ticks]
        assert len(boxes) >= 2
        for left, right in itertools.pairwise(boxes):
            assert right.x0 - left.x1 > left.height / 3, "about a space between two labels"


def test_runs_without_a_clock_are_drawn_by_rounds(runs, make_run):
    mixed = [runs[0], make_run("local", global_model=False)]
    assert plots.overview(grouped(mixed)).axes[0].get_xlabel().startswith("round")
    assert "accuracy-hours" in [figure.name for figure in figures(mixed)]
    assert "accuracy-hours" not in [figure.name for figure in figures(mixed[1:])]


@needs_chromium
@pytest.mark.parametrize(
    ("hours", "unit", "last"),
    [([1, 2, 6], "hours", "6"), ([0.01, 0.02, 0.05], "minutes", "3"), ([0.001], "seconds", "3.6")],
)
def test_the_interactive_chart_has_the_unit_of_the_figure(hours, unit, last, tmp_path, browser):
    runs = Selection([write(tmp_path / "run", "fedavg", 0, hours)], [])
    (tmp_path / "report.html").write_text(html(runs), encoding="utf-8")
    browser.open(
        f"file://{tmp_path}/report.html", wait_for="document.querySelector('.curves svg[role=img]')"
    )
    buttons = "[...document.querySelectorAll('.picker button')]"
    browser.evaluate(f"{buttons}.find((one) => one.innerText.startsWith('simulated')).click()")
    drawn = "document.querySelector('.curves svg[role=img]')"
    assert browser.evaluate(f"{drawn}.getAttribute('aria-label')").endswith(f"simulated {unit}")
    edge = f"{drawn}.getBoundingClientRect().right - 20"
    move = f"new PointerEvent('pointermove', {{clientX: {edge}, bubbles: true}})"
    browser.evaluate(f"{drawn}.dispatchEvent({move})")
    assert browser.evaluate("document.querySelector('.tip b').innerText") == (
        f"simulated {unit}: {last}"
    )
    assert browser.complaints == []


def test_charts_have_the_hours_as_an_axis(runs, make_run):
    assert [line["x"].get("hours") for line in series(grouped(runs))] == [[3, 6, 9], [1, 2]]
    assert WatchedRun("a", runs[0].path).line()["x"]["hours"] == [2, 4, 6]
    plain = make_run("local")
    assert "hours" not in series(grouped([plain]))[0]["x"]
    assert "hours" not in WatchedRun("local", plain.path).line()["x"]
