"""The papers' networks by name; any `nn.Module`, or a function that makes one, works as well."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedhelix.core import seeds
from fedhelix.core.copies import copied
from fedhelix.core.docs import summary
from fedhelix.core.entries import check_entries
from fedhelix.core.errors import UserError, nearest, unknown
from fedhelix.core.fit import LENT, check_fits
from fedhelix.core.imports import find_in_file
from fedhelix.models import cnn, dense, lora, resnet, text

__all__ = ["build", "check_fits", "describe", "names"]

Builder = Callable[[tuple[int, ...], int], nn.Module]

NETWORKS: dict[str, Builder] = {
    "digits-cnn": cnn.digits_cnn,
    "digits-bn-cnn": cnn.digits_bn_cnn,
    "small-cnn": cnn.small_cnn,
    "fedpac-cnn": cnn.fedpac_cnn,
    "genfed-cnn": cnn.genfed_cnn,
    "w1-cnn": cnn.w1_cnn,
    "bn-cnn": cnn.bn_cnn,
    "lenet": cnn.lenet,
    "lenet-sigmoid": cnn.lenet_sigmoid,
    "resnet18": resnet.resnet18,
    "resnet8": resnet.resnet8,
    "transformer": text.transformer,
    "mlp": dense.mlp,
    "linear": dense.linear,
    "lora-mlp": lora.lora_mlp,
}

CHOSEN_BY_SHAPE = {
    "auto": "The network that suits the data set; for tables and odd shapes `mlp`.",
    "cnn": "The small convolutional network that suits the size of the images.",
}

FOR_DATA = {
    "digits": "digits-cnn",
    "mnist": "small-cnn",
    "fashion-mnist": "small-cnn",
    "emnist": "fedpac-cnn",
    "cifar10": "fedpac-cnn",
    "svhn": "fedpac-cnn",
    "cifar100": "resnet18",
}
CHANNELS_FIRST = "Channels come first: give images as N×C×H×W, moveaxis(x, -1, 1)"
FOR_TEXT = {"synthetic-text": "transformer", "shakespeare": "transformer"}


def names() -> tuple[str, ...]:
    """Every name that `build` knows."""
    return (*CHOSEN_BY_SHAPE, *NETWORKS)


def describe() -> dict[str, str]:
    """One line of help for each name."""
    return CHOSEN_BY_SHAPE | {name: summary(builder) for name, builder in NETWORKS.items()}


def build(
    model: str | nn.Module | Callable[..., nn.Module],
    shape: Any,
    outputs: int,
    data_name: str | None = None,
    seed: int = 0,
) -> nn.Module:
    """A network for samples of a shape and a number of outputs, on the CPU.

    `model` is a name (see `names()`), FILE.py:NAME of your own, a module, which is copied, or a
    callable that returns a module; the callable gets `shape` and `outputs` if it has parameters of
    these names. New weights depend on the seed alone.
    """
    if isinstance(model, nn.Module):
        check_entries(model)  # some of which PyTorch cannot copy
        return checked(copied(model))
    if isinstance(model, str) and ".py" in model:
        model = from_file(model)
    if isinstance(model, str) and not all(isinstance(size, int) for size in shape):
        padded = "" if isinstance(shape, dict) else "; rows of different lengths are padded, and "
        raise UserError(
            f"samples with the parts {shape} need a model of your own that takes them, not "
            f"'{model}'{padded and padded + 'a mask says where they have values'}."
        )
    shape = shape if isinstance(shape, dict) else tuple(shape)
    # Fork and seed the default generator alone: `torch.manual_seed` would reseed other devices too.
    with LENT, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seeds.key(seed, "model"))
        if isinstance(model, str):
            return named(model, shape, outputs, data_name)
        if callable(model):
            return checked(call(model, shape=shape, outputs=outputs))
    raise UserError(
        "a model is a name, a torch.nn.Module or a function that makes one, "
        f"not {type(model).__name__}."
    )


def from_file(spec: str) -> Callable[..., nn.Module]:
    """The class or function that makes a network, from a file of the user's: FILE.py:NAME."""
    path, _, name = spec.partition(":")
    if not name.isidentifier():
        raise UserError(f"name the network in '{path}' as {path}:NAME, its class or function.")
    try:
        found: Callable[..., nn.Module] = find_in_file(str(Path(path).resolve()), name)
    except AttributeError as problem:
        known = vars(problem.obj)
        own = [
            key
            for key, value in known.items()
            if callable(value) and getattr(value, "__module__", None) == known["__name__"]
        ]
        raise UserError(f"'{path}' has no network '{name}'; {nearest(name, own)}") from None
    if not callable(found):
        raise UserError(f"'{name}' in '{path}' is no class or function that makes a network.")
    return found


def named(name: str, shape: tuple[int, ...], outputs: int, data_name: str | None) -> nn.Module:
    """A network of this library."""
    wanted = name.lower().replace("_", "-")
    if wanted not in names():
        raise unknown("model", name, names())
    if not shape or min(shape) < 1 or outputs < 1:
        raise UserError(
            "a model needs at least one input and one output, "
            f"not shape {shape} and {outputs} outputs."
        )
    if wanted in CHOSEN_BY_SHAPE and has_channels_last(shape):
        raise UserError(
            f"model '{name}' takes samples of shape {shape} for images with their channels last. "
            f"{CHANNELS_FIRST}; model 'mlp' takes any samples as they are."
        )
    if wanted == "auto":
        wanted = suited(shape, data_name)
    elif wanted == "cnn":
        wanted = suited_to_images(shape)
    try:
        return NETWORKS[wanted](shape, outputs)
    except UserError as problem:
        how = f" {CHANNELS_FIRST}." if has_channels_last(shape) else ""
        raise UserError(
            f"model '{name}' does not fit samples of shape {shape}: {problem}{how}"
        ) from None


def has_channels_last(shape: tuple[int, ...]) -> bool:
    """Whether samples look like grey or coloured images whose last axis is the channels."""
    return len(shape) == 3 and shape[2] in (1, 3, 4) and min(shape[:2]) > 4


def suited(shape: tuple[int, ...], data_name: str | None) -> str:
    """The network that a data set is usually trained with, or one for samples of this shape."""
    name = (data_name or "").lower().replace("_", "-")
    if len(shape) == 1:
        return FOR_TEXT.get(name, "mlp")
    if len(shape) != 3 or min(shape[1:]) < 4:
        return "mlp"
    return FOR_DATA.get(name) or suited_to_images(shape)


def suited_to_images(shape: tuple[int, ...]) -> str:
    """A small CNN by the size of the images: 5×5 kernels without padding would use up tiny ones."""
    if len(shape) != 3 or min(shape[1:]) < 24:
        return "digits-cnn"
    return "small-cnn" if shape[0] == 1 else "fedpac-cnn"


def call(make: Callable[..., nn.Module], **known: Any) -> nn.Module:
    """Call a user's function or class with those values that it has parameters for."""
    title = getattr(make, "__name__", "the model function")
    signature = inspect.signature(make)
    given = {name: value for name, value in known.items() if name in signature.parameters}
    try:
        signature.bind(**given)
    except TypeError as problem:
        raise UserError(
            f"{title} cannot be called with {' and '.join(known)} alone: {problem}."
        ) from None
    try:
        made = make(**given)
    except UserError:
        raise
    except Exception as problem:
        raise UserError(f"{title} fails with {type(problem).__name__}: {problem}.") from problem
    if not isinstance(made, nn.Module):
        raise UserError(f"{title} must return a torch.nn.Module, not {type(made).__name__}.")
    return made


def checked(module: nn.Module) -> nn.Module:
    """A user's network on the CPU, if it has weights to train."""
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise UserError(
            f"the model is wrapped in {type(module).__name__}; give the network inside, "
            "model.module: the engine runs clients side by side."
        )
    parameters = list(module.parameters())
    if any(nn.parameter.is_lazy(parameter) for parameter in parameters):
        raise UserError(
            "the model has lazy layers without weights yet: "
            "run it once on a batch before you hand it over."
        )
    if not any(parameter.requires_grad for parameter in parameters):
        raise UserError("the model has no trainable parameters.")
    check_entries(module)
    return module.cpu()
