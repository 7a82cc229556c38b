"""What methods with a privacy budget share: its options, the noise, and every client's ledger."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from fedhelix.components.accounting import Accounting, Ledger
from fedhelix.core.errors import NoMoreRounds
from fedhelix.core.method import Capabilities, Context
from fedhelix.core.options import option
from fedhelix.core.tree import Tree
from fedhelix.core.wrapper import Wrapper

NOISE_ADVICE = (
    "the noise may drown what clients learn, and what helps then is more clients per round "
    "(cohort), less noise (noise, or a larger epsilon), or {}"
)


@dataclass(frozen=True)
class Budgeted(Wrapper):
    """Gaussian noise, of which every client can afford so many rounds."""

    books: ClassVar[str]  # where the server's state has noise and ledger
    level: ClassVar[Literal["sample", "client"]]  # whom epsilon protects

    epsilon: float = option(8.0, "privacy budget", above=0, high=1e6)
    delta: float = option(1e-5, "probability with which epsilon may not hold", above=0, below=1)
    noise: float | None = option(
        None, "its standard deviation on the sum, in clips (auto: by epsilon and rounds)", above=0
    )
    accountant: Literal["rdp", "pld"] = option(
        "rdp", "Rényi divergences, or the tighter but slower privacy loss distributions"
    )

    @property
    def capabilities(self) -> Capabilities:
        """The server counts what clients spend."""
        return replace(super().capabilities, server_extra=("dp_accounting", "privacy"))

    def candidates(self, server: Tree, ctx: Context) -> Sequence[int]:
        """Server: whoever has enough left of its budget for one more round."""
        return self._able(server, ctx)

    def select_clients(self, server: Tree, cohort: Sequence[int], ctx: Context) -> Sequence[int]:
        """Server: of the cohort, whoever has enough left of its budget for one more round."""
        able = set(self._able(server, ctx))
        # Aggregation replaces the record, unless nobody uploads anything.
        self._record(server[self.books], able, ctx)
        if not able:
            raise NoMoreRounds(
                f"the budget epsilon = {self.epsilon:g} is spent: no client can take part in round "
                f"{ctx.round + 1}; run fewer rounds, or raise noise or epsilon."
            )
        return [client for client in cohort if client in able]

    def counted(self, payload: Tree) -> int | None:
        """Client: the number of its rounds with noise, if the server counts them."""
        return None

    def spent(self, payload: Tree, client_state: Tree) -> float:
        """Client: its epsilon after a round, by what it received and what it keeps."""
        raise NotImplementedError

    def is_last(self, payload: Tree, client_state: Tree, epochs: int) -> bool:
        """Client: whether it has too little left after a round for another one."""
        raise NotImplementedError

    # What a round costs: by default one sum whose participants are known ------------------------

    def _accounting(self, ctx: Context) -> Accounting:
        return Accounting(self.accountant, "public", self.delta)

    def _rate(self, client: int, ctx: Context) -> float:
        return 1.0

    def _sums(self, ctx: Context) -> int:
        return 1

    def _counted(self, ctx: Context) -> Mapping[int, int]:
        return {}

    # Its books ----------------------------------------------------------------------------------

    def _opened_books(self, ctx: Context) -> Tree:
        """The noise with which the budget lasts for all rounds, and empty ledgers."""
        noise = self.noise
        if noise is None:
            rate = max(self._rate(client, ctx) for client in ctx.present)
            rounds = ctx.rounds * max(self._sums(ctx), 1)
            noise = self._accounting(ctx).noise(self.epsilon, {rate: rounds})
        return {"noise": noise, "ledger": {}}

    def _charged_books(self, server: Tree, clients: Iterable[int], ctx: Context) -> Tree:
        """The books after a round of some clients; the round's record says what they have spent."""
        rates = {client: self._rate(client, ctx) for client in clients}
        spent = self._ledger(server[self.books], ctx).charged(rates, self._sums(ctx))
        books = {**server[self.books], "ledger": spent}
        able = self._able({self.books: books}, ctx)
        left = self._record(books, set(able), ctx)
        first = len(self._able(server, ctx)) == len(ctx.present)
        if left and first and ctx.round + 1 < ctx.rounds:
            named = f"client {left[0]}" if len(left) == 1 else f"{len(left)} clients"
            warnings.warn(
                f"the budget epsilon = {self.epsilon:g} of {named} is spent after round "
                f"{ctx.round + 1}: whoever has spent it takes no part any more; raise noise or "
                "epsilon, run fewer rounds, or draw from more clients.",
                stacklevel=2,
            )
        return books

    def _record(self, books: Tree, able: Collection[int], ctx: Context) -> list[int]:
        """The round's record says what every client has spent, with which noise, and who has too
        little left for another round; the result are those.
        """
        ledger = self._ledger(books, ctx)
        ctx.metadata["epsilon"] = ledger.epsilons()
        ctx.metadata["privacy_level"] = self.level
        ctx.metadata["noise"] = ledger.noise
        if spent := [client for client in ctx.present if client not in able]:
            ctx.metadata["budget_spent"] = spent
        return spent

    def _able(self, server: Tree, ctx: Context) -> list[int]:
        """Who has enough left for one more round."""
        ledger, sums = self._ledger(server[self.books], ctx), self._sums(ctx)
        return [i for i in ctx.present if ledger.allows(i, self._rate(i, ctx), sums)]

    def _ledger(self, books: Tree, ctx: Context) -> Ledger:
        ledger = Ledger(self._accounting(ctx), books["noise"], self.epsilon, books["ledger"])
        for client, rounds in self._counted(ctx).items():
            ledger = ledger.at_least(client, self._rate(client, ctx), rounds)
        return ledger
