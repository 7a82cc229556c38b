"""Draw the figures of the method pages: `python docs/draw.py`.

Blue layers are shared, orange ones stay with their client, grey ones are frozen.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from fedhelix.report.style import COLOURS, GREY, PALE, save, sheet

FIGURES = Path(__file__).parent / "figures" / "methods"
LOOKS = {
    "travels": (COLOURS[0], ""),
    "stays": (COLOURS[4], "//"),
    "frozen": (PALE, ""),
    "sometimes": (COLOURS[5], ".."),
}
SHORT = {"t": "travels", "s": "stays", "f": "frozen", "m": "sometimes"}


@dataclass(frozen=True)
class Sketch:
    """What a figure shows: the layers from input to output, and what server and clients do."""

    layers: str
    server: str
    client: str
    second: str = ""  # a second model of the client
    arrows: str = "both"


SKETCHES = {
    "fedavg": Sketch("ttttt", "mean of the models", "train"),
    "fedavg-ft": Sketch("ttttt", "mean of the models", "train; fine-tune\na copy for use"),
    "fedavgm": Sketch("ttttt", "mean of the models,\nplus momentum", "train"),
    "fedprox": Sketch("ttttt", "mean of the models", "train close to\nthe received model"),
    "scaffold": Sketch(
        "ttttt", "mean of models\nand of controls", "train, corrected by\nthe controls", "sssss"
    ),
    "fedopt": Sketch("ttttt", "Adam along the\nmean update", "train"),
    "ditto": Sketch(
        "ttttt", "mean of the models", "train both; the second\nstays close to the first", "sssss"
    ),
    "feddyn": Sketch(
        "ttttt", "mean of the models,\ncorrected by h", "train, corrected by\nits dual", "sssss"
    ),
    "moon": Sketch(
        "ttttt",
        "mean of the models",
        "features: near the received\nmodel, far from the last",
        "sssss",
    ),
    "apfl": Sketch("ttttt", "mean of the models", "train both;\nuse their mixture", "sssss"),
    "fedproto": Sketch("sssss", "mean features\nof every class", "train near these;\nsend its own"),
    "local": Sketch("sssss", "not involved", "train alone", arrows="none"),
    "fedbn": Sketch("tstst", "mean of all but\nBatchNorm", "train; BatchNorm\nis personal"),
    "fedper": Sketch("tttts", "mean of the bodies", "train; the last\nlayer is personal"),
    "fedrep": Sketch("tttts", "mean of the bodies", "first the head,\nthen the body"),
    "lg-fedavg": Sketch("sssst", "mean of the heads", "train; the body\nis personal"),
    "fedbabu": Sketch("ttttf", "mean of the bodies", "train the body only;\nfine-tune for use"),
    "partialfed": Sketch("ststs", "mean of one layer\nper stage", "train; the rest\nis personal"),
    "fedfina": Sketch("ssttt", "mean of the\nlast layers", "train; the rest\nis personal"),
    "fedlg": Sketch("stsst", "mean of chosen\nlayers", "train; the rest\nis personal"),
    "fedlp": Sketch(
        "mmmmm", "per layer: mean over\nits senders", "train; send each\nlayer at random"
    ),
    "fedlps": Sketch(
        "fmmmt",
        "per channel: mean over\nits senders",
        "train; send only the\nstrongest channels",
    ),
    "clustered": Sketch("ttttt", "one model for each\ncluster of clients", "train"),
    "compact": Sketch(
        "ttttt",
        "unpack the updates;\nmean of the models",
        "train; send few bits,\nkeep what they lose",
        "sssss",
    ),
    "gene-fl": Sketch(
        "ssmms", "per cluster: mean of\nthe genes", "train near the cluster;\nsend a small gene"
    ),
    "fedau": Sketch("ttttt", "weights: rounds between\nparticipations", "train"),
    "fedumf": Sketch(
        "ttttt", "mean of the models", "idle clients pre-train\nfor their next round", "sssss"
    ),
    "pfedgpa": Sketch(
        "ttttt",
        "mean of the models;\nfinally, generate\npersonal models",
        "train; fine-tune the\ngenerated model",
    ),
    "pfedhn": Sketch("ttttt", "a hypernetwork generates\neach client's model", "train"),
}


def box(axes: Axes, x: float, y: float, width: float, height: float) -> None:
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.04", fill=False, edgecolor=GREY)
    )


def bar(axes: Axes, corner: tuple[float, float], width: float, code: str) -> None:
    """One layer."""
    colour, hatch = LOOKS[SHORT[code]]
    axes.add_patch(
        Rectangle(
            corner, width, 0.15, facecolor=colour, hatch=hatch, edgecolor="white", linewidth=0.5
        )
    )


def model(axes: Axes, x: float, y: float, layers: str) -> None:
    """A network as five bars, input below and output above, narrower towards the output."""
    for number, code in enumerate(layers):
        if code == " ":
            continue
        width = 0.9 - 0.1 * number
        bar(axes, (x - width / 2, y + 0.2 * number), width, code)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], both: bool = True
) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="<|-|>" if both else "-|>", mutation_scale=12, color=GREY
        )
    )


def exchange(sketch: Sketch, path: Path) -> None:
    """A server above two clients."""
    figure = sheet(5.2, 3.6)
    axes = figure.subplots()
    box(axes, 2.0, 2.35, 3.2, 1.25)
    model(axes, 2.6, 2.45, "".join(code if code in "tm" else " " for code in sketch.layers))
    axes.text(4.15, 2.98, sketch.server, ha="center", va="center", fontsize=8.5)
    axes.text(2.02, 3.68, "server", fontsize=8.5, color=GREY)
    for place, left in enumerate((0.1, 3.3)):
        box(axes, left, 0.1, 2.9, 1.25)
        model(axes, left + 0.6, 0.2, sketch.layers)
        if sketch.second:
            model(axes, left + 1.55, 0.2, sketch.second)
        middle = left + (1.45 if sketch.second else 1.95)
        height, align = (0.02, "top") if sketch.second else (0.72, "center")
        axes.text(middle, height, sketch.client, ha="center", va=align, fontsize=8.5)
        axes.text(left + 0.02, 1.43, f"client {place + 1}", fontsize=8.5, color=GREY)
        if sketch.arrows == "both":
            arrow(axes, (left + 1.45, 1.42), (2.9 + 1.4 * place, 2.28))
    used = [SHORT[code] for code in dict.fromkeys(sketch.layers + sketch.second)]
    words = {
        "travels": "shared",
        "stays": "stays with its client",
        "frozen": "frozen",
        "sometimes": "sometimes shared",
    }
    for number, kind in enumerate(used):
        colour, hatch = LOOKS[kind]
        corner = (0.1, 3.5 - 0.28 * number)
        axes.add_patch(
            Rectangle(corner, 0.22, 0.15, facecolor=colour, hatch=hatch, edgecolor="white")
        )
        axes.text(0.4, 3.5 - 0.28 * number, words[kind], fontsize=8, va="bottom")
    axes.set(xlim=(0, 6.3), ylim=(-0.35 if sketch.second else 0, 3.9))
    axes.axis("off")
    save(figure, path)


def selection(path: Path) -> None:
    """GenFed: returned models with their fitness; only the best are averaged."""
    figure = sheet(5.2, 3.6)
    axes = figure.subplots()
    fitness = (0.55, 0.9, 0.25, 0.8, 0.4)
    for place, value in enumerate(fitness):
        chosen, x = value > 0.7, 0.7 + 1.2 * place
        colour = COLOURS[0] if chosen else PALE
        for number in range(5):
            width = 0.8 - 0.1 * number
            axes.add_patch(
                Rectangle((x - width / 2, 0.25 + 0.18 * number), width, 0.13, facecolor=colour)
            )
        axes.text(x, 0.0, f"client {place + 1}", ha="center", fontsize=8.5, color=GREY)
        axes.add_patch(Rectangle((x - 0.28, 1.55), 0.56, 0.9 * value, facecolor=colour))
        axes.text(x, 1.6 + 0.9 * value, f"{value:.2f}", ha="center", fontsize=8.5)
        arrow(axes, (x, 1.2), (x, 1.5), both=False)
        if chosen:
            arrow(axes, (x, 2.62), (3.1 + 0.15 * (place - 2), 3.2), both=False)
    axes.text(-0.05, 1.95, "fitness", fontsize=8.5, color=GREY, rotation=90, va="center")
    box(axes, 2.2, 3.3, 1.8, 0.4)
    axes.text(3.1, 3.5, "next generation", ha="center", va="center", fontsize=9)
    axes.set(xlim=(-0.2, 6.2), ylim=(-0.15, 3.85))
    axes.axis("off")
    save(figure, path)


if __name__ == "__main__":
    for name, sketch in SKETCHES.items():
        exchange(sketch, FIGURES / f"{name}.svg")
    selection(FIGURES / "genfed.svg")
