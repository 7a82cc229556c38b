"""Hooks for MkDocs: convert formulas to MathML, show notebooks as pages, add the measurements as
downloads, and build the menu from the files.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

from parts import notebooks  # noqa: E402 - MkDocs loads this file without its folder

OUTSIDE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}

MENU: list[tuple[str, list[str]]] = [
    ("Tutorials", ["index.md", "your-own-data.md", "tutorials/*.ipynb", "tutorials/*.md",
                   "your-own-method.md", "tutorials.md"]),
    ("How to", ["choosing.md", "looking-at-runs.md", "heterogeneity.md", "devices.md"]),
    ("Machines", ["engines.md", "clusters.md", "deployment.md", "privacy.md"]),
    ("Explanation", ["architecture.md", "results.md", "leaderboard.md", "results/*.md",
                     "reproducing.md"]),
    ("All methods", ["methods.md", "methods/*.md"]),
    ("Reference", ["api.md", "glossary.md", "faq.md", "coming-from.md", "changelog.md",
                   "contributing.md"]),
]  # fmt: skip

FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`[^`\n]+`)")
DISPLAYED = re.compile(r"\$\$(.+?)\$\$", re.DOTALL)
INLINE = re.compile(r"(?<![\\$\w])\$(?!\s)([^$\n]+?)(?<![\s\\])\$(?!\w)")
LINK = re.compile(r"\[([^\[\]]+)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Build the menu: the pages that exist, in the order of `MENU`."""
    config.nav = [
        {title: [_entry(page) for pattern in patterns for page in _pages(pattern)]}
        for title, patterns in MENU
    ]
    return config


def _entry(page: str) -> str | dict[str, str]:
    """A page by its own title; results have the titles of methods and are told apart."""
    if not page.startswith("results/"):
        return page
    title = (DOCS / page).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    return {f"Results: {title}": page}


def _pages(pattern: str) -> list[str]:
    if pattern in OUTSIDE.values():
        return [pattern]
    found = sorted(path.relative_to(DOCS) for path in DOCS.glob(pattern))
    return [path.with_suffix(".md").as_posix() for path in found]


def on_files(files: Any, config: Any) -> Any:
    """Add the measurements, two pages from outside docs/, and the notebooks as pages."""
    for path in sorted(DOCS.rglob("*.ipynb")):
        name = path.relative_to(DOCS).with_suffix(".md").as_posix()
        files.append(File.generated(config, name, content=notebooks.page(path)))
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        files.append(File.generated(config, f"measured/{path.name}", abs_src_path=str(path)))
    for name, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(text: str, page: Any, config: Any, files: Any) -> str:
    """Convert formulas and links; leave code as it is."""
    here = page.file.src_uri
    outside = {inside: outside for outside, inside in OUTSIDE.items()}
    source = outside.get(here, f"docs/{here}")
    parts = FENCED.split(text)
    return "".join(
        part if number % 2 else _prose(part, here, source) for number, part in enumerate(parts)
    )


def _prose(text: str, here: str, source: str) -> str:
    text = LINK.sub(lambda match: _link(match, here, source), text)
    return "".join(
        part if number % 2 else _formulas(part) for number, part in enumerate(CODE.split(text))
    )


def _formulas(text: str) -> str:
    text = DISPLAYED.sub(lambda match: convert(match[1].strip(), display="block"), text)
    return INLINE.sub(lambda match: convert(match[1]), text)


def _link(match: re.Match[str], here: str, source: str) -> str:
    """Turn a link within the repository into one within the site; source files are only named."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
    if target.startswith("benchmarks/results/") and target.endswith(".json"):
        inside = f"measured/{posixpath.basename(target)}"
    elif target in OUTSIDE:
        inside = OUTSIDE[target]
    elif target == "README.md":
        inside = "index.md"
    elif target.startswith("docs/"):
        inside = target.removeprefix("docs/").replace(".ipynb", ".md")
    else:
        return match[1]
    path = posixpath.relpath(inside, posixpath.dirname(here) or ".")
    return f"[{match[1]}]({path}{match[3] or ''})"
