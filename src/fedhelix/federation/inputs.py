"""What a federation is given, as text or as values: data, a partition, a method, a network."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from fedhelix import models
from fedhelix.core.errors import UserError, brief
from fedhelix.core.fit import check_constant_buffers, check_fits, probe
from fedhelix.core.hooks import checked
from fedhelix.core.layers import Layers
from fedhelix.core.method import Method
from fedhelix.core.metrics import fitting_axes
from fedhelix.core.objective import (
    Objective,
    cross_entropy,
    squared_error,
    token_cross_entropy,
)
from fedhelix.core.registry import make, option_names, resolve
from fedhelix.core.trial import (
    check_loss,
    check_loss_of_samples,
    check_metric,
    check_optimizer,
    note_probabilities,
)
from fedhelix.data import (
    UNSHIFTED,
    Dataset,
    Partition,
    from_arrays,
    from_clients,
    from_table,
    is_table,
    load,
    partitions,
)
from fedhelix.data.augment import check_augmentation
from fedhelix.data.columns import is_pair, pair_of
from fedhelix.engines.kernels import Kernels
from fedhelix.engines.kernels.choice import choose
from fedhelix.engines.local import Setup, can_cut
from fedhelix.federation.devices import check_level
from fedhelix.methods import FedAvg
from fedhelix.robust.attacks import Attack

USUAL_CLIENTS = 20
SEVERAL = 3  # samples that tell whether network, loss and data fit
Model = str | nn.Module | Callable[[], nn.Module]
OWN = [
    "clients",
    "cohort",
    "data",
    "device",
    "engine",
    "loss",
    "method",
    "metric",
    "model",
    "partition",
    "seed",
    "workers",
]


def read_data(data: Any, partition: str | Partition | None) -> Dataset:
    """A data set by its name, as it is, from a table, a torch data set, or one part per client."""
    if isinstance(data, str):
        return load(data)
    if isinstance(data, Dataset):
        return data
    if is_table(data):
        return from_table(data, owner=owner_column(partition))
    if isinstance(data, TorchDataset | DataLoader):
        return from_arrays(*pair_of(data, "the data set"))
    if isinstance(data, tuple):
        raise UserError(
            "data is a tuple; give from_arrays(x, y) for two arrays, from_clients([train], "
            "test=test) for two data sets, or a list with an entry for each client."
        )
    if is_pair(data) and all(isinstance(part, np.ndarray | torch.Tensor) for part in data.values()):
        raise UserError("data is a dictionary of two arrays; give from_arrays(x, y) for them.")
    if not hasattr(data, "__len__"):
        raise UserError(
            f"data is of type {type(data).__name__}; give the name of a data set, from_arrays(x, "
            "y), a table, a torch data set, or a list with an entry for each client."
        )
    if (column := owner_column(partition)) is not None:
        raise UserError(
            f"partition.natural('{column}') names a column of one table, and in a list every entry "
            "is a client already; leave the partition out, or join the tables into one."
        )
    return from_clients(data)


def owner_column(partition: str | Partition | None) -> str | None:
    """The column of a table that `partition.natural("column")` names."""
    ids = getattr(partition, "ids", None)
    return str(ids) if ids is not None and ids.ndim == 0 else None


def read_partition(
    partition: str | Partition | None, pool: Dataset, clients: int | None
) -> Partition:
    """A partition as it is or from text; None takes the usual one for these data."""
    if owner_column(partition) is not None and pool.owners is not None:
        partition = replace(partition, ids=None)  # type: ignore[type-var]
    if partition is None:
        partition = partitions.usual(pool)
    if isinstance(partition, str):
        partition = partitions.parse(partition, USUAL_CLIENTS if clients is None else clients)
    if not isinstance(partition, Partition):
        raise UserError(
            "partition is text or a value such as partition.iid(10), not "
            f"{brief(partition)}; to assign samples "
            "yourself, name the owner of each one: from_arrays(x, y, owners=ids), without a "
            "partition."
        )
    return partition


def read_method(method: str | Method | None) -> Method:
    """A method by its name or as it is; None is FedAvg."""
    if isinstance(method, str) and "@" in method and ".py" not in method:
        raise UserError(f"'{method}' is for the command line; in Python give {in_python(method)}.")
    chosen = make(method) if isinstance(method, str) else FedAvg() if method is None else method
    if not isinstance(chosen, Method):
        raise UserError(f"method is a name or a value such as FedAvg(), not {method!r}.")
    return chosen


def in_python(variant: str) -> str:
    """The arguments of a federation for METHOD@KEY=VALUE,... of the command line."""
    spec, _, text = variant.partition("@")
    pairs = dict(pair.partition("=")[::2] for pair in text.split(","))
    value = ""
    for kind in reversed(resolve(spec)):
        mine = [f"{key}={pairs.pop(key)}" for key in option_names(kind) if key in pairs]
        value = f"{kind.__name__}({', '.join(filter(None, [value, *mine]))})"
    return ", ".join([f"method={value}", *(f"{key}={given}" for key, given in pairs.items())])


def network(
    model: Model, pool: Dataset, method: Method, seed: int, objective: Objective
) -> tuple[nn.Module, Layers]:
    """The network for these data and its layers, if it fits them and the method can use it."""
    if pool.classes == 1:
        raise UserError(
            f"all samples of '{pool.name}' have one class, so there is nothing to learn; if there "
            "are more, give classes=, their number (in an npz file an array of this name)."
        )
    module = models.build(model, pool.shape, pool.outputs, data_name=pool.name, seed=seed)
    example = pool.prepare(pool.x[:SEVERAL].cpu())  # where a new network is
    usual = objective.loss in (cross_entropy, squared_error)
    check_tokens(module, pool)
    outputs = check_fits(module, example, pool.outputs if usual else None)
    targets = pool.y[:SEVERAL].cpu()
    if objective.loss is token_cross_entropy:
        _check_classes_of_tokens(pool, outputs)
    if method.capabilities.sample_features and outputs.dim() > 2:
        raise UserError(
            f"{method.label} works on the features of a sample as a whole, and this model scores "
            "tokens or pixels; use another method."
        )
    check_loss(objective, outputs.float(), targets)
    if method.capabilities.sample_gradients:
        spread = torch.linspace(0, len(pool.y) - 1, len(outputs)).long()  # over several classes
        various = pool.y.cpu()[spread]
        check_loss_of_samples(objective, outputs.float(), various, method.label)
    check_metric(objective, outputs.float(), targets)
    layers = Layers.of(module, example)
    note_probabilities(objective, module, layers, example, outputs.float(), targets)
    if pool.classes is None and pool.y.dtype == torch.int64:
        _note_unclear_axis(outputs, targets)
    checked(method).check(layers)
    if method.capabilities.sample_gradients:
        check_constant_buffers(module, example, method.label)
    return module, layers


def _check_classes_of_tokens(pool: Dataset, outputs: torch.Tensor) -> None:
    """Refuse classes of tokens where a network scores samples as a whole, and say why they are
    no labels.
    """
    y = torch.cat([pool.y, pool.y_test])
    values = y[(y != 0) & (y != 1)]
    if outputs.dim() == y.dim() == 2 and pool.labels is not None:
        raise UserError(
            f"y of '{pool.name}' has {y.shape[1]} texts per sample, which are classes of tokens, "
            "but the model does not score tokens; for labels of which several may hold give a "
            "column of 0 and 1 for each, as scikit-learn's MultiLabelBinarizer makes them."
        )
    if outputs.dim() == y.dim() == 2 and pool.token_classes is not None:
        raise UserError(
            f"classes={pool.token_classes} makes the {y.shape[1]} numbers per sample in y of "
            f"'{pool.name}' classes of tokens, but the model does not score tokens; leave classes "
            "out for labels of which several may hold, and give one class per sample as one number "
            "(y.argmax(1))."
        )
    if outputs.dim() == y.dim() == 2 and len(values):
        raise UserError(
            f"y of '{pool.name}' has the value {int(values[0])}, so its {y.shape[1]} whole numbers "
            "per sample are classes of tokens, but the model does not score tokens; labels of "
            "which several may hold are 0 or 1, and numbers to predict need classes=None."
        )


def check_tokens(module: nn.Module, pool: Dataset) -> None:
    """Refuse a network that fails for the largest or smallest whole numbers of the samples."""
    extreme = []
    for x in (pool.x, pool.x_test):
        for part in pool.whole_numbers(x) if len(x) else ():
            values = part.reshape(len(part), -1)  # one number per sample or many
            extreme += [x[values.amax(1).argmax()], x[values.amin(1).argmin()]]
    if extreme:
        probe(module, pool.prepare(torch.stack(extreme).cpu()))


def _note_unclear_axis(outputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Say which axis is that of the classes, where tokens are as many as classes."""
    if outputs.dim() == 3 and all(fitting_axes(outputs, targets)):
        warnings.warn(
            f"outputs of shape {tuple(outputs.shape)} are taken as N×T×C, the scores of each token "
            "on the last axis; if they are N×C×T, let the model return outputs.transpose(1, 2).",
            stacklevel=5,
        )


def client_setup(setup: Setup, kernels: Kernels | Literal["auto"]) -> Setup:
    """What clients' work depends on, on its device, with the initial state and with kernels."""
    check_training(setup)
    batch_size = setup.training.batch_size
    if batch_size < 2 and any(isinstance(m, nn.BatchNorm1d) for m in setup.module.modules()):
        raise UserError("BatchNorm needs two samples in a minibatch; set batch_size to 2 or more.")
    if setup.layers.norm and any(len(split.train) == 1 for split in setup.splits):
        raise UserError(
            "a client has only one training sample, but BatchNorm needs two; give it more samples, "
            "or use a network without BatchNorm."
        )
    state = setup.module.to(setup.device).state_dict()
    initial = {name: state[name].detach().clone() for name in setup.layers.names}
    setup = replace(setup, initial=initial, data=setup.data.to(setup.device))
    setup = replace(setup, cuts=can_cut(setup))
    if setup.method.capabilities.sample_gradients:  # our own kernels know whole batches only
        return replace(setup, kernels="onednn")
    return replace(setup, kernels=choose(setup) if kernels == "auto" else kernels)


def check_training(setup: Setup) -> None:
    """Refuse an optimiser, a sampler, an augmentation or a target that does not suit data or
    method.
    """
    training, data = setup.training, setup.data
    check_optimizer(training.rule, training.momentum)
    check_level("target", getattr(training, "target", None), setup.objective.name)
    if training.sampler == "balanced" and data.classes is None:
        raise UserError(f"sampler = balanced needs classes, and '{data.name}' has none.")
    if training.sampler == "balanced" and setup.method.capabilities.sample_gradients:
        raise UserError(f"{setup.method.label} counts on sampler = shuffle for its privacy budget.")
    if training.augmentation is None:
        return
    if data.fields is not None:
        raise UserError(
            f"augment changes samples of one part, and those of '{data.name}' have more."
        )
    x = data.x[:SEVERAL].clone()
    if training.augment is True and x.dim() != 4:
        raise UserError(
            f"augment = true crops and flips images, and a sample of '{data.name}' has the shape "
            f"{data.shape}; in Python it takes an Augmentation of your own."
        )
    if training.augment is True and data.y.dim() > 2 and data.y.shape[-2:] == x.shape[-2:]:
        raise UserError(
            f"augment = true crops and flips images, but not their targets, and '{data.name}' has "
            "a target for every pixel; leave it out."
        )
    check_augmentation(training.augmentation, x)


def check_apart(settings: Any) -> None:
    """Refuse settings of a federation that need the samples of all clients in one place."""
    if settings.server_only or settings.participation == "classes":
        raise UserError(
            "server_only and participation = classes need all samples in one place, but sites "
            "keep theirs; leave them out."
        )
    if settings.standardize:
        raise UserError(
            "standardize needs all samples in one place, but sites keep theirs; scale them there."
        )
    if settings.shift != UNSHIFTED:
        raise UserError(
            f"shift = {settings.shift} changes samples, but sites keep theirs, which differ as "
            "they are; leave it out."
        )


def check_forging(attack: Attack, method: Method) -> None:
    """Refuse an attack that cannot read or change the messages of a method."""
    if attack.forges and method.capabilities.packed_uploads:
        raise UserError(
            f"attack = {attack.attack} cannot change what {method.label} uploads, which is packed."
        )
    if attack.forges and method.capabilities.packed_downloads:
        raise UserError(
            f"attack = {attack.attack} cannot read what clients of {method.label} receive, which "
            "is packed."
        )


def device_of(name: str) -> torch.device:
    """The device of that name; `auto` takes what there is."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):
        raise UserError(
            f"there is no device '{name}' here; use auto to take what there is."
        ) from None
    return device
