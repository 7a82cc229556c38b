"""How the server onboards an unseen client, which trains between the turns.

This is Algorithm 1 of pFedGPA, lines 7 to 15.
"""

from __future__ import annotations

from torch import Tensor

from fedhelix.components.generative.buffer import Buffer, distances
from fedhelix.components.generative.generator import FEWEST, Generator
from fedhelix.components.generative.recipe import Recipe
from fedhelix.components.generative.training import Watch, unwatched
from fedhelix.components.generative.vectors import Layout
from fedhelix.core.errors import UserError
from fedhelix.core.tree import State, Tree, drop, take

PENDING = "guest"  # the key in checkpoints, which keeps its name


def receive_newcomer(
    recipe: Recipe,
    server: Tree,
    message: Tree,
    layout: Layout,
    initial: State,
    client: int,
    seed: int,
    watch: Watch = unwatched,
) -> tuple[Tree, Tree, bool]:
    """One turn: the server's next state, the newcomer's payload, and whether it was the last turn.

    Between the turns the server's state holds the last payload and the number of turns.
    """
    pending, average = server.get(PENDING), server["model"]
    if pending is None:
        random = recipe.newcomer == "random" or (
            recipe.newcomer in ("guide", "alone") and recipe.guide_from == "random"
        )
        model, turn = (initial if random else average), 0
        done = recipe.newcomer in ("random", "model") or "buffer" not in server
    else:
        if "model" not in message:
            raise UserError("a newcomer that was sent a model must answer with what it trained.")
        buffer, turn = Buffer(**server["buffer"]), pending["turn"]
        if layout.accepts(message["model"], "the newcomer's model"):
            server = with_generator(recipe, server, buffer, layout, seed, watch)
            moved = layout.flatten([pending["sent"], message["model"]])
            vector = advice(recipe, buffer, server.get("generator"), moved, seed + turn, watch)
            model = {**average, **layout.unflatten(vector)}
            done = recipe.newcomer == "nearest" or turn == recipe.guide_turns
        else:  # its training diverged: there is nothing to learn from, and it keeps what it has
            model, done = {**average, **pending["sent"]}, True
    if done:
        personal = {**server.get("personal", {}), str(client): {} if model is average else model}
        return {**drop(server, [PENDING]), "personal": personal}, {"model": model}, True
    sent = {"sent": take(model, layout.shapes), "turn": turn + 1}
    return {**server, PENDING: sent}, {"model": model, "turn": turn + 1}, False


def with_generator(
    recipe: Recipe, server: Tree, buffer: Buffer, layout: Layout, seed: int, watch: Watch
) -> Tree:
    """The server's state with a generator, if guidance needs one and the uploads suffice.

    Otherwise the most similar client's upload has to do.
    """
    if recipe.newcomer != "guide" or "generator" in server:
        return server
    known, _ = recipe.material(buffer)
    if len(known.vectors) < FEWEST:
        return server
    return {**server, "generator": recipe.fit(known, layout.sizes, seed, watch=watch).tree()}


def advice(
    recipe: Recipe,
    buffer: Buffer,
    tree: Tree | None,
    moved: Tensor,
    seed: int,
    watch: Watch = unwatched,
) -> Tensor:
    """The next vector of a newcomer, from its vectors before and after local training.

    Guidance generates it; without a generator it is the most similar client's upload.
    """
    if recipe.newcomer == "alone":
        return moved[1]
    known, base = recipe.material(buffer)
    before, after = moved - base
    if recipe.newcomer == "nearest" or tree is None:
        uploads = known.latest()
        return base + uploads[int(distances(after[None], uploads).argmin())]
    guided = Generator.of(tree).guide(
        before[None], after[None], recipe.guide_steps, recipe.guide_strength, seed, watch
    )
    return base + guided[0]
