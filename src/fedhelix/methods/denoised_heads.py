"""Denoised heads: every client gets the mean head, and of its own one what is no noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedhelix.components.shrinkage import denoised
from fedhelix.core.errors import UserError
from fedhelix.core.flat import FlatLayout
from fedhelix.core.layers import Layers
from fedhelix.core.method import Capabilities, Context, Method, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree, add, subtract
from fedhelix.core.wrapper import Wrapper
from fedhelix.methods.fedavg import FedAvg


@register("denoised-heads", paper="fedhelix; with the shrinkage of Gavish and Donoho, 2017")
@dataclass(frozen=True)
class DenoisedHeads(Wrapper):
    """Gives every client its own head, less its noise.

    For groups of clients that disagree about labels: the server gives every client the mean head
    plus the client's own deviation from it, without noise. What remains is what some clients have
    in common and others do not.
    """

    inner: Method = option(FedAvg(), "the method that trains the body and the mean head")

    @property
    def capabilities(self) -> Capabilities:
        """The head of every single upload counts."""
        return replace(super().capabilities, single_uploads=True)

    def check_inner(self, layers: Layers | None = None) -> None:
        """Refuse a method whose clients do not upload their heads."""
        super().check_inner(layers)
        inner = self.inner.capabilities
        whole = layers is None or set(self.inner.shared_params(layers)) >= set(layers.head)
        if inner.packed_uploads or not inner.central_model or not whole:
            raise UserError(
                f"denoised-heads needs heads, which {self.inner.label} does not upload."
            )

    def server_init(
        self, client_inits: Mapping[int, Tree], ctx: Context
    ) -> tuple[Tree, dict[int, Tree]]:
        """Server: nobody's head is known yet."""
        server, replies = super().server_init(client_inits, ctx)
        none = torch.zeros(0, _layout(server, ctx).count, device=ctx.device)
        heads = {"clients": torch.zeros(0, dtype=torch.long), "deviations": none, "signals": none}
        return {**server, "own_heads": heads}, replies

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: as the inner method, with the client's head."""
        payload = self.inner.download(server, client, ctx)
        return {**payload, "model": _moved(payload["model"], server, client, ctx, 1)}

    def deliver(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: as the inner method, with the client's head."""
        payload = self.inner.deliver(server, client, ctx)
        return {**payload, "model": _moved(payload["model"], server, client, ctx, 1)}

    def weights(self, server: Tree, uploads: Sequence[Upload], ctx: Context) -> list[float]:
        """Server: as the inner method, as if all had begun at the mean head."""
        return super().weights(server, _common(server, uploads, ctx), ctx)

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: as the inner method, as if all had begun at the mean head; then it sees how each
        head has moved away from the others.
        """
        common = _common(server, uploads, ctx)
        state = super().aggregate(server, common, weights, ctx)
        counted = [
            (upload, weight)
            for upload, weight in zip(common, weights, strict=True)
            if weight > 0 and upload.tree["model"].keys() >= set(ctx.layers.head)
        ]
        if len(counted) < 2:
            return state
        layout = _layout(server, ctx)
        rows = torch.stack([layout.flat(upload.tree["model"]) for upload, _ in counted])
        shares = rows.new_tensor([weight for _, weight in counted])
        moved = rows - (shares / shares.sum()) @ rows
        heads = _updated(server["own_heads"], [upload.client for upload, _ in counted], moved)
        left = heads["signals"].norm() / heads["deviations"].norm().clamp(min=1e-30)
        ctx.metadata["own_heads"] = float(left)
        return {**state, "own_heads": heads}


def _updated(heads: Tree, clients: Sequence[int], moved: Tensor) -> Tree:
    """What is known of all heads, after some clients have moved theirs away from the others."""
    place = {client: at for at, client in enumerate(heads["clients"].tolist())}
    for client in clients:
        place.setdefault(client, len(place))
    fresh = moved.new_zeros(len(place) - len(heads["clients"]), moved.shape[1])
    deviations, signals = (torch.cat([heads[name], fresh]) for name in ("deviations", "signals"))
    at = [place[client] for client in clients]
    deviations[at] = signals[at] + moved
    known = torch.tensor(list(place), dtype=torch.long)
    return {"clients": known, "deviations": deviations, "signals": denoised(deviations)}


def _layout(server: Tree, ctx: Context) -> FlatLayout:
    """The head as one vector."""
    head = [server["model"][name] for name in ctx.layers.head]
    shapes = tuple(tuple(value.shape) for value in head)
    return FlatLayout(tuple(ctx.layers.head), shapes, tuple(value.dtype for value in head))


def _moved(model: State, server: Tree, client: int, ctx: Context, sign: int) -> State:
    """A model whose head is moved by the client's own part of it, forth or back."""
    own = _own(server, client, ctx)
    head = {name: model[name] for name in own if name in model}
    return {**model, **(add if sign > 0 else subtract)(head, own)}


def _own(server: Tree, client: int, ctx: Context) -> State:
    """How a client's head differs from the mean one; nothing if it is not known."""
    at = (server["own_heads"]["clients"] == client).nonzero().flatten()
    return _layout(server, ctx).state(server["own_heads"]["signals"][int(at)]) if len(at) else {}


def _common(server: Tree, uploads: Sequence[Upload], ctx: Context) -> list[Upload]:
    """Uploads without the clients' own parts of the head."""

    def common(upload: Upload) -> Upload:
        model = _moved(upload.tree.get("model", {}), server, upload.client, ctx, -1)
        return upload._replace(tree={**upload.tree, "model": model})

    return [common(upload) for upload in uploads]
