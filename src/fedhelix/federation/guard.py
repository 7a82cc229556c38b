"""No single client stops the server: what cannot be computed with its message is computed without.

A message may pass every check of its own and still do harm together with the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import torch

from fedhelix.core.errors import UnusableMessage
from fedhelix.core.hooks import checked
from fedhelix.core.method import Context, Method, Upload
from fedhelix.core.tree import Tree, flatten, tensors
from fedhelix.federation.uploads import finite

Part = TypeVar("Part")
Parts = Mapping[int, Part]  # what clients sent


class Outcome(NamedTuple):
    """A result, or what went wrong."""

    tree: Tree
    why: str


def without_culprit(
    compute: Callable[[dict[int, Part]], Tree],
    parts: Parts[Part],
    strangers: bool,
    before: Tree | None = None,
) -> tuple[Tree | None, dict[int, str]]:
    """What the server computes of clients' parts, and whose part had to be left out, and why.

    If the result is not finite with all parts but is without one, that one is to blame, and if not,
    those whose parts do harm alone; what was not finite `before` does not count. Exceptions count
    only where parts come from `strangers`; elsewhere they are mistakes of the method. If the others
    cannot do without these either, there is no result, and all are named.
    """
    sound = _sound_entries(before or {})

    def attempt(chosen: Parts[Part]) -> Outcome:
        try:
            tree = compute(dict(chosen))
        except Exception as problem:
            if not strangers:
                raise
            words = f"{type(problem).__name__}: {problem}".partition("\n")[0][:200]
            return Outcome({}, f"cannot be used: {words}")
        entries = {path: value for path, value in flatten(tree).items() if path in sound}
        why = "" if finite([entries])[0] else "makes the server's state not finite"
        return Outcome(tree, why)

    whole = attempt(parts)
    if not whole.why:
        return whole.tree, {}
    for client in parts if len(parts) > 1 else ():
        others = {other: part for other, part in parts.items() if other != client}
        rest = attempt(others)
        if not rest.why:
            return rest.tree, {client: whole.why}
    alone = {client: attempt({client: part}).why for client, part in parts.items()}
    harmless = {client: part for client, part in parts.items() if not alone[client]}
    if 0 < len(harmless) < len(parts) and not (rest := attempt(harmless)).why:
        return rest.tree, {client: why for client, why in alone.items() if why}
    return None, dict.fromkeys(parts, whole.why)


def _sound_entries(tree: Tree) -> set[str]:
    """The paths of a tree's finite entries; some methods keep NaN for what they do not know."""
    flat = flatten(tree)
    fine = finite([{path: value} for path, value in flat.items()])
    return {path for path, sound in zip(flat, fine, strict=True) if sound}


def aggregate(
    method: Method, server: Tree, uploads: list[Upload], ctx: Context, strangers: bool
) -> tuple[Tree, dict[str, str], bool]:
    """The next server state, whose upload had to be left out, and whether all others had weight
    zero and changed nothing; the old state may stay.
    """
    hooks, before, weights = checked(method), dict(ctx.metadata), [1.0]

    def compute(chosen: dict[int, Upload]) -> Tree:
        nonlocal weights
        ctx.metadata.clear()
        ctx.metadata.update(before)
        sent = list(chosen.values())
        weights = hooks.weights(server, sent, ctx)
        return hooks.aggregate(server, sent, weights, ctx)

    parts = {upload.client: upload for upload in uploads}
    after, refused = without_culprit(compute, parts, strangers, server)
    named = {str(client): why for client, why in refused.items()}
    if after is None:
        return server, named, False
    return after, named, not any(weights) and _are_equal(after, server)


def _are_equal(one: Tree, other: Tree) -> bool:
    """Whether two states hold the same tensors."""
    left, right = tensors(one), tensors(other)
    return len(left) == len(right) and all(map(torch.equal, left, right))


def onboard(
    method: Method, server: Tree, message: Tree, ctx: Context, strangers: bool
) -> tuple[Tree, Tree, bool]:
    """The server's turn in its dialogue with a newcomer; a stranger's message that does harm
    raises UnusableMessage.
    """
    payload, done = Tree(), False

    def compute(chosen: dict[int, Tree]) -> Tree:
        nonlocal payload, done
        after, payload, done = checked(method).onboard_server(server, chosen[ctx.clients], ctx)
        return after

    parts = {ctx.clients: message}
    if not strangers:
        return compute(parts), payload, done
    after, harmful = without_culprit(compute, parts, strangers, server)
    if after is None:
        raise UnusableMessage(f"the message of newcomer {ctx.clients} {harmful[ctx.clients]}")
    return after, payload, done


def server_init(
    method: Method, inits: Mapping[int, Tree], ctx: Context, strangers: bool
) -> tuple[Tree, dict[int, Tree], dict[int, str]]:
    """The first server state, replies to clients, and whose first message had to be left out.

    A client without a valid one counts as a copy of the first client that has one.
    """
    replies: dict[int, Tree] = {}

    def compute(chosen: dict[int, Tree]) -> Tree:
        nonlocal replies
        first = next(iter(chosen.values()), None)
        everybody = {} if first is None else {i: chosen.get(i, first) for i in range(ctx.clients)}
        server, replies = checked(method).server_init(everybody, ctx)
        return server

    server, refused = without_culprit(compute, inits, strangers)
    return (compute(dict(inits)) if server is None else server), replies, refused
