"""Between client and server: every upload is checked before the server looks at it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedhelix.client import Outcome
from fedhelix.method import Upload
from fedhelix.tree import State, Tree, payload_bytes, tensors

LARGEST = 10  # an upload may weigh at most this many models


def refusal(tree: Tree, initial: State) -> str | None:
    """Why an upload cannot be used, or None."""
    if payload_bytes(tree) > LARGEST * payload_bytes(initial):
        return f"weighs more than {LARGEST} models"
    for name, value in tree.get("model", {}).items():
        if name not in initial:
            return f"has an unknown entry '{name}'"
        if value.shape != initial[name].shape:
            return f"has shape {tuple(value.shape)} for '{name}' instead of {tuple(initial[name].shape)}"
    if not all(bool(torch.isfinite(value).all()) for value in tensors(tree)):
        return "holds values that are not finite"
    return None


def receive(outcomes: Sequence[Outcome], initial: State) -> tuple[list[Upload], dict[str, str]]:
    """The uploads that arrived whole, ordered by client, and why the others were refused."""
    uploads, refused = [], {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.client):
        reason = refusal(outcome.upload, initial)
        if reason is None:
            uploads.append(Upload(outcome.client, outcome.samples, outcome.upload))
        else:
            refused[str(outcome.client)] = reason
    return uploads, refused
