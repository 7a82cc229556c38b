"""Every method computes what it did in version 0.1, to the bit.

The table was made with the code of version 0.1 (commit 00faed1), the cases of gene-fl in 0.2: its
penalties no longer touch what was never learnt, and their sums have another order. Bits depend on
the processor and on PyTorch; on another machine the figures of the table are compared instead, with
a tolerance.
SCAFFOLD's recorded losses are those of 0.2: before, they included the correction of its gradients.
"""

import hashlib
import json
import platform
from pathlib import Path

import pytest
import torch

from fedhelix import load
from fedhelix.components.generative import training
from fedhelix.core.registry import make
from fedhelix.core.tree import flatten, paper_bytes
from fedhelix.engines.local import batches
from fedhelix.federation import loop, newcomers, uploads
from helpers import small

TABLE = json.loads((Path(__file__).parent / "checksums-0.1.json").read_text())
DIGITS = load("digits").subsample(300, 100)
RECORDED = (
    "train_loss",
    "loss",
    "accuracy",
    "personal_accuracy",
    "valid_accuracy",
    "uplink_bytes",
    "downlink_bytes",
    "other_bytes",
    "arrival_bytes",
    "arrival_accuracy",
    "untuned_accuracy",
)


def machine() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return {
        "cpu": names[0] if names else platform.processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def checksum(trees) -> str:
    digest = hashlib.sha256()
    for tree in trees:
        for name, value in flatten(tree).items():
            digest.update(name.encode())
            if isinstance(value, torch.Tensor):
                digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
                digest.update(value.detach().contiguous().numpy().tobytes())
            else:
                digest.update(json.dumps(value).encode())
    return digest.hexdigest()[:16]


def run(case):
    usual = {"data": DIGITS, "clients": 4, "batch_size": 32, "seed": 3}
    options = case["options"]
    if case["spec"] == "fedopt":  # its option has another name now
        options = {{"optimizer": "server_optimizer"}.get(k, k): v for k, v in options.items()}
    if case["spec"] == "centred-clipping":  # which began every round at no update
        options = {**options, "carry": False}
    return small(make(case["spec"], options), **usual | case["settings"]).fit(2, quiet=True)


@pytest.mark.parametrize("name", TABLE["cases"])
def test_every_method_computes_what_it_did_in_version_0_1(name, monkeypatch):
    case = TABLE["cases"][name]
    for module in (loop, newcomers, uploads):  # 0.1 counted 4 bytes for every value
        monkeypatch.setattr(module, "payload_bytes", paper_bytes)
    monkeypatch.setattr(training, "SMALL", 0)  # 0.1 trained generators with oneDNN
    monkeypatch.setattr(batches, "SMALLEST", 2)  # 0.1 left out single samples only
    done = run(case)
    assert [record["uplink_bytes"] for record in done.records] == case["uplink_bytes"]
    losses = [record["train_loss"] for record in done.records]
    assert losses == pytest.approx(case["train_loss"], rel=1e-2)
    values = [v for v in flatten(done.state.server).values() if isinstance(v, torch.Tensor)]
    squares = sum(float(v.double().square().sum()) for v in values if v.is_floating_point())
    assert squares**0.5 == pytest.approx(case["norm"], rel=1e-2)
    if machine() != TABLE["machine"]:
        return
    states = done.state.client_states
    assert (
        checksum([done.state.server, *(states[client] for client in sorted(states))])
        == case["state"]
    )
    rows = [
        [record.get(key) for key in RECORDED] + [record["participants"], record.get("personal")]
        for record in done.records
    ]
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16] == case["records"]
