import dataclasses
import itertools
import struct
import threading
import xml.dom.minidom

import numpy as np
import pytest
from matplotlib.ticker import MaxNLocator

from fedhelix.core.errors import UserError
from fedhelix.report.diagnostics import partition_plot
from fedhelix.report.labels import folded
from fedhelix.report.plots import (
    bytes_plot,
    comparison_plot,
    curves,
    draw_clients,
    draw_rounds,
    draw_uploads,
    overview,
    single,
)
from fedhelix.report.results import grouped
from fedhelix.report.style import Percent, percents, sheet
from fedhelix.report.tables import comparison, markdown


def png_size(path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and content[-8:-4] == b"IEND"
    return struct.unpack(">II", content[16:24])


def test_a_comparison_of_methods_and_seeds(make_run, tmp_path):
    runs = [make_run(method, seed) for method in ("fedavg", "genfed") for seed in (0, 1)]
    runs += [make_run("local", mib=0, global_model=False), make_run("gene-fl", mib=0.05)]
    comparison_plot(runs, tmp_path / "plot.png")
    assert png_size(tmp_path / "plot.png") == (2000, 840)
    assert [path.name for path in tmp_path.glob("*plot*")] == ["plot.png"], (
        "no temporary files stay"
    )


@pytest.mark.parametrize("rounds", [1, 2, 3, 20])
def test_rounds_are_whole_numbers(make_run, rounds):
    figure = sheet()
    axes = figure.subplots()
    draw_rounds(axes, curves(grouped([make_run(rounds=rounds, every=1)])))
    assert all(float(place).is_integer() for place in axes.get_xticks())


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"rounds": 1, "every": 1},
        {"rounds": 0},
        {"evaluated": False},
        {"summary": False},
        {"global_model": False, "mib": 0},
        {"metric": "score"},
        {"clients": 1},
    ],
)
def test_odd_runs_are_drawn_too(make_run, tmp_path, odd):
    comparison_plot([make_run(**odd)], tmp_path / "plot.png")
    assert png_size(tmp_path / "plot.png") == (2000, 840)


def test_words_on_a_line_at_100_percent_do_not_cover_the_title(make_run):
    runs = [make_run("local", mib=0, final=1.5, global_model=False), make_run("helix", final=1.5)]
    figure = overview(grouped(runs))
    figure.draw_without_rendering()
    axes = figure.axes[1]
    (words,) = axes.texts
    height = axes.transData.transform((0, words.xy[1]))[1]
    assert words.get_bbox_patch().get_window_extent().y1 < height < axes.get_window_extent().y1


def test_words_on_a_method_without_uploads_do_not_cover_its_line(make_run):
    runs = [make_run("local", mib=0, global_model=False), make_run("helix", global_model=False)]
    figure = overview(grouped(runs))
    figure.draw_without_rendering()
    axes = figure.axes[1]
    (words,) = axes.texts
    line = axes.lines[-1]
    assert words.get_text() == "local: no upload"
    assert set(line.get_ydata()) == {words.xy[1]}, "it is the line of these words"
    height = axes.transData.transform((0, words.xy[1]))[1]
    ground = words.get_bbox_patch().get_window_extent()
    half = line.get_linewidth() / 2 * figure.dpi / 72
    assert ground.y0 >= height + half or ground.y1 <= height - half


def test_words_on_a_method_without_uploads_cover_no_curve(make_run):
    """On the left, curves run close above and below its line."""
    runs = [make_run(name, mib=0 if name == "local" else 1) for name in ("local", "above", "below")]
    drawn = [
        dataclasses.replace(curve, mean=0 * curve.mean + level)
        for curve, level in zip(curves(grouped(runs)), (0.5, 0.52, 0.48), strict=True)
    ]
    drawn[1].mean.iloc[len(drawn[1].mean) // 2 :] = 0.9
    figure = single(draw_uploads, drawn)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    (words,) = axes.texts
    ground = words.get_bbox_patch().get_window_extent()
    for line in axes.lines:
        path = line.get_transform().transform_path(line.get_path())
        assert not path.intersects_bbox(ground, filled=False)
    assert axes.get_window_extent().contains(ground.x1, ground.y1)


@pytest.mark.parametrize(("value", "label"), [(1.0, "100 %"), (0.0, "0 %"), (1 / 3, "33.33 %")])
def test_the_only_value_of_all_clients_has_a_tick(make_run, value, label):
    drawn = [
        dataclasses.replace(curve, clients=np.full(5, value), malicious=np.zeros(5, dtype=bool))
        for curve in curves(grouped([make_run("a"), make_run("b")]))
    ]
    figure = single(draw_clients, drawn)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    low, high = axes.get_xlim()
    ticks = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
    assert [text.get_text() for place, text in ticks if low <= place <= high] == [label]


def test_lines_of_six_methods_differ_in_their_dashes(make_run):
    drawn = curves(grouped([make_run(name) for name in "abcdef"]))
    assert len({str(curve.dashes) for curve in drawn}) == 6


def test_newcomers_are_marked_where_they_take_over(make_run):
    old, new = make_run("old", rounds=4, every=1), make_run("new", rounds=2, every=1, summary=False)
    with new:
        for round in (3, 4):
            new.append({"round": round, "accuracy": 0.5, "uplink_bytes": 9, "arrival_bytes": 5})
    axes = single(draw_rounds, curves(grouped([new, old]))).axes[0]
    assert axes.get_xlabel() == "round\nvertical line: newcomers take over after it"
    assert list(axes.lines[-1].get_xdata()) == [2, 2]
    assert single(draw_rounds, curves(grouped([old]))).axes[0].get_xlabel() == "round"


def test_a_method_with_only_a_global_model(make_run, tmp_path):
    folder = make_run(rounds=0, summary=False)
    with folder:
        folder.append({"round": 1, "accuracy": 0.5, "uplink_bytes": 10})
        folder.append({"round": 2, "accuracy": 0.6})
    comparison_plot([folder], tmp_path / "plot.svg")
    assert "global model" in (tmp_path / "plot.svg").read_text()


def test_axes_say_whose_accuracy_it_is(make_run):
    personal, shared = make_run(), make_run("local", rounds=0, summary=False)
    with shared:
        shared.append({"round": 1, "accuracy": 0.5, "uplink_bytes": 10})
    for runs, said in [
        ([personal], "personal accuracy"), ([shared], "accuracy"), ([personal, shared], "accuracy"),
    ]:  # fmt: skip
        assert overview(grouped(runs)).axes[0].get_ylabel() == said


@pytest.mark.filterwarnings("error")  # of Matplotlib, where it finds no room
@pytest.mark.parametrize("rows", [3, 9, 12, 24])
def test_long_names_of_many_rows_cover_nothing(make_run, rows):
    """The labels of a sweep: no legend over a panel, no label over another, nothing cut off."""
    results = next(iter(grouped([make_run()]).values()))
    names = [f"fedper (lr=0.{n:02}, momentum=0.5, partition=dirichlet:0.1)" for n in range(rows)]
    groups = dict.fromkeys(names, results)
    figures = [overview(groups), single(draw_rounds, curves(groups)), bytes_plot(groups)]
    figures.append(single(draw_clients, curves(groups)))
    for figure in figures:
        figure.draw_without_rendering()
        legends = [legend.get_window_extent() for legend in figure.legends]
        panels = [axes.get_tightbbox() for axes in figure.axes]
        for box in (*legends, *panels):
            assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
            assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1
        assert not any(box.overlaps(panel) for box in legends for panel in panels)
        assert all(axes.get_window_extent().height > 1.3 * figure.dpi for axes in figure.axes)
        for axes in figure.axes:
            spans = [label.get_window_extent() for label in axes.get_yticklabels()]
            spans = sorted((box.y0, box.y1) for box in spans)
            assert all(low[1] <= high[0] for low, high in itertools.pairwise(spans))


def test_words_stay_whole_where_they_almost_fit():
    assert folded("fedavg (partition=dirichlet:0.1)", 22) == "fedavg\n(partition=dirichlet:0.1)"
    assert folded("fedavg (attack=sign-flip)", 22) == "fedavg\n(attack=sign-flip)"
    assert max(map(len, folded("x" * 100, 22).split("\n"))) == 22


def test_clients_up_to_the_10th_percentile_of_the_table_are_in_full_colour(make_run):
    folder = make_run(clients=20)
    table = comparison([folder])
    (panel,) = single(draw_clients, curves(grouped([folder]))).axes
    low, others, *_ = (dots.get_offsets()[:, 0] for dots in panel.collections)
    assert len(low) == 2 and low.max() <= table.loc["fedavg", "personal_p10"] < others.min()
    assert "full colour: bottom 10 %" in panel.get_xlabel()
    assert "| 10th percentile % |" in markdown(table)


def test_svg_by_suffix_and_from_any_thread(make_run, tmp_path):
    thread = threading.Thread(
        target=comparison_plot, args=([make_run()], tmp_path / "new" / "plot.SVG")
    )
    thread.start()
    thread.join()
    assert (
        xml.dom.minidom.parse(str(tmp_path / "new" / "plot.SVG")).documentElement.tagName == "svg"
    )


def test_bad_paths(make_run, tmp_path):
    for name in ("plot", "plot.jpeg"):
        with pytest.raises(UserError, match=r"must end in \.png, \.svg, \.pdf"):
            comparison_plot([make_run()], tmp_path / name)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        partition_plot(np.ones((2, 2), int), tmp_path / "file" / "plot.png")


@pytest.mark.parametrize("shape", [(20, 10), (1, 1), (100, 10), (3, 100)])
def test_partition(tmp_path, shape):
    partition_plot(np.random.default_rng(0).integers(0, 50, shape), tmp_path / "partition.png")
    width, height = png_size(tmp_path / "partition.png")
    assert 800 <= width <= 2800 and 500 <= height <= 1800


def test_partition_refuses_nonsense(tmp_path):
    for counts in (np.ones(3), np.ones((0, 3)), np.array([[1, -1]])):
        with pytest.raises(UserError, match="clients × classes"):
            partition_plot(counts, tmp_path / "partition.png")
    partition_plot(np.zeros((2, 2), int), tmp_path / "partition.png")


@pytest.mark.parametrize(
    ("ends", "labels"),
    [
        ((0.0, 1.0), ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]),
        ((0.96, 0.98), ["96.0 %", "96.5 %", "97.0 %", "97.5 %", "98.0 %"]),
        ((0.9991, 0.9992), ["99.910 %", "99.914 %", "99.918 %"]),
    ],
)
def test_axes_of_shares_have_the_decimals_that_their_ticks_need(ends, labels):
    axes = sheet().subplots()
    axes.set_xlim(*ends)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(Percent())
    shown = axes.xaxis.get_major_formatter().format_ticks(axes.xaxis.get_major_locator()())
    assert [one for one in shown if one in labels] == labels and len(set(shown)) == len(shown)


@pytest.mark.parametrize("values", [(0.0, 1.0), (0.3, 0.99), (1.0, 1.0), (0.4, 0.6), (0.996, 1.0)])
@pytest.mark.parametrize("which", ["x", "y"])
def test_axes_of_shares_end_at_0_and_100_percent(values, which):
    figure = sheet()
    axes = figure.subplots()
    axes.plot(*((values, [5, 9]) if which == "x" else ([5, 9], values)))
    axis = axes.xaxis if which == "x" else axes.yaxis
    before = axis.get_view_interval()
    percents(axis)
    low, high = axis.get_view_interval()
    assert low < values[0] and values[1] < high
    assert low > -0.03 and high < 1.03
    if values == (0.4, 0.6):
        assert (low, high) == tuple(before)
    ticks = [tick for tick in axis.get_ticklocs() if low <= tick <= high]
    assert all(0 <= tick <= 1 + 1e-9 for tick in ticks) and len(ticks) > 1


def test_a_comparison_has_no_band_above_100_percent(make_run):
    figure = overview(grouped([make_run(final=0.99), make_run("local", mib=0, final=0.95)]))
    tops = [axes.get_ylim()[1] for axes in figure.axes[:2]] + [figure.axes[2].get_xlim()[1]]
    assert max(tops) < 1.03


def test_ticks_of_little_traffic_keep_apart(make_run):
    figure = bytes_plot(grouped([make_run(rounds=4, mib=0.0004)]))
    assert 2 < len(figure.axes[0].get_xticks()) < 8
