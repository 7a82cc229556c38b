"""What a trained network says about new samples: arrays, data frames or tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedhelix.core.errors import UserError, unknown
from fedhelix.core.metrics import IGNORED, class_axis
from fedhelix.core.parts import Inputs, arguments, each, in_order, output_of, shapes
from fedhelix.data import Dataset
from fedhelix.data.checks import check_finite
from fedhelix.data.columns import features_of
from fedhelix.data.fields import Fields, Parts, aligned, as_parts, ends_padded, part_names
from fedhelix.data.owners import Names
from fedhelix.data.reading import Samples, read_inputs
from fedhelix.engines.local import Setup

AT_ONCE = 1000  # samples


def number_of(client: int | str, clients: int, names: Names | None) -> int:
    """The number of a client that is given by its name or its number; where owners are whole
    numbers, these are the names.
    """
    if isinstance(client, bool) or not isinstance(client, int | np.integer | str):
        raise UserError(f"a client is a whole number or a name, not {client!r}.")
    called = [str(name) for name in (range(clients) if names is None else names)]
    if str(client) in called:
        return called.index(str(client))
    if names is None:
        words = f"client '{client}'; these clients have no names, only numbers"
        numbered = words if isinstance(client, str) else f"client {client}; clients are numbered"
        raise UserError(f"there is no {numbered} from 0 to {clients - 1}.")
    if isinstance(client, str) or isinstance(names[0], int):
        raise unknown("client", client, called)
    if not 0 <= client < clients:
        raise UserError(
            f"there is no client {client}; clients are numbered from 0 to {clients - 1}."
        )
    return int(client)


def predicted(module: nn.Module, setup: Setup, x: Any) -> np.ndarray:
    """What a network says about samples such as it was trained on: classes, labels or values; where
    a sequence of tokens is padded, what marks that in targets (among names: none).
    """
    data = setup.data
    given = _prepared(data, x)
    found = decided(module, data, _outputs_of_given(module, setup, given))
    filled = _filled(data, given)
    if filled is not None and tuple(filled.shape) == found.shape and ends_padded(filled):
        found[~filled.numpy()] = IGNORED if data.labels is None else ""
    return found


def outputs_for(module: nn.Module, setup: Setup, x: Any) -> Tensor:
    """A network's outputs for samples such as it was trained on."""
    return _outputs_of_given(module, setup, _prepared(setup.data, x))


def _outputs_of_given(module: nn.Module, setup: Setup, given: Inputs) -> Tensor:
    """A network's outputs for prepared samples; for tokens, without those of padding that only the
    network needs.
    """
    data, outputs = setup.data, _all_outputs(module, setup.data, _as_trained(setup, given))
    filled = _filled(data, given)
    if filled is None:
        return outputs
    tokens = 2 if class_axis(_trained_outputs(module, data), data.y[:1]) == 1 else 1
    return outputs.narrow(tokens, 0, min(filled.shape[1], outputs.shape[tokens]))


def _filled(data: Dataset, given: Inputs) -> Tensor | None:
    """Which places of sequences are tokens, where every token has a target."""
    if not data.has_token_targets or data.fields is None or data.fields.mask is None:
        return None
    return in_order(given)[data.fields.mask] != 0


def prepared_inputs(setup: Setup, x: Any, padded: bool = False) -> Inputs:
    """New samples as the network gets them, `padded` to the length of the training in any case;
    refuses those of another form.
    """
    return _as_trained(setup, _prepared(setup.data, x), padded)


def keeps_padding(setup: Setup) -> bool:
    """Whether the network gets all the padding behind sequences, in training and after it: what it
    says may depend on that.
    """
    return not setup.cuts and setup.data.lengths is not None


def _as_trained(setup: Setup, x: Inputs, padded: bool = False) -> Inputs:
    """Prepared samples with as much padding as in training, where the network may look at it."""
    fields = setup.data.fields
    return fields.filled(x) if fields and (padded or keeps_padding(setup)) else x


@torch.no_grad()
def _all_outputs(module: nn.Module, data: Dataset, x: Inputs) -> Tensor:
    """The outputs for prepared samples, some of them at once."""
    device = next(iter(module.state_dict().values())).device
    prepared = each(lambda part: part.to(device), x)
    count = len(in_order(prepared)[0])
    if not count:  # networks may fail for no samples, and not for one
        return _trained_outputs(module, data)[:0]
    parts = []
    for at in range(0, count, AT_ONCE):
        rows = each(lambda part, at=at: part[at : at + AT_ONCE], prepared)  # type: ignore[misc]
        parts.append(_outputs(module, data, rows))
    return torch.cat(parts).cpu()


@torch.no_grad()
def _trained_outputs(module: nn.Module, data: Dataset) -> Tensor:
    """The outputs for one of the training samples."""
    device = next(iter(module.state_dict().values())).device
    example = each(lambda part: part.to(device), data.prepare(data.x[:1]))
    return _outputs(module, data, example).cpu()


def _outputs(module: nn.Module, data: Dataset, x: Inputs) -> Tensor:
    """The outputs for one batch; a network may fail for samples unlike those of its training."""
    args, keywords = arguments(x)
    try:
        return output_of(module(*args, **keywords)).float()
    except UserError:
        raise
    except Exception as problem:
        reason = str(problem).strip().partition("\n")[0].rstrip(".") or type(problem).__name__
        raise UserError(
            f"the network fails for samples of shape {shapes(x)} with '{reason}'"
            f"{_unknown_token(data, x)}."
        ) from problem


def _unknown_token(data: Dataset, x: Inputs) -> str:
    """Which token none of the training samples has, where there is one."""
    tokens = [part for part in in_order(x) if part.dtype == torch.int64]
    for new, known in zip(tokens, data.whole_numbers(data.x), strict=True):
        if not new.numel():
            continue
        last = int(known.max())
        if int(new.max()) > last or int(new.min()) < 0:
            token = int(new.max()) if int(new.max()) > last else int(new.min())
            return f"; x has the token {token}, and those of the training samples go up to {last}"
    return ""


def _prepared(data: Dataset, x: Any) -> Inputs:
    """New samples, scaled as those of the training; refuses those of another form."""
    fields = data.fields
    features = features_of(x, data.columns, None if fields is None else fields.keywords)
    samples = read_inputs(features, "x")
    tensors = samples.tensors.values() if isinstance(samples, Parts) else [samples]
    if any(len(part) and not part.numel() for part in tensors):
        raise UserError("sample 0 of x is empty; leave it out.")
    if isinstance(samples, Tensor):
        check_finite("the new samples", "x", samples)
        if samples.shape == (0,):  # an empty list
            none: Inputs = data.prepare(data.x[:0])
            return none
    if fields is not None:
        return _prepared_parts(data, fields, samples)
    if isinstance(samples, Parts) or tuple(samples.shape[1:]) != data.shape:
        parts = f"parts {Fields.of(samples)}" if isinstance(samples, Parts) else None
        shape = None if isinstance(samples, Parts) else f"shape {tuple(samples.shape)}"
        if isinstance(samples, Tensor) and tuple(samples.shape) == data.shape:
            how = "give it a batch axis, such as x[None], or x[:1] of several"
            if hasattr(x, "to_frame"):  # a pandas Series
                how = "give a data frame, also for one row, such as df.iloc[[0]]"
            if isinstance(x, list):
                how = "give a list of them, also for one: [x]"
            raise UserError(
                f"x is one sample, of shape {data.shape}, and predict takes N of them; {how}."
            )
        raise UserError(
            f"x has the {parts or shape}, but a sample of '{data.name}' has the shape "
            f"{data.shape}; give N of them."
        )
    prepared: Inputs = data.prepare(scaled_as(data.x, samples))
    return prepared


def _prepared_parts(data: Dataset, fields: Fields, samples: Samples) -> Inputs:
    """New samples of several parts, in the order in which the network was trained on them."""
    if isinstance(samples, Tensor) and (fields.mask is None or samples.dim() < 2):
        raise UserError(
            f"x has the shape {tuple(samples.shape)}, but samples have the parts {fields}; "
            f"give {'a list of sequences' if fields.mask is not None else 'N of each'}."
        )
    given = as_parts(samples)
    samples = aligned(given, fields)
    if tuple(samples.tensors) != fields.names or samples.named != fields.named:
        own, right = part_names(given, fields)
        raise UserError(f"x has {own}, but samples have {right}; give {_form(fields)}.")
    trained = (fields.part(data.x, place) for place in range(len(fields.names)))
    typed = {
        name: unit_pixels(part) if dtype == torch.uint8 else scaled_as(known, part)
        for (name, part), dtype, known in zip(
            samples.tensors.items(), fields.dtypes, trained, strict=True
        )
    }
    return typed if fields.named else tuple(typed.values())


def _form(fields: Fields) -> str:
    """How a user gives samples of these parts."""
    if fields.keywords is not None:
        return f"{{{', '.join(f'{name!r}: ...' for name in fields.keywords)}}}"
    single = len(fields.given) == 1
    return "a list of sequences" if single else "them as in the training, in a tuple"


def scaled_as(trained: Tensor, x: Tensor) -> Tensor:
    """New samples in the type and on the scale of the training samples: pixels for a network that
    was trained on floats are divided by 255 where those lie between 0 and 1, else refused.
    """
    if trained.dtype == torch.uint8:
        return pixels(x)
    if trained.dtype == torch.int64 and x.is_floating_point() and not torch.equal(x, x.round()):
        raise UserError(
            f"x has {float(x[x != x.round()][0]):g}, but the training samples are whole numbers "
            "(tokens)."
        )
    if not trained.is_floating_point() or x.is_floating_point() or not x.numel():
        return x.to(trained.dtype)
    low, high = (float(limit) for limit in trained.aminmax())
    if low == high == 0:  # as at the server of a deployment, which has no samples
        raise UserError(
            "x has whole numbers, and the scale of the training samples is not known here; give "
            "floats on that scale."
        )
    is_unit, most = low >= 0 and high <= 1, int(x.max())
    if is_unit and x.dim() > 2 and (x.dtype == torch.uint8 or most > 1):
        return unit_pixels(x)
    if x.dtype == torch.uint8 and ((is_unit and most > 1) or (x.dim() > 2 and low < 0)):
        raise UserError(
            f"x has whole numbers up to {most} as uint8, but the network was trained on floats "
            f"from {low:.3g} to {high:.3g}; give floats on that scale."
        )
    return x.float()


def pixels(x: Tensor) -> Tensor:
    """Pixels as whole numbers up to 255, or as floats between 0 and 1; refuses other values."""
    most = 1 if x.is_floating_point() else 255
    if x.numel() and not (x.min() >= 0 and x.max() <= most):
        raise UserError(
            f"x has values from {float(x.min()):g} to {float(x.max()):g}, but pixels are whole "
            "numbers from 0 to 255 or floats from 0 to 1; they are normalised here."
        )
    return x.float() if x.is_floating_point() else x.to(torch.uint8)


def unit_pixels(x: Tensor) -> Tensor:
    """Pixels as floats between 0 and 1."""
    checked = pixels(x)
    return checked if checked.is_floating_point() else checked.float() / 255


def decided(module: nn.Module, data: Dataset, outputs: Tensor) -> np.ndarray:
    """What a network's outputs mean: classes (by name, where the data have names), labels, or
    values.
    """
    if data.classes is not None and (outputs.dim() < 2 or outputs.shape[1] == 1):
        raise UserError(
            f"the network has one output for {data.classes} classes, so predict cannot tell a "
            "logit from a probability; compare predict(..., raw=True) with 0 or 0.5, or give the "
            "network an output for every class."
        )
    if data.classes is not None:
        return _named(data, outputs.argmax(-1))
    if data.y.dtype == torch.bool:
        return (outputs > 0).numpy()
    if data.y.dtype == torch.int64:  # new sequences may be shorter, so training samples tell
        axis = class_axis(_trained_outputs(module, data), data.y[:1])
        return _named(data, outputs.argmax(axis))
    return outputs.reshape(len(outputs), *data.y.shape[1:]).numpy()


def _named(data: Dataset, classes: Tensor) -> np.ndarray:
    """Classes by their names, where the data have names."""
    return classes.numpy() if data.labels is None else np.asarray(data.labels)[classes.numpy()]
