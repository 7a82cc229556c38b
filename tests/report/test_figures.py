from concurrent.futures import ThreadPoolExecutor

import matplotlib
import method_metadata as metadata
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.transforms import Bbox

from fedhelix.core.errors import UserError
from fedhelix.report import diagnostics
from fedhelix.report.figures import figures, write_all
from fedhelix.report.labels import shortened
from fedhelix.report.results import read
from fedhelix.report.style import COLOURS, content, sheet
from fedhelix.report.themed import inline

ALWAYS = ["overview", "accuracy-rounds", "accuracy-bytes", "accuracy-seconds", "clients", "traffic"]


def test_the_partition_calls_classes_and_clients_by_their_names():
    def labels(axis):
        return [tick.get_text() for tick in axis.get_ticklabels()]

    (axes,) = diagnostics.partition([[1, 2], [3, 4], [0, 5]], class_names=["cat", "$dog"]).axes
    assert labels(axes.yaxis) == ["cat", r"\$dog"] and labels(axes.xaxis) == ["0", "1", "2"]
    (axes,) = diagnostics.partition([[1, 2], [3, 4]], names=["ulm", "bern"]).axes
    assert labels(axes.xaxis) == ["ulm", "bern"] and labels(axes.yaxis) == ["0", "1"]
    many = [f"kind {n}" for n in range(60)]
    (axes,) = diagnostics.partition(np.ones((2, 60)), class_names=many).axes
    assert labels(axes.yaxis) == many[::3] and list(axes.get_yticks()) == list(range(0, 60, 3))


LONG = ["University Hospital Bern", "University Hospital Basel", "Ulm"]


def test_long_names_stay_distinct():
    assert shortened(LONG, 16) == ["Universi…al Bern", "Universi…l Basel", "Ulm"]
    assert shortened(["one way or another", "one day or another"], 7) == [
        "one w…ther",
        "one d…ther",
    ]
    assert shortened(["a" * 20] * 2, 16) == ["aaaaaaaa…aaaaaaa"] * 2 and shortened([], 16) == []


@pytest.mark.parametrize("shape", [(4, 2), (2, 2), (20, 10), (100, 2), (1, 1)])
def test_bubbles_fit_their_cells(shape):
    names = [f"University Hospital of {n} and more" for n in range(shape[0])]
    figure = diagnostics.partition(np.full(shape, 7), names=names)
    (axes,) = figure.axes
    figure.draw_without_rendering()
    (x, y), (right, above) = axes.transData.transform([(0, 0), (1, 1)])
    radius = np.sqrt(axes.collections[0].get_sizes()[0]) / 2 * figure.dpi / 72
    box = axes.get_window_extent()
    assert 2 * radius <= min(right - x, above - y)
    assert box.x0 <= x - radius and box.y0 <= y - radius
    assert 2 * radius > 0.9 * min(right - x, above - y)


def test_the_figure_of_a_run_has_the_names_of_its_classes(make_run):
    census = {
        **metadata.CENSUS,
        "class_names": [f"kind {n}" for n in range(len(metadata.CENSUS["classes"][0]))],
    }
    (drawing,) = [
        one for one in figures([make_run(clients=3, census=census)]) if one.name == "partition"
    ]
    (axes,) = drawing.figure.axes
    assert axes.get_yticklabels()[1].get_text() == "kind 1"


def test_every_method_brings_its_own_figures(make_run):
    runs = [
        make_run("fedavg", clients=3, census=metadata.CENSUS),
        make_run("genfed", clients=3, census=metadata.CENSUS, metadata=metadata.genfed),
        make_run("gene-fl", clients=3, census=metadata.CENSUS, metadata=metadata.gene_fl),
        make_run("pfedgpa", clients=3, census=metadata.CENSUS, metadata=metadata.pfedgpa),
    ]
    special = [
        "partition",
        "fitness-genfed",
        "units-gene-fl",
        "clusters-gene-fl",
        "numbers-gene-fl",
        "distances-pfedgpa",
    ]
    assert [figure.name for figure in figures(runs)] == ALWAYS + special
    assert [figure.name for figure in figures(runs[:1])] == [*ALWAYS, "partition"]
    assert [figure.name for figure in figures([make_run("local", rounds=0)])] == [
        "overview",
        "traffic",
    ]


def offsets(axes, label: str) -> list[list[float]]:
    points = next(
        part
        for part in axes.collections
        if isinstance(part, PathCollection) and part.get_label() == label
    )
    return points.get_offsets().tolist()


def test_fitness_marks_the_chosen_and_the_attackers(make_run):
    run = read(
        make_run("genfed", rounds=2, clients=3, census=metadata.CENSUS, metadata=metadata.genfed)
    )
    above, below = diagnostics.fitness(run).axes
    assert offsets(above, "chosen") == [[1, 0.04], [2, 0.08]]
    assert offsets(above, "left out") == [[1, 0.03], [2, 0.06]]
    assert offsets(above, "attacker, left out") == [[1, 0.1], [2, 0.1]]
    assert below.lines[0].get_ydata().tolist() == [1, 1]


def test_all_four_marks_of_fitness_fit_the_figure(make_run):
    def genfed(round):
        return {**metadata.genfed(round), "selected": [0, 2] if round == 1 else [0]}

    run = make_run("genfed", rounds=2, clients=3, census=metadata.CENSUS, metadata=genfed)
    figure = diagnostics.fitness(read(run))
    figure.canvas.draw()
    legend = figure.legends[0]
    assert len(legend.get_texts()) == 4
    assert legend.get_window_extent().width < 0.75 * figure.bbox.width


def test_the_heat_map_holds_shares_of_the_senders(make_run):
    axes = diagnostics.units(read(make_run(rounds=3, metadata=metadata.gene_fl))).axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["layer2.conv", "layer10.conv"]
    assert axes.images[0].get_array().tolist() == [[1.0] * 3, [0.5] * 3]


def test_clusters_and_distances_show_their_points(make_run):
    axes = diagnostics.clusters(
        read(make_run(clients=3, census=metadata.CENSUS, metadata=metadata.gene_fl))
    ).axes[0]
    assert offsets(axes, "cluster 0") == [[0.0, 1.0]] and offsets(axes, "cluster 1") == [[1.0, 0.0]]
    assert offsets(axes, "cluster none") == [[1.1, 0.1]] == offsets(axes, "attacker")
    axes = diagnostics.distances(read(make_run(metadata=metadata.pfedgpa))).axes[0]
    assert [line.get_xdata()[0] for line in axes.lines] == [5.0, 5.0, 1.5]


PLACES = {
    "2": [0.91, -0.31], "4": [0.82, 0.19], "6": [1.0, 0.21], "17": [0.72, 0.43],
    "19": [0.7, 0.07], "16": [0.49, -0.27], "14": [-1.38, -0.4], "9": [-0.65, 1.22],
}  # fmt: skip


def test_the_name_of_a_client_covers_no_other_client(make_run):
    table = {"positions": PLACES, "clusters": dict.fromkeys(PLACES, 0)}
    figure = diagnostics.clusters(read(make_run(metadata=lambda _: table)))
    FigureCanvasAgg(figure).draw()
    (axes,) = figure.axes
    names = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert names.keys() == PLACES.keys()
    half = 42**0.5 / 2 * figure.dpi / 72
    for name, box in names.items():
        for other in PLACES.keys() - {name}:
            x, y = axes.transData.transform(PLACES[other])
            mark = Bbox.from_extents(x - half, y - half, x + half, y + half)
            assert not box.overlaps(mark), f"{name} covers client {other}"
            assert not box.overlaps(names[other])


def test_a_page_can_change_every_colour_of_a_figure():
    figure = sheet()
    axes = figure.subplots()
    for place, colour in enumerate(COLOURS):
        axes.scatter([place], [place], color=colour, linewidths=0)
    svg = inline(figure, "colours", "seven dots")
    assert all(f"fill: var(--k{place})" in svg for place in range(len(COLOURS)))


NONSENSE = [
    None,
    3,
    "text",
    [],
    {},
    [1, "a", None],
    {"a": "b"},
    {"0": None, "99999999999": 1},
    {"0": [1]},
    {"0": ["$\\frac$"]},
]
KEYS = [
    "fitness",
    "selected",
    "rho",
    "units",
    "clusters",
    "positions",
    "mask_density",
    "gamma",
    "distances",
]


@pytest.mark.parametrize("value", NONSENSE, ids=str)
def test_nonsense_in_metadata_does_no_harm(make_run, value):
    run = make_run(
        rounds=2,
        every=1,
        clients=2,
        metadata=lambda _: dict.fromkeys(KEYS, value),
        census={"classes": value},
    )
    for figure in figures([run]):
        assert content(figure.figure, "svg")


def test_files_are_named_after_methods_but_never_climb_out(make_run, tmp_path):
    run = make_run("../../<b>$x$", metadata=metadata.genfed, clients=3, name="hostile")
    written = write_all([run], tmp_path / "out", "svg")
    assert all(path.parent == tmp_path / "out" and path.exists() for path in written)
    assert written[-1].name == "fitness-b-x.svg"
    with pytest.raises(UserError, match="png, svg or pdf, not 'gif'"):
        write_all([run], tmp_path, "gif")


def test_the_same_run_gives_the_same_bytes(make_run):
    run = make_run()
    first, again = ([content(figure.figure, "svg") for figure in figures([run])] for _ in range(2))
    assert first == again


def test_several_threads_draw_what_one_does():
    def drawn(name: str) -> str:
        figure = sheet()
        for axes in figure.subplots(2, 1, sharex=True):
            axes.plot([1, 3, 2], marker="o")
        return inline(figure, name, "a line")

    names = [f"figure-{number}" for number in range(6)]
    expected = [drawn(name) for name in names]
    settings = matplotlib.rcParams["svg.hashsalt"], matplotlib.rcParams["svg.fonttype"]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(drawn, names)) == expected
    assert (matplotlib.rcParams["svg.hashsalt"], matplotlib.rcParams["svg.fonttype"]) == settings


def test_the_name_of_a_number_stands_below_the_title(make_run):
    run = make_run(rounds=3, metadata=lambda t: {"own_heads": 0.5 + 0.1 * t})
    figure = diagnostics.numbers(read(run))
    FigureCanvasAgg(figure).draw()
    (axes,) = figure.axes
    (words,) = axes.texts
    title = axes._left_title.get_window_extent()
    assert words.get_text() == "share of own heads that is kept"
    assert words.get_window_extent().y1 <= title.y0
    assert title.y1 <= figure.bbox.y1
