"""Compares every registered method on an engine and device with the serial engine on the CPU.

    PYTHONPATH=src python benchmarks/conformance.py --engine batched --device cuda --out FILE.json

The network is smooth (tanh, mean pooling), so that rounding cannot be magnified by a switch of a
ReLU or a maximum.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch import nn

from fedhelix import METHODS, Federation, add_lora, load, partition
from fedhelix.core.errors import UserError
from fedhelix.core.tree import flatten
from fedhelix.federation.provenance import versions

TOLERANCE = 2e-4
# A generator draws random numbers on its device, so its results differ between devices. Everything
# before it must agree.
OWN = {"pfedgpa": {"generate": "own_mean"}}
# A code of few bits magnifies rounding, and noise is drawn on the device, too. The tests compare
# engines with both on the CPU.
LEFT_OUT = {"compact", "dp-sgd"}
EXTRA = "pip install 'fedhelix["  # what a method lacks on this machine is no difference
ONLY_WITH_NORM, ONLY_WITHOUT = {"fedbn"}, {"private"}
ADAPTED = {"fedit", "fedsa-lora", "ffa-lora", "flexlora"}  # they train LoRA adapters


def smooth(norm: bool, adapted: bool) -> nn.Module:
    """A small network without corners, with or without BatchNorm and LoRA adapters."""
    layers = [
        nn.Conv2d(1, 6, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 8, 3),
        nn.Tanh(),
    ]
    if norm:
        layers.insert(1, nn.BatchNorm2d(6))
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 10))
    return add_lora(network, rank=2) if adapted else network


def distance(left: dict, right: dict) -> float:
    """The largest difference of any value of two trees."""
    left, right = flatten(left), flatten(right)
    if set(left) != set(right):
        return math.inf
    pairs = [
        (left[name], right[name].cpu()) for name in left if isinstance(left[name], torch.Tensor)
    ]
    return max(
        (float((a.double().cpu() - b.double()).abs().max()) for a, b in pairs if a.numel()),
        default=0.0,
    )


def check(name: str, norm: bool, engine: str, device: str) -> dict:
    """Three rounds of one method on both."""
    torch.backends.cudnn.allow_tf32 = False  # the CPU has no TF32 to agree with
    runs = []
    for kind, where in (("serial", "cpu"), (engine, device)):
        fed = Federation(
            load("digits"),
            partition.dirichlet(clients=8, alpha=0.5),
            model=lambda: smooth(norm, name in ADAPTED),
            method=METHODS[name](**OWN.get(name, {})),
            cohort=5,
            engine=kind,
            device=where,
        )
        runs.append(fed.fit(3, quiet=True))
        fed.close()
    one, other = runs
    keys = ("uplink_bytes", "downlink_bytes", "other_bytes", "participants")
    differences = {
        "server": distance(one.state.server, other.state.server),
        "own": max(
            (
                distance(one.state.client_states[i], other.state.client_states[i])
                for i in one.state.client_states
            ),
            default=0.0,
        ),
    }
    same = all([r[key] for r in one.records] == [r[key] for r in other.records] for key in keys)
    return {
        **differences,
        "same_bytes_and_cohorts": same,
        "holds": same and max(differences.values()) < TOLERANCE,
    }


def main() -> None:
    """Check all methods with and without BatchNorm."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="batched")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="methods that are checked at once")
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    names = sorted(METHODS.keys() - LEFT_OUT)
    cases = [(name, False) for name in names if name not in ONLY_WITH_NORM]
    cases += [(name, True) for name in names if name not in ONLY_WITHOUT]
    results = {}
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        checks = [pool.submit(check, *case, args.engine, args.device) for case in cases]
        for (name, norm), done in zip(cases, checks, strict=True):
            label = name + (" + BatchNorm" if norm else "")
            try:
                results[label] = done.result()
            except UserError as refusal:
                results[label] = {"refused": str(refusal), "holds": False}
            print(label, results[label], flush=True)
    ran = [result for result in results.values() if EXTRA not in result.get("refused", "")]
    holds = all(result["holds"] for result in ran)
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    options = f"--engine {args.engine} --device {args.device}"
    report = {
        "command": f"python benchmarks/conformance.py {options}",
        "device": device,
        "versions": {**versions(), **({"commit": args.commit} if args.commit else {})},
        "tolerance": TOLERANCE,
        "holds": holds,
        "methods": results,
    }
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print("all hold" if holds else "SOME DIFFER")
    raise SystemExit(0 if holds else 1)


if __name__ == "__main__":
    main()
