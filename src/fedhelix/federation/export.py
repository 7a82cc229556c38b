"""A trained network for others: weights, a program, and a card that says where it comes from."""

from __future__ import annotations

import inspect
import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.export import Dim

from fedhelix.core.bounds import rounded_up
from fedhelix.core.errors import UserError
from fedhelix.core.files import writable_file, write_atomically
from fedhelix.core.parts import Inputs, arguments, output_of
from fedhelix.core.shift import is_extended, load_shifted
from fedhelix.core.tree import State, to_device
from fedhelix.data import Dataset
from fedhelix.engines.local import Setup, UsedModel
from fedhelix.federation.predictions import keeps_padding
from fedhelix.federation.setup import FederationSetup
from fedhelix.store.records import Record, has_effect

Format = Literal["safetensors", "torch", "onnx"]
FILES = {"safetensors": "model.safetensors", "torch": "model.pt2", "onnx": "model.onnx"}
OTHER = {".pt2": "onnx", ".onnx": "torch"}  # the other format of programs, by a file's suffix
ANSI = re.compile(r"\x1b\[[0-9;]*m")  # colours of a terminal
CARD = "README.md"
# Where a client may make a model of its own, which does not leave it.
OWN_WORK = ("start", "personal", "predict", "personalize", "choose")
EXPORTERS = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")  # loggers


def export(
    module: nn.Module, fed: FederationSetup, folder: Path, formats: Sequence[Format], card: str
) -> Path:
    """Write a network in some formats, and its card."""
    with _removed_if_empty(folder):
        writable_file(*(folder / FILES[name] for name in formats), folder / CARD)
        fixed = [name for name in formats if write_network(module, fed.data, folder / FILES[name])]
    if fixed and fed.data.fields is not None:
        card += "".join(
            f"\n{FILES[name]} takes sequences of length {fed.data.fields.length} alone; "
            "`run.prepare(x, padded=True)` pads them to it.\n"
            for name in fixed
        )
    write_atomically(folder / CARD, card.encode())
    return folder


def check_formats(formats: Sequence[str]) -> None:
    """Refuse formats that do not exist."""
    if not formats:
        raise UserError(f"formats is empty; give some of {', '.join(FILES)}.")
    for name in formats:
        if name not in FILES:
            raise UserError(f"formats are {', '.join(FILES)}, not '{name}'.")


@contextmanager
def _removed_if_empty(folder: Path) -> Iterator[None]:
    """Leave no folder that was made for files that could not be written."""
    new = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        yield
    except BaseException:
        for one in new:
            with suppress(OSError):  # one with files stays
                one.rmdir()
        raise


def network_of(setup: Setup, state: State) -> nn.Module:
    """A model as a network of its own, with what the method makes of its outputs."""
    state = to_device(state, setup.device)
    if setup.method.overrides("predict") and is_extended(state):
        return UsedModel(setup, state).eval()
    example = setup.data.prepare(setup.data.x[:8])
    return load_shifted(setup.module, state, setup.layers, example)


def check_suffix(path: Path) -> None:
    """Refuse a file whose name ends in none of the formats."""
    if path.suffix not in WRITERS:
        kinds = ", ".join(f"FILE{suffix}" for suffix in WRITERS)
        raise UserError(f"models are written as {kinds}, not '{path}'.")


def write_network(module: nn.Module, data: Dataset, path: Path) -> bool:
    """Write a network in the format that the file's name ends in; whether it is a program for
    sequences of one length.
    """
    check_suffix(path)
    module = module.cpu()
    example = data.prepare(data.x[[0, 0]].cpu())  # a batch of one would be one for ever
    # Programs return the outputs alone: only transformers itself knows the objects that its
    # networks return.
    outputs = module.register_forward_hook(lambda _, inputs, returned: output_of(returned))
    try:
        return _written(path, lambda file: WRITERS[path.suffix](module, example, data, file))
    finally:
        outputs.remove()


def weights(module: nn.Module) -> dict[str, Tensor]:
    """All entries, frozen ones too, each whole and alone."""
    return {
        name: value.detach().clone().contiguous() for name, value in module.state_dict().items()
    }


def _weights(module: nn.Module, example: Inputs, data: Dataset, file: Path) -> bool:
    file.write_bytes(save(weights(module)))
    return False


def _program(module: nn.Module, example: Inputs, data: Dataset, file: Path) -> bool:
    args, keywords = arguments(example)
    dynamic = _dynamic(module, example, data)
    program = torch.export.export(module, args, keywords, dynamic_shapes=dynamic)
    torch.export.save(program, file)
    return _has_one_length(program, data)


def _has_one_length(program: torch.export.ExportedProgram | None, data: Dataset) -> bool:
    """Whether a program takes sequences of one length alone, as PyTorch makes it of a GRU, whose
    steps it writes down one by one.
    """
    from torch.fx.experimental.symbolic_shapes import is_concrete_int  # slow to import

    length = None if data.fields is None else data.fields.length
    if program is None or length is None:
        return False
    names = program.graph_signature.user_inputs
    shapes = [node.meta["val"].shape for node in program.graph.nodes if node.name in names]
    return any(is_concrete_int(size) and size == length for shape in shapes for size in shape[1:2])


def _dynamic(module: nn.Module, example: Inputs, data: Dataset) -> dict[str, Any]:
    """Batches of any size, and sequences of any length where the network takes them, for each
    argument of its `forward`.
    """
    length = None if data.fields is None else data.fields.length

    def sizes(part: Tensor) -> dict[int, Any]:
        padded = length is not None and part.shape[1:2] == (length,)
        return {0: Dim.DYNAMIC, 1: Dim.AUTO} if padded else {0: Dim.DYNAMIC}

    args, keywords = arguments(example)
    named = {name: sizes(part) for name, part in keywords.items()}
    return inspect.signature(module.forward).bind(*map(sizes, args), **named).arguments


def _onnx(module: nn.Module, example: Inputs, data: Dataset, file: Path) -> bool:
    try:
        import onnxscript  # noqa: F401 - torch needs it
    except ImportError:
        raise UserError("ONNX needs a package: pip install 'fedhelix[export]'.") from None
    args, keywords = arguments(example)
    program = torch.onnx.export(
        module,
        args,
        str(file),
        kwargs=keywords,
        dynamo=True,
        dynamic_shapes=_dynamic(module, example, data),
        external_data=False,
        verbose=False,
    )
    return _has_one_length(None if program is None else program.exported_program, data)


WRITERS = {".safetensors": _weights, ".pt2": _program, ".onnx": _onnx}  # by a file's suffix


def _written(path: Path, write: Callable[[Path], bool]) -> bool:
    """A file that others write, in its place only once it is complete."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / path.name
        try:
            with _hushed():
                has_one_length = write(file)
        except UserError:
            raise
        except Exception as problem:  # a network may do anything
            reason = ANSI.sub("", str(problem)).strip().partition("\n")[0].rstrip(".:; ")
            raise UserError(
                f"PyTorch cannot make a program of this network ({reason}); {OTHER[path.suffix]} "
                "may succeed, and safetensors has its weights in any case."
            ) from problem
        write_atomically(path, file.read_bytes())
    return has_one_length


@contextmanager
def _hushed() -> Iterator[None]:
    """Without the exporters' warnings about their own parts, on which no user can act."""
    loggers = [logging.getLogger(name) for name in EXPORTERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def model_card(
    fed: FederationSetup,
    summary: Mapping[str, Any],
    records: Sequence[Record],
    formats: Sequence[Format],
    client: int | str | None,
) -> str:
    """What is known of a network: data, training, results, and who could learn what from it."""
    data, name = fed.data, fed.objective.name
    whose = "the server's model" if client is None else f"the personal model of client {client}"
    later = ", with those of clients that joined after the training" if fed.joined else ""
    rows = {
        "Network": f"{type(fed.engine.setup.module).__name__}, {whose}",
        "Trained parameters": f"{summary['parameters']:,}",
        "Data": f"{data!r}{later}" if fed.data_is_here else "of the sites, which keep it",
        "Inputs": _inputs(data) if data.fields is None else _parts(fed),
        **({"Columns, in this order": ", ".join(data.columns)} if data.columns else {}),
        "Classes": ", ".join(data.labels) if data.labels else _classes(data) or "none",
        "Clients": summary["clients"],
        "Method": fed.method.label,
        "Rounds": _rounds(records),
        "Seed": fed.seed,
        f"Personal {name} (mean of clients)": _figure(summary.get(f"personal_{name}")),
        f"Global {name}": _figure(summary.get(f"final_{name}", summary.get(name))),
        "Uploaded": f"{summary.get('uplink_bytes', 0):,} bytes",
        "Privacy": _privacy(fed, summary, client is not None),
        "Files": ", ".join(FILES.get(kind, kind) for kind in formats),
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return f"# {fed.method.label} on {data.name}\n\n| | |\n| --- | --- |\n{table}\n"


def _rounds(records: Sequence[Record]) -> str:
    """How many rounds there were, and in how many of them an upload counted."""
    effective = sum(map(has_effect, records))
    some = f", {effective} of which changed the model" if effective < len(records) else ""
    return f"{len(records)}{some}"


def _privacy(fed: FederationSetup, summary: Mapping[str, Any], is_personal: bool) -> str:
    """Whom differential privacy protects, and how well; a client may train for itself without."""
    if "epsilon" not in summary:
        return "no formal guarantee"
    whom = "single samples" if fed.method.capabilities.sample_gradients else "clients"
    most = f"epsilon {rounded_up(summary['epsilon'])} at delta {summary['delta']:g}"
    said = f"differential privacy of {whom}, {most} (what a client has spent at most)"
    if not (is_personal and _has_own_parts(fed)):
        return said
    return (
        f"{said}, for what clients have sent and for the server's model; this personal model has "
        "parts of its client's own, which its samples may have trained without noise, and no "
        "epsilon holds for them"
    )


def _has_own_parts(fed: FederationSetup) -> bool:
    """Whether a client may use anything else than what the server delivers to it."""
    method, layers = fed.method, fed.engine.setup.layers
    kept = set(layers.names) - set(method.shared_params(layers))
    return bool(kept) or any(map(method.overrides, OWN_WORK))


def _inputs(data: Dataset) -> str:
    """The shape of a sample, and what to do with one before the network gets it."""
    kind = "int64" if data.x.dtype == torch.int64 else "float32"
    steps = ["x / 255"] if data.x.dtype == torch.uint8 else []
    if data.mean is not None:
        rest = f"(x - mean) / std with mean {data.mean} and std {data.std}"
        steps.append(f"{rest}, one for each channel or column" if len(data.mean) > 1 else rest)
    how = f"the network does not scale samples, so give it {', then '.join(steps)}"
    return f"{data.shape} {kind}; {how if steps else 'samples as they are'}"


def _parts(fed: FederationSetup) -> str:
    """The parts of a sample by the names that the network's `forward` gives them."""
    setup, fields = fed.engine.setup, fed.data.fields
    assert fields is not None
    if not fields.named:
        taken = inspect.signature(setup.module.forward).parameters.values()
        names = [one.name for one in taken if one.kind is not one.VAR_POSITIONAL]
        if len(names) >= len(fields.names):
            fields = replace(fields, names=tuple(names[: len(fields.names)]))
    words = [f"{fields}"]
    if torch.uint8 in fields.dtypes:
        words.append("the network does not scale samples, so give it the uint8 ones as x / 255")
    if fields.mask is not None:
        mask = fields.names[fields.mask]
        end = f" to length {fields.length}, as in training" if keeps_padding(setup) else ""
        words.append(
            f"sequences are padded at the end{end}, and {mask} is 1 where they have values"
        )
    return "; ".join(words)


def _classes(data: Dataset) -> int | None:
    """How many classes samples have, or their tokens or pixels."""
    of_parts = data.y.dtype == torch.int64 and data.y.numel()
    return data.outputs if data.classes is None and of_parts else data.classes


def _figure(value: Any) -> str:
    return "not measured" if value is None else f"{value:.4f}"
