"""Single numbers within a sentence: `<!-- made: NAME ARGUMENTS -->12<!-- end -->`."""

from __future__ import annotations

from typing import Any

from parts.files import percent, result


def personal(method: str) -> str:
    """The personal accuracy of the README's comparison."""
    return percent(_compared(method), "personal_accuracy")


def fewer_bytes(method: str) -> str:
    """How many times as much FedAvg uploads there."""
    return f"{_compared('fedavg')['uplink_bytes'] / _compared(method)['uplink_bytes']:.0f}"


def _compared(method: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = result("readme-comparison")["table"]
    return next(row for row in rows if row["method"] == method)


def slower(workload: str) -> str:
    """How many times as long the fastest of Flower, pfl and BlazeFL takes on a CPU."""
    ratios = result("race")[workload]["ratio_to_fedhelix"]
    return f"{min(ratios[name]['median'] for name in ('flower', 'pfl', 'blazefl')):.1f}"


def seeds(*words: str) -> str:
    """`FILE | ROW | MEASURE`: the least and the greatest value of a study with one column."""
    file, row, measure = " ".join(words).split(" | ")
    cell = next(cell for cell in result(file)["cells"] if cell["row"] == row)
    ends = [_short(end(cell[measure]["by_seed"])) for end in (min, max)]
    return " to ".join(dict.fromkeys(ends))


def one_seed(*words: str) -> str:
    """`FILE | ROW | COLUMN | MEASURE | SEED`: what one run gave."""
    file, row, column, measure, seed = " ".join(words).split(" | ")
    cells = result(file)["cells"]
    cell = next(cell for cell in cells if (cell["row"], cell["column"]) == (row, column))
    return _short(cell[measure]["by_seed"][cell["seeds"].index(int(seed))])


def gap(*words: str) -> str:
    """`FILE | ROW | OTHER ROW | COLUMN | MEASURE`: how far one mean is above the other."""
    file, row, other, column, measure = " ".join(words).split(" | ")
    means = {
        cell["row"]: cell[measure]["mean"]
        for cell in result(file)["cells"]
        if cell["column"] == column
    }
    return f"{means[row] - means[other]:.1f}"


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 1 else f"{value:.1f}"
