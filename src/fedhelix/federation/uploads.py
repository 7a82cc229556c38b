"""Between client and server: every upload is checked before the server looks at it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from fedhelix.core.entries import check_named
from fedhelix.core.errors import UserError
from fedhelix.core.method import HOOKS, Context, Method, Upload
from fedhelix.core.tree import State, Tree, paper_bytes, payload_bytes, tensors
from fedhelix.engines.local import ClientResult

LARGEST = 10  # the size of an upload, in models
SEVERAL = 10  # clients of whom one would send a model if the method did


class Expected:
    """What an upload has to look like; a method may need some entries in any case."""

    def __init__(self, initial: State, needed: Collection[str] = ()):
        self.shapes = {name: value.shape for name, value in initial.items()}
        self.most = LARGEST * payload_bytes(initial)
        self.needed = needed

    def refusal(self, tree: Tree) -> str | None:
        """Why an upload cannot be used as it is shaped, or None."""
        if payload_bytes(tree) > self.most:
            return f"weighs more than {LARGEST} models"
        model = tree.get("model", {})
        for name, value in model.items():
            if name not in self.shapes:
                return f"has an unknown entry '{name}'"
            if value.shape != self.shapes[name]:
                shape, right = tuple(value.shape), tuple(self.shapes[name])
                return f"has shape {shape} for '{name}' instead of {right}"
        lacking = [name for name in self.needed if name not in model]
        return f"lacks the entry '{lacking[0]}'" if lacking else None


def finite(trees: Sequence[Tree]) -> list[bool]:
    """Which trees hold nothing but finite numbers: one wait for the device,
    however many there are.
    """
    # Tensors of one type are looked at together.
    groups: dict[tuple[torch.dtype, torch.device], tuple[list[int], list[Tensor]]] = {}
    for place, tree in enumerate(trees):
        for value in tensors(tree):
            if value.is_floating_point() and value.numel():
                owners, values = groups.setdefault((value.dtype, value.device), ([], []))
                owners.append(place)
                values.append(value)
    flags = [_are_finite(values) for _, values in groups.values()]
    # Numbers move to a GPU without waiting for it, but not the other way.
    device = next((part.device for part in flags if part.is_cuda), torch.device("cpu"))
    sound = torch.cat([part.to(device) for part in flags]).tolist() if flags else []
    owners = [place for owners, _ in groups.values() for place in owners]
    spoilt = {place for place, fine in zip(owners, sound, strict=True) if not fine}
    return [place not in spoilt for place in range(len(trees))]


def _are_finite(values: Sequence[Tensor]) -> Tensor:
    """Which tensors of one type and device are finite: on a GPU, their largest magnitudes tell,
    without a wait; on a CPU, their lengths do, which are faster, but for those that are too large.
    """
    if values[0].is_cuda:
        return torch.stack(torch._foreach_norm(list(values), math.inf)).isfinite()
    sound = torch.stack(torch._foreach_norm(list(values))).isfinite()
    for doubtful in (~sound).nonzero().flatten().tolist():
        sound[doubtful] = values[doubtful].isfinite().all()
    return sound


def keep_states(
    results: Sequence[ClientResult], before: Mapping[int, Tree], valid: Sequence[Upload] = ()
) -> dict[int, Tree]:
    """What clients keep of a round: those who did not come out of it with finite numbers go back to
    what they had. Uploads that are `valid` as they were sent are not looked at again.
    """
    seen = {id(upload.tree) for upload in valid}
    unseen = [{} if id(result.upload) in seen else result.upload for result in results]
    kept = [result.client_state for result in results]
    sound = finite([{"own": own, "upload": sent} for own, sent in zip(kept, unseen, strict=True)])
    return {
        result.client: result.client_state if fine else before.get(result.client, {})
        for result, fine in zip(results, sound, strict=True)
    }


def decode_uploads(
    method: Method,
    results: Sequence[ClientResult],
    payloads: Mapping[int, Tree],
    ctx: Context,
    strangers: bool = False,
) -> tuple[list[ClientResult], dict[str, str]]:
    """The results with their uploads unpacked, and why some could not be; an empty one is
    silence. What `strangers` send may raise anything.
    """
    if not method.overrides("decode"):  # they are as they were sent
        return list(results), {}
    decoded, refused = [], {}
    for result in results:
        args = result.upload, payloads[result.client], ctx
        try:
            upload = method.decode(*args) if result.upload else {}
        except UserError as problem:
            refused[str(result.client)] = str(problem).rstrip(".")
            continue
        except Exception as problem:
            if not strangers:
                raise
            words = f"{type(problem).__name__}: {problem}".partition("\n")[0][:200]
            refused[str(result.client)] = f"cannot be unpacked: {words}"
            continue
        where = f"{method.label}.decode"
        upload = HOOKS["decode"].check(where, upload, args)
        if not strangers and not method.overrides("aggregate"):
            check_named(where, upload, ctx.initial, "{'model': {...}}")
        decoded.append(result._replace(upload=upload))
    return decoded, refused


def check_some_sent(
    method: Method, results: Sequence[ClientResult], shared: Sequence[str], ctx: Context
) -> None:
    """Refuse a method whose clients send no model in the first round, where FedAvg's own hooks wait
    for some. `weights` may make something else of uploads, and a few clients may be silent.
    """
    own = any(map(method.overrides, ("select_clients", "decode", "aggregate")))
    weighed = method.overrides("weights")
    sent = any("model" in result.upload or (weighed and result.upload) for result in results)
    many = len(results) >= min(SEVERAL, len(ctx.present)) > 0
    if many and shared and not own and not sent:
        raise UserError(
            f"{method.label}.upload must return ({{'model': {{...}}}}, client_state), but no "
            "client sends a 'model' in the first round, so that nothing is learnt."
        )


def check_some_received(
    method: Method, payloads: Mapping[int, Tree], kept: Mapping[int, Tree], shared: Sequence[str]
) -> None:
    """Refuse a method whose clients come back and receive no model, where FedAvg's own `start`
    waits for one and nobody keeps any: they would all begin at the initial weights again.
    """
    back = any(client in kept for client in payloads)
    has_model = any("model" in tree for tree in chain(payloads.values(), kept.values()))
    if back and shared and not has_model and not method.overrides("start"):
        raise UserError(
            f"{method.label}.download must return {{'model': {{...}}}}, unless there is a `start` "
            "that makes a model of what it returns: no client receives a 'model' or keeps one, so "
            "that all would begin at the initial weights again."
        )


def send_forged(
    method: Method,
    results: Sequence[ClientResult],
    forgers: Collection[int],
    payloads: Mapping[int, Tree],
    ctx: Context,
) -> tuple[list[ClientResult], dict[str, str]]:
    """The results with forged uploads as they arrive, and why some could not be read: what a
    method packs, forgers have to pack, too.
    """
    if not method.overrides("encode"):
        return list(results), {}
    honest = [result for result in results if result.client not in forgers or not result.upload]
    forged = [
        result._replace(upload=method.encode(result.upload, payloads[result.client], ctx))
        for result in results
        if result.client in forgers and result.upload
    ]
    arrived, refused = decode_uploads(method, forged, payloads, ctx)
    return [*honest, *arrived], refused


def validate_uploads(
    results: Sequence[ClientResult], initial: State, needed: Collection[str] = ()
) -> tuple[list[Upload], dict[str, str]]:
    """The uploads that arrived whole, ordered by client, and why the others were refused; an empty
    one is silence.
    """
    expected, uploads, refused = Expected(initial, needed), [], {}
    ordered = sorted(
        (result for result in results if result.upload), key=lambda result: result.client
    )
    for result, sound in zip(ordered, finite([result.upload for result in ordered]), strict=True):
        reason = expected.refusal(result.upload) or (
            None if sound else "holds values that are not finite"
        )
        if reason is None:
            uploads.append(Upload(result.client, result.samples, result.upload))
        else:
            refused[str(result.client)] = reason
    return uploads, refused


def traffic(
    payloads: Mapping[int, Tree],
    results: Sequence[ClientResult],
    arrived: Sequence[Tree],
    more: int,
) -> dict[str, int]:
    """What a round weighs: the payloads that were sent and the uploads that arrived; apart, what
    went to clients that send nothing back (they train in advance), and `more`.
    """
    silent = {result.client for result in results if not result.upload}
    weights = {id(payload): payload_bytes(payload) for payload in payloads.values()}
    sent = {client: weights[id(payload)] for client, payload in payloads.items()}
    return {
        "uplink_bytes": sum(map(payload_bytes, arrived)),
        "uplink_values": sum(map(paper_bytes, arrived)) // 4,
        "downlink_bytes": sum(size for client, size in sent.items() if client not in silent),
        "other_bytes": more + sum(size for client, size in sent.items() if client in silent),
    }
