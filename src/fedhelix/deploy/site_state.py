"""What a site keeps of an experiment on its disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch

from fedhelix.core.errors import UserError
from fedhelix.core.files import remove_leftovers, write_atomically
from fedhelix.core.method import Method
from fedhelix.core.shift import load_shifted
from fedhelix.core.tree import State, Tree, load, save
from fedhelix.deploy.logs import say
from fedhelix.engines.local import Setup

MODEL = "model.safetensors"  # a client's own model after its rounds of a run
GONE_BACK = "begin a new run, or put the newest copy of the server's folder back."


class SiteState:
    """A client's state in one experiment: after the last round that counted, and after a newer one.

    The server says which round that was. The newer one counts if its answer came in time, and if
    the server is not killed and runs the round again. A server that was restored from a backup may
    name a round of which nothing is kept: see `go_on_after`.
    """

    def __init__(self, folder: Path, counted: int | None = None):
        self.folder = folder
        # Whether nothing is here, although a round of the site has counted, as the server says.
        self._is_lost = counted is not None and not folder.exists()
        self.after = -1  # the last round that counted
        self.remark: dict[str, int] = {}  # for the server, in the header of the answer
        self._supplement_path = folder / "supplement.safetensors"
        self._sent_path = folder / "sent.safetensors"
        self._used_path = folder / "used.safetensors"
        self._masked_path = folder / "masked.safetensors"
        self._lacking_path = folder / "lacking.safetensors"

    def _rounds(self) -> list[int]:
        return sorted(
            int(path.stem.removeprefix("own-")) for path in self.folder.glob("own-*.safetensors")
        )

    def _path(self, round: int) -> Path:
        return self.folder / f"own-{round:06d}.safetensors"

    def _current(self) -> list[int]:
        """The round whose state is the current one, if there is any."""
        return [known for known in self._rounds() if known <= self.after][-1:]

    def go_on_after(self, round: int | None) -> None:
        """Go on after the last round that counted, None where none did.

        Two states that are both newer mean that the server has gone back further than the site can:
        the oldest one then stands for the missing one. Before the first round that counted a
        client has no state of its own, and begins anew. What the server does not know any more
        stays, for the case that it comes back.
        """
        self.after, known = -1 if round is None else round, self._rounds()
        self._notice_older_copy(round, max(known, default=-1))
        if self._current() or len(known) < 2:
            return
        if round is None:
            say("the server begins the run anew, and so does this site", "warning")
            return
        say(
            f"the server goes on after round {round + 1}, of which the site keeps no state; it "
            f"goes on with its own of round {known[0] + 1}",
            "warning",
        )
        save(load(self._path(known[0])), self._path(round))
        self._remove_others(round)
        self.remark = {"state_of": known[0]}

    def go_on_once(self, before: int, counted: int | None, is_spent: bool) -> None:
        """Go on with the newest state before a round, whatever the server says.

        Where the rounds spend a privacy budget, an older copy of the state is refused: it does not
        count all that was spent. The site remembers that, in case the server goes back too.
        """
        self.after = before - 1
        if is_spent and self._lacking_path.exists():
            lacking = int(load(self._lacking_path)["round"])
            counted = lacking if counted is None else max(counted, lacking)
        newest = max([self._last_sent()["round"], *self._rounds()])
        if is_spent and counted is not None and newest < counted:
            save({"round": counted}, self._lacking_path)
            raise UserError(
                f"the site has answered round {counted + 1}, but what it keeps of this run is "
                "older, so it cannot tell what it has spent of its privacy budget; put the newest "
                "copy of the site's folder back, or begin a new run."
            )
        self._notice_older_copy(counted, newest)

    def _notice_older_copy(self, counted: int | None, newest: int) -> None:
        """Say so where the folder is a copy from before the last round that counted."""
        if counted is None or not 0 <= newest < counted:
            return
        say(
            f"the site has answered round {counted + 1}, but the newest state that it keeps in "
            f"'{self.folder.parent.parent}' is of round {newest + 1}: an older copy, with which it "
            "goes on",
            "warning",
        )
        self.remark = {"state_of": newest}

    def read(self) -> Tree:
        """The current state."""
        return next((load(self._path(known)) for known in self._current()), {})

    def write(self, round: int, client_state: Tree) -> None:
        """Store the state after a round; of the earlier ones, only the current one stays."""
        if self._is_lost and client_state:
            say(
                "the site has worked in this run before, but the state that it kept of it is gone "
                f"from '{self.folder.parent.parent}'; it begins anew",
                "warning",
            )
            self.remark = {"anew": True}
        self.folder.mkdir(parents=True, exist_ok=True)  # a sign that the site has worked
        origin = self._current()
        if client_state or self._rounds():
            save(client_state, self._path(round))
        remove_leftovers(self.folder, "*")
        self._remove_others(round, *origin)

    def _remove_others(self, round: int, *origin: int) -> None:
        """Remove all states but these, and the two newest of rounds to come."""
        newer = [known for known in self._rounds() if known > round]
        for known in set(self._rounds()) - {round, *origin, *newer[-2:]}:
            self._path(known).unlink(missing_ok=True)

    @property
    def has_sent(self) -> bool:
        """Whether an answer was sent that may not be computed again."""
        return self._sent_path.exists()

    def sent(self, round: int) -> Tree:
        """The answer that was sent in a round, if it was the last one; earlier ones are refused."""
        last = self._last_sent()
        if round < last["round"]:
            raise UserError(
                f"round {round + 1} is over, and its noise is not drawn again; {GONE_BACK}"
            )
        return last if round == last["round"] else {}

    def _last_sent(self) -> Tree:
        return load(self._sent_path) if self.has_sent else {"round": -1}

    def spent(self) -> dict[str, float]:
        """What the last answer to a round said of the privacy budget, if any."""
        fields = self._last_sent().get("fields", {})
        names = ("epsilon", "delta", "noisy_rounds")
        return {name: fields[name] for name in names if name in fields}

    def write_sent(self, answer: Tree) -> None:
        """Store the answer of a round before it leaves."""
        save(answer, self._sent_path)

    def supplement(self) -> Tree:
        """The samples that the server has supplied, if any."""
        return load(self._supplement_path) if self._supplement_path.exists() else {}

    def write_supplement(self, samples: Tree) -> None:
        """Store samples that the server supplies."""
        save(samples, self._supplement_path)

    def masked(self) -> Tree:
        """The last round that was masked, for which clients, and who was said to have answered."""
        return load(self._masked_path) if self._masked_path.exists() else {"round": -1}

    def fix(self, round: int, what: str, clients: list[int]) -> None:
        """Store a set of clients of a masked round before anything leaves; another one for the
        same round is refused, since the difference of two sums is a single upload.
        """
        last = self.masked()
        if last["round"] != round:
            last = {"round": round}
        named = " ".join(map(str, clients))
        if last.setdefault(what, named) != named:
            raise UserError(
                f"round {round + 1} was masked for other clients already, and is not unmasked for "
                "these too."
            )
        save(last, self._masked_path)

    def used(self) -> tuple[dict[str, Any], State]:
        """The request after which the client's own model was stored, and all of its entries."""
        stored = load(self._used_path)
        return json.loads(stored["request"]), stored["state"]

    def write_model(self, setup: Setup, state: State, request: Mapping[str, Any]) -> None:
        """Store the client's own model when its rounds are over: for `used` with what the method
        added, and as the network's entries alone. A newer one stays where the server has gone back.
        """
        kept = self.used()[0] if self._used_path.exists() else {}
        if any((kept.get(name) or 0) > (request.get(name) or 0) for name in ("counted", "after")):
            say(
                "the server has gone back to an older copy of this run; the site keeps its model "
                f"after {rounds_of(kept)} rounds",
                "warning",
            )
            return
        save({"request": json.dumps(dict(request)), "state": state}, self._used_path)
        example = setup.data.prepare(setup.data.x[:8])
        module = load_shifted(setup.module, state, setup.layers, example)
        write_atomically(self.folder / MODEL, safetensors.torch.save(module.state_dict()))
        say(f"after round {rounds_of(request)}: the site keeps its model of this run")


def draws_once(method: Method) -> bool:
    """Whether a round has masks or noise, and what a client has spent counts: no server may say
    what a client keeps, or have a round computed anew.
    """
    return method.capabilities.outermost or method.capabilities.sample_gradients


def rounds_of(request: Mapping[str, Any]) -> int:
    """The rounds of a model: up to the last one that had an effect, if the server says so."""
    return int(request.get("counted") or request["round"])


def disk_error(problem: OSError) -> dict[str, Any]:
    """What a site says when it cannot write: to its owner, and to the server."""
    words = f"the site's disk: {problem.strerror}"
    say(words, "error")
    return {"error": words}


def latest_model(folder: Path, name: str) -> Path:
    """The file with a site's own model after its rounds of the latest run."""
    found = sorted(folder.glob(f"*/{name}/{MODEL}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UserError(
            f"the site '{name}' has no model in '{folder}' yet; it gets one when its rounds of a "
            "run are over."
        )
    return found[-1]
