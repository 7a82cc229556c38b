"""Compact: clients send their updates in few bits per value, and what a code lost goes into the
next one (error feedback).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from fedhelix.components import codes, feedback
from fedhelix.components.codes import Bits, Parts
from fedhelix.core.errors import UserError
from fedhelix.core.flat import FlatLayout
from fedhelix.core.layers import Layers
from fedhelix.core.method import Capabilities, Client, Context, LocalRound, Method
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree, drop, zeros
from fedhelix.core.wrapper import Wrapper, shares
from fedhelix.methods.fedavg import FedAvg

# Packing alone delivers nothing else, and makes no other dialogue with a newcomer.
DIALOGUE = ("deliver", "onboard_client", "onboard_server")


@register("compact", paper="error feedback of Karimireddy et al., ICML 2019, arXiv:1901.09847")
@dataclass(frozen=True)
class Compact(Wrapper):
    """Sends updates in few bits, with error feedback.

    Sends the updates of weights in few bits per value; what a code lost is sent later.
    """

    inner: Method = option(FedAvg(), "the method whose uploads are packed")
    code: Literal["bits", "top-k", "units"] = option(
        "bits", "few bits for every value, the largest values alone, or whole layers"
    )
    bits: Bits = option(1, "bits: for every value; one scale per row comes on top")
    keep: float = option(0.05, "top-k and units: share of the values", above=0, high=1)
    download_bits: Literal[4, 8, 32] = option(32, "bits of every weight that the server sends")

    @property
    def capabilities(self) -> Capabilities:
        """On the server an upload is what the inner method's is."""
        inner = self.inner.capabilities
        return replace(
            super().capabilities,
            complete_uploads=inner.complete_uploads,
            packed_downloads=inner.packed_downloads or self.download_bits < 32,
        )

    @property
    def spares_samples(self) -> bool:
        """Updates are packed as they are."""
        return True

    def overrides(self, hook: str) -> bool:
        """Whether the wrapper, or a method inside of it, has a hook that is not FedAvg's."""
        return self.inner.overrides(hook) if hook in DIALOGUE else super().overrides(hook)

    def check_inner(self, layers: Layers | None = None) -> None:
        """Refuse a method without plain updates of a common model."""
        super().check_inner(layers)
        inner = self.inner.capabilities
        if inner.packed_uploads or self.inner.overrides("decode"):
            raise UserError(f"compact cannot pack what {self.inner.label} has packed already.")
        if not inner.central_model or not shares(self.inner, layers):
            raise UserError(f"compact sees no updates of a common model around {self.inner.label}.")

    # What the server sends ------------------------------------------------------------------------

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: as the inner method, with the weights packed."""
        return self._closed(self.inner.download(server, client, ctx), ctx)

    def deliver(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: as the inner method, with the weights packed."""
        return self._closed(self.inner.deliver(server, client, ctx), ctx)

    def onboard_server(self, server: Tree, message: Tree, ctx: Context) -> tuple[Tree, Tree, bool]:
        """Server: as the inner method, with the weights packed."""
        server, payload, done = self.inner.onboard_server(server, message, ctx)
        return server, self._closed(payload, ctx), done

    def _closed(self, payload: Tree, ctx: Context) -> Tree:
        """A payload with its weights packed."""
        if self.download_bits == 32 or not payload.get("model"):
            return payload
        model = payload["model"]
        layout, packed = codes.present(model, codes.packable(ctx.layers, ctx.initial), ctx.initial)
        if layout.count:
            packed |= codes.packed_model(model, layout, self.download_bits)
        return {**payload, "model": drop(model, layout.names), "packed": packed}

    def _opened(self, payload: Tree, view: Client | Context) -> Tree:
        """A payload as the inner method made it, but for what the packing lost."""
        if "packed" not in payload:
            return payload
        layout, parts = _announced(payload, view)
        weights = codes.unpacked_model(parts, layout, self.download_bits) if layout.count else {}
        return {**drop(payload, ["packed"]), "model": {**payload["model"], **weights}}

    # What a client does ---------------------------------------------------------------------------

    def start(self, payload: Tree, client_state: Tree, client: Client) -> dict[str, State]:
        """Client: as the inner method."""
        return self.inner.start(self._opened(payload, client), client_state, client)

    def loss_context(self, payload: Tree, client_state: Tree, client: Client) -> Tree:
        """Client: as the inner method."""
        return self.inner.loss_context(self._opened(payload, client), client_state, client)

    def onboard_client(self, payload: Tree, client: Client) -> Tree:
        """Client: as the inner method."""
        return super().onboard_client(self._opened(payload, client), client)

    def onboard_state(self, payload: Tree, client: Client) -> Tree:
        """Client: as the inner method."""
        return self.inner.onboard_state(self._opened(payload, client), client)

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: a code of its update and of what the last code lost; what this one loses
        stays.
        """
        payload = self._opened(local.payload, local.client)
        tree, kept = self.inner.upload(replace(local, payload=payload))
        residual: State = dict(local.client_state.get("residual", {}))
        if tree:
            tree, lost = self._packed(tree, payload, residual, local.client)
            residual |= lost
        return tree, {**kept, "residual": residual} if residual else kept

    def encode(self, upload: Tree, payload: Tree, ctx: Context) -> Tree:
        """Whoever forges an upload: it has to fit into the code, without error feedback."""
        return self._packed(upload, self._opened(payload, ctx), {}, ctx)[0]

    def _packed(
        self, tree: Tree, payload: Tree, residual: State, view: Client | Context
    ) -> tuple[Tree, State]:
        """An upload with its weights packed, and what the code lost."""
        model, weights = tree.get("model", {}), codes.packable(view.layers, view.initial)
        layout, packed = codes.present(model, weights, view.initial)
        lost: State = {}
        if layout.count:
            origin = feedback.flat_model(_origin(payload, view), layout)
            update = layout.flat(model) - origin
            if residual:
                update += layout.flat({**zeros(drop(model, residual)), **residual})
            parts, rest = self._encode(update, origin, layout)
            packed |= parts
            lost = layout.state(rest)
        return {**tree, "model": drop(model, layout.names), "packed": packed}, lost

    def decode(self, upload: Tree, payload: Tree, ctx: Context) -> Tree:
        """Server: the received model plus what the code says, and what came as it is."""
        layout, parts = _announced(upload, ctx)
        self._check(parts, layout)
        weights: State = {}
        if layout.count:
            origin = feedback.flat_model(_origin(self._opened(payload, ctx), ctx), layout)
            weights = layout.state(self._decode(parts, origin, layout))
        model = {**upload.get("model", {}), **weights}
        return {**drop(upload, ["packed"]), "model": model}

    def _encode(self, update: Tensor, origin: Tensor, layout: FlatLayout) -> tuple[Parts, Tensor]:
        """The code of an update, and what it lost."""
        if self.code == "bits":
            return feedback.encode(update, layout, self.bits)
        if self.code == "top-k":
            parts = codes.encode_top(update, layout, self.keep)
            return parts, feedback.bounded(update - codes.decode_top(parts, layout))
        parts = codes.encode_units(update, origin, layout, self.keep)
        return parts, feedback.bounded(update - codes.decode_units(parts, layout))

    def _decode(self, parts: Mapping[str, Tensor], origin: Tensor, layout: FlatLayout) -> Tensor:
        """The origin plus what the code says."""
        if self.code == "bits":
            return feedback.decode(parts, origin, layout, self.bits)
        decode = codes.decode_top if self.code == "top-k" else codes.decode_units
        return origin + decode(parts, layout)

    def _check(self, parts: Mapping[str, Any], layout: FlatLayout) -> None:
        """Raise UserError for what no client sends."""
        if not layout.count:
            codes.check_parts(parts, {})
        elif self.code == "bits":
            codes.check_bits(parts, layout, self.bits)
        elif self.code == "top-k":
            codes.check_top(parts, layout, self.keep)
        else:
            codes.check_units(parts, layout)


def _announced(tree: Tree, view: Client | Context) -> tuple[FlatLayout, dict[str, Any]]:
    """What is packed in a tree, and its code."""
    weights = codes.packable(view.layers, view.initial)
    return codes.announced(tree.get("packed"), weights, view.initial)


def _origin(payload: Tree, view: Client | Context) -> State:
    """What updates are relative to: the received model, or the initial one where none was sent."""
    return {**view.initial, **payload.get("model", {})}
