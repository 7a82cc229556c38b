"""The inputs and results of a client's work."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from fedhelix.core.cuda import Recorded
from fedhelix.core.errors import UserError
from fedhelix.core.hooks import checked
from fedhelix.core.layers import Layers
from fedhelix.core.method import Method, Phase
from fedhelix.core.objective import Objective
from fedhelix.core.optimizers import OPTIMIZERS, OptimizerRule
from fedhelix.core.options import Checked, option
from fedhelix.core.tree import State, Tree
from fedhelix.data import Augmentation, CropAndFlip, Dataset, Split
from fedhelix.engines.kernels import Kernels

Subset = Literal["train", "test"]
Outputs = Callable[[Subset, Tensor], Tensor]  # a model's outputs for some samples of a subset


@dataclass(frozen=True)
class Training(Checked):
    """How a client trains: minibatches, with a fresh optimiser in every round and phase."""

    epochs: int = option(2, "local epochs of one round", low=0)
    batch_size: int = option(16, "samples in a minibatch", low=1, high=1_000_000)
    lr: float = option(0.1, "learning rate", above=0)
    lr_decay: float | tuple[float, ...] = option(
        1.0,
        "factor on the learning rate after each round, or a list with a factor for each round, of "
        "which the last one stays (on the command line with commas: 1,0.5,0.1)",
        above=0,
    )
    momentum: float = option(
        0.5, "momentum of SGD", low=0, below=1, idle_with={"optimizer": ("adam", "adamw")}
    )
    weight_decay: float = option(0.0, "weight decay", low=0)
    optimizer: Literal["sgd", "adam", "adamw"] | OptimizerRule = option(
        "sgd", "how a client steps: sgd, adam or adamw; in Python also a rule of your own"
    )
    augment: bool | Augmentation = option(
        False,
        "random crop and horizontal flip of the training images; in Python also an Augmentation "
        "of your own",
    )
    sampler: Literal["shuffle", "balanced"] = option(
        "shuffle",
        "samples of an epoch: each once, or drawn so that a client's classes are equally frequent "
        "(shuffle, balanced)",
    )
    precision: Literal["float32", "bfloat16"] = option(
        "float32", "arithmetic of the training steps (float32, bfloat16)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr_decay == ():
            raise UserError("lr_decay is an empty list; give a factor for at least one round.")
        if isinstance(self.lr_decay, float) and self.lr_decay > 1:
            raise UserError(
                f"lr_decay must be at most 1, not {self.lr_decay}; factors that rise are a list, "
                "with one for each round."
            )

    def rate(self, round: int, phase: Phase) -> float:
        """The learning rate of a phase of a round."""
        decay = self.lr_decay
        if isinstance(decay, tuple):
            return phase.rate * self.lr * decay[min(round, len(decay) - 1)]
        return phase.rate * self.lr * decay**round

    @property
    def augmentation(self) -> Augmentation | None:
        """How training samples are changed at random, if at all."""
        if isinstance(self.augment, Augmentation):
            return self.augment
        return CropAndFlip() if self.augment else None

    @property
    def rule(self) -> OptimizerRule:
        """The optimiser's rule."""
        return OPTIMIZERS[self.optimizer] if isinstance(self.optimizer, str) else self.optimizer


@dataclass(frozen=True, eq=False)
class Setup:
    """Everything that a client's work depends on, except its payload and its state."""

    method: Method
    module: nn.Module
    layers: Layers
    initial: State
    data: Dataset
    splits: Sequence[Split]
    training: Training
    objective: Objective
    seed: int
    device: torch.device
    kernels: Kernels = "onednn"
    deployed: bool = False  # this is a real site
    cuts: bool = False  # batches of sequences are as wide as their longest, not as that of all
    # What a GPU does for single clients as recorded programs, where the engine records steps.
    programs: dict[object, Recorded] | None = None

    def recorded(
        self, key: object, function: Callable[..., tuple[Tensor, ...]]
    ) -> Callable[..., tuple[Tensor, ...]]:
        """A function of tensors alone, or its recorded program; the key stands for all else that
        its results depend on.
        """
        if self.programs is None:
            return function
        return self.programs.setdefault(key, Recorded(function))

    def forget_programs(self) -> None:
        """Release what is recorded, and its memory."""
        if self.programs is not None:
            self.programs.clear()

    @cached_property
    def hooks(self) -> Method:
        """The method's hooks, with checks of what they return."""
        return checked(self.method)

    @cached_property
    def loss_key(self) -> object:
        """Equal for clients whose losses are; see `Capabilities`."""
        return self.method.capabilities.loss_key

    @cached_property
    def cast(self) -> tuple[str, ...]:
        """The entries that `autocast` casts whenever they are used, as those of plain layers are;
        what has several names may have other uses.
        """
        if self.layers.tied:
            return ()
        plain = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        entries = (
            f"{name}.{entry}" if name else entry
            for name, layer in self.module.named_modules()
            if type(layer) in plain
            for entry, value in layer.named_parameters(recurse=False)
            if value.dtype == torch.float32
        )
        known = set(self.layers.parameters)
        return tuple(name for name in entries if name in known)

    @cached_property
    def architecture(self) -> str:
        """Equal for networks that can be stacked."""
        return str(self.module)

    @cached_property
    def frozen(self) -> str:
        """Equal for networks whose frozen parameters are."""
        digest = hashlib.sha256()
        for name in self.layers.frozen:
            value = self.module.get_parameter(name).detach().cpu().contiguous()
            digest.update(name.encode() + value.view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


class ClientTask(NamedTuple):
    """One client's turn in one round."""

    client: int
    round: int
    payload: Tree
    client_state: Tree
    trained: bool = False  # evaluated after the local training of one round
    final: bool = False  # the rounds are over: what the client makes of its model now, it keeps


class ClientResult(NamedTuple):
    """The result of a task; the loss is the mean over the round's steps, None if a site keeps it
    to itself.
    """

    client: int
    samples: int
    upload: Tree
    client_state: Tree
    loss: float | None


class PersonalModel(NamedTuple):
    """The model that a client uses, and its name among the client's models."""

    state: State
    name: str


class Scores(NamedTuple):
    """A personal model on the client's own test and validation parts."""

    test: float
    test_loss: float
    valid: float
    used: str = "model"  # the name of the personal model
