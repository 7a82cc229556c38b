"""A method around a method: GenFed, clusters and the defences change a hook or two of it."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Any

from fedhelix.core.errors import UserError
from fedhelix.core.layers import Layers
from fedhelix.core.method import HOOKS, Capabilities, Client, Context, Method
from fedhelix.core.tree import State, Tree

# Where a method may make something of a client's samples, besides their loss, that others see.
CLIENT_HOOKS = ("client_init", "start", "loss_context", "phases", "upload", "onboard_client")
CHOICES = ("candidates", "select_clients")  # where a server may choose who works


@dataclass(frozen=True)
class Wrapper(Method):
    """A method that holds a method; every hook that it does not override is the inner one's."""

    inner: Method

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        uploads_itself = cls.upload is not Wrapper.upload
        if cls.shared_params is not Wrapper.shared_params and not uploads_itself:
            raise UserError(
                f"{cls.__name__} overrides shared_params, but the method inside uploads what it "
                "shares itself; override upload as well, or leave shared_params out."
            )

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Method):
            raise UserError(
                f"{self.name} works around a method such as FedAvg(), not around {self.inner!r}."
            )
        super().__post_init__()

    @property
    def label(self) -> str:
        """Its name and the inner one's; plain FedAvg goes without saying."""
        inner = self.inner.label
        return self.name if inner == "fedavg" else f"{self.name}+{inner}"

    def options(self) -> dict[str, Any]:
        """Its own hyperparameters and the inner ones, on one level."""
        mine = {name: value for name, value in vars(self).items() if name != "inner"}
        return {**mine, **self.inner.options()}

    def overrides(self, hook: str) -> bool:
        """Whether the wrapper, or a method inside of it, has a hook that is not FedAvg's."""
        mine = getattr(type(self), hook) is not getattr(Wrapper, hook)
        return mine or self.inner.overrides(hook)

    @property
    def capabilities(self) -> Capabilities:
        """As the inner method, but for the hooks that the wrapper changes."""
        inner, mine = self.inner.capabilities, type(self)
        changes_loss = mine.loss is not Wrapper.loss
        return replace(
            inner,
            client_init=inner.client_init or mine.client_init is not Wrapper.client_init,
            complete_uploads=inner.complete_uploads and mine.upload is Wrapper.upload,
            loss_key=self if changes_loss else inner.loss_key,
        )

    @property
    def spares_samples(self) -> bool:
        """Whether it takes nothing from a client's samples that could leave the client."""
        return all(getattr(type(self), hook) is getattr(Wrapper, hook) for hook in CLIENT_HOOKS)

    def check(self, layers: Layers) -> None:
        """It must suit the method inside, and that one the network."""
        self.check_inner(layers)
        self.inner.check(layers)

    def check_inner(self, layers: Layers | None = None) -> None:
        """A wrapper looks at the server's model, of which there must not be several, and may look
        at uploads. Without `layers`, whatever needs no network is checked.
        """
        if self.inner.capabilities.outermost:
            raise UserError(
                f"{self.name} cannot stand around {self.inner.name}, which protects single uploads "
                "and must be the outermost method."
            )
        if self.inner.capabilities.sample_gradients and not self.spares_samples:
            raise UserError(
                f"{self.name} cannot stand around dp-sgd: its clients may use samples without "
                "noise."
            )
        if self.inner.capabilities.several_models:
            inner = self.inner.name
            if isinstance(self.inner, Wrapper):
                raise UserError(
                    f"{self.name} must stand inside of {inner}, as in {inner}+{self.name}."
                )
            raise UserError(
                f"{self.name} cannot be put around {inner}, which keeps a model for each cluster."
            )

    def deliver(self, server: Tree, client: int, ctx: Context) -> Tree:
        """As the inner method; where that is a mere download, it is the wrapper's."""
        if not self.overrides("deliver"):
            return self.download(server, client, ctx)
        return self.inner.deliver(server, client, ctx)

    def choose(self, models: dict[str, State], client: Client) -> str:
        """As the inner method; where that takes its personal model, it is the wrapper's."""
        if not self.overrides("choose"):
            return self.personal(models)
        return self.inner.choose(models, client)

    def onboard_server(self, server: Tree, message: Tree, ctx: Context) -> tuple[Tree, Tree, bool]:
        """As the inner method; where that is a mere download, it is the wrapper's."""
        if not self.overrides("onboard_server"):
            return Method.onboard_server(self, server, message, ctx)
        return self.inner.onboard_server(server, message, ctx)

    def onboard_client(self, payload: Tree, client: Client) -> Tree:
        """As the inner method; where that is a mere `client_init`, it is the wrapper's."""
        if not self.overrides("onboard_client"):
            return Method.onboard_client(self, payload, client)
        return self.inner.onboard_client(payload, client)


def check_wrappers(method: Method) -> None:
    """Refuse wrappers around methods that they do not suit, whatever the network."""
    while isinstance(method, Wrapper):
        method.check_inner()
        method = method.inner


def shares(method: Method, layers: Layers | None) -> bool:
    """Whether anything of a network travels; of one that is not known yet, something may.

    A network that is too small for the method is refused in the method's own words.
    """
    if layers is None or method.shared_params(layers):
        return True
    method.check(layers)
    return False


def beyond_a_sum(method: Method, layers: Layers | None) -> str | None:
    """What a method's clients tell besides a sum of their updates, if anything."""
    needs = method.capabilities
    reasons = {
        "its clients send something before the first round": needs.client_init,
        "its uploads are packed": needs.packed_uploads or method.overrides("decode"),
        "it has no updates of a common model": (
            not needs.central_model or needs.several_models or not shares(method, layers)
        ),
        "its server looks at single uploads": (
            needs.single_uploads or needs.compares_uploads or method.overrides("weights")
        ),
        "its server takes uploads as they arrive": needs.buffer is not None,
        "its server chooses who works": any(map(method.overrides, CHOICES)),
    }
    return next((why for why, holds in reasons.items() if holds), None)


def without_noise(method: Method, layers: Layers | None) -> str | None:
    """What of a network travels though noise on updates of parameters does not protect it, if
    anything, and what helps.
    """
    travels = set() if layers is None else set(method.shared_params(layers)) - {*layers.parameters}
    if layers is None or not travels:
        return None
    others = [name for name in layers.buffers if name in travels and name not in layers.norm]
    if not others:
        return (
            "running statistics of BatchNorm travel; use private+fedbn, or a network without "
            "BatchNorm"
        )
    norm = ", and BatchNorm needs private+fedbn" if len(others) < len(travels) else ""
    return (
        f"noise protects parameters, and its network's buffer '{others[0]}' travels too; if "
        "training does not change it, register it with persistent=False, otherwise use a network "
        f"without it{norm}"
    )


def rounded(layers: Layers | None) -> str | None:
    """Why noise that is made for a sum of clipped updates does not suit the weights, if so."""
    if layers is None or not layers.half:
        return None
    return (
        "half precision would round single updates after they are clipped; give the network as "
        "net.float()"
    )


def how_to_sum(method: Method) -> str:
    """The end of a sentence that refuses a method beyond a sum: what to set, if that helps."""
    others = [
        f"--set {method.name}.{key}={str(value).lower()}"
        for key, value in method.if_summed
        if getattr(method, key) != value
    ]
    return f" (it works with `{' '.join(others)}`)" if others else ""


def without_classes(method: Method) -> str:
    """The option with which a method that needs classes does without; empty if there is none."""
    if not method.capabilities.classification:
        return ""
    inner = without_classes(method.inner) if isinstance(method, Wrapper) else ""
    return method.without_classes or inner


def refuse_more(wrapper: Wrapper, tree: Tree, known: Set[str], verb: str) -> None:
    """Refuse an upload with other entries than those that a wrapper can deal with."""
    if extra := ", ".join(sorted(tree.keys() - known)):
        inner = wrapper.inner.label
        raise UserError(
            f"{wrapper.name} cannot {verb} what {inner} sends too: {extra}; have its upload send "
            f"the model alone, or leave out {wrapper.name}+{inner}."
        )


def _delegated(name: str) -> Callable[..., Any]:
    def call(self: Wrapper, *args: Any) -> Any:
        return getattr(self.inner, name)(*args)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = "As the inner method."
    return call


for _name in HOOKS:
    if _name not in vars(Wrapper):
        setattr(Wrapper, _name, _delegated(_name))
