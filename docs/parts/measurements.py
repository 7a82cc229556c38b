"""Tables of benchmarks: accuracy, speed, memory, faults."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from fedhelix.core.bounds import rounded_up
from fedhelix.store.progress import human_bytes
from parts.files import RESULTS, ROOT, exists, fashion, percent, result, table

GPU = {
    "w1": "10 clients per round",
    "w1-100-clients": "100 clients per round",
    "sweep": "30 runs (5 seeds × 6 learning rates) at once, 10 clients per round each",
    "resnet18-float32": "ResNet-18 on CIFAR-10, 10 clients per round, PyTorch's default precision",
    "resnet18-bfloat16": "the same in bfloat16, against the plain loop in default precision",
}
FRESH = {
    "plain": "plain loop",
    "first process": "batched, first process on the machine",
    "second process": "batched, second process",
    "third process": "batched, third process",
}
DEEP = {
    "fedavg float32": "FedAvg, PyTorch's default precision",
    "fedavg bfloat16": "FedAvg, bfloat16",
    "gene-fl bfloat16": "GENE-FL, bfloat16",
    "helix bfloat16": "Helix, bfloat16",
}
RACE = {
    "fedhelix": "fedhelix {}, `parallel`, two workers",
    "pfl": "pfl {}",
    "flower": "Flower {}, simulation",
    "blazefl": "BlazeFL {}",
    "plain": "plain loop, PyTorch {}",
}
CLUSTER = {
    "short": "digits, 20 of 100 clients per round, 5 epochs",
    "long": "the same, 25 epochs",
}
SITES = {
    "warm": "`fedhelix site`: a long-lived worker process",
    "flower": "Flower's SuperNode: a process per message",
}


def table1() -> str:
    """pFedGPA's Table 1, the methods without a generator."""
    rows = [
        [method, f"{row['mean']:.1f} ± {row['se']:.1f}", f"{row['paper']:.2f}", _agreement(row)]
        for method, row in fashion().items()
        if method != "pfedgpa"
    ]
    return table(["method", "ours %", "paper %", "within two standard errors "], rows)


def _agreement(row: dict[str, float]) -> str:
    difference = row["mean"] - row["paper"]
    if abs(difference) <= 2 * row["se"]:
        return "yes"
    return f"no: ours is {abs(difference):.1f} {'better' if difference > 0 else 'worse'}"


def gpu() -> str:
    """Speed on a GPU."""
    measured = result("speed-gpu")
    rows = []
    for key in filter(measured.__contains__, GPU):
        seconds = measured[key]["seconds_per_round"]
        times = [f"{seconds['plain']:.3g}", f"{seconds['ours']:.3g}"]
        rows.append([GPU[key], *times, f"{measured[key]['ratio']:.1f}"])
    return table(["workload", "plain loop, s per round", "batched, s per round", "ratio"], rows)


def deep() -> str:
    """ResNet-18 in GENE-FL's setting on a GPU."""
    measured = result("speed-deep")
    steps = 10 * 70  # ten clients, ten epochs of seven batches
    plain = measured["plain loop"]["seconds_per_round"][-1]
    rows = [["plain loop, FedAvg", f"{plain:.2f}", f"{1000 * plain / steps:.1f}", "1"]]
    for key, words in DEEP.items():
        seconds = statistics.median(measured[key]["seconds_per_round"][1:])
        step = f"{measured[key]['ms_per_client_step']:.2f}"
        rows.append([words, f"{seconds:.2f}", step, f"{plain / seconds:.1f}"])
    heads = ["ResNet-18, ten clients, ten epochs", "s per round", "ms per client step", "ratio"]
    return table(heads, rows)


def fresh() -> str:
    """Twelve rounds in a fresh process."""
    measured = result("speed-fresh")
    rows = []
    for key, words in FRESH.items():
        first, total = measured[key]["seconds"][0], measured[key]["total"]
        rows.append(
            [words, f"{first:.1f}", f"{total:.1f}", f"{measured['plain']['total'] / total:.1f}"]
        )
    return table(["twelve rounds in a fresh process", "first round, s", "all, s", "ratio"], rows)


def race() -> str:
    """The CPU race of all simulators."""
    measured = result("race")
    figures: dict[str, list[str]] = {}
    for row in measured["rows"]:
        memory = measured[row["workload"]]["peak_memory_MiB"][row["contestant"]]["pss"]
        figures.setdefault(RACE[row["contestant"]].format(row["version"]), []).extend(
            [
                f"{row['seconds_per_round']:.2f}",
                f"{row['relative_to_fedhelix']:.2f}",
                f"{memory:.0f}",
            ]
        )
    heads = [
        f"{workload}, {what}"
        for workload in ("W1", "W2")
        for what in ("s per round", "relative to ours", "MiB")
    ]
    return table(["simulator", *heads], [[words, *cells] for words, cells in figures.items()])


def cluster() -> str:
    """The ray engine against the parallel engine on one machine."""
    measured = result("cluster")
    rows = []
    for key, words in CLUSTER.items():
        races = [one["ratio"] for one in measured[key]["repetitions"]]
        low, high = min(one["p10"] for one in races), max(one["p90"] for one in races)
        rows.append([words, f"{measured[key]['ratio']:.2f}", f"{low:.2f} to {high:.2f}"])
    return table(["workload", "speed of `ray` relative to `parallel`", "range"], rows)


def dashboard() -> str:
    """How fast the dashboard is, and how much memory it needs."""
    measured = result("dashboard")
    drawn = measured["compare_ten_in_browser_s"]
    slowest = f"{max(drawn):.2f} s" if drawn else "–"
    rows = [
        ["list of all runs, first time", f"{measured['list_first_s']:.2f} s", "0.5 s"],
        ["list of all runs, later", f"{measured['list_again_s']:.2f} s", "0.5 s"],
        ["ten runs compared, drawn in the browser (slowest of five)", slowest, "2 s"],
        ["memory, all runs loaded", f"{measured['memory_peak_MiB']} MiB", "300 MiB"],
    ]
    size = f"{measured['runs']} runs of {measured['rounds']} rounds"
    return table([size, "measured", "target"], rows)


def deployment() -> str:
    """The overhead of a round across processes."""
    rows = [
        [
            SITES[row["way"]],
            f"{row['overhead_median']:.1f}",
            f"{row['processor_seconds_per_round']['superlink']:.1f}",
            f"{row['processor_seconds_per_round']['site']:.2f}",
            " → ".join(f"{load:.1f}" for load in row["load_average_before_and_after"]),
        ]
        for row in result("deploy-overhead")["rows"]
    ]
    heads = ["overhead per round, s", "SuperLink's CPU, s", "a connection's CPU, s", "load average"]
    return table(["sites", *heads], rows)


def faults() -> str:
    """The fault matrix, as its script wrote it."""
    return (RESULTS / "deploy-faults.md").read_text(encoding="utf-8")


def choosing() -> str:
    """Measured accuracies for the choice of a method, the best first."""
    paper = fashion()
    measured = sorted(result("choosing")["table"], key=lambda row: -row["personal_accuracy"])
    rows = []
    for row in measured:
        method = row["method"]
        theirs = paper.get(method)
        rows.append(
            [
                f"[`{method}`](methods/{method}.md)",
                percent(row, "personal_accuracy"),
                f"{100 * row['personal_p10']:.1f}",
                human_bytes(row["uplink_bytes"]),
                f"{theirs['mean']:.1f} ± {theirs['se']:.1f}" if theirs else "–",
            ]
        )
    heads = ["digits, personal %", "10th percentile %", "uploaded", "Fashion-MNIST, personal %"]
    return table(["method", *heads], rows)


def widths() -> str:
    """HeteroFL and FedRolex against training alone, by the client's width."""
    rows: dict[float, list[dict[str, float]]] = {}
    for row in result("widths")["widths"]:
        rows.setdefault(row["width"], []).append(row)
    methods = ("heterofl", "fedrolex", "alone")
    return table(
        ["width", *methods],
        [[f"{width:g}", *(_mean_percent(found, name) for name in methods)]
         for width, found in rows.items()],
    )  # fmt: skip


def lengths() -> str:
    """Batches that are cut to their longest sequence, against all padding."""
    measured = result("lengths")
    width = {"serial": measured["widths"]["batch"], "batched": measured["widths"]["stack"]}
    rows = [
        [
            f"`{row['engine']}`",
            f"{width[row['engine']]:.0f} of {measured['widths']['padded']}",
            f"{row['padded_s']:.2f}",
            f"{row['cut_s']:.2f}",
            f"{row['faster']:.2f}",
        ]
        for row in measured["engines"]
    ]
    heads = ["engine", "mean width", "padded, s per round", "cut, s per round", "ratio"]
    return table(heads, rows)


def whole() -> str:
    """The whole network of HeteroFL and FedRolex, where no client has it."""
    found, methods = result("widths")["whole"], ("heterofl", "fedrolex")
    return table(methods, [[_mean_percent(found, name) for name in methods]])


def heirs() -> str:
    """A newcomer of half the width, from a gene and from new weights."""
    measured = result("heirs")
    rows = []
    for network in dict.fromkeys(row["network"] for row in measured["rows"]):
        found = [row for row in measured["rows"] if row["network"] == network]
        for key, start in {"gene": "the gene", "new": "new weights"}.items():
            by_round = [
                [{"accuracy": row[key][place]} for row in found]
                for place in range(len(measured["rounds"]))
            ]
            accuracies = [_mean_percent(each, "accuracy") for each in by_round]
            rows.append([f"`{network}`", start, *accuracies])
    heads = ["at arrival", *(f"after round {count}" for count in measured["rounds"][1:])]
    return table(["network", "half of it starts from", *heads], rows)


def helix_cost() -> str:
    """A round of Helix relative to FedAvg's, by engine and epochs."""
    rows, devices = [], {"cpu": "CPU", "cuda": "H200"}
    names = [f"helix-cost{which}" for which in ("", "-batched", "-ray", "-gpu")]
    for found in map(result, names):
        for run in found["runs"]:
            fedavg, helix = (
                _fastest(run["all_seconds"], name, found["rounds"]) for name in ("fedavg", "helix")
            )
            seconds = [f"{fedavg:.2f}", f"{helix:.2f}", f"{helix / fedavg:.2f}"]
            engine = f"`{run['engine']}`, {devices[found['device']]}"
            rows.append([engine, str(run["epochs"]), *seconds])
    return table(["engine", "epochs", "FedAvg, s", "Helix, s", "ratio"], rows)


def _fastest(repeats: list[dict[str, list[float]]], name: str, rounds: int) -> float:
    """The mean of the last rounds, each as fast as in the fastest repeat."""
    fastest = [min(times) for times in zip(*(one[name] for one in repeats), strict=True)]
    return statistics.mean(fastest[-rounds:])


def characters() -> str:
    """Perplexity of the next character, before and after the rounds."""
    found, rows = result("characters")["rows"], []
    for method in dict.fromkeys(row["method"] for row in found):
        own = [row for row in found if row["method"] == method]
        before = statistics.mean(row["perplexity before"] for row in own)
        after = [row["perplexity"][-1] for row in own]
        each = ", ".join(f"{value:.2f}" for value in after)
        cells = [f"{before:.2f}", f"{statistics.mean(after):.2f}", each]
        rows.append([f"`{method}`", *cells, human_bytes(own[0]["uplink_bytes"])])
    return table(["method", "before", "after", "each seed", "uploaded"], rows)


def _mean_percent(rows: list[dict[str, float]], key: str) -> str:
    """Mean and standard error over seeds."""
    values = [100 * row[key] for row in rows]
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.1f} ± {error:.1f} %"


def scaffold() -> str:
    """SCAFFOLD with both kinds of control and two step sizes, against FedAvg."""
    measured = {
        tuple(name.split("; ")): one["table"][0]
        for name, one in result("scaffold").items()
        if isinstance(one, dict) and "table" in one
    }
    kinds = {"FedAvg": "FedAvg"} | {kind: f"`control = {kind}`" for kind in ("gradient", "steps")}
    rows = [
        [steps, *(percent(measured[steps, kind], "accuracy") for kind in kinds)]
        for steps in dict.fromkeys(steps for steps, _ in measured)
    ]
    return table(["clients' steps", *kinds.values()], rows)


def participation() -> str:
    """FedAU against FedAvg where clients take part at different rates."""
    rows = []
    for name, measured in result("participation").items():
        if isinstance(measured, dict) and "table" in measured:
            by_method = {row["method"]: row for row in measured["table"]}
            values = [
                percent(by_method[method], key)
                for key in ("accuracy", "personal_p10")
                for method in ("fedavg", "fedau")
            ]
            rows.append([name, *values])
    heads = [
        f"{what}, {method}"
        for what in ("global %", "10th percentile of the clients %")
        for method in ("FedAvg", "FedAU")
    ]
    return table(["local training", *heads], rows)


def masking() -> str:
    """What secure aggregation costs in a round."""
    measured = result("masking")
    rows = [
        [
            f"{row['clients']}",
            f"{row['neighbours']}",
            f"{1000 * row['client_seconds']:.0f}",
            f"{1000 * row['server_seconds']:.0f}",
            f"{row['protocol_bytes_per_client'] / 1000:.0f}",
        ]
        for row in measured["rows"]
    ]
    heads = ["neighbours", "a client's ms", "the server's ms", "kB of keys and shares per client"]
    where = f"one core of {measured['machine']['processor']}"
    return f"`{measured['command']}` ({where})\n\n{table(['clients', *heads], rows)}"


def masked_words() -> str:
    """Bytes and accuracy with words of fewer bits."""
    measured = result("masked_words")["digits"]
    names = measured["command"].partition(" --")[0].split()[2:]  # with what was set for each
    rows = [
        [name, f"{row['uplink_bytes'] / 1e6:.2f}", percent(row, "accuracy")]
        for name, row in zip(names, measured["table"], strict=True)
    ]
    heads = ["method", "MB uploaded", "accuracy %"]
    return f"`{measured['command']}`\n\n{table(heads, rows)}"


def privacy() -> str:
    """Accuracy against epsilon."""
    if not exists("privacy"):
        return "Not run yet.\n"
    measured = result("privacy")
    rates = {(row["epsilon"], row["name"]): row["lr"] for row in measured["rows"]}
    rows = []
    for (epsilon, name), lr in rates.items():
        same = [row for row in measured["rows"] if (row["epsilon"], row["name"]) == (epsilon, name)]
        values = [100 * row["personal_accuracy"] for row in same]
        error = statistics.stdev(values) / len(values) ** 0.5
        noise = f"epsilon {epsilon:g}" if epsilon else "no noise"
        rows.append([noise, name, f"{lr:g}", f"{statistics.mean(values):.1f} ± {error:.1f}"])
    heads = ["noise", "method", "learning rate", "personal accuracy %"]
    shown = "![Personal accuracy of each method against epsilon](figures/privacy.png)\n\n"
    drawn = shown if (ROOT / "docs/figures/privacy.png").exists() else ""
    return f"{drawn}`{measured['command']}` ({measured['device']})\n\n{table(heads, rows)}"


def audit(name: str) -> str:
    """What `fedhelix audit` reconstructed."""
    if not exists(name):
        return "Not run yet.\n"
    measured = result(name)
    rows = [
        [
            row["method"],
            row["attacker"],
            f"{100 * row['seen']:.1f} %",
            f"{row['psnr']:.1f}",
            f"{row['ssim']:.2f}",
        ]
        for row in measured["rows"]
    ]
    heads = ["attacker ", "share of the model seen", "PSNR in dB, median", "SSIM, median"]
    return f"`{measured['command']}`\n\n{table(['method', *heads], rows)}"


def inversion(name: str) -> str:
    """What `fedhelix audit inversion` rebuilt."""
    if not exists(name):
        return "Not run yet.\n"
    measured = result(name)
    rows = [
        [
            row["method"],
            row["attacker"],
            f"{100 * row['seen']:.0f} %",
            "not seen" if row["labels"] is None else f"{100 * row['labels']:.0f} %",
            "none" if row["epsilon"] is None else rounded_up(row["epsilon"]),
            f"{row['psnr']:.1f}",
            f"{row['ssim']:.2f}",
        ]
        for row in measured["rows"]
    ]
    heads = ["the server sees ", "share of the model", "labels found", "epsilon"]
    heads += ["PSNR in dB, median", "SSIM, median"]
    return f"`{measured['command']}`\n\n{table(['method', *heads], rows)}"


def membership(name: str) -> str:
    """What `fedhelix audit membership` could tell."""
    if not exists(name):
        return "Not run yet.\n"
    measured = result(name)
    rows = [
        [
            row["method"],
            f"{row['advantage']:.2f}",
            *_guarantee(row),
            f"{100 * row['accuracy']:.1f}",
        ]
        for row in measured["rows"]
    ]
    heads = ["advantage", "epsilon", "delta", "bound of the advantage", "accuracy %"]
    return f"`{measured['command']}`\n\n{table(['method', *heads], rows)}"


def _guarantee(row: Mapping[str, Any]) -> list[str]:
    """Epsilon, delta and the bound of the advantage; older files give delta only through it."""
    epsilon, bound = row["epsilon"], row["bound"]
    if epsilon is None:
        return ["none"] * 3
    implied = (bound * (math.exp(epsilon) + 1) - math.expm1(epsilon)) / 2
    return [rounded_up(epsilon), f"{row.get('delta', implied):.3g}", rounded_up(bound)]
