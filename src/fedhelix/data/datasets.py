"""Data sets: a training pool and a test pool, checked once when they are made."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhelix.core.errors import UserError
from fedhelix.core.metrics import IGNORED
from fedhelix.core.options import checks_options
from fedhelix.core.parts import Inputs
from fedhelix.core.seeds import numpy_draw
from fedhelix.data.checks import Pool, check_pool, describe, describe_targets
from fedhelix.data.fields import WIDTHS, Fields
from fedhelix.data.sampling import stratified

POOLS = ("x", "y", "x_test", "y_test")
COPYING = threading.Lock()  # of several runs that start together, one copies and all share


def rows_of(pool: Tensor, samples: Tensor) -> Tensor:
    """The samples with these indices; the result has the axes of `samples` in front."""
    if pool.device.type != "cpu":
        return pool[samples]
    # `index_select` copies whole rows; indexing goes value by value and takes ten times as long.
    return pool.index_select(0, samples.flatten()).view(*samples.shape, *pool.shape[1:])


@checks_options
@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """A training pool and a test pool.

    Clients are index arrays into them, so that no sample is copied per client.
    """

    name: str
    x: Tensor
    """uint8 pixels, float32 values or int64 tokens; images N×C×H×W, tables N×D."""
    y: Tensor
    """One int64 label per sample; otherwise float32 (regression), bool (labels of which several may
    hold) or int64 (the classes of tokens or pixels; -100 does not count)."""
    x_test: Tensor
    y_test: Tensor
    classes: int | None
    """How many classes; None: not one label per sample."""
    mean: tuple[float, ...] | None = None
    """Per channel, on the [0, 1] scale."""
    std: tuple[float, ...] | None = None
    owners: np.ndarray | None = None
    """Who owns each sample, where the data come with owners."""
    owners_test: np.ndarray | None = None
    fields: Fields | None = None
    """Where samples have several parts: how these lie in the rows of x."""
    labels: tuple[str, ...] | None = None
    """What the classes are called, where the data say."""
    columns: tuple[str, ...] | None = None
    """What the columns that the network gets are called, where the data are a table."""
    token_classes: int | None = None
    """How many classes tokens or pixels have, where that was given."""
    # Made once, on the data's device: a copy from the host in every batch would be slow and cannot
    # be captured in a CUDA graph.
    _shift: Tensor | None = dataclasses.field(init=False, default=None)
    _scale: Tensor | None = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        train = Pool(self.name, "x", self.x, "y", self.y, self.owners)
        test = Pool(self.name, "x_test", self.x_test, "y_test", self.y_test, self.owners_test)
        for pool in (train, test):
            check_pool(pool, self.classes)
        if self.x.shape[1:] != self.x_test.shape[1:] or self.x.dtype != self.x_test.dtype:
            raise UserError(
                f"x and x_test of '{self.name}' must hold samples of one kind, "
                f"but x has {describe(self.x)} and x_test {describe(self.x_test)}."
            )
        if (self.mean is None) != (self.std is None):
            raise UserError(f"'{self.name}' has only one of mean and std; give both or none.")
        if self.mean is not None and self.fields is not None:
            raise UserError(f"'{self.name}' has samples of several parts, so mean has no meaning.")
        if self.mean is not None and self.std is not None:
            object.__setattr__(self, "_shift", self._per_channel("mean", self.mean))
            object.__setattr__(self, "_scale", self._per_channel("std", self.std))

    def __repr__(self) -> str:
        kinds = {torch.bool: "labels", torch.int64: "classes of each token or pixel"}
        kind = f"{self.classes} classes" if self.classes else kinds.get(self.y.dtype, "regression")
        return (
            f"Dataset({self.name}: {len(self.x)} train, {len(self.x_test)} test, {self._sample}, "
            f"{kind})"
        )

    @property
    def _sample(self) -> str:
        """What a sample is, for people."""
        return describe(self.x) if self.fields is None else str(self.fields)

    @property
    def shape(self) -> Any:
        """The shape of one sample, or those of its parts by name or in order."""
        return tuple(self.x.shape[1:]) if self.fields is None else self.fields.shape

    @property
    def sample_bytes(self) -> int:
        """What one sample weighs on the wire, with its target: 4 bytes for every value."""
        values = self.x[0].numel() if self.fields is None else self.fields.values
        return 4 * (values + self.y[0].numel())

    @property
    def outputs(self) -> int:
        """How many outputs a network needs: one for each class, or for each number."""
        if self.classes is not None:
            return self.classes
        if self.y.dtype == torch.int64:
            return self.token_classes or 1 + max(int(self.y.max()), int(self.y_test.max()))
        return math.prod(self.y.shape[1:])

    def codes(self, targets: Tensor) -> np.ndarray:
        """Labels as NumPy; a regression counts as one class."""
        return (
            np.zeros(len(targets), dtype=np.int64)
            if self.classes is None
            else targets.cpu().numpy()
        )

    def prepare(self, x: Tensor) -> Any:
        """A gathered batch as network input: pixels become floats in [0, 1], then are normalised.

        There may be any axes before the sample's (batch, clients × batch); tokens pass through.
        """
        if self.fields is not None:
            return self.fields.unpack(x)
        if x.dtype == torch.uint8:
            x = x.float() / 255
        if self._shift is None or self._scale is None or not x.is_floating_point():
            return x
        return (x - self._shift.to(x.device)) / self._scale.to(x.device)

    def whole_numbers(self, x: Tensor) -> list[Tensor]:
        """The parts of samples that are whole numbers, such as tokens."""
        if self.fields is None:
            return [x] if x.dtype == torch.int64 else []
        kinds = enumerate(self.fields.dtypes)
        return [self.fields.part(x, place) for place, dtype in kinds if dtype == torch.int64]

    @cached_property
    def lengths(self) -> Tensor | None:
        """How long each training sample is without its padding, on the CPU.

        None where samples are no sequences that are padded at their ends.
        """
        lengths = None if self.fields is None else self.fields.lengths(self.x)
        if lengths is None or not self.has_token_targets:
            return None if lengths is None else lengths.cpu()
        places = torch.arange(1, self.y.shape[1] + 1, device=self.y.device)
        return torch.maximum(lengths, ((self.y != IGNORED) * places).amax(1)).cpu()

    @cached_property
    def widths(self) -> Tensor | None:
        """How wide a batch must be for each training sample: its length, rounded up to one of few.

        None where all would be as wide as the widest.
        """
        whole = None if self.fields is None else self.fields.length
        if self.lengths is None or whole is None:
            return None
        step = -(-whole // WIDTHS)
        widths = (-(-self.lengths // step) * step).clamp(step, whole)
        return None if bool((widths == whole).all()) else widths

    @property
    def has_token_targets(self) -> bool:
        """Whether every place of a padded sequence has a class."""
        length = None if self.fields is None else self.fields.length
        return self.y.dtype == torch.int64 and self.y.shape[1:] == (length,)

    def cut(self, x: Inputs, y: Tensor, width: int) -> tuple[Inputs, Tensor]:
        """Prepared samples and their targets with only the first places of sequences."""
        assert self.fields is not None
        x = self.fields.cut(x, width)
        return x, y[..., :width] if self.has_token_targets else y

    def pixels(self, x: Tensor) -> Tensor:
        """Network inputs as what they were before `prepare` normalised them."""
        if self._shift is None or self._scale is None:
            return x
        return x * self._scale.to(x.device) + self._shift.to(x.device)

    def to(self, device: torch.device | str) -> Dataset:
        """The same data on a device; the copy is cached."""
        device = torch.device(device)
        if device == self.x.device:
            return self
        return self.cached(
            device,
            lambda: dataclasses.replace(
                self, **{name: getattr(self, name).to(device) for name in POOLS}
            ),
        )

    def cached(self, key: Hashable, copy: Callable[[], Dataset]) -> Dataset:
        """A changed copy, made once: federations that share a data set share its copies too."""
        with COPYING:
            if key not in self._copies:
                self._copies[key] = copy()
            return self._copies[key]

    def with_flipped(self) -> Dataset:
        """The training pool twice: sample N + i is sample i with label classes - 1 - label.

        The copy is cached, so that federations under attack share it.
        """
        return self.cached("flipped", self._flipped)

    def _flipped(self) -> Dataset:
        x = torch.cat([self.x, self.x])
        y = torch.cat([self.y, (self.classes or 1) - 1 - self.y])
        owners = None if self.owners is None else np.concatenate([self.owners, self.owners])
        return dataclasses.replace(self, x=x, y=y, owners=owners)

    def with_trigger(self) -> Dataset:
        """The training pool, the same with a trigger, and the test pool with it: all of class 0.

        The trigger is a bright square in the last corner of an image, an eighth of its height and
        at least two pixels wide. The copy is cached, as that of `with_flipped`.
        """
        if self.x.dim() != 4:
            raise UserError(
                f"a trigger is a patch in the corner of an image, and '{self.name}' has "
                f"{describe(self.x)}."
            )
        return self.cached("trigger", self._triggered)

    def _triggered(self) -> Dataset:
        marked = torch.cat([self.x, self.x_test])
        size = max(2, self.x.shape[2] // 8)
        marked[:, :, -size:, -size:] = self.x.max()
        x = torch.cat([self.x, marked])
        y = torch.cat([self.y, self.y.new_zeros(len(marked))])
        return dataclasses.replace(self, x=x, y=y, owners=None)

    def joined(self, other: Dataset) -> Dataset:
        """Both data sets as one, the other's samples last and without owners."""
        alike = self.x.shape[1:] == other.x.shape[1:] and self.x.dtype == other.x.dtype
        if not alike or self.fields != other.fields:
            raise UserError(
                f"{other.name} has samples of {other._sample}, '{self.name}' has {self._sample}; "
                f"{self._advice(other)}."
            )
        if self.y.shape[1:] != other.y.shape[1:]:
            raise UserError(
                f"{other.name} has targets of shape {describe_targets(other.y)}, "
                f"'{self.name}' has {describe_targets(self.y)}; give targets of that shape."
            )
        pairs = {
            part: (getattr(self, part), getattr(other, part).to(self.x.device)) for part in POOLS
        }
        both: dict[str, Any] = {part: torch.cat(pair) for part, pair in pairs.items()}
        return dataclasses.replace(self, **both, owners=None, owners_test=None)

    def _advice(self, other: Dataset) -> str:
        """How samples become such as these."""
        if self.x.shape[1:] != other.x.shape[1:] or self.fields != other.fields:
            return "give samples of that shape"
        if self.x.dtype == torch.uint8 and other.x.is_floating_point():
            return "give pixels from 0 to 255 as uint8 (multiply values from 0 to 1 by 255)"
        return f"give them as {str(self.x.dtype).removeprefix('torch.')}"

    @cached_property
    def _copies(self) -> dict[Hashable, Dataset]:
        return {}

    def first(self, train: int | None, test: int | None) -> Dataset:
        """Only the first samples of each pool (None: all)."""
        shortened = self
        for part, size in (("", train), ("_test", test)):
            if size is None:
                continue
            available = len(getattr(self, "y" + part))
            if size > available:
                raise UserError(
                    f"'{self.name}' has only {available} samples in x{part}, not {size}."
                )
            shortened = shortened._only(part, slice(size))
        return shortened

    def subsample(self, train: int, test: int | None = None, seed: int = 0) -> Dataset:
        """A smaller data set with the same class proportions (`test=None`: the whole test pool)."""
        smaller = self
        wanted = {"": (self.y, train), "_test": (self.y_test, test)}
        for part, (labels, size) in wanted.items():
            if size is None:
                continue
            if not 1 <= size <= len(labels):
                raise UserError(
                    f"cannot draw {size} samples from the {len(labels)} "
                    f"of x{part} of '{self.name}'."
                )
            codes = labels.cpu().numpy() if self.classes else np.zeros(len(labels), dtype=np.int64)
            smaller = smaller._only(
                part, stratified(codes, size, numpy_draw(seed, "subsample" + part))
            )
        return smaller

    def _only(self, part: str, chosen: np.ndarray | slice) -> Dataset:
        """The same data set with only the chosen samples of one pool."""
        pool = {name + part: getattr(self, name + part) for name in ("x", "y", "owners")}
        kept: dict[str, Any] = {
            name: None if values is None else values[chosen] for name, values in pool.items()
        }
        return dataclasses.replace(self, **kept)

    def _per_channel(self, field: str, values: tuple[float, ...]) -> Tensor:
        channels = self.x.shape[1]
        if len(values) not in (1, channels):
            raise UserError(
                f"{field} of '{self.name}' has {len(values)} values for {channels} channels."
            )
        tensor = torch.tensor(values, dtype=torch.float32, device=self.x.device)
        if not bool(tensor.isfinite().all()) or (field == "std" and not bool((tensor > 0).all())):
            raise UserError(
                f"{field} of '{self.name}' is {values}; {field} must be finite and std above zero."
            )
        return tensor.view(-1, *[1] * (self.x.dim() - 2))


def channel_values(field: str, values: Any) -> tuple[float, ...] | None:
    """One number for each channel, or a single one for all."""
    if values is None:
        return None
    try:
        channels: tuple[float, ...] = tuple(np.asarray(values, dtype=float).ravel().tolist())
    except (TypeError, ValueError):
        raise UserError(
            f"{field} must be a number, or one for each channel, not {values!r}."
        ) from None
    return channels


def with_class_names(data: Dataset, names: tuple[str, ...] | None) -> Dataset:
    """The data with the names of their classes, where there is one for each."""
    return dataclasses.replace(data, labels=names) if data.classes == len(names or "") else data
