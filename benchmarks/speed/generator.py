"""The server's time to fit its generator, by size, and to send every client's vector through it.

    PYTHONPATH=src python benchmarks/speed/generator.py --device cuda --out FILE.json

The vectors are as many and as long as those of pFedGPA on Fashion-MNIST (20 clients, 20 rounds,
20,522 parameters): five groups of clients, their own directions, and noise. Accuracy is not
measured.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import get_args

import torch
from measure import machine

from fedhelix.components.generative.generator import Generator, SizeName, size_for

CLIENTS, ROUNDS, LENGTH, GROUPS = 20, 20, 20_522, 5


def uploads(device: torch.device) -> torch.Tensor:
    """Vectors of clients in groups, round after round."""
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(GROUPS, LENGTH, generator=draw)
    directions = torch.randn(CLIENTS, LENGTH, generator=draw)
    clients = centres[torch.arange(CLIENTS) % GROUPS] + 0.5 * directions
    noise = torch.randn(CLIENTS * ROUNDS, LENGTH, generator=draw)
    return (clients.repeat(ROUNDS, 1) + 0.3 * noise).to(device)


def main() -> None:
    """Each size once, after a short fit that warms up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--sizes", nargs="+", choices=get_args(SizeName), default=["fast", "linear", "default"]
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/speed-generator.json"))
    args = parser.parse_args()
    device = torch.device(args.device)
    vectors, seconds = uploads(device), {}
    for size in args.sizes:
        Generator.fit(vectors, [LENGTH], size_for(size, device).shortened(10))
        began = time.perf_counter()
        generator = Generator.fit(vectors, [LENGTH], size_for(size, device))
        float(generator.reconstruct(vectors[-1:]).sum())  # waits for the device
        fitted = time.perf_counter()
        float(generator.invert(vectors[-CLIENTS:], 250, seed=0).sum())
        seconds[size] = {
            "fit": round(fitted - began, 2),
            "inversion": round(time.perf_counter() - fitted, 2),
        }
        print(size, seconds[size], flush=True)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    options = f"--device {args.device} --sizes {' '.join(args.sizes)}"
    report = {
        "command": f"python benchmarks/speed/generator.py {options}",
        "device": name,
        "machine": machine(),
        "vectors": list(vectors.shape),
        "seconds": seconds,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
