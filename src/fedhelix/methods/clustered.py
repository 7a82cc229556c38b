"""Clusters: clients with similar data share a server state of their own, formed once before the
first round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fedhelix.components.genes.clusters import (
    Algorithm,
    Distance,
    class_vectors,
    cluster,
    distances,
    layout,
    nearest,
    principal_vectors,
)
from fedhelix.core.method import Capabilities, Client, Context, Method, Upload
from fedhelix.core.options import option
from fedhelix.core.registry import register
from fedhelix.core.tree import State, Tree
from fedhelix.core.wrapper import Wrapper
from fedhelix.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Clusters(Method):
    """To be put before a method in a class's bases: every hook of the server then works within one
    cluster.
    """

    clusters: int = option(4, "how many clusters", low=1)
    vectors: int = option(5, "singular vectors of its data that a client tells once", low=1)
    cluster_by: Algorithm = option("kmeans", "how clients are grouped")
    cluster_distance: Distance = option("flat", "how far two clients are from each other")

    @property
    def capabilities(self) -> Capabilities:
        """Every client sends its singular vectors, unless there is one cluster; every cluster has a
        model.
        """
        usual = super().capabilities
        sends = usual.client_init or self.clusters > 1
        return replace(usual, client_init=sends, several_models=True)

    def client_init(self, client: Client) -> Tree:
        """Client: the directions of its data, besides what else there is to tell."""
        return {**super().client_init(client), **self._fingerprint(client)}

    def _fingerprint(self, client: Client) -> Tree:
        """Client: its singular vectors in the space of features; for one cluster nobody needs
        them.
        """
        if self.clusters == 1:
            return {}
        if self.cluster_distance == "pacfl":
            classes = client.layers.weighted[-1].outputs
            vectors = class_vectors(client.raw_inputs(), client.targets(), classes)
        else:
            vectors = principal_vectors(client.raw_inputs(), self.vectors)
        return {"print": vectors.cpu()}

    def server_init(
        self, client_inits: Mapping[int, Tree], ctx: Context
    ) -> tuple[Tree, dict[int, Tree]]:
        """Server: group the clients, and begin once for every group."""
        member, prints, parts = [0] * ctx.clients, torch.zeros(0), Tree()
        if self.clusters > 1:
            prints = torch.stack([client_init["print"] for client_init in client_inits.values()])
            by = (self.cluster_distance, self.cluster_by)
            member = cluster(prints, self.clusters, *by, ctx.seed)
        replies: dict[int, Tree] = {}
        for k in range(max(member) + 1):
            mine = {i: client_init for i, client_init in client_inits.items() if member[i] == k}
            parts[str(k)], more = super().server_init(mine, ctx)
            replies |= more
        return {"member": torch.tensor(member), "prints": prints, "parts": parts}, replies

    def select_clients(self, server: Tree, cohort: Sequence[int], ctx: Context) -> Sequence[int]:
        """Server: who works in each cluster."""
        selected: list[int] = []
        for k, part in server["parts"].items():
            mine = [client for client in cohort if self._place(server, client) == k]
            selected += super().select_clients(part, mine, self._within(server, k, ctx))
        return sorted(selected)

    def download(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: what the client's cluster has for it."""
        return super().download(server["parts"][self._place(server, client)], client, ctx)

    def weights(self, server: Tree, uploads: Sequence[Upload], ctx: Context) -> list[float]:
        """Server: weights within each cluster."""
        weights: dict[int, float] = {}
        for k, mine in self._groups(server, uploads).items():
            shares = super().weights(server["parts"][k], mine, self._within(server, k, ctx))
            weights |= {upload.client: weight for upload, weight in zip(mine, shares, strict=True)}
        return [weights[upload.client] for upload in uploads]

    def aggregate(
        self, server: Tree, uploads: Sequence[Upload], weights: Sequence[float], ctx: Context
    ) -> Tree:
        """Server: aggregate within each cluster; one that nobody took part in stays as it is."""
        weight_of = {upload.client: weight for upload, weight in zip(uploads, weights, strict=True)}
        parts = dict(server["parts"])
        for k, mine in self._groups(server, uploads).items():
            mine_count = [weight_of[upload.client] for upload in mine]
            parts[k] = super().aggregate(parts[k], mine, mine_count, self._within(server, k, ctx))
        shown = (
            range(len(server["member"]))
            if ctx.round == 0
            else [upload.client for upload in uploads]
        )
        ctx.metadata.setdefault("clusters", {}).update(
            {str(i): int(server["member"][i]) for i in shown}
        )
        if ctx.round == 0 and self.clusters > 1:
            points = layout(distances(server["prints"], server["prints"], self.cluster_distance))
            ctx.metadata["positions"] = {str(i): point for i, point in enumerate(points.tolist())}
        return {**server, "parts": parts}

    def model(self, server: Tree, ctx: Context) -> State | None:
        """Server: there is one model for all only if there is one cluster."""
        return super().model(server["parts"]["0"], ctx) if len(server["parts"]) == 1 else None

    def onboard_client(self, payload: Tree, client: Client) -> Tree:
        """Client: a newcomer tells its singular vectors too."""
        said = super().onboard_client(payload, client)
        return said if payload else {**said, **self._fingerprint(client)}

    def onboard_server(self, server: Tree, message: Tree, ctx: Context) -> tuple[Tree, Tree, bool]:
        """Server: a newcomer joins the nearest cluster, whose mean moves by it."""
        if ctx.clients == len(server["member"]):
            server = self._joined(server, message, ctx)
        k = self._place(server, ctx.clients)
        part, payload, done = super().onboard_server(server["parts"][k], message, ctx)
        return {**server, "parts": {**server["parts"], k: part}}, payload, done

    def _joined(self, server: Tree, message: Tree, ctx: Context) -> Tree:
        """The server's state with a newcomer as a member of the nearest cluster."""
        prints, member, cluster_of = server["prints"], server["member"], 0
        if self.clusters > 1:
            mine = message["print"].to(prints.device)
            cluster_of = nearest(mine, prints, member.tolist(), self.cluster_distance)
            prints = torch.cat([prints, mine[None]])
        ctx.metadata.setdefault("clusters", {})[str(ctx.clients)] = cluster_of
        grown = torch.cat([member, member.new_tensor([cluster_of])])
        return {**server, "member": grown, "prints": prints}

    def _within(self, server: Tree, k: str, ctx: Context) -> Context:
        """The round as a cluster sees it: nobody else could have come. What is noted is noted for
        all.
        """
        member = server["member"].tolist()
        return replace(ctx, present=[client for client in ctx.present if member[client] == int(k)])

    def _place(self, server: Tree, client: int) -> str:
        """The name of a client's cluster."""
        return str(int(server["member"][client]))

    def _groups(self, server: Tree, uploads: Sequence[Upload]) -> dict[str, list[Upload]]:
        """The uploads of each cluster."""
        groups: dict[str, list[Upload]] = {}
        for upload in uploads:
            groups.setdefault(self._place(server, upload.client), []).append(upload)
        return groups


@register("clustered", paper="the one-shot clusters of GENE-FL, arXiv:2504.14628")
@dataclass(frozen=True)
class Clustered(Clusters, Wrapper):
    """Splits the clients into clusters, each its own federation.

    Puts any method into one-shot clusters: each cluster is a federation of its own.
    """

    inner: Method = option(FedAvg(), "the method of every cluster")

    def deliver(self, server: Tree, client: int, ctx: Context) -> Tree:
        """Server: what the client's cluster has for it to use."""
        return self.inner.deliver(server["parts"][self._place(server, client)], client, ctx)
