"""A site's part in secure aggregation, and how its messages are written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhelix.components.masking import MaskingClient
from fedhelix.components.secure_sum import DIGEST, SHARE, SIGNATURE, TAG, WORDS
from fedhelix.core.errors import UserError
from fedhelix.core.method import Method
from fedhelix.core.tree import Tree, encode
from fedhelix.deploy.key_ring import ANSWERS, KEYS, SIGNED, KeyRing
from fedhelix.deploy.site_state import GONE_BACK, SiteState
from fedhelix.engines.local import ClientTask


def to_tensors(texts: Mapping[int, bytes]) -> Tree:
    """Bytes by client, as a tree."""
    return {
        str(i): torch.frombuffer(bytearray(text), dtype=torch.uint8) for i, text in texts.items()
    }


def to_bytes(tree: Any, size: int) -> dict[int, bytes]:
    """The inverse of `to_tensors`, for texts of one size."""
    if not isinstance(tree, dict) or not all(str(key).isdigit() for key in tree):
        raise UserError("holds no keys or shares by client.")
    for value in tree.values():
        if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.shape != (size,):
            raise UserError(f"holds keys or shares that are not {size} bytes long.")
    return {int(key): bytes(value.tolist()) for key, value in tree.items()}


def to_unsigned(words: Any, like: np.ndarray | None = None) -> np.ndarray:
    """Words of an upload as NumPy has them, as many and as long as the given ones."""
    if not isinstance(words, Tensor) or words.dtype not in WORDS.values() or words.dim() != 1:
        raise UserError("holds no row of words.")
    row = words.cpu().numpy().view(f"u{words.element_size()}")
    if like is not None and (len(row), row.dtype) != (len(like), like.dtype):
        raise UserError(f"holds {_form(row)} instead of {_form(like)}.")
    return row


def _form(words: np.ndarray) -> str:
    return f"{len(words)} words of {8 * words.itemsize} bits"


def to_signed(words: np.ndarray) -> Tensor:
    """The inverse of `to_unsigned`."""
    return torch.from_numpy(words.view(f"i{words.itemsize}"))


def round_name(experiment: str, task: ClientTask) -> str:
    """What keys of a round are bound to."""
    return f"{experiment} {task.round}"


def task_digest(header: Mapping[str, Any], payload: Tree) -> bytes:
    """What an upload was computed from, besides a site's samples: settings, model, numbers.

    Masks cancel only where all sites have the same: whoever sends one site another model gets no
    sum. What a client has spent is its own, and nothing is computed from it.
    """
    settings = json.dumps([header.get(name) for name in ("spec", "classes", "code")])
    common = {name: part for name, part in payload.items() if name != "spent"}
    return hashlib.sha256(settings.encode() + encode(common)).digest()


class Masker:
    """A site's part: its secrets of the current round, which never touch the disk."""

    def __init__(self, ring: KeyRing | None = None) -> None:
        self._ring = ring or KeyRing()
        self._current: MaskingClient | None = None

    def keys(self, experiment: str, method: Method, task: ClientTask, kept: SiteState) -> Tree:
        """Its public keys in a round; asked again, it sends the same."""
        purpose = round_name(experiment, task)
        if method.capabilities.masks is None:
            raise UserError(f"{method.label} has no secure aggregation.")
        if task.round < kept.masked()["round"]:
            raise UserError(f"round {task.round + 1} is over, and is not masked again; {GONE_BACK}")
        if self._current is None or self._current.purpose != purpose:
            self._current = MaskingClient(task.client, purpose, *method.capabilities.masks)
        keys = self._of(experiment, task).advertise()
        return to_tensors({task.client: self._ring.signed(KEYS, purpose, task.client, keys)})

    def shares(self, experiment: str, task: ClientTask, body: Tree) -> Tree:
        """Shares of its secrets, each encrypted for one neighbour."""
        client = self._of(experiment, task)
        signed = to_bytes(body.get("keys"), SIGNED)
        keys = self._ring.checked(KEYS, client.purpose, signed)
        if keys.get(task.client) != client.advertise():
            raise UserError("the keys of a round must include the site's own.")
        return to_tensors(client.share(keys))

    def check_shares(self, experiment: str, task: ClientTask, body: Tree) -> None:
        """Refuse a round whose upload could not be masked, before it is trained for."""
        received = to_bytes(body.get("shares"), 2 * SHARE + TAG)
        self._of(experiment, task).receive(received)

    def upload(
        self, experiment: str, task: ClientTask, body: Tree, sent: Tree, kept: SiteState
    ) -> Tree:
        """An upload under masks; a round is masked for one set of clients only."""
        words = sent["upload"].get("words")
        if words is None or words.is_floating_point():
            raise UserError("the client has nothing finite to send.")
        received = to_bytes(body.get("shares"), 2 * SHARE + TAG)
        client = self._of(experiment, task)
        masked = client.upload(to_unsigned(words), received, bytes.fromhex(sent["task"]))
        kept.fix(task.round, "cohort", sorted([*received, task.client]))
        return {"words": to_signed(masked)}

    def agree(self, experiment: str, task: ClientTask, body: Tree, kept: SiteState) -> Tree:
        """Its signature on who has answered, of which there is one set in a round."""
        client, survivors = self._of(experiment, task), answered(body)
        client.reveal(survivors)  # refuses too few
        kept.fix(task.round, "survivors", survivors)
        digest = _digest(client, survivors)
        signed = self._ring.signed(ANSWERS, client.purpose, task.client, digest)
        return to_tensors({task.client: signed})

    def reveal(self, experiment: str, task: ClientTask, body: Tree, kept: SiteState) -> Tree:
        """Its shares of what the server needs to unmask the sum, if enough other sites were told
        the same.
        """
        client, survivors = self._of(experiment, task), answered(body)
        shares = client.reveal(survivors)
        signed = to_bytes(body.get("agreed"), DIGEST + SIGNATURE)
        told = self._ring.checked(ANSWERS, client.purpose, signed)
        digest = _digest(client, survivors)
        agree = sum(told.get(other) == digest for other in shares if other in survivors)
        if agree < client.needed:
            raise UserError(
                f"{client.needed} clients must have been told the same about who has answered, and "
                f"{agree} were."
            )
        kept.fix(task.round, "survivors", survivors)
        return to_tensors(shares)

    def _of(self, experiment: str, task: ClientTask) -> MaskingClient:
        current = self._current
        if current is None or current.purpose != round_name(experiment, task):
            raise UserError(
                f"the site has no keys for round {task.round + 1}: it was started again since."
            )
        if current.client != task.client:
            raise UserError(f"the site is client {current.client} in this round.")
        return current


def answered(body: Tree) -> list[int]:
    """Whom the server calls those who have answered."""
    survivors = body.get("survivors", {}).get("clients")
    if not isinstance(survivors, Tensor) or survivors.dim() != 1 or survivors.dtype != torch.int64:
        raise UserError("the message does not say who has answered.")
    return sorted(set(survivors.tolist()))


def _digest(client: MaskingClient, survivors: list[int]) -> bytes:
    return hashlib.sha256(f"{client.view} {survivors}".encode()).digest()
