"""The prose of the documentation: no house words, no misspellings, every public name."""

import re
from pathlib import Path

import pytest

import fedhelix

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

# Words of earlier versions, and the field's own that replace them; the changelog may name both.
HOUSE_WORDS = {
    r"\bmuster(s|ed)?\b": "ensure",
    r"\bcrews?\b": "worker pool",
    r"\berrands?\b": "pending request",
    r"\bdoorbell\b": "long poll",
    r"\brosters?\b": "site registry",
    r"\bunjudged\b": "unevaluated",
    r"\bhellos?\b": "client_init",
    r"\bwelcomed?\b": "onboarding",
    r"\bwhat of it holds\b": "which claims reproduce",
    r"\bnothing to halve\b": "too small to judge",
    r"\buploads are dear\b": "bandwidth is limited",
    r"\bwho waits works ahead\b": "idle clients pre-train",
    r"\bby and by\b": "gradually",
    r"\bhas learnt to say\b": "predicts",
    r"\bworst tenth\b": "10th percentile",
}


def prose(page: Path) -> str:
    """A page without its code."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```|`[^`\n]+`", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.stem
)
def test_no_house_words(page):
    text = prose(page)
    found = {
        match[0]: better
        for word, better in HOUSE_WORDS.items()
        if (match := re.search(word, text, re.IGNORECASE))
    }
    assert not found, f"{page.name} has {found}: use the words on the right"


def test_no_misspellings():
    codespell = pytest.importorskip("codespell_lib")
    assert codespell.main(*map(str, PAGES), str(ROOT / "src"), "--skip", "*.c,*.h,*.js") == 0


def test_every_public_name_is_in_the_reference():
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    missing = [name for name in fedhelix.__all__ if not re.search(rf"\| `{name}[(`]", text)]
    assert not missing, "run `python docs/make.py`"


def test_the_changelog_has_each_kind_of_change_once_per_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for version in text.split("\n## ")[1:]:
        kinds = re.findall(r"^### (.+)$", version, re.MULTILINE)
        assert len(kinds) == len(set(kinds)), version.splitlines()[0]
    entries = re.findall(r"^- .+$", text, re.MULTILINE)
    assert len(entries) == len(set(entries))
