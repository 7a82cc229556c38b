"""The search of the documentation, where the site is opened as a file without a network."""

from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SHIM = "javascripts/iframe-worker.js"
PAGE = """<html><head><script src="worker-shim.js"></script></head><body><script>
const worker = new Worker("echo.js");
worker.addEventListener("message", ({data}) => { document.title = data; });
worker.postMessage("found");
</script></body></html>"""
ECHO = """importScripts("double.js").then(() => {
  addEventListener("message", ({data}) => postMessage(doubled(data)));
});"""


def test_no_page_needs_a_script_from_the_network():
    settings = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    assert f"- {SHIM}" in settings and "- offline" in settings
    assert "http" not in (DOCS / SHIM).read_text(encoding="utf-8").partition("if (location")[2]


def test_a_worker_of_a_page_from_a_file_answers(tmp_path):
    browsers = pytest.importorskip("report.browser")
    if browsers.CHROMIUM is None:
        pytest.skip("needs a browser")
    pytest.importorskip("websockets")
    (tmp_path / "worker-shim.js").write_text((DOCS / SHIM).read_text(encoding="utf-8"))
    (tmp_path / "index.html").write_text(PAGE)
    (tmp_path / "echo.js").write_text(ECHO)
    (tmp_path / "double.js").write_text("doubled = (text) => `${text} ${text}`;")
    browser = browsers.Browser(tmp_path / "profile")
    try:
        browser.open(f"file://{tmp_path}/index.html")
        browser.until("document.title === 'found found'", 10)
        assert browser.complaints == []
    finally:
        browser.close()
