"""Fills the generated parts of the documentation: `python docs/make.py`; with `--check` it only
says what is stale.

A part stands between `<!-- made: NAME -->` and `<!-- end -->`. Numbers come from
benchmarks/results/*.json, options from the methods themselves; nobody types them.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import statistics
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from claims import claims

from fedhelix import METHODS, FedAvg, Method, Wrapper
from fedhelix.papers.figures import image
from fedhelix.papers.tables import grid, has_paper
from fedhelix.report.style import save
from fedhelix.robust.defences import Defence
from fedhelix.store.progress import human_bytes

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PART = re.compile(r"(<!-- made: ([^>]+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are numbers unless their header ends in a space."""
    rule = [
        "---" if not place or header.endswith(" ") else "---:"
        for place, header in enumerate(headers)
    ]
    return "".join(
        f"| {' | '.join(cells)} |\n"
        for cells in ([header.strip() for header in headers], rule, *rows)
    )


def result(name: str) -> dict[str, Any]:
    """A committed measurement."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def link(name: str) -> str:
    """Where its file is, from a page directly in docs/."""
    return f"[`{name}.json`](../benchmarks/results/{name}.json)"


def fashion() -> dict[str, dict[str, float]]:
    """pFedGPA's Table 1 on Fashion-MNIST with 20 clients, by method: mean, standard error, and the
    paper's figure.
    """
    cells = [
        cell
        for cell in result("pfedgpa-table1-gpu")["cells"]
        if cell["column"] == "Fashion-MNIST 20"
    ]
    return {
        cell["method"]: cell["accuracy"]
        for cell in cells
        if cell["runs"] and cell["accuracy"]["paper"]
    }


def table1() -> str:
    """Those of its methods that have no generator."""
    rows = [
        [method, f"{row['mean']:.1f} ± {row['se']:.1f}", f"{row['paper']:.2f}", verdict(row)]
        for method, row in fashion().items()
        if method != "pfedgpa"
    ]
    return table(["method", "ours %", "paper %", "within two standard errors "], rows)


def verdict(row: dict[str, float]) -> str:
    """Whether ours and the paper's agree."""
    difference = row["mean"] - row["paper"]
    if abs(difference) <= 2 * row["se"]:
        return "yes"
    return f"no: ours is {abs(difference):.1f} {'better' if difference > 0 else 'worse'}"


def gpu() -> str:
    """The GPU race."""
    found = result("speed-gpu")
    workloads = {
        "w1": "10 clients per round",
        "w1-100-clients": "100 clients per round",
        "sweep": "30 runs (5 seeds × 6 learning rates) at once, 10 clients per round each",
        "resnet18-float32": "ResNet-18 on CIFAR-10, 10 clients per round, PyTorch's default precision",
        "resnet18-bfloat16": "the same in bfloat16 against the plain loop in default precision",
    }
    rows = []
    for key, words in workloads.items():
        if key in found:
            seconds = found[key]["seconds_per_round"]
            rows.append(
                [
                    words,
                    f"{seconds['plain']:.3g}",
                    f"{seconds['ours']:.3g}",
                    f"{found[key]['ratio']:.1f}",
                ]
            )
    return table(["workload", "plain loop, s per round", "batched, s per round", "ratio"], rows)


def cpu() -> str:
    """The CPU race."""
    found = result("speed-cpu")
    names = {
        "fedhelix": "fedhelix, `parallel`, two workers",
        "pfl": "pfl 0.6 in its best setting",
        "flower": "Flower's simulation in its best setting",
        "plain": "plain PyTorch loop in its best setting",
        "pfl-default": "pfl as installed",
        "flower-default": "Flower's simulation as installed",
    }
    rows = []
    for key, words in names.items():
        row = [words]
        for workload in ("W1", "W2"):
            race = found[workload]
            ratio = (
                race["ratio_to_fedhelix"][key]["median"]
                if key in race["ratio_to_fedhelix"]
                else 1.0
            )
            row += [f"{race['seconds_per_round'][key]['median']:.2f}", f"{ratio:.2f}"]
            row.append(f"{race['peak_memory_MiB'][key]['pss']:.0f}")
        rows.append(row)
    heads = [
        f"{workload}, {what}"
        for workload in ("W1", "W2")
        for what in ("s per round", "times ours", "MiB")
    ]
    return table(["contestant", *heads], rows)


def dashboard() -> str:
    """What the dashboard bears."""
    found = result("dashboard")
    drawn = found["compare_ten_in_browser_s"]
    rows = [
        ["list of all runs, first time", f"{found['list_first_s']:.2f} s", "0.5 s"],
        ["list of all runs, later", f"{found['list_again_s']:.2f} s", "0.5 s"],
        [
            "ten runs compared, drawn in the browser (slowest of five)",
            f"{max(drawn):.2f} s" if drawn else "–",
            "2 s",
        ],
        ["memory, all runs read", f"{found['memory_peak_MiB']} MiB", "300 MiB"],
    ]
    return table([f"{found['runs']} runs of {found['rounds']} rounds", "measured", "aim"], rows)


def deployment() -> str:
    """What a round across processes costs beyond the work itself."""
    ways = {
        "warm": "`fedhelix site`: a warm worker",
        "flower": "Flower's SuperNode: a process per message",
    }
    rows = [
        [
            ways[row["way"]],
            f"{row['overhead_median']:.1f}",
            f"{row['processor_seconds_per_round']['superlink']:.1f}",
            f"{row['processor_seconds_per_round']['site']:.2f}",
            " → ".join(f"{load:.1f}" for load in row["load_average_before_and_after"]),
        ]
        for row in result("deploy-overhead")["rows"]
    ]
    headers = [
        "sites",
        "overhead per round, s",
        "SuperLink's CPU, s",
        "a connection's CPU, s",
        "load of the machine",
    ]
    return table(headers, rows)


def faults() -> str:
    """The fault matrix, as its script wrote it."""
    return (RESULTS / "deploy-faults.md").read_text(encoding="utf-8")


def choosing() -> str:
    """Measured figures for the choice of a method."""
    rows = []
    paper = fashion()
    digits = {row["method"]: row for row in result("choosing")["table"]}
    for method in sorted(digits, key=lambda name: -digits[name]["personal_accuracy"]):
        row = digits[method]
        rows.append([
            f"[`{method}`](methods/{method}.md)",
            f"{100 * row['personal_accuracy']:.1f} ± {100 * row['personal_accuracy_se']:.1f}",
            f"{100 * row['personal_p10']:.1f}",
            human_bytes(row["uplink_bytes"]),
            f"{paper[method]['mean']:.1f} ± {paper[method]['se']:.1f}" if method in paper else "–",
        ])  # fmt: skip
    return table(
        ["method", "digits, personal %", "worst tenth %", "uploaded", "Fashion-MNIST, personal %"],
        rows,
    )


def participation() -> str:
    """FedAU against FedAvg where clients come unequally often."""
    rows = []
    for name, found in result("participation").items():
        if isinstance(found, dict) and "table" in found:
            by_method = {row["method"]: row for row in found["table"]}
            figures = [
                f"{100 * by_method[method][key]:.1f} ± {100 * by_method[method][f'{key}_se']:.1f}"
                for key in ("accuracy", "personal_p10")
                for method in ("fedavg", "fedau")
            ]
            rows.append([name, *figures])
    heads = [
        f"{what}, {method}"
        for what in ("global %", "worst tenth of the clients %")
        for method in ("FedAvg", "FedAU")
    ]
    return table(["local training", *heads], rows)


def options(name: str) -> str:
    """A method's options, from its fields."""
    kind = METHODS[name]
    hints = typing.get_type_hints(kind)
    rows = []
    for field in dataclasses.fields(kind):
        if field.init and field.name != "inner":
            literal = typing.get_origin(hints[field.name]) is typing.Literal
            choices = f" (`{'`, `'.join(typing.get_args(hints[field.name]))}`)" if literal else ""
            default = "auto" if field.default is None else field.default
            rows.append(
                [f"`{field.name}`", f"`{default}`", field.metadata.get("meaning", "") + choices]
            )
    return (
        table(["option", "default ", "meaning "], rows)
        if rows
        else "It has no options of its own.\n"
    )


def results(name: str) -> str:
    """A method's measured figures beside the paper's."""
    rows = []
    found = fashion().get(name)
    if found:
        ours = f"{found['mean']:.1f} ± {found['se']:.1f} %"
        words = "[pFedGPA's Table 1, Fashion-MNIST](../results.md#pfedgpas-table-1-the-methods-without-a-generator)"
        rows.append([words, ours, f"{found['paper']:.2f} %"])
    for row in result("choosing")["table"]:
        if row["method"] == name:
            ours = (
                f"{100 * row['personal_accuracy']:.1f} ± {100 * row['personal_accuracy_se']:.1f} %"
            )
            rows.append(["[digits, 20 clients](../choosing.md#measured)", ours, "–"])
    headers = ["personal accuracy after the last round", "ours", "the paper's"]
    page = f"../results/{name}.md"
    said = (
        f"[Ours beside the paper's]({page}).\n"
        if (ROOT / "docs/methods" / page).exists()
        else appearances(name)
    )
    return (
        "\n".join(filter(None, [said, table(headers, rows) if rows else ""]))
        or "Not measured by itself so far.\n"
    )


def appearances(name: str) -> str:
    """Whose tables a method stands in."""
    files = [path for path in sorted(RESULTS.glob("*-gpu.json")) if "cells" in result(path.stem)]
    there = [
        path.stem
        for path in files
        if any(cell["method"] == name for cell in result(path.stem)["cells"])
    ]
    papers = {"gene-fl": "GENE-FL", "genfed": "GenFed", "pfedgpa": "pFedGPA"}
    links = [
        f"[{papers[key]}'s](../results/{key}.md)"
        for key in papers
        if any(stem.startswith(key) for stem in there)
    ]
    return f"Beside others in {', '.join(links)} tables.\n" if links else ""


def hooks() -> str:
    """The hooks of a method, what they are for, and who overrides them."""
    rows = []
    for hook, function in vars(Method).items():
        if hook.startswith("_") or not inspect.isfunction(function) or hook == "options":
            continue
        side, _, words = (function.__doc__ or "").splitlines()[0].partition(": ")
        side, words = (side.lower(), words) if words else ("both", side)
        requested = ", ".join(list(inspect.signature(function).parameters)[1:])
        who = [name for name in sorted(METHODS) if _overrides(METHODS[name], hook)]
        robust = [name for name in who if issubclass(METHODS[name], Defence)]
        named = [f"`{name}`" for name in who if name not in robust] + (
            ["the defences"] if robust else []
        )
        rows.append(
            [
                side,
                f"`{hook}({requested})`",
                words[:1].lower() + words[1:].rstrip("."),
                ", ".join(named),
            ]
        )
    return table(["side", "hook ", "in one sentence ", "who overrides it "], rows)


def _overrides(kind: type[Method], hook: str) -> bool:
    usual = Wrapper if issubclass(kind, Wrapper) else FedAvg
    return getattr(kind, hook) is not getattr(usual, hook)


def study(name: str, scale: str) -> str:
    """What `fedhelix bench` measured: a table for each measure, or one for all where it has a
    single column.
    """
    if not (RESULTS / f"{name}-{scale}.json").exists():
        return f"It has not been run at scale `{scale}` yet.\n"
    found = result(f"{name}-{scale}")
    run = {cell["column"] for cell in found["cells"] if cell["runs"]}
    missing = list(
        dict.fromkeys(cell["column"] for cell in found["cells"] if cell["column"] not in run)
    )
    found["cells"] = [cell for cell in found["cells"] if cell["column"] in run]
    taken = {cell["column"]: cell.get("train_samples") for cell in found["cells"]}
    told = f"`{found['command']}`, {found['device']}, {seeds_of(found['cells'])}"
    if any(taken.values()):
        sizes = {f"{size:,}" if size else "all" for size in taken.values()}
        each = "; ".join(f"{column}: {size or 'all'}" for column, size in taken.items())
        told += f"; training samples: {sizes.pop() if len(sizes) == 1 else each}"
    told += f"; not run yet: {', '.join(missing)}" if missing else ""
    told += (
        ""
        if all(cell["runs"] for cell in found["cells"])
        else "; – marks what has not been run yet"
    )
    told += "; the paper's figures in brackets" if has_paper(found, found["measures"]) else ""
    told += f" → [`{name}-{scale}.json`](../../benchmarks/results/{name}-{scale}.json)\n"
    grids = {measure: grid(found, measure) for measure in found["measures"]}
    headers, rows = next(iter(grids.values()))
    if len(headers) == 2:
        lines = [
            [row[0], *(texts[place][1] for _, texts in grids.values())]
            for place, row in enumerate(rows)
        ]
        return f"{told}\n{table([headers[1], *grids], lines)}"
    return "\n".join(
        [told, *(f"*{measure}*\n\n{table(*shown)}" for measure, shown in grids.items())]
    )


def seeds_of(cells: Sequence[dict[str, Any]]) -> str:
    """How many seeds most columns have, and which have others."""
    most: dict[str, int] = {}
    for cell in cells:
        most[cell["column"]] = max(cell["runs"], most.get(cell["column"], 0))
    usual = statistics.mode(most.values())
    others = [f"{column}: {count}" for column, count in most.items() if count != usual]
    fewer = sum(0 < cell["runs"] < most[cell["column"]] for cell in cells)
    others += [f"{fewer} cells have fewer"] if fewer else []
    return f"{usual} seed{'s' if usual > 1 else ''}" + (f" ({', '.join(others)})" if others else "")


def drawn(name: str, scale: str) -> str:
    """A picture of what `fedhelix bench` measured."""
    if not (RESULTS / f"{name}-{scale}.json").exists():
        return "\n"
    found, place = result(f"{name}-{scale}"), f"figures/studies/{name}-{scale}.png"
    figure = image(found)
    if figure is None:
        return "\n"
    if "--check" not in sys.argv and not (ROOT / "docs" / place).exists():
        save(figure, ROOT / "docs" / place)
    return f"![{found['title']}](../{place})\n"


def audit(name: str) -> str:
    """What `fedhelix audit` found."""
    if not (RESULTS / f"{name}.json").exists():
        return "It has not been run yet.\n"
    found = result(name)
    rows = [
        [
            row["method"],
            row["attacker"],
            f"{row['seen']:.1%}",
            f"{row['psnr']:.1f}",
            f"{row['ssim']:.2f}",
        ]
        for row in found["rows"]
    ]
    headers = ["method", "attacker ", "of the model is seen", "PSNR in dB, median", "SSIM, median"]
    return f"`{found['command']}`\n\n{table(headers, rows)}"


PARTS: dict[str, Callable[..., str]] = {
    "table1": table1, "gpu": gpu, "cpu": cpu, "dashboard": dashboard, "choosing": choosing, "options": options,
    "deployment": deployment, "faults": faults, "results": results, "study": study, "drawn": drawn, "audit": audit,
    "claims": lambda paper: claims(paper, RESULTS), "hooks": hooks, "participation": participation,
}  # fmt: skip


def made(text: str) -> str:
    """A page with its parts made anew."""

    def fill(found: re.Match[str]) -> str:
        name, *given = found[2].split()
        return f"{found[1]}{PARTS[name](*given)}{found[4]}"

    return PART.sub(fill, text)


def stale() -> Iterator[tuple[Path, str]]:
    """Pages whose parts are not what they would be now."""
    for page in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]):
        text = page.read_text(encoding="utf-8")
        if (new := made(text)) != text:
            yield page, new


if __name__ == "__main__":
    pages = list(stale())
    for page, new in pages:
        print(page.relative_to(ROOT))
        if "--check" not in sys.argv:
            page.write_text(new, encoding="utf-8")
    sys.exit(bool(pages) and "--check" in sys.argv)
