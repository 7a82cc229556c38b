"""`fedhelix doctor`: what is installed, which engine and kernels run, and which data are here."""

from __future__ import annotations

import json
import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.markup import escape

from fedhelix.cli.common import Json
from fedhelix.core.files import cache_folder
from fedhelix.core.version import __version__
from fedhelix.data import available
from fedhelix.engines.kernels import library
from fedhelix.engines.parallel.pool import cores
from fedhelix.report.terminal import console, listing

# What each extra of the package needs, and what it is for.
EXTRAS = {
    "flower": ("flwr", "deployments"),
    "ray": ("ray", "clusters"),
    "report": ("starlette", "the dashboard, Parquet"),
    "track": ("tensorboard", "TensorBoard, MLflow, W&B"),
    "tune": ("optuna", "searches for settings"),
    "data": ("datasets", "downloads"),
    "hf": ("peft", "transformers and adapters"),
    "export": ("onnx", "models as ONNX"),
    "privacy": ("dp-accounting", "differential privacy"),
}


def doctor(as_json: Json = False) -> None:
    """What is installed, which engine and kernels run here, and which data are at hand."""
    facts = {**_machine(), **_extras(), **_data()}
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    table = listing("what", "here")
    for what, here in facts.items():
        table.add_row(escape(what), escape(here))
    console.print(table)


def _machine() -> dict[str, str]:
    """Versions, processors and what computes on them."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    compiler = shutil.which(os.environ.get("CC", "cc"))
    compiled = "compiled kernels work" if library.available() else "no compiled kernels"
    return {
        "fedhelix": __version__,
        "Python": f"{platform.python_version()} on {platform.platform(terse=True)}",
        "torch": torch.__version__,
        "cores": str(cores()),
        "GPU": gpu,
        "engine (auto)": "batched"
        if gpu != "none"
        else "serial or parallel, by the round's length",
        "C compiler": f"{compiler}: {compiled}" if compiler else f"none (cc): {compiled}",
        "cache": str(cache_folder()),
    }


def _extras() -> dict[str, str]:
    """Optional packages with their versions, or how to get them."""
    found = {}
    for extra, (package, purpose) in EXTRAS.items():
        try:
            found[f"[{extra}] {purpose}"] = f"{package} {version(package)}"
        except PackageNotFoundError:
            found[f"[{extra}] {purpose}"] = f'missing: pip install "fedhelix[{extra}]"'
    return found


def _data() -> dict[str, str]:
    """Data sets that are here."""
    here = [item.name for item in available(None) if item.found]
    return {"data": ", ".join(here) + "; `fedhelix data` says how to get others"}
