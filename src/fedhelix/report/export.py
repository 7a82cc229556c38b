"""The records of runs as one flat table for other programs: CSV or Parquet."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedhelix.core.errors import UserError
from fedhelix.core.imports import from_extra
from fedhelix.report.results import Result, read
from fedhelix.report.style import write
from fedhelix.store import RunFolder
from fedhelix.store.records import spent


def rounds(results: Sequence[Result]) -> pd.DataFrame:
    """One row per run and round: what is a single number or word."""
    tables = []
    for result in results:
        metrics = _with_epsilon(result)
        flat = [column for column in metrics if not _nested(metrics[column])]
        named: dict[str, Any] = {"run": result.name, "method": result.method, "seed": result.seed}
        tables.append(metrics[flat].assign(**named)[[*named, *flat]])
    return pd.concat(tables, ignore_index=True)


def _with_epsilon(result: Result) -> pd.DataFrame:
    """The records of a run, with the largest epsilon that a client has spent by then where the
    method counts it.
    """
    by_round = {one["round"]: spent([one], {}).get("epsilon") for one in result.records}
    if not any(by_round.values()):
        return result.metrics
    return result.metrics.assign(epsilon=result.metrics["round"].map(by_round))


def clients(results: Sequence[Result]) -> pd.DataFrame:
    """One row per run, evaluated round and client, with its name where clients have names."""
    has_names = any(result.names for result in results)

    def named(result: Result, client: int) -> list[str]:
        found = result.names[client : client + 1]
        return (found or [""]) if has_names else []

    rows = [
        (result.name, result.method, result.seed, client, *named(result, client), round, value,
         client in result.attackers)
        for result in results
        for client, history in result.clients().items()
        for round, value in history
    ]  # fmt: skip
    names = ["name"] if has_names else []
    columns = ["run", "method", "seed", "client", *names, "round", "value", "attacker"]
    return pd.DataFrame(rows, columns=columns)


def export(folders: Sequence[RunFolder], out: Path, by_client: bool = False) -> pd.DataFrame:
    """Write the records of some runs; the suffix chooses the format."""
    results = [read(folder) for folder in folders]
    for damage in filter(None, (result.damage for result in results)):
        warnings.warn(damage, stacklevel=2)
    table = clients(results) if by_client else rounds(results)
    if out.suffix == ".csv":
        write(out, table.to_csv(index=False).encode())
    elif out.suffix == ".parquet":
        from_extra("pyarrow", "report")
        stream = io.BytesIO()
        table.to_parquet(stream, index=False)
        write(out, stream.getvalue())
    else:
        raise UserError(
            f"'{out}' must end in .csv or .parquet, so that it is clear which format to write."
        )
    return table


def _nested(column: pd.Series) -> bool:
    return any(isinstance(value, list | dict) for value in column)
