"""Seeds: means, confidence bands and ties, with numbers by hand."""

import math
import re

import pandas as pd
import pytest

from fedhelix.report import plots
from fedhelix.report.headline import tiles, winners
from fedhelix.report.live import Watch
from fedhelix.report.live.comparison import compared
from fedhelix.report.locate import Selection
from fedhelix.report.page import html
from fedhelix.report.results import by_setting, grouped, make, read
from fedhelix.report.spread import band, explanation, tied
from fedhelix.store import RunFolder

T_OF_TWO = 4.302653  # Student's t, 97.5 %, two degrees of freedom: from any table


def test_the_band_is_students_confidence_interval():
    mean, low, high = band(pd.DataFrame([[1.0, 2.0, 3.0]]))
    half = T_OF_TWO * 1.0 / math.sqrt(3)  # the standard deviation of 1, 2, 3 is 1
    assert mean[0] == 2 and [low[0], high[0]] == pytest.approx([2 - half, 2 + half], rel=1e-6)
    assert [side[0] for side in band(pd.DataFrame([[0.2, 0.6]]))] == pytest.approx([0.4, 0.2, 0.6])
    assert [side[0] for side in band(pd.DataFrame([[0.7]]))] == [0.7, 0.7, 0.7]
    _, low, high = band(pd.DataFrame([[0.1, 0.9, 0.5]]), is_share=True)
    assert (low[0], high[0]) == (0, 1), "no accuracy is below zero or above one"


def test_the_band_says_what_it_is():
    assert explanation([1, 1]) == ""
    assert explanation([2]) == "line: mean of seeds; band: lowest to highest seed"
    assert explanation([3, 1]).endswith("95 % confidence interval")


def test_a_tie_is_a_difference_that_may_be_zero():
    better = {0: 0.92, 1: 0.93, 2: 0.95}
    assert tied(better, {0: 0.90, 1: 0.94, 2: 0.94}, alike=False), "seeds disagree"
    assert not tied(better, {0: 0.82, 1: 0.83, 2: 0.85}, alike=False), "ten points on each"
    two = {0: 0.90, 1: 0.93}  # the interval of 4 and 1.4 points is 2.7 ± 16.5 points
    assert tied(two, {0: 0.86, 1: 0.916}, alike=False), "two seeds say little"
    assert not tied(two, {0: 0.60, 1: 0.631}, alike=False), "30 and 29.9 points"
    sent = {0: 8_613_000, 1: 6_890_400}, {0: 334_000, 1: 334_000}  # 26 and 21 times as much
    assert tied(*sent, alike=False) and not tied(*sent, alike=False, by_ratio=True)
    assert tied(sent[0], sent[0], alike=True, by_ratio=True)
    assert tied({0: 0.9}, {1: 0.9}, alike=True) and not tied({0: 0.9}, {0: 0.8}, alike=False)


def run(method: str, seed: int, accuracy: float, seconds: float = 1.0, complete=True, **config):
    records = [{"round": 1, "personal_accuracy": accuracy, "uplink_bytes": 9, "seconds": seconds}]
    about = {"complete": complete, "uplink_bytes": 9, "seconds": seconds}
    config = {"method": {"name": method}, "seed": seed, "data": "digits", **config}
    return make(f"{method}-{seed}", config, about, records, {})


def test_ties_are_named_as_ties():
    close = [run("a", seed, 0.9 + 0.01 * seed) for seed in range(3)]
    close += [run("b", seed, 0.93 - 0.01 * seed) for seed in range(3)]
    far = [run("c", seed, 0.5) for seed in range(3)]
    best, *_, bytes_ = tiles(grouped([*close, *far]))
    assert (best["value"], best["who"]) == ("92.0 ± 0.6 %", "b and a tie")
    assert bytes_["who"] == "a, b and c tie"
    assert winners(grouped([*close, *far])) == ("personal_accuracy", ["b", "a"])
    assert winners(grouped([*close[:3], *far])) == ("personal_accuracy", ["a"])


def test_bytes_tie_by_their_ratio():
    """26 times as much does not tie, though the difference of two seeds is wide."""
    runs = [run(method, seed, 0.9) for method in ("a", "b") for seed in range(2)]
    for result, sent in zip(runs, (8.6e6, 6.9e6, 334e3, 334e3), strict=True):
        result.records[0]["uplink_bytes"] = result.summary["uplink_bytes"] = sent
    *_, bytes_ = tiles(grouped(runs))
    assert (bytes_["what"], bytes_["who"]) == ("fewest bytes uploaded", "b")


def test_an_unfinished_run_may_be_all_that_tells_labels_apart():
    stopped = run("b", 0, 0.99, complete=False, lr=0.5)
    first, *_ = tiles(grouped([run("a", 0, 0.9, lr=0.1), run("b", 0, 0.8, lr=0.1), stopped]))
    assert first["who"] == "a (lr=0.1)"


def test_an_unfinished_run_is_the_best_of_nothing():
    stopped = run("c", 0, 0.99, complete=False)
    groups = grouped([run("a", 0, 0.9), run("b", 0, 0.8), stopped])
    assert {tile["who"] for tile in tiles(groups)} == {"a", "a and b tie"}
    assert winners(groups) == ("personal_accuracy", ["a"])
    alone = grouped([run("a", 0, 0.9), stopped])
    assert tiles(alone) == [] and winners(alone) == ("personal_accuracy", [])


def test_runs_on_different_data_are_not_compared():
    digits = [run("a", 0, 0.9), run("b", 0, 0.8)]
    wine = [run("a", 0, 0.7, data="wine", partition="iid")]
    sections = by_setting([*digits, *wine])
    assert {words: len(part) for words, part in sections.items()} == {
        "digits · no partition": 2,
        "wine · iid": 1,
    }
    assert list(by_setting(digits)) == [""], "nothing to tell apart"


def test_times_far_apart_are_drawn_on_a_logarithmic_axis():
    drawn = plots.curves(grouped([run("a", 0, 0.9), run("b", 0, 0.8, seconds=90.0)]))
    assert plots.single(plots.draw_seconds, drawn).axes[0].get_xscale() == "log"
    drawn = plots.curves(grouped([run("a", 0, 0.9), run("b", 0, 0.8, seconds=4.0)]))
    assert plots.single(plots.draw_seconds, drawn).axes[0].get_xscale() == "linear"


def test_the_report_has_a_section_per_setting(make_run):
    folders = [make_run(clients=2, rounds=2), make_run(clients=2, rounds=2, data="wine")]
    page = html(Selection(folders, []))
    assert re.findall(r'class="setting-name">([^<]+)<', page) == ["digits", "wine"]
    assert page.count('class="curves"') == 2
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids)), "an id is there once, also in figures"


def test_the_dashboard_compares_seeds_as_one_line(make_run, tmp_path):
    for seed in range(3):
        make_run(seed=seed, rounds=4, clients=2, name=f"fedavg-{seed}")
    make_run("local", rounds=4, clients=2, data="wine", name="local")
    make_run(rounds=4, clients=2, data="wine", name="same")
    make_run(rounds=4, clients=2, data="wine", name="again")
    watch = Watch(tmp_path)
    watch.refresh()
    digits, wine = compared([watch.runs[name] for name in sorted(watch.runs, reverse=True)])[::-1]
    assert [line["label"] for line in digits["means"]] == ["fedavg, 3 seeds"]
    finals = [
        read(RunFolder.open(tmp_path / f"fedavg-{seed}")).final("personal_accuracy")
        for seed in range(3)
    ]
    mean = digits["means"][0]["y"]["personal_accuracy"]["mid"][-1]
    assert mean == pytest.approx(sum(finals) / 3, rel=1e-5)
    assert len(digits["lines"]) == len(digits["rows"]) == 3
    assert {line["label"] for line in wine["means"]} == {"local", "same", "again"}, "twins"


def test_the_rest_of_a_run_is_told_until_it_stops(tmp_path):
    watch = Watch(tmp_path)
    with RunFolder.create(tmp_path / "mine", {"rounds": 5, "method": {"name": "x"}}) as folder:
        folder.append({"round": 1, "seconds": 3.0})
        folder.append({"round": 2, "seconds": 5.0})
        watch.refresh()
        assert watch.overview()[0]["left"] == 12.0, "three rounds of four seconds"
    watch.refresh()
    assert watch.overview()[0]["left"] is None
