"""The server's part in secure aggregation: keys, shares, masked uploads and unmasking.

A site that falls silent drops out of the round; as long as enough stay, the sum of the others is
exact. Sites that know each other's public keys (`peers` in their policies) notice a server that
passes on other masking keys than theirs, or tells them different things about who has answered;
all others rely on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fedhelix.components.masking import Shares, Unmasking, Words
from fedhelix.components.secure_sum import DIGEST, KEY, SHARE, SIGNATURE, TAG, shares_needed
from fedhelix.core.errors import UserError
from fedhelix.core.tree import Tree, drop, payload_bytes
from fedhelix.deploy.engine import RemoteEngine
from fedhelix.deploy.key_ring import SIGNED
from fedhelix.deploy.masked import (
    round_name,
    task_digest,
    to_bytes,
    to_signed,
    to_tensors,
    to_unsigned,
)
from fedhelix.engines.local import ClientResult, ClientTask


class MaskingEngine(RemoteEngine):
    """A remote engine that learns the sum of all uploads only.

    The sum stands in the first client's upload, and zeros in the others'.
    """

    def needed(self, cohort: int) -> int:
        """How many clients of a cohort must send keys."""
        masks = self.setup.method.capabilities.masks
        assert masks is not None
        return shares_needed(cohort, masks[0])

    def results(self, tasks: Sequence[ClientTask]) -> dict[int, ClientResult]:
        """The clients whose uploads are in the sum; none if the masks cannot be removed."""
        dropped: dict[int, str] = {}
        self.exchanged = 0
        try:
            results, total = self._masked(tasks, dropped)
        except UserError as problem:
            why = f"took part in vain: {str(problem).rstrip('.')}"
            dropped |= {
                task.client: f"{self.registry.sites[task.client]} {why}"
                for task in tasks
                if task.client not in dropped
            }
            results, total = {}, np.zeros(0, np.uint32)
        self.missing = {i: why for i, why in dropped.items() if i not in results}
        rows = (total, *[np.zeros_like(total)] * (len(results) - 1))
        return {
            i: result._replace(upload={"words": to_signed(row)})
            for (i, result), row in zip(results.items(), rows, strict=False)
        }

    def _masked(
        self, tasks: Sequence[ClientTask], dropped: dict[int, str]
    ) -> tuple[dict[int, ClientResult], Words]:
        """The five exchanges; who falls silent in one of them is added to `dropped`."""
        digests = {task_digest(self.common_header, task.payload) for task in tasks}
        if len(digests) > 1:
            raise UserError("masks cancel only where all clients receive the same.")
        light = [task._replace(payload={}, client_state={}) for task in tasks]
        keys = {
            i: sent[i]
            for i, sent in self._bytes("masking_keys", light, {}, dropped, SIGNED).items()
            if i in sent
        }
        masks = self.setup.method.capabilities.masks
        assert masks is not None
        if len(keys) < (least := self.needed(len(tasks))):
            raise UserError(f"{least} clients are needed for masks, and {len(keys)} sent keys.")
        light = [task for task in light if task.client in keys]
        everybody: Tree = {"keys": to_tensors(keys)}
        bodies = dict.fromkeys(keys, everybody)
        shares = self._bytes("masking_shares", light, bodies, dropped, 2 * SHARE + TAG)
        if len(shares) < least:  # nobody shall train, and spend budget, for no sum
            raise UserError(f"{least} clients are needed for masks, and {len(shares)} sent shares.")
        results = self._uploads([task for task in tasks if task.client in shares], shares, dropped)
        answered = torch.tensor(sorted(results), dtype=torch.int64)
        survivors: Tree = {"survivors": {"clients": answered}}
        light = [task for task in light if task.client in results]
        bodies = dict.fromkeys(results, survivors)
        signed = self._bytes("masking_agree", light, bodies, dropped, DIGEST + SIGNATURE)
        agreed = to_tensors({i: sent[i] for i, sent in signed.items() if i in sent})
        survivors = {**survivors, "agreed": agreed}
        bodies = dict.fromkeys(results, survivors)
        light = [task for task in light if task.client in signed]
        revealed = self._bytes("masking_reveal", light, bodies, dropped, SHARE)
        name = round_name(self.common_header["experiment"], tasks[0])
        words = {i: to_unsigned(result.upload["words"]) for i, result in results.items()}
        if not words:
            raise UserError("no client sent a masked upload.")
        plain = {i: text[: 2 * KEY] for i, text in keys.items()}
        whole = Unmasking(name, *masks, plain, list(shares), *digests)
        try:
            return results, whole.total(words, revealed)
        except UserError as problem:
            self.unused += [result.upload for result in results.values()]
            dropped |= {
                i: f"{dropped[i].rstrip('.')}; so the sum could not be unmasked"
                for i in results.keys() & dropped.keys()
            }
            raise UserError(f"the sum could not be unmasked: {problem}") from None

    def _bytes(
        self,
        kind: str,
        tasks: Sequence[ClientTask],
        bodies: Mapping[int, Tree],
        dropped: dict[int, str],
        size: int,
    ) -> dict[int, Shares]:
        """What clients answer in one exchange: keys or shares, by client."""
        found = {}
        answers = self.request(kind, tasks, bodies=bodies)
        self._add_exchanged(bodies, [answer.body for answer in answers.values()])
        for i, answer in answers.items():
            try:
                found[i] = to_bytes(answer.body, size)
            except UserError as problem:
                self.refuse(i, problem)
        dropped |= self.missing
        return found

    def _add_exchanged(self, bodies: Mapping[int, Tree], answers: Sequence[Tree] = ()) -> None:
        """Count keys and shares of one exchange: those that went to sites, and their answers."""
        reached = map(self.registry.client_of, self.transport.reached)
        sent = [drop(bodies.get(client, {}), ["survivors"]) for client in reached]
        self.exchanged = (self.exchanged or 0) + sum(map(payload_bytes, [*sent, *answers]))

    def _uploads(
        self,
        tasks: Sequence[ClientTask],
        shares: Mapping[int, Shares],
        dropped: dict[int, str],
    ) -> dict[int, ClientResult]:
        """The masked uploads, all of one form."""
        bodies = {
            i: {"shares": to_tensors({j: sent[i] for j, sent in shares.items() if i in sent})}
            for i in shares
        }
        answers = self.request("train", tasks, self.enough, bodies)
        self._add_exchanged(bodies)
        results = self.accept(answers)
        first = None
        for i, result in list(results.items()):
            try:
                row = to_unsigned(result.upload.get("words"), first)
            except UserError as problem:
                self.refuse(i, problem)
                del results[i]
            else:
                first = row
        dropped |= self.missing
        return results
