"""A trained network for others: weights, a program, and a card that says where it comes from."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import nn

from fedhelix.core.errors import UserError
from fedhelix.core.files import write_atomically
from fedhelix.core.parts import arguments
from fedhelix.federation.setup import FederationSetup

Format = Literal["safetensors", "torch", "onnx"]
FILES = {"safetensors": "model.safetensors", "torch": "model.pt2", "onnx": "model.onnx"}
CARD = "README.md"


def export(
    module: nn.Module, fed: FederationSetup, folder: Path, formats: Sequence[Format], card: str
) -> Path:
    """Write a network in some formats, and its card."""
    for name in formats:
        if name not in FILES:
            raise UserError(f"formats are {', '.join(FILES)}, not '{name}'.")
    module, data = module.cpu(), fed.data
    args, keywords = arguments(data.prepare(data.x[:2].cpu()))
    folder.mkdir(parents=True, exist_ok=True)
    writers: dict[str, Callable[[Path], None]] = {
        "safetensors": lambda path: write_atomically(path, save(weights(module))),
        "torch": lambda path: _written(path, lambda file: _program(module, args, keywords, file)),
        "onnx": lambda path: _written(path, lambda file: _onnx(module, args, keywords, file)),
    }
    for name in formats:
        writers[name](folder / FILES[name])
    write_atomically(folder / CARD, card.encode())
    return folder


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """All entries, frozen ones too, each whole and alone."""
    return {
        name: value.detach().clone().contiguous() for name, value in module.state_dict().items()
    }


def _program(module: nn.Module, args: Any, keywords: Any, file: Path) -> None:
    dynamic = _dynamic(module, args, keywords)
    torch.export.save(torch.export.export(module, args, keywords, dynamic_shapes=dynamic), file)


def _dynamic(module: nn.Module, args: Any, keywords: Any) -> tuple[Any, ...]:
    """Batches of any size, for each argument; those of a forward(*args) are one."""
    shapes = tuple({0: torch.export.Dim.DYNAMIC} for _ in args)
    kinds = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
    several = bool(args) and kinds[0] is inspect.Parameter.VAR_POSITIONAL
    return (shapes,) if several else (*shapes, *({0: torch.export.Dim.DYNAMIC} for _ in keywords))


def _onnx(module: nn.Module, args: Any, keywords: Any, file: Path) -> None:
    try:
        import onnxscript  # noqa: F401 - torch needs it
    except ImportError:
        raise UserError("ONNX needs a package: pip install 'fedhelix[export]'.") from None
    torch.onnx.export(
        module,
        args,
        str(file),
        kwargs=keywords,
        dynamo=True,
        dynamic_shapes=_dynamic(module, args, keywords),
        external_data=False,
        verbose=False,
    )


def _written(path: Path, write: Callable[[Path], None]) -> None:
    """A file that others write, in its place only once it is complete."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / path.name
        write(file)
        write_atomically(path, file.read_bytes())


def model_card(
    fed: FederationSetup,
    summary: Mapping[str, Any],
    last: Mapping[str, Any],
    formats: Sequence[Format],
    client: int | str | None,
) -> str:
    """What is known of a network: data, training, results, and who could learn what from it.

    `last` is the record of the last round.
    """
    data, name = fed.data, fed.objective.name
    whose = "the server's model" if client is None else f"the personal model of client {client}"
    scaled = "pixels are divided by 255" if data.x.dtype == torch.uint8 else "values as they are"
    if data.mean is not None:
        scaled += f", then mean {data.mean} and standard deviation {data.std} are applied"
    spent = last.get("metadata", {}).get("epsilon")
    private = (
        f"differential privacy of clients, epsilon {spent}" if spent else "no formal guarantee"
    )
    rows = {
        "Network": f"{type(fed.engine.setup.module).__name__}, {whose}",
        "Trained parameters": f"{summary['parameters']:,}",
        "Data": repr(data),
        "Inputs": f"{data.shape}; {scaled}" if data.fields is None else f"{data.fields}",
        "Classes": ", ".join(data.labels) if data.labels else data.classes or "none",
        "Clients": summary["clients"],
        "Method": fed.method.label,
        "Rounds": last.get("round", 0),
        "Seed": fed.seed,
        f"Personal {name} (mean of clients)": _figure(summary.get(f"personal_{name}")),
        f"Global {name}": _figure(summary.get(f"final_{name}", summary.get(name))),
        "Uploaded": f"{summary.get('uplink_bytes', 0):,} bytes",
        "Privacy": private,
        "Files": ", ".join(FILES.get(kind, kind) for kind in formats),
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return f"# {fed.method.label} on {data.name}\n\n| | |\n| --- | --- |\n{table}\n"


def _figure(value: Any) -> str:
    return "not measured" if value is None else f"{value:.4f}"
