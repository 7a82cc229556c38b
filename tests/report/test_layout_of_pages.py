"""Pages in a real browser: what their layout is on a phone, a tablet and a desk, light and dark."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path

import method_metadata as metadata
import pytest
from browser import Browser, needs_chromium
from matplotlib.image import imread
from test_server import serving

from fedhelix.report.locate import Selection
from fedhelix.report.page import html
from fedhelix.store import RunFolder

FACTS = (Path(__file__).parent / "layout.js").read_text(encoding="utf-8")
WIDTHS, SCHEMES = (390, 768, 1440), ("light", "dark")
LONG = "a-method-with-a-name-that-nobody-would-type-twice"


@pytest.fixture
def runs(make_run) -> list[RunFolder]:
    """Two settings, three seeds, a run that takes long, attackers, and every kind of metadata."""
    kinds = [("fedavg", None), ("genfed", metadata.genfed), ("gene-fl", metadata.gene_fl)]
    shared = {"clients": 3, "census": metadata.CENSUS, "rounds": 6}
    folders = [
        make_run(method, seed, metadata=notes, name=f"{method}-seed{seed}", **shared)
        for method, notes in kinds
        for seed in range(3)
    ]
    generated = metadata.pfedgpa(20)
    folders.append(make_run("pfedgpa", metadata=lambda round: generated, **shared))
    folders += [
        make_run(method, 0, data="wine", config={"partition": "iid"}, name=f"wine-{method}",
                 mib=mib, incidents={"refused": {"1": "it holds NaN"}}, **shared)
        for method, mib in (("fedavg", 1.0), (LONG, 90.0))
    ]  # fmt: skip
    return folders


def views(browser: Browser, address: str, ready: str) -> Iterator[str]:
    """The page at every width in light and dark, ready to be looked at."""
    for width in WIDTHS:
        browser.open("about:blank")
        browser.open(address, width, wait_for=ready)
        for scheme in SCHEMES:
            browser.prefer(scheme)
            yield f"{width} {scheme}"


def check(browser: Browser, where: str) -> None:
    facts = browser.evaluate(FACTS)
    assert facts.pop("texts") > 20, f"{where}: hardly any text was looked at"
    wrong = {key: found for key, found in facts.items() if found}
    assert wrong == {}, where


@needs_chromium
def test_the_report_at_every_width_in_light_and_dark(runs, tmp_path, browser: Browser):
    (tmp_path / "report.html").write_text(html(Selection(runs, [])), encoding="utf-8")
    grounds = set()
    for where in views(
        browser, f"file://{tmp_path}/report.html", "document.querySelector('.line')"
    ):
        check(browser, where)
        decisive = "document.querySelector('.results tbody td:nth-child(2)')"
        assert browser.evaluate("document.querySelector('.results th:nth-child(2)').innerText") == (
            "personal %"
        )
        assert browser.evaluate(
            f"{decisive}.getBoundingClientRect().right <= document.documentElement.clientWidth"
        ), where
        grounds.add(
            browser.evaluate("getComputedStyle(document.querySelector('figure')).backgroundColor")
        )
    assert len(grounds) == 2, "figures have a dark ground too"
    assert browser.evaluate("document.querySelectorAll('.setting').length") == 2
    browser.prefer("light")
    assert browser.complaints == []


# The characters before which a line begins inside a word, in names of methods.
TORN = """[...document.querySelectorAll("h1, .tile span, td:first-child")].flatMap((node) => {
  const walker = document.createTreeWalker(node, NodeFilter.SHOW_TEXT), torn = [];
  const range = document.createRange();
  let before = null;
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    [...text.data].forEach((letter, place) => {
      range.setStart(text, place);
      range.setEnd(text, place + 1);
      const top = range.getBoundingClientRect().top;
      const inside = before && /\\w\\w/.test(before.letter + letter);
      if (inside && top > before.top + 5) torn.push(node.textContent);
      before = { top, letter };
    });
  }
  return torn;
})"""


def at_widths(runs, tmp_path, browser, widths):
    """The report on some runs at each width, once it is drawn and keeps to the layout's rules."""
    (tmp_path / "report.html").write_text(html(Selection(runs, [])), encoding="utf-8")
    for width in widths:
        browser.open("about:blank")
        address = f"file://{tmp_path}/report.html"
        browser.open(address, width, wait_for="document.querySelector('.line')")
        check(browser, str(width))
        yield width


HIDDEN = """(({scrollWidth, clientWidth}) => scrollWidth - clientWidth)(
  document.querySelector('.results').parentElement)"""


@needs_chromium
def test_names_break_at_signs_and_rounds_are_whole_numbers(make_run, tmp_path, browser: Browser):
    names = ("fedavg", "genfed+ditto", "compact+genfed+scaffold")
    runs = [make_run(name, 0, rounds=2, clients=3, every=1, name=name) for name in names]
    for width in at_widths(runs, tmp_path, browser, (390, 1280)):
        assert browser.evaluate(TORN) == [], width
        marks = "[...document.querySelectorAll('.canvas .tick.middle')].map((m) => m.textContent)"
        assert browser.evaluate(marks) == ["1", "2", "round"]


@needs_chromium
def test_the_result_of_private_runs_fits_a_desk_and_a_small_window(
    make_run, tmp_path, browser: Browser
):
    def spent(round):
        return {"epsilon": {"0": 7.9985}, "privacy_level": "sample"}

    runs = [
        make_run("dp-sgd", seed, rounds=2, clients=3, metadata=spent, name=f"{epsilon}-{seed}",
                 options={"epsilon": epsilon, "delta": 1e-5})
        for epsilon in (8.0, 2.0)
        for seed in range(2)
    ]  # fmt: skip
    for width in at_widths(runs, tmp_path, browser, (390, 1000, 1280)):
        shown = browser.evaluate("document.querySelector('.results .lines').innerText")
        assert shown == "7.999\nat δ = 1e-05,\nsample-level"
        assert width == 390 or browser.evaluate(HIDDEN) == 0, width


EDGE = """((table) => {
  const box = table.parentElement.getBoundingClientRect();
  const row = table.querySelector("tbody tr").getBoundingClientRect();
  return {x: box.right - 4 + scrollX, y: row.top + 2 + scrollY, width: 3, height: 1, scale: 1};
})(document.querySelector(".results"))"""


def edge_of_the_table(browser) -> float:
    """The brightness of its right edge, between two lines of text."""
    taken = browser.call(
        "Page.captureScreenshot", clip=browser.evaluate(EDGE), captureBeyondViewport=True
    )
    return float(imread(io.BytesIO(base64.b64decode(taken["data"])))[..., :3].mean())


@needs_chromium
def test_a_table_that_is_too_wide_has_a_shadow_where_it_goes_on(runs, tmp_path, browser: Browser):
    browser.prefer("light")
    for width in at_widths(runs[:9], tmp_path, browser, (390, 1000, 1280)):
        is_cut = browser.evaluate(HIDDEN) > 0
        assert is_cut == (width == 390), width
        assert (edge_of_the_table(browser) < 0.9) == is_cut, width
        browser.evaluate("document.querySelector('.results').parentElement.scrollLeft = 9999")
        assert edge_of_the_table(browser) > 0.95, width


@needs_chromium
def test_the_dashboard_at_every_width_in_light_and_dark(runs, tmp_path, browser: Browser):
    names = "/".join(folder.path.name for folder in runs)
    config = {"rounds": 40, "seed": 0, "data": "digits", "method": {"name": "fedavg"}}
    record = {"round": 1, "personal_accuracy": 0.5, "uplink_bytes": 9, "seconds": 2.0}
    with serving(tmp_path) as port, RunFolder.create(tmp_path / "now", config) as folder:
        folder.append(record)
        home = f"http://127.0.0.1:{port}/"
        for where in views(browser, home, "document.querySelectorAll('tbody tr').length === 13"):
            check(browser, f"list {where}")
            assert "1 min 18 s left" in browser.text(), "39 rounds of two seconds"
            heads = "[...document.querySelectorAll('th:nth-child(3)')].map((h) => h.textContent)"
            assert set(browser.evaluate(heads)) == {"personal accuracy"}
            assert browser.evaluate("document.querySelectorAll('.card').length") == 2, "settings"
            value = "document.querySelector('td.value').getBoundingClientRect()"
            assert browser.evaluate(f"{value}.right <= document.documentElement.clientWidth"), where
        ready = "document.querySelectorAll('.canvas .line').length > 0"
        for where in views(browser, f"{home}#/compare/{names}", ready):
            check(browser, f"compare {where}")
        assert "genfed, 3 seeds" in browser.text() and "95 % confidence" in browser.text()
        drawn = "[...document.images].length === 3 && [...document.images].every((i) => i.complete)"
        for where in views(browser, f"{home}#/run/gene-fl-seed0", f"{ready} && {drawn}"):
            check(browser, f"run {where}")
            assert browser.evaluate("[...document.images].every((i) => i.naturalWidth > 0)"), where
            assert "{" not in browser.text(), "metadata are figures and words, not JSON"
        browser.prefer("light")
        browser.call("Page.navigate", url="about:blank")
    assert browser.complaints == []


@needs_chromium
def test_rounds_stay_on_one_line_and_a_diverged_run_says_so(tmp_path, browser: Browser):
    config = {"rounds": 400, "seed": 0, "data": "digits", "method": {"name": "fedavg"}}
    cost = {"uplink_bytes": 9, "seconds": 2.0, "personal_accuracy": 0.9}
    with serving(tmp_path) as port, RunFolder.create(tmp_path / "now", config) as folder:
        for number in range(1, 33):
            folder.append({"round": number, "train_loss": 1e6 if number > 1 else 0.8, **cost})
        home, said = f"http://127.0.0.1:{port}/", "diverged since round 2"
        for width in (390, 800, 1400):
            browser.open("about:blank")
            ready = "document.querySelector('.tile progress')"
            browser.open(f"{home}#/run/now", width, wait_for=ready)
            check(browser, str(width))
            text = "document.querySelector('.tile progress').parentElement.lastChild"
            lines = browser.evaluate(
                f"(() => {{ const range = document.createRange(); range.selectNode({text}); "
                "return range.getClientRects().length; })()"
            )
            assert lines == 1, width
            assert said in browser.text() and "now has diverged since round 2." in browser.text()
            browser.open("about:blank")
            browser.open(home, width, wait_for="document.querySelector('tbody tr')")
            assert browser.evaluate(FACTS)["spills"] == [], width
            assert said in " ".join(browser.text().split())
        browser.call("Page.navigate", url="about:blank")
    assert browser.complaints == []
