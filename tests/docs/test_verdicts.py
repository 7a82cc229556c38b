"""The verdicts on the result pages follow from the committed files, recomputed here with SciPy."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scipy import stats

from fedhelix.papers.verdicts import together, verdict

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAPERS = ("genfed", "pfedgpa", "gene-fl")
FOLD = re.compile(r"<details markdown>.*?</details>", re.DOTALL)


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    from parts import claims

    yield claims
    for name in [name for name in sys.modules if name.split(".")[0] == "parts"]:
        del sys.modules[name]


def page(name):
    return (ROOT / "docs" / "results" / f"{name}.md").read_text(encoding="utf-8")


def verdict_table(name):
    """Claim, verdict, ours, paper and link of every row on the page."""
    text = re.search(rf"<!-- made: verdicts {name} -->\n(.*?)<!-- end -->", page(name), re.DOTALL)
    lines = text[1].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def recomputed(claim):
    """The verdict on one comparison, from the file alone."""
    report = json.loads((RESULTS / f"{claim.study}-gpu.json").read_text())
    sides = []
    for row, column, measure in (claim.ours, claim.other):
        cell = next(one for one in report["cells"] if (one["row"], one["column"]) == (row, column))
        rounds = cell.get("accuracy_curve", {"rounds": [None]})["rounds"][-1]
        values = dict(zip(cell["seeds"], cell[measure]["by_seed"], strict=True))
        sides.append((values, rounds))
    (ours, ours_end), (other, other_end) = sides
    seeds = [
        seed
        for seed in ours.keys() & other.keys()
        if not (ours[seed] is None and other[seed] is None)
    ]
    margins = [
        claim.margin(
            ours_end if ours[seed] is None else ours[seed],
            other_end if other[seed] is None else other[seed],
        )
        for seed in seeds
    ]
    if len(margins) < 5:
        return "inconclusive"
    low, high = stats.ttest_1samp(margins, 0).confidence_interval(0.95)
    return "reproduced" if low > 0 else "not reproduced" if high < 0 else "inconclusive"


def expected_verdict(headline, measured):
    """The verdict on a claim from those on its settings, by the rules that the pages state."""

    def of(kinds):
        if len(set(kinds)) == 1:
            return kinds[0]
        if "reproduced" in kinds:
            return "partly"
        return "not reproduced" if "not reproduced" in kinds else "inconclusive"

    whole = of([kind for _, kind in measured])
    if not headline.enough:
        return whole
    columns = {claim.ours[1] for claim in headline.claims}
    by_column = {
        column: [kind for claim, kind in measured if claim.ours[1] == column] for column in columns
    }
    won = sum(set(kinds) == {"reproduced"} for kinds in by_column.values())
    lost = sum("not reproduced" in kinds for kinds in by_column.values())
    if won >= headline.enough:
        return "reproduced"
    return "not reproduced" if lost > len(columns) - headline.enough else whole


@pytest.mark.parametrize("paper", [*PAPERS, "helix"])
def test_every_verdict_follows_from_its_file(paper, parts):
    rows = verdict_table(paper)
    assert 0 < len(rows) <= (8 if paper in PAPERS else 11)
    words_of = {} if paper in PAPERS else {"reproduced": "met", "not reproduced": "not met"}
    headlines = {headline.words: headline for headline in parts.HEADLINES[paper]}
    for words, found, ours, printed, link in rows:
        headline = headlines[words]
        measured = [
            (claim, recomputed(claim))
            for claim in headline.claims
            if parts.check(claim, RESULTS) is not None
        ]
        expected = expected_verdict(headline, measured)
        assert found == f"**{words_of.get(expected, expected)}**"
        assert "n = " in ours and printed and link.startswith("[")


def test_two_seeds_are_inconclusive_and_five_decide():
    assert verdict([3.0, 3.1]) == verdict([3.0] * 4) == "inconclusive"
    assert verdict([3.0, 3.1, 2.9, 3.2, 3.0]) == "reproduced"
    assert verdict([-3.0, -3.1, -2.9, -3.2, -3.0]) == "not reproduced"
    assert verdict([3.0, -3.1, 2.9, -3.2, 3.0]) == "inconclusive"
    assert verdict([3.0, 3.1, 2.9, 3.2, None]) == "inconclusive"


def test_verdicts_on_several_settings():
    yes, no, open_ = "reproduced", "not reproduced", "inconclusive"
    assert together([yes, yes]) == yes and together([no, no]) == no
    assert together([yes, no]) == together([yes, open_]) == "partly"
    assert together([no, open_]) == together([open_, open_, no]) == no
    assert together([open_, open_]) == open_


def test_another_file_gives_another_verdict(parts, tmp_path):
    """Five seeds that agree decide a row; the page would then be out of date."""
    shutil.copytree(RESULTS, tmp_path / "results")
    path = tmp_path / "results" / "pfedgpa-table2-gpu.json"
    report = json.loads(path.read_text())
    for cell in report["cells"]:
        shift = 10 if cell["row"] == "inversion" else 0
        cell["seeds"] = list(range(5))
        for measure in report["measures"]:
            cell[measure]["by_seed"] = [70 + shift + seed / 10 for seed in range(5)]
        cell["after fine-tuning"]["by_seed"] = [80 + shift / 10 * (-1) ** seed for seed in range(5)]
    path.write_text(json.dumps(report))
    rows = [
        line.split(" | ")[1]
        for line in parts.verdicts("pfedgpa", tmp_path / "results").splitlines()
        if "direct generation" in line and "fine-tuning" in line
    ]
    assert rows == ["**reproduced**", "**inconclusive**"]


def shifted(report, by_column):
    """A report with five seeds in which Helix is ahead by so many points in every column."""
    for cell in report["cells"]:
        ahead = by_column.get(cell["column"], 0) if cell["row"] == "Helix" else 0
        cell["seeds"] = list(range(5))
        for measure in report["measures"]:
            cell[measure]["by_seed"] = [
                70 + ahead + (seed % 2) * 0.1 * bool(ahead) for seed in range(5)
            ]
    return report


@pytest.mark.parametrize(
    ("won", "lost", "word"), [(6, 0, "met"), (5, 0, "partly"), (0, 4, "not met"), (5, 4, "not met")]
)
def test_a_target_for_six_of_nine_columns(parts, tmp_path, won, lost, word):
    name = "helix-pfedgpa-gpu.json"
    report = json.loads((RESULTS / name).read_text())
    columns = list(dict.fromkeys(cell["column"] for cell in report["cells"]))
    ahead = dict.fromkeys(columns[:won], 3) | dict.fromkeys(columns[9 - lost :], -3)
    (tmp_path / name).write_text(json.dumps(shifted(report, ahead)))
    (row,) = [
        line for line in parts.verdicts("helix", tmp_path).splitlines() if "pFedGPA's" in line
    ]
    assert row.split(" | ")[1] == f"**{word}**"


def test_the_sentences_on_helix_have_their_numbers_from_the_files(parts, tmp_path):
    from parts import targets

    shutil.copytree(RESULTS, tmp_path / "results")
    path = tmp_path / "results" / "helix-attacks-gpu.json"
    report = json.loads(path.read_text())
    cell = next(
        one for one in report["cells"] if (one["row"], one["column"]) == ("Helix", "mimic 20%")
    )
    cell["at the end"]["by_seed"][0] -= 50
    path.write_text(json.dumps(report))
    text = page("helix")
    assert targets.found(RESULTS) in text
    changed = targets.found(tmp_path / "results")
    assert changed not in text and "(mimic 20%; " in changed


@pytest.mark.parametrize("name", [*PAPERS, "helix"])
def test_a_result_page_is_two_screens_before_its_folds(name):
    shown = FOLD.sub("", page(name))
    tables = re.findall(r"^\| ---", shown, re.MULTILINE)
    assert len(tables) == 1
    prose = re.sub(r"^\|.*$|<!--.*?-->", "", shown, flags=re.MULTILINE)
    assert len(prose.split()) <= (450 if name in PAPERS else 650)
    assert shown.index("## Which claims") < 2000


@pytest.mark.parametrize("place", ["README.md", "docs/results.md", "docs/results"])
def test_means_and_intervals_in_the_text_come_from_a_file(place):
    """Numbers of settings may be typed; results with a spread, or with a sign, may not."""
    path = ROOT / place
    for one in sorted(path.glob("*.md")) if path.is_dir() else [path]:
        text = re.sub(r"<!-- made: .*?<!-- end -->", "", one.read_text("utf-8"), flags=re.DOTALL)
        typed = re.findall(r"[\d.]+ ± [\d.]+|[+−]\d+\.\d+", text)
        assert not typed, f"{one.name}: fill in {typed} with docs/make.py"


def test_every_commit_is_in_the_history_or_named():
    """A result names the commit of its code; commits of squashed branches are on the page."""
    log = subprocess.run(
        ["git", "log", "--format=%H"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    known = {line[:7] for line in log.stdout.split()}
    if len(known) < 100:
        pytest.skip("not a checkout with its history")
    squashed = (ROOT / "docs" / "results.md").read_text("utf-8").split("are not in the history")[1]
    known |= set(re.findall(r"\b[0-9a-f]{7}\b", squashed.split(". The change")[0]))
    for path in sorted(RESULTS.glob("*.json")):
        for text in re.findall(r'"commit": "([^"]*)"', path.read_text("utf-8")):
            for commit in re.findall(r"\b[0-9a-f]{7,40}\b", text):
                assert commit[:7] in known, f"{path.name} names {commit}"


def typed(text):
    """A page without what `docs/make.py` writes."""
    return re.sub(r"<!-- made: .*?<!-- end -->", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("name", PAPERS)
def test_the_text_says_no_more_than_the_verdicts(name):
    if {verdict for _, verdict, *_ in verdict_table(name)} == {"**inconclusive**"}:
        assert not re.search(r"\breproduces\b|not reproduce\b", typed(page(name)))


def test_a_next_figure_follows():
    for path in sorted((ROOT / "docs").rglob("*.md")):
        for after in path.read_text(encoding="utf-8").split("The next figure")[1:]:
            following = after.partition("\n\n")[2][:200]
            assert following.startswith(("<!-- made: drawn", "![")), path


def test_what_is_not_run_yet_is_in_no_table():
    (rows,) = re.findall(r"also has the rows (.*?); they are not run yet", typed(page("genfed")))
    exceptions = set(re.findall(r"Table (\d) but for its row \*(.*?)\*", typed(page("genfed"))))
    for table in "2456":
        report = json.loads((RESULTS / f"genfed-table{table}-gpu.json").read_text())
        there = {cell["row"] for cell in report["cells"] if cell["seeds"]}
        found = there & set(re.findall(r"\*(.*?)\*", rows))
        assert {(table, row) for row in found} <= exceptions


def test_who_is_ahead_of_gene_fl_is_said_by_group():
    said = {}
    for network in ("ResNet-18", "small network"):
        sentence = rf"{network}.*, for known clients, GENE-FL is (.*); for newcomers, it is (.*)\."
        ((known, new),) = re.findall(sentence, page("gene-fl"))
        for group, clause in (("Known", known), ("Newcomers", new)):
            parts = re.split(r"(ahead of|undecided against|behind) ", clause)[1:]
            for words, names in zip(parts[::2], parts[1::2], strict=True):
                for rival in re.findall(r"\w+", names.replace(" and ", " ")):
                    said[group, rival, network] = words
    words = {
        "reproduced": "ahead of",
        "inconclusive": "undecided against",
        "not reproduced": "behind",
    }
    table = r"\| (Known|Newcomers).*?: GENE-FL is more .* \| (\w+), ([\w -]+) \| ([a-z ]+) \|"
    decided = {found[:3]: words[found[3]] for found in re.findall(table, page("gene-fl"))}
    assert said == decided and len(decided) == 15


def test_the_leaderboard_names_all_who_are_ahead_of_helix():
    text = (ROOT / "docs" / "leaderboard.md").read_text(encoding="utf-8")
    (bullet,) = re.findall(r"\* \*\*It is not first everywhere\.\*\* (.*)", text)
    cells = json.loads((RESULTS / "leaderboard-gpu.json").read_text())["cells"]
    means = {
        column: {
            cell["row"]: cell["accuracy"]["mean"]
            for cell in cells
            if cell["column"] == column and cell["seeds"]
        }
        for column in ("text, authors", "table, concept shift")
    }
    authors, concepts = means.values()
    assert max(authors, key=authors.get) in bullet
    assert all(row in bullet for row, mean in concepts.items() if mean > concepts["Helix"])


def test_the_page_of_helix_names_the_row_behind_its_numbers_on_svhn():
    cells = json.loads((RESULTS / "helix-genfed-gpu.json").read_text())["cells"]
    (helix,) = [one for one in cells if (one["row"], one["column"]) == ("Helix", "SVHN")]
    (bullet,) = re.findall(r"\* (.*; on SVHN, which was held out.*)", page("helix"))
    assert ("*Helix, cold start, plain shares*" in bullet) == (not helix["seeds"])
