"""FedPAC: shared features are aligned by prototypes, and every client gets the combination of heads
that suits it best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedhelix.core.layers import Layers
from fedhelix.core.method import Capabilities, Client, Context, LocalRound, Phase, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import Tree, masked_mean, take
from fedhelix.methods.fedavg import FedAvg
from fedhelix.methods.fedproto import FedProto


def combination(own: Tensor, moments: Tensor, variances: Tensor) -> list[float]:
    """The weights a of a mean with the least |own - sum a_j moments_j|² + sum a_j² variances_j."""
    gaps = (moments - own).double()
    # Rounding can make the variance of features that hardly differ a little negative.
    quadratic = gaps @ gaps.T + variances.double().clamp(min=0).diag()
    quadratic += 1e-9 * quadratic.diag().max().clamp(min=1e-30) * torch.eye(len(quadratic))
    # The least x'Qx / 2 - sum x over x >= 0 points to the least a'Qa over means.
    root = torch.linalg.cholesky(quadratic)
    ones = torch.ones(len(root), 1, dtype=root.dtype)
    target = torch.linalg.solve_triangular(root, ones, upper=False)[:, 0]
    from scipy.optimize import nnls  # slow to import, and no other method needs it

    solution, _ = nnls(root.T.numpy(), target.numpy())
    return [float(value) for value in solution / solution.sum()]


@register("fedpac", paper="Xu et al., ICLR 2023, arXiv:2306.11867")
@dataclass(frozen=True)
class FedPAC(FedProto):
    """Aligns features by class; mixes heads for each client.

    The body is averaged, its features pulled towards the prototypes of their classes; the head of a
    client is a mean of all heads of the round, weighted for the client.

    The weights minimise a bound of the client's risk, from what clients upload about their
    features: the mean for each class and the variance.
    """

    head_epochs: int = option(1, "epochs of the head", low=0)
    body_epochs: int = option(1, "epochs of the body", low=0)

    @property
    def capabilities(self) -> Capabilities:
        """The bodies have a mean; of the heads every single one counts."""
        return replace(
            super().capabilities, classification=True, central_model=True, single_uploads=True
        )

    def shared_params(self, layers: Layers) -> Sequence[str]:
        """The whole model."""
        return layers.names

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: the body with the client's head, and the prototypes; before its first round a
        client gets the mean head.
        """
        head = server.get("heads", {}).get(str(client), {})
        return {**super().download(server, client, ctx), "model": {**server["model"], **head}}

    def phases(self, client: Client) -> Sequence[Phase]:
        """Client: head, then body."""
        return Phase("head", self.head_epochs), Phase("body", self.body_epochs)

    def upload(self, local: LocalRound) -> tuple[Tree, Tree]:
        """Client: model and prototypes, and moments of the features in the received body."""
        tree, client_state = super().upload(local)
        features = local.client.features({**local.client.initial, **local.payload["model"]})
        targets, samples = local.client.targets(), local.client.samples
        means = torch.zeros(len(tree["shares"]), features.shape[1], device=features.device)
        means = means.index_add(0, targets, features) / samples
        variance = (features.square().sum() / samples - means.square().sum()) / samples
        moments = {"means": means, "variance": variance}
        return {**tree, "model": local.models["model"], "moments": moments}, client_state

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: the mean model, the prototypes, and a head for everybody who took part."""
        state = FedAvg.aggregate(self, server, uploads, weights, ctx)
        state = super().aggregate(state, uploads, weights, ctx)
        counted = [upload for upload, w in zip(uploads, weights, strict=True) if w > 0]
        if not counted:
            return state
        sent = [upload.tree["moments"] for upload in counted]
        means = torch.stack([moments["means"].flatten() for moments in sent]).cpu()
        variances = torch.stack([moments["variance"] for moments in sent]).cpu()
        sent_heads = [take(upload.tree["model"], ctx.layers.head) for upload in counted]
        heads = {}
        for upload, own in zip(counted, means, strict=True):
            best = combination(own, means, variances)
            heads[str(upload.client)] = masked_mean(sent_heads, best, sent_heads[0])
        return {**state, "heads": server.get("heads", {}) | heads}
