"""Draw the figures of the method pages and of shifts: `python docs/draw.py`.

Blue layers are shared, orange ones stay with their client, grey ones are frozen.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from fedhelix.data import Dataset, load, partitions, shifted
from fedhelix.data.shifts import KINDS
from fedhelix.report.style import ALARM, COLOURS, GREY, PALE, save, sheet

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
    "fedala": Sketch(
        "ttttt", "mean of the models", "learn how much of the\nnew head to take; train", "fffss"
    ),
    "fedlc": Sketch("ttttt", "mean of the models", "train with margins\nby class sizes"),
    "fedit": Sketch("ftftf", "mean of A\nand of B", "train the adapters"),
    "ffa-lora": Sketch("ftftf", "mean of B", "train B;\nA stays as drawn"),
    "fedsa-lora": Sketch("ftfsf", "mean of A", "train both;\nB stays here"),
    "flexlora": Sketch(
        "ftftf", "mean of B A, cut to\neach client's rank", "train adapters\nof its own rank"
    ),
    "heterofl": Sketch(
        "ttttt", "mean of every value over\nthose who have it", "train its first\nchannels"
    ),
    "fedrolex": Sketch(
        "ttttt", "mean of every value over\nthose who have it", "train its channels\nof this round"
    ),
    "fednova": Sketch(
        "ttttt", "mean update per\nlocal work", "train; tell how far\nthe steps went"
    ),
    "feddbe": Sketch(
        "ttttt",
        "mean of the models",
        "train with a memory\nadded to the features",
        "   s ",
    ),
    "pfedme": Sketch(
        "ttttt", "mean of the models", "train its own near the\nglobal; move that to it", "sssss"
    ),
    "fedpac": Sketch(
        "ttttt",
        "mean of the bodies; for\neach client a mix of heads",
        "first the head, then the\nbody, near prototypes",
    ),
    "fedamp": Sketch(
        "ttttt",
        "for each client a mean\nof models like its own",
        "train near that mean;\nuse what it trained",
        "sssss",
    ),
    "ifca": Sketch(
        "ttttt", "several models, each the\nmean of its clients'", "choose the best one;\ntrain it"
    ),
    "knn-per": Sketch(
        "ttttt", "mean of the models", "train; use it with the\nlabels of near samples"
    ),
    "fedcp": Sketch(
        "ttttt",
        "mean of bodies, policies,\nand heads",
        "train; a policy divides the\nfeatures between two heads",
        "    s",
    ),
    "gpfl": Sketch(
        "tttts",
        "mean of bodies, valves,\nclass embeddings",
        "train for the embeddings\nand for its own head",
    ),
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
    "private": Sketch(
        "ttttt",
        "sum of the updates\nplus noise, within a budget",
        "train; clip the update",
        "ttttt",
    ),
    "secure": Sketch(
        "ttttt",
        "sum of all updates;\nmasks cancel",
        "train; mask the update",
        "sssss",
    ),
    "dp-sgd": Sketch(
        "ttttt", "mean of the models,\nwithin a budget", "train on clipped\nand noisy gradients"
    ),
    "calibrated": Sketch(
        "ttttt",
        "mean of the models,\nfor balanced classes",
        "train and use with\nits class shares added",
    ),
    "ancestors": Sketch(
        "ttttt", "last model to train,\nmean over rounds to use", "train one,\nuse the other"
    ),
    "denoised-heads": Sketch(
        "ttttt", "mean of the models; of\neach head what is no noise", "train with\nits own head"
    ),
    "warm-start": Sketch("ttttt", "before round 1: train\non its own samples", "train from there"),
    "finish": Sketch(
        "ttttt",
        "mean of the models",
        "in the end: fine-tune;\nvalidation decides",
        "sssss",
    ),
    "gene-fl": Sketch(
        "ssmms", "per cluster: mean of\nthe genes", "train near the cluster;\nsend a small gene"
    ),
    "fedbuff": Sketch(
        "ttttt", "a step whenever some\nupdates are there", "train; nobody waits\nfor others"
    ),
    "fedasync": Sketch(
        "ttttt", "mix in every model\nwhen it arrives", "train; nobody waits\nfor others"
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
    used = [SHORT[code] for code in dict.fromkeys(sketch.layers + sketch.second) if code != " "]
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


def culling(path: Path) -> None:
    """Cull: the loss of the mean without each model, beside that of the mean of all."""
    figure = sheet(5.2, 3.6)
    axes = figure.subplots()
    without, everyone = (0.74, 0.8, 0.35, 0.76, 0.72), 0.65
    for place, loss in enumerate(without):
        kept, x = loss > everyone, 0.9 + 1.1 * place
        colour = COLOURS[0] if kept else PALE
        for number in range(5):
            width = 0.8 - 0.1 * number
            corner = (x - width / 2, 0.25 + 0.18 * number)
            axes.add_patch(Rectangle(corner, width, 0.13, facecolor=colour))
        axes.text(x, 0.0, f"client {place + 1}", ha="center", fontsize=8.5, color=GREY)
        axes.add_patch(Rectangle((x - 0.28, 1.5), 0.56, 1.4 * loss, facecolor=colour))
        axes.text(x, 1.55 + 1.4 * loss, f"{loss:.2f}", ha="center", fontsize=8.5)
        if kept:
            arrow(axes, (x, 2.85), (3.1 + 0.15 * (place - 2), 3.3), both=False)
        else:
            axes.text(x, 2.55, "dropped", ha="center", fontsize=8.5, color=GREY)
    level = 1.5 + 1.4 * everyone
    axes.plot([0.4, 5.7], [level, level], color=ALARM, linewidth=1, linestyle="--")
    axes.text(5.78, level, "mean\nof all", fontsize=8.5, color=ALARM, va="center")
    words = "validation loss\nof the mean without it"
    axes.text(0.2, 2.1, words, fontsize=8, color=GREY, rotation=90, va="center", ha="center")
    box(axes, 2.1, 3.4, 2.0, 0.4)
    axes.text(3.1, 3.6, "mean of the others", ha="center", va="center", fontsize=9)
    axes.set(xlim=(-0.2, 6.4), ylim=(-0.15, 3.95))
    axes.axis("off")
    save(figure, path)


STAGE = (3.3, 0.76)  # width and height of a stage
CLIENT, SERVER = 2.0, 7.6  # where the stages of either side are


def stage(axes: Axes, x: float, y: float, title: str, text: str) -> None:
    """One part of a method: its name, and what it does."""
    width, height = STAGE
    box(axes, x - width / 2, y - height / 2, width, height)
    axes.text(x, y + 0.19, title, ha="center", va="center", fontsize=9, fontweight="bold")
    axes.text(x, y - 0.17, text, ha="center", va="center", fontsize=8.5)


def helix(path: Path) -> None:
    """A round of Helix, clockwise from the client's training, and what is used in the end."""
    figure = sheet(7.4, 4.6)
    axes = figure.subplots()
    edge = STAGE[0] / 2 + 0.08
    for x, name in ((CLIENT, "client"), (SERVER, "server")):
        axes.add_patch(
            FancyBboxPatch(
                (x - 1.85, -0.5), 3.7, 6.2, boxstyle="round,pad=0.04", facecolor="#f4f4f4",
                edgecolor="none",
            )
        )  # fmt: skip
        axes.text(x - 1.85, 5.85, name, fontsize=9, color=GREY)
    stage(axes, CLIENT, 5.0, "compact", "one bit per weight, error feedback")
    stage(axes, CLIENT, 2.9, "calibrated", "train with log class shares")
    stage(axes, CLIENT, 1.3, "personal model", "add its own log class shares")
    stage(axes, CLIENT, 0.1, "finish", "fine-tune, unless validation objects")
    stage(axes, SERVER, 5.0, "decode", "received model + update")
    stage(axes, SERVER, 3.95, "cull", "drop models that harm the mean")
    stage(axes, SERVER, 2.9, "momentum", "mean update + last step")
    stage(axes, SERVER, 1.3, "ancestors", "mean of the models so far")
    for x, top, bottom in ((SERVER, 5.0, 3.95), (SERVER, 3.95, 2.9), (SERVER, 2.9, 1.3)):
        arrow(axes, (x, top - 0.38), (x, bottom + 0.38), both=False)
    arrow(axes, (CLIENT, 3.28), (CLIENT, 4.62), both=False)
    arrow(axes, (CLIENT, 0.92), (CLIENT, 0.48), both=False)
    exchanged = (
        (5.0, "packed update", CLIENT, edge),
        (2.9, "model to train", SERVER, -edge),
        (1.3, "model to use", SERVER, -edge),
    )
    for y, words, start, out in exchanged:
        arrow(axes, (start + out, y), (CLIENT + SERVER - start - out, y), both=False)
        axes.text((CLIENT + SERVER) / 2, y + 0.13, words, ha="center", fontsize=8.5, color=GREY)
    axes.set(xlim=(0, 9.6), ylim=(-0.65, 6.15))
    axes.axis("off")
    save(figure, path)


def shifts(path: Path) -> None:
    """One digit as four groups of clients have it, for each kind of shift."""
    digits = load("digits")
    tint = torch.tensor([1.0, 0.55, 0.1]).view(1, 3, 1, 1)  # orange, so that hues can be seen
    x = (digits.x[10:14].float() * tint).round().to(torch.uint8)
    four = Dataset("four", x, digits.y[10:14], x, digits.y[10:14], classes=10)
    figure = sheet(6.4, 1.15 * len(KINDS))
    panels = figure.subplots(len(KINDS), 4)
    for row, kind in zip(panels, KINDS, strict=True):
        splits = partitions.iid(4, valid=0).split(four, 0)
        data, _, _ = shifted(four, splits, f"{kind}:4", seed=0)
        for group, axes in enumerate(row):
            sample = 4 * group  # the first sample, in the copy of this group
            axes.imshow(data.x[sample].permute(1, 2, 0))
            axes.set_xlabel(f"label {int(data.y[sample])}", fontsize=8)
            axes.set(xticks=[], yticks=[])
        row[0].set_ylabel(f"{kind}:4", fontsize=9)
    for group, axes in enumerate(panels[0]):
        axes.set_title(f"group {group}", fontsize=9)
    save(figure, path)


if __name__ == "__main__":
    for name, sketch in SKETCHES.items():
        exchange(sketch, FIGURES / f"{name}.svg")
    selection(FIGURES / "genfed.svg")
    culling(FIGURES / "cull.svg")
    helix(FIGURES / "helix.svg")
    shifts(FIGURES.parent / "shifts.png")
