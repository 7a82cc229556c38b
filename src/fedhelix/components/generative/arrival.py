"""The server's side of the talk with an unseen client, which trains between the turns (Algorithm 1,
lines 7 to 15).
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
    """One turn: the server's next state, what the newcomer receives, and whether that was all.

    Between the turns the server remembers as `guest` what it sent last, and how often.
    """
    guest, average = server.get("guest"), server["model"]
    if guest is None:
        random = recipe.newcomer == "random" or (
            recipe.newcomer in ("guide", "alone") and recipe.guide_from == "random"
        )
        model, turn = (initial if random else average), 0
        done = recipe.newcomer in ("random", "model") or "buffer" not in server
    else:
        if "model" not in message:
            raise UserError("a newcomer that was sent a model must answer with what it trained.")
        buffer, turn = Buffer(**server["buffer"]), guest["turn"]
        if layout.accepts(message["model"], "the newcomer's model"):
            if recipe.newcomer == "guide" and "generator" not in server:
                known, _ = recipe.material(buffer)
                if len(known.vectors) >= FEWEST:  # otherwise the most similar client has to do
                    server = {
                        **server,
                        "generator": recipe.fit(known, layout.sizes, seed, watch=watch).tree(),
                    }
            moved = layout.flatten([guest["sent"], message["model"]])
            advised = advice(recipe, buffer, server.get("generator"), moved, seed + turn)
            model = {**average, **layout.unflatten(advised)}
            done = recipe.newcomer == "nearest" or turn == recipe.guide_turns
        else:  # its training diverged: there is nothing to learn from, and it keeps what it was sent
            model, done = {**average, **guest["sent"]}, True
    if done:
        personal = {**server.get("personal", {}), str(client): {} if model is average else model}
        return {**drop(server, ["guest"]), "personal": personal}, {"model": model}, True
    sent = {"sent": take(model, layout.shapes), "turn": turn + 1}
    return {**server, "guest": sent}, {"model": model, "turn": turn + 1}, False


def advice(recipe: Recipe, buffer: Buffer, tree: Tree | None, moved: Tensor, seed: int) -> Tensor:
    """For a vector before and after local training: where guidance leads, or the most similar
    client's upload.
    """
    if recipe.newcomer == "alone":
        return moved[1]
    known, base = recipe.material(buffer)
    before, after = moved - base
    if recipe.newcomer == "nearest" or tree is None:
        client_state = known.latest()
        return base + client_state[int(distances(after[None], client_state).argmin())]
    generator = Generator.of(tree)
    return (
        base
        + generator.guide(
            before[None], after[None], recipe.guide_steps, recipe.guide_strength, seed
        )[0]
    )
