import json
import re

import method_metadata as metadata
import pytest
from browser import Browser, needs_chromium

from fedhelix.report.documents import latex_report, markdown_report
from fedhelix.report.headline import tiles, warnings, warnings_of_page, winners
from fedhelix.report.locate import Selection
from fedhelix.report.page import html
from fedhelix.report.results import grouped, read
from fedhelix.report.sections import clients, series

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture
def chosen(make_run) -> Selection:
    runs = [
        make_run(
            method,
            seed,
            clients=3,
            census=metadata.CENSUS,
            metadata=metadata.genfed,
            incidents={"refused": {"1": "it holds NaN"}},
        )
        for method in ("fedavg", "genfed")
        for seed in (0, 1)
    ]
    return Selection(runs, ["fedhelix compare fedavg genfed --seeds 2"])


def test_the_best_methods_are_bold_on_paper_too(make_run, tmp_path):
    runs = [make_run(name, seed, clients=2, rounds=2) for name in "ab" for seed in (0, 1)]
    runs += [make_run("c", seed, final=0.1, clients=2, rounds=2) for seed in (0, 1)]
    _, best = winners(grouped(runs))
    text, tex = (
        markdown_report(Selection(runs, []), tmp_path / "r.md"),
        latex_report(Selection(runs, [])),
    )
    assert set(
        re.findall(r"^\| \*\*(\w)\*\* \|.* \*\*\d+\.\d ± \d+\.\d\*\* \|", text, re.M)
    ) == set(best)
    assert set(
        re.findall(r"^\\textbf\{(\w)\} &.* \\textbf\{\d+\.\d \$\\pm\$ \d+\.\d\} &", tex, re.M)
    ) == set(best)
    assert {"a", "b"} <= set(best), "they differ by chance only"


def test_the_page_holds_everything_and_needs_nothing_else(chosen):
    page = html(chosen)
    for words in (
        "fedhelix compare fedavg genfed --seeds 2",
        "vs fedavg",
        "it holds NaN",
        "attacked",
        "Samples by client and class",
    ):
        assert words in page
    outside = [
        link
        for link in re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?([^\"')\s>]+)", page)
        if "data:" not in link and not link.startswith("#")
    ]
    assert outside == []
    assert "http" not in re.sub(
        r"data:image/png;base64,[\w+/=\s]+|http-equiv|http://www.w3.org/2000/svg", "", page
    )


def test_numbers_of_the_page_by_hand(chosen, make_run):
    groups = grouped(chosen.folders)
    line = series(groups)[0]
    assert line["x"]["round"] == list(range(1, 21)) and line["x"]["mib"] == list(range(1, 21))
    assert line["x"]["seconds"][:2] == [1.5, 3.0]
    personal = line["y"]["personal_accuracy"]
    finals = [read(folder).final("personal_accuracy") for folder in chosen.folders[:2]]
    assert personal["mid"][0] is None, "odd rounds were not evaluated"
    assert personal["mid"][-1] == pytest.approx(sum(finals) / 2, rel=1e-5)
    assert [personal["low"][-1], personal["high"][-1]] == pytest.approx(sorted(finals), rel=1e-5)
    table = clients(groups)
    assert (
        table["headers"] == ["client", "seed", "samples", "fedavg", "genfed"]
        and len(table["rows"]) == 6
    )
    marked = [row[0]["text"] for row in table["rows"] if "×" in row[0]["text"]]
    assert marked == ["2 ×", "2 ×"]
    assert tiles(groups)[0]["what"] == "highest personal accuracy"
    (warning,) = warnings([read(make_run(complete=False, rounds=3))])
    assert "unfinished" in warning


def test_every_incident_is_reported(make_run):
    late = "site-2 did not answer within 40 s"
    incidents = {
        "missing": {"2": late},
        "unevaluated": {"2": late, "0": "is gone"},
        "troubles": {"site-2": "answered twice"},
    }
    run = make_run(name="mine", rounds=2, incidents=incidents)
    assert warnings([read(run)]) == [
        f"{run.path}: 2 answers of client 2 missing ({late}).",
        f"{run.path}: 4 scores of client 0, 2 missing (2 × {late}; 2 × is gone).",
        f"{run.path}: 2 troubles of site-2 noted (answered twice).",
    ]


def test_clients_of_several_runs_are_told_by_their_names(make_run):
    """A site that joins late has another number than in a run that it began with."""
    two = [make_run("fedavg", clients=2, rounds=2, census={"names": ["bern", "ulm"]})]
    all_three = make_run("helix", clients=3, rounds=2, census={"names": ["bern", "metz", "ulm"]})
    table = clients(grouped([*two, all_three]))
    shown = {row[0]["text"]: [cell["value"] for cell in row[3:]] for row in table["rows"]}
    first, second = (read(one).client_finals() for one in (*two, all_three))
    assert [label.split()[0] for label in table["headers"][3:]] == ["fedavg", "helix"]
    assert shown == {
        "bern": [first[0], second[0]],
        "ulm": [first[1], second[2]],
        "metz": ["", second[1]],
    }
    missing = {"missing": {"1": "is gone"}}
    run = make_run(rounds=2, incidents=missing, census={"names": ["bern", "ulm"]})
    assert "2 answers of client ulm missing" in warnings([read(run)])[0]


def test_incidents_beyond_the_most_frequent_reasons_are_counted(make_run):
    reasons = dict(enumerate(["is gone", "is late", "is full", "is lost", "is late", "is odd"]))
    (warning,) = warnings([read(make_run(rounds=1, incidents={"missing": reasons}))])
    assert warning.endswith("(2 × is late; 1 × is gone; 1 × is full; and 2 more).")


def test_rounds_without_an_upload_have_not_diverged(make_run):
    away = {"participants": [0, 1], "missing": {"0": "is gone", "1": "is gone"}, "uplink_bytes": 0}
    run = read(make_run(rounds=3, incidents={"participants": [0, 1], "train_loss": 0.5}))
    run.records[1] |= {**away, "train_loss": None}
    assert list(warnings_of_page(run)) == [f"{run.name}: no upload arrived in 1 round."]
    run.records[2] |= {"train_loss": None}
    assert list(warnings_of_page(run))[-2:] == [
        f"{run.name}: no upload arrived in 1 round.",
        f"{run.name}: the training loss was not a number in some rounds.",
    ]


def test_hostile_text_stays_text(make_run, tmp_path):
    run = make_run(
        HOSTILE,
        name="hostile",
        options={"x": HOSTILE},
        incidents={"refused": {HOSTILE: HOSTILE}},
        data=HOSTILE,
    )
    chosen = Selection([run], [HOSTILE])
    page = html(chosen)
    assert "<script>alert" not in page and "<img src=x" not in page
    paper = markdown_report(chosen, tmp_path / "r.md")
    outside_of_code = re.sub(r"```.*?```", "", paper, flags=re.DOTALL)
    assert "<script>" not in re.sub(r"\\.", "", outside_of_code)
    assert r"\textless" not in latex_report(chosen) and r"alert(1)" in latex_report(chosen)


@pytest.mark.parametrize(
    "odd", [{"rounds": 0}, {"evaluated": False}, {"summary": False}, {"metric": "score"}]
)
def test_odd_runs_have_reports_too(make_run, odd):
    assert "Result" in html(Selection([make_run(**odd)], []))


def test_papers(chosen, tmp_path):
    text = markdown_report(chosen, tmp_path / "r.md")
    assert re.search(r"^\| (\*\*)?genfed(\*\*)? \| 2 \|", text, re.M)
    for figure in re.findall(r"\]\((\S+\.png)\)", text):
        assert (tmp_path / figure).exists()
    lines = latex_report(chosen).splitlines()
    assert lines[0] == "% fedhelix compare fedavg genfed --seeds 2"
    assert lines[1] == r"\begin{tabular}{lrrrrrrrrr}" and lines[-1] == r"\end{tabular}"
    assert r"personal \%" in lines[3] and r"$\pm$" in lines[5]


def test_papers_have_a_table_per_setting(make_run, tmp_path):
    folders = [make_run(rounds=0, summary=True), make_run(rounds=0, data="wine")]
    text = markdown_report(Selection(folders, []), tmp_path / "r.md")
    assert re.findall(r"^## (.+)$", text, re.M) == ["digits", "wine"]
    figures = re.findall(r"\]\((\S+\.png)\)", text)
    assert len(figures) == len(set(figures)) and all((tmp_path / one).exists() for one in figures)
    assert latex_report(Selection(folders, [])).count(r"\begin{tabular}") == 2


@needs_chromium
def test_the_page_in_a_browser(chosen, make_run, tmp_path, browser: Browser):
    (tmp_path / "report.html").write_text(html(chosen), encoding="utf-8")
    for width in (1280, 390):
        browser.open(
            f"file://{tmp_path}/report.html",
            width,
            wait_for="document.querySelector('.curves .line')",
        )
        assert browser.evaluate(
            "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        ), "no sideways scrolling"
        assert browser.evaluate("document.querySelectorAll('.drawing svg').length") > 5
    lines = "document.querySelectorAll('.curves polyline').length"
    click = "[...document.querySelectorAll('.{} button')].find((b) => b.innerText === '{}').click()"
    assert browser.evaluate(lines) == 2
    browser.evaluate(click.format("legend", "fedavg"))
    assert browser.evaluate(lines) == 1
    browser.evaluate(click.format("picker", "seconds"))
    assert browser.evaluate(
        "document.querySelector('.curves svg[role=img]').getAttribute('aria-label')"
    ).endswith("seconds")
    browser.evaluate("document.querySelector('table.sortable th:nth-child(3) button').click()")
    assert (
        browser.evaluate("document.querySelector('table.sortable tbody td:nth-child(3)').innerText")
        == "20"
    )
    hostile = make_run(HOSTILE, name="hostile", data=HOSTILE)
    (tmp_path / "hostile.html").write_text(html(Selection([hostile], [HOSTILE])), encoding="utf-8")
    browser.open(
        f"file://{tmp_path}/hostile.html", wait_for="document.querySelector('.curves .line')"
    )
    assert HOSTILE in browser.text() and browser.complaints == []


@needs_chromium
def test_an_axis_has_two_ticks_at_least_and_few(chosen, tmp_path, browser: Browser):
    (tmp_path / "report.html").write_text(html(chosen), encoding="utf-8")
    browser.open(
        f"file://{tmp_path}/report.html", wait_for="document.querySelector('.curves .line')"
    )
    assert browser.evaluate("ticks(1, 37, 3, 1)") == [10, 20, 30]
    assert browser.evaluate("ticks(1, 12, 3, 1)") == [5, 10]
    found = browser.evaluate(
        "[...Array(400).keys()].map((n) => [n + 2, ticks(1, n + 2, 3, 1)])"
        ".filter(([high, some]) => some.length < 2 || some.length > 5 || some.at(-1) > high)"
    )
    assert found == []


@needs_chromium
def test_axes_of_accuracies_end_at_0_and_100_percent(chosen, tmp_path, browser: Browser):
    (tmp_path / "report.html").write_text(html(chosen), encoding="utf-8")
    browser.open(
        f"file://{tmp_path}/report.html", wait_for="document.querySelector('.curves .line')"
    )
    draw = """(([percent, ...mid]) => {
        const box = document.body.appendChild(element("div"));
        const measures = [{ key: "value", label: "value", percent }];
        new LineChart(box, { axes: [{ key: "round", label: "round" }], measures })
            .show([{ label: "a", place: 0, x: { round: [1, 2] }, y: { value: { mid } } }]);
        const words = [...box.querySelectorAll("text.end")].map((one) => one.textContent);
        const ticks = words.map(parseFloat);
        return [Math.min(...ticks), Math.max(...ticks)];
    })"""
    for given, shown in (
        ([True, 0.9, 0.9], [40, 100]),
        ([True, 0.1, 0.1], [0, 60]),
        ([True, 1.0], [50, 100]),
        ([True, 0.0, 1.0], [0, 100]),
        ([False, 1.0, 1.0], [0.6, 1.4]),  # a score may be anything
    ):
        assert browser.evaluate(f"{draw}({json.dumps(given)})") == shown
